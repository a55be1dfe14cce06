"""`load_profile` reads the options of an engine from a TOML file: one of ours, or a user's own."""

from __future__ import annotations

import difflib
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from trio_vllm.errors import ConfigurationError
from trio_vllm.mock.config import MockEngineConfig

DESCRIPTIONS = ("description", "source")
"""Keys of a profile that are no options."""

_FILES = resources.files("trio_vllm.mock.profiles")


def profile_names() -> list[str]:
    """The names of the profiles that come with the package."""
    names = (file.name for file in _FILES.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_profile(name: str | Path) -> dict[str, Any]:
    """Options of `MockEngineConfig` from a profile.

    Args:
      name: Of a profile of the package; a `pathlib.Path` is a file of one's own.

    Raises:
      ConfigurationError: There is no such profile, or it has a key or a value that makes no sense.
    """
    if isinstance(name, Path):
        try:
            return parse_profile(name.read_text(encoding="utf-8"), str(name))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"profile {name} cannot be read: {error}") from None
    if name not in profile_names():
        known = ", ".join(profile_names())
        raise ConfigurationError(f"there is no profile {name!r}; there are {known}")
    return parse_profile((_FILES / f"{name}.toml").read_text(encoding="utf-8"), name)


def parse_profile(text: str, name: str) -> dict[str, Any]:
    """Options from the text of a profile; ``name`` is for failures.

    Raises:
      ConfigurationError: It is no TOML, or it has a key or a value that makes no sense.
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"profile {name} is no TOML: {error}") from None
    fields = attrs.fields_dict(MockEngineConfig)
    options = {key: value for key, value in given.items() if key not in DESCRIPTIONS}
    for key in options:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(f"profile {name} has an unknown key {key!r}{hint}")
    try:
        config = MockEngineConfig(
            **{key: _value(fields[key], value) for key, value in options.items()}
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"profile {name}: {error}") from None
    return {key: getattr(config, key) for key in options}


def _value(field: attrs.Attribute[Any], value: Any) -> Any:
    """A value of a profile, as the class takes it."""
    if str(field.type) == "bool" and not isinstance(value, bool):
        raise ConfigurationError(f"{field.name} must be true or false, got {value!r}")
    return tuple(value) if isinstance(value, list) else value
