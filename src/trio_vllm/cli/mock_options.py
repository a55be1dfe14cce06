"""`MockOptions`, and `with_options`, which makes fields of the mock's own classes options of a command.

Names, defaults, bounds and help are those of `MockEngineConfig` and `ServeOptions`. This module puts
the options under headings and has each value checked where cyclopts can name the option. Those of
vLLM's Rust ``vllm-mock-engine`` have its names, defaults and meaning.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import attrs
from cyclopts import Group, Parameter, Token

from trio_vllm import ConfigurationError
from trio_vllm._help import field_docs_in_source
from trio_vllm.mock import MockEngineConfig, ServeOptions, parse_duration
from trio_vllm.values import frozen

F = TypeVar("F", bound=Callable[..., Any])

SECTIONS = (
    "Engines",
    "Tokens",
    "Scheduling",
    "Time of a step",
    "Time of a request",
    "Disaggregation",
    "What the engines say of themselves",
    "Life",
)
"""The headings of the help, in order."""
WITH_TIMES = ("Time of a step", "Time of a request", "Disaggregation", "Life")
HOW_TO_WRITE_TIMES = "Times are seconds, or have a unit: 20ms, 1.5s."
GROUPS = {
    title: Group(title, help=HOW_TO_WRITE_TIMES if title in WITH_TIMES else "", sort_key=number)
    for number, title in enumerate(SECTIONS)
}


def _split(_type: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(name for token in tokens for name in token.value.split(","))


def _duration(_type: Any, tokens: Sequence[Token]) -> float:
    return parse_duration(tokens[0].value)


def _with_no_limit(value: float) -> str:
    return "no limit" if value == math.inf else str(value)


SPECIAL: dict[str, dict[str, Any]] = {
    "supported_tasks": {"converter": _split, "show_default": ",".join},
    "startup_timeout": {"show_default": _with_no_limit},
    "heartbeat_timeout": {"show_default": _with_no_limit},
    "reconnect": {"negative": "--no-reconnect"},
    "schedule": {"negative": "--no-schedule", "show_default": False},
    "enable_chunked_prefill": {"negative": "--no-enable-chunked-prefill"},
    "enable_prefix_caching": {"negative": "--no-enable-prefix-caching"},
}
"""What cannot be told from a field."""

HIDDEN = {"enable_sleep_mode"}
"""Fields that are not options of the command."""


def _check_of(field: attrs.Attribute[Any]) -> Callable[[Any, Any], None]:
    """Check a value by the field's own validator, which speaks of the field."""

    def check(_type: Any, value: Any) -> None:
        fault = field.validator.fault_in(value)  # type: ignore[union-attr]
        if fault is not None:
            raise ValueError(f"{fault[0].upper()}{fault[1:]}.")

    return check


def _option(field: attrs.Attribute[Any], hint: Any, doc: str) -> inspect.Parameter:
    if field.name == "supported_tasks":
        hint = str  # one text, separated by commas
    told: dict[str, Any] = {"help": doc}  # one object for all of it: each takes 0.1 ms
    if field.validator is not None:
        told["validator"] = _check_of(field)
    if title := field.metadata.get("section"):
        told["group"] = GROUPS[title]
    if field.converter is not None:  # of a time
        told["converter"] = _duration
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[hint, Parameter(**told, **SPECIAL.get(field.name, {}))],
    )


def _options_of(*classes: type[Any]) -> Iterator[inspect.Parameter]:
    # cyclopts finds them, too, but parses the module for each class and base class: 50 ms.
    docs = field_docs_in_source(*classes)
    for cls in classes:
        hints = get_type_hints(cls)
        for field in attrs.fields(cls):
            if field.name not in HIDDEN:
                yield _option(field, hints[field.name], docs[field.name])


def with_options(function: F) -> F:
    """Give a function, besides its own, the options of both classes as keyword parameters."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    named = [parameter for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
    parameters = [*_options_of(ServeOptions, MockEngineConfig), *named]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


@frozen(kw_only=True)
class MockOptions:
    """What ``mock-engine`` is told."""

    engine: MockEngineConfig = attrs.field(factory=MockEngineConfig)
    serving: ServeOptions = attrs.field(factory=ServeOptions)
    processes: int = 1
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    live: bool = False
    state_interval: float = math.inf
    """Seconds between two reports of a process about its engines."""
    debug: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether what the engines do is shown while they run."""
        return self.live or self.metrics_port is not None

    @classmethod
    def of(
        cls, *, like: str | None = None, profile: Path | None = None, **options: Any
    ) -> MockOptions:
        """Options by their names.

        Args:
          like: A profile of the package, whose options hold where none are given.
          profile: The file of another one.
          options: All others.

        Raises:
          ConfigurationError: They make sense one by one, but not together.
        """
        options = {**_options_of_profile(like, profile), **options}
        engine = {name: options.pop(name) for name in _names(MockEngineConfig) & options.keys()}
        serving = {name: options.pop(name) for name in _names(ServeOptions) & options.keys()}
        try:
            config, serve = MockEngineConfig(**engine), ServeOptions(**serving)
        except ConfigurationError as error:
            raise ConfigurationError(_with_options(str(error))) from error
        return cls(engine=config, serving=serve, **options)

    def __attrs_post_init__(self) -> None:
        count = self.processes
        if count > self.serving.engine_count:
            raise ConfigurationError(f"--processes {count} is more than --engine-count.")
        if count > 1 and self.engine.lockstep:
            raise ConfigurationError(
                "--lockstep takes --processes 1: engines agree on a wave only within a process."
            )

    def to_json(self) -> str:
        """The options that differ from their defaults, for `from_json`."""
        own: dict[str, Any] = {"processes": self.processes, "debug": self.debug}
        if self.live:
            own["live"] = True
        if self.state_interval != math.inf:
            own["state_interval"] = self.state_interval
        return json.dumps({**own, **_changed(self.engine), **_changed(self.serving)})

    @classmethod
    def from_json(cls, text: str) -> MockOptions:
        """The options of another process."""
        options = json.loads(text)
        if "supported_tasks" in options:
            options["supported_tasks"] = tuple(options["supported_tasks"])
        return cls.of(**options)


def _options_of_profile(like: str | None, profile: Path | None) -> dict[str, Any]:
    if like is not None and profile is not None:
        raise ConfigurationError("--like and --profile exclude each other.")
    name = profile if like is None else like
    if name is None:
        return {}
    from trio_vllm.mock import load_profile

    return load_profile(name)


def _with_options(fault: str) -> str:
    """The same text with the options of a command in the place of the fields."""
    fields = _names(MockEngineConfig) | _names(ServeOptions)
    names = "|".join(sorted(name for name in fields if "_" in name))
    # A whole word, and no part of a path.
    return re.sub(
        rf"(?<!\S)(?:{names})(?![^\s:,;])", lambda found: f"--{found[0].replace('_', '-')}", fault
    )


def _names(cls: type[Any]) -> set[str]:
    return {field.name for field in attrs.fields(cls)}


def _changed(value: attrs.AttrsInstance) -> dict[str, Any]:
    return attrs.asdict(value, filter=lambda field, given: given != field.default)
