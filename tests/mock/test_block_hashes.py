"""Block hashes equal those of vLLM; the expected ones were computed by vLLM 0.32.0."""

import hashlib

import pytest

from trio_vllm.mock.block_hashes import (
    PLAIN,
    BlockHasher,
    BlockKeys,
    CacheScope,
    MultiModalSpan,
    encode_cbor,
    event_extra_keys,
    event_hash,
)

KNOWN_HASHES = [
    ("sha256", "bb8694d760a0ccfa7421c843adcb80b9c8ced3dc4590cf56dc0e80fc7d80b040"),
    ("sha256_cbor", "ec33cc4f94113029ced965a007c247ca5abb21e56b7aaa1a6ea7ef96bd6559b6"),
]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # RFC 8949, appendix A
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (255, "18ff"),
        (256, "190100"),
        (65535, "19ffff"),
        (65536, "1a00010000"),
        (1000000000000, "1b000000e8d4a51000"),
        (18446744073709551615, "1bffffffffffffffff"),
        (-1, "20"),
        (-100, "3863"),
        (None, "f6"),
        (b"", "40"),
        (bytes.fromhex("01020304"), "4401020304"),
        ("", "60"),
        ("\u00fc", "62c3bc"),
        ((), "80"),
        ([1, (2, 3)], "8201820203"),
        (tuple(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
)
def test_cbor_is_canonical(value: object, expected: str) -> None:
    """The shortest form of each item."""
    assert encode_cbor(value).hex() == expected


@pytest.mark.parametrize("value", [1.5, {}, 1 << 64])
def test_cbor_of_other_types_is_refused(value: object) -> None:
    """Nothing is encoded as something else."""
    with pytest.raises(TypeError):
        encode_cbor(value)


def test_hashes_form_a_chain() -> None:
    """A hash is that of the parent's hash, the tokens and the extra keys."""
    hasher = BlockHasher("sha256_cbor", "0")
    root = hashlib.sha256(encode_cbor("0")).digest()
    first = hasher.hash_block(None, [1, 2], None)
    assert first == hashlib.sha256(encode_cbor((root, (1, 2), None))).digest()
    second = hasher.hash_block(first, [3, 4], (("cache_salt", "a"),))
    expected = encode_cbor((first, (3, 4), (("cache_salt", "a"),)))
    assert second == hashlib.sha256(expected).digest()


@pytest.mark.parametrize(("algorithm", "expected"), KNOWN_HASHES)
def test_hashes_are_those_of_vllm(algorithm: str, expected: str) -> None:
    """Without PYTHONHASHSEED upstream has a fixed seed."""
    hasher = BlockHasher(algorithm)
    keys = CacheScope(cache_salt="salt", lora_name="a", lora_path="/a").extra_keys(0, 4)
    first = hasher.hash_block(None, [1, 200, 30000, 4], keys)
    assert hasher.hash_block(first, [5, 6, 7, 8], None).hex() == expected


def test_keys_tell_apart_what_hashes_do() -> None:
    """Other tokens, another parent, other extra keys: another key; else the same one."""
    keys = BlockKeys()
    first, salted = keys.hash_block(None, [1, 2], None), (("cache_salt", "a"),)
    blocks = [
        first,
        keys.hash_block(None, [2, 1], None),
        keys.hash_block(None, [1, 2], salted),
        keys.hash_block(first, [1, 2], None),
        keys.hash_block(first, [1, 2], salted),
    ]
    assert len({*blocks}) == len(blocks)
    assert keys.hash_block(None, [1, 2], None) == first


def test_seed_changes_all_hashes() -> None:
    """PYTHONHASHSEED is part of the first block, and so of all."""
    hashes = {BlockHasher(seed=seed).hash_block(None, [1], None) for seed in ("0", "1")}
    assert len(hashes) == 2


def test_event_hash_is_the_end_of_the_hash() -> None:
    """Events carry the last 64 bits as a number."""
    assert event_hash(bytes(24) + bytes.fromhex("0102030405060708")) == 0x0102030405060708


def test_extra_keys_of_a_block() -> None:
    """Adapter, multimodal inputs that reach into the block, and for the first block the salt."""
    scope = CacheScope(
        cache_salt="s",
        lora_name="l",
        lora_path="/l",
        multimodal=(MultiModalSpan("m", 2, 4), MultiModalSpan("n", 8, 8)),
    )
    lora = ("lora", "l", "/l")
    assert PLAIN.extra_keys(0, 4) is None
    assert scope.extra_keys(0, 4) == (lora, ("mm", "m", 2), ("cache_salt", "s"))
    assert scope.extra_keys(4, 8) == (lora, ("mm", "m", -2))
    assert scope.extra_keys(8, 12) == (lora, ("mm", "n", 0))
    assert scope.extra_keys(16, 20) == (lora,)


def test_events_show_extra_keys_without_their_names() -> None:
    """Consumers know the older form."""
    keys = (("lora", "l", "/l"), ("mm", "m", 2), ("cache_salt", "s"))
    assert event_extra_keys(keys) == ("l", ("m", 2), "s")
    assert event_extra_keys(None) is None
