"""Profiles of known engines."""

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from trio_vllm.errors import ConfigurationError
from trio_vllm.mock import MockEngineConfig, load_profile, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_usable_and_say_where_they_come_from(name: str) -> None:
    """Each takes time by the step."""
    config = MockEngineConfig(**load_profile(name))
    assert config.is_scheduled
    assert 0.001 < config.step_time < 0.1
    assert config.step_time_per_prefill_token > config.step_time_per_context_token > 0
    file = resources.files("trio_vllm.mock.profiles") / f"{name}.toml"
    described = tomllib.loads(file.read_text(encoding="utf-8"))
    assert "https://" in described["source"]
    assert described["description"]


def test_numbers_follow_from_the_source() -> None:
    """8.03 billion parameters of two bytes at 3.35 TB/s, and so on."""
    options = load_profile("llama-3.1-8b-h100")
    assert options["step_time"] == pytest.approx(8.03e9 * 2 / 3.35e12, rel=0.01)
    assert options["step_time_per_prefill_token"] == pytest.approx(2 * 8.03e9 / 989e12, rel=0.01)
    assert options["step_time_per_context_token"] == pytest.approx(131_072 / 3.35e12, rel=0.01)


def test_own_profiles(tmp_path: Path) -> None:
    """With durations as texts or numbers."""
    file = tmp_path / "mine.toml"
    file.write_text('step_time = "8ms"\nstep_time_per_request = 0.001\nmax_num_seqs = 4\n')
    assert load_profile(file) == {
        "step_time": 0.008,
        "step_time_per_request": 0.001,
        "max_num_seqs": 4,
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("step_tim = 1", "unknown key 'step_tim'; did you mean 'step_time'"),
        ("step_time = 'soon'", "step_time must be a time such as 20ms"),
        ("step_time = -1", "step_time must be finite and not be negative"),
        ("acceptance_rate = '500ms'", "acceptance_rate must be from 0 to 1"),
        ("time_scale = '500ms'", "time_scale must be more than 0"),
        ("max_num_seqs = 'all'", "max_num_seqs must be an integer"),
        ("enable_prefix_caching = 'no'", "must be true or false"),
        ("max_num_seqs = 9000", "less than max_num_seqs"),
        ("step_time", "is no TOML"),
    ],
)
def test_unusable_profiles_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    """In one line that names the file and the key."""
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        load_profile(file)
    assert "mine.toml" in str(caught.value)


def test_missing_profiles_are_told(tmp_path: Path) -> None:
    """With the names that there are."""
    with pytest.raises(ConfigurationError, match=r"llama-3\.1-8b-h100"):
        load_profile("llama")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_profile(tmp_path / "none.toml")
