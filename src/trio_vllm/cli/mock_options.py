"""`MockOptions`: `MockEngineConfig` and `ServeOptions` as options of ``mock-engine``, and the command's own.

Names, defaults, bounds and help are those of the two classes. This module puts the options under
headings and has each value checked where cyclopts can name the option. Those of vLLM's Rust
``vllm-mock-engine`` have its names, defaults and meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import attrs
from cyclopts import CycloptsError, Group, Parameter, Token
from cyclopts.validators import Number

from trio_vllm.mock import MockEngineConfig, ServeOptions

SECTIONS = ("Engines", "Tokens", "What the engines say of themselves", "Life")
"""The headings of the help, in order."""
GROUPS = {title: Group(title, sort_key=number) for number, title in enumerate(SECTIONS)}


def _split(_type: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(name for token in tokens for name in token.value.split(","))


def _with_no_limit(value: float) -> str:
    return "no limit" if value == math.inf else str(value)


SPECIAL = {
    "supported_tasks": Parameter(converter=_split, show_default=",".join),
    "startup_timeout": Parameter(show_default=_with_no_limit),
    "reconnect": Parameter(negative="--no-reconnect"),
    "enable_sleep_mode": Parameter(parse=False),
}
"""What cannot be told from a field."""


def _checked(field: attrs.Attribute[Any]) -> Parameter:
    """Check a value by the field's own validator, which speaks of the field."""
    if field.validator is None:
        return Parameter()

    def check(_type: Any, value: Any) -> None:
        fault = field.validator.fault_in(value)  # type: ignore[union-attr]
        if fault is not None:
            raise ValueError(f"{fault[0].upper()}{fault[1:]}.")

    return Parameter(validator=check)


def _as_option(field: attrs.Attribute[Any], hint: Any) -> attrs.Attribute[Any]:
    if field.name == "supported_tasks":
        hint = str  # one text, separated by commas
    title = field.metadata.get("section")
    parameters = (
        _checked(field),
        Parameter(group=GROUPS[title]) if title else Parameter(),
        SPECIAL.get(field.name, Parameter()),
    )
    return field.evolve(type=Annotated[hint, *parameters])


def _as_options(cls: type[Any], fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    hints = get_type_hints(cls.__base__)
    return [_as_option(field, hints[field.name]) for field in fields]


@attrs.frozen(kw_only=True, field_transformer=_as_options)
class EngineOptions(MockEngineConfig):
    """`MockEngineConfig` for the command line."""


@attrs.frozen(kw_only=True, field_transformer=_as_options)
class ServingOptions(ServeOptions):
    """`ServeOptions` for the command line."""


@attrs.frozen(kw_only=True)
class MockOptions:
    """What ``mock-engine`` can be told."""

    config: Path | None = None
    """A TOML file with options."""
    engine: Annotated[EngineOptions, Parameter(name="*")] = EngineOptions()
    serving: Annotated[ServingOptions, Parameter(name="*")] = ServingOptions()
    processes: Annotated[
        int, Parameter(validator=Number(gte=1, lte=2**16), group=GROUPS["Engines"])
    ] = 1
    """How many processes they are spread over, since one can use no more than one core."""
    debug: bool = False
    """Print the traceback of a failure."""

    def to_json(self) -> str:
        """The options that differ from their defaults, for `from_json`."""
        return json.dumps(attrs.asdict(self, filter=lambda field, value: value != field.default))

    @classmethod
    def from_json(cls, text: str) -> MockOptions:
        """The options of another process."""
        given = json.loads(text)
        engine, serving = given.pop("engine", {}), given.pop("serving", {})
        if "supported_tasks" in engine:
            engine["supported_tasks"] = tuple(engine["supported_tasks"])
        return cls(engine=EngineOptions(**engine), serving=ServingOptions(**serving), **given)


def check_together(options: MockOptions = MockOptions()) -> None:
    """Refuse, by `CycloptsError`, options that make sense one by one, but not together."""
    if options.processes > options.serving.engine_count:
        reason = f"--processes {options.processes} is more than --engine-count."
    elif options.processes > 1 and options.engine.lockstep:
        reason = "--lockstep takes --processes 1: engines agree on a wave only within a process."
    else:
        return
    raise CycloptsError(msg=reason)
