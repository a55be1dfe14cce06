"""Write a tiny Qwen3 model directory that real vLLM processes load in a second.

Run by the Python that has vLLM: ``python tiny_model.py DIRECTORY``. There are no weights in
it (vLLM makes them up with ``--load-format dummy``), only a configuration and a tokenizer with
one token a byte; the ids above the bytes are filler so that the vocabulary has the 32,000 ids
that the mock engine has too.
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 32_000
FIRST_SPECIAL_ID = 31_990
"""Where the special tokens begin; the few ids after them have no text."""

SPECIAL_TOKENS = END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>{{ '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
)


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, then filler, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    filler = [f"<filler {token_id}>" for token_id in range(len(alphabet), FIRST_SPECIAL_ID)]
    vocabulary = {token: token_id for token_id, token in enumerate(alphabet + filler)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def model_config(tokenizer: Tokenizer) -> dict[str, object]:
    """Two layers of 64: small enough for a step of a few milliseconds on one core."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
    }


def write_model(directory: Path) -> None:
    """Fill ``directory``; what is there already is written again."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    contents: dict[str, dict[str, object]] = {
        "config.json": model_config(tokenizer),
        "generation_config.json": {
            "eos_token_id": tokenizer.token_to_id(TURN_END),
            "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "model_max_length": 40_960,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    write_model(parser.parse_args().directory)
