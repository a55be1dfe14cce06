"""What a run of ``llm-smoke`` tells on standard output."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import attrs


@attrs.define
class Report:
    """What one smoke has found out; prints each finding at once, unless told to be quiet."""

    name: str
    quiet: bool = False
    findings: dict[str, Any] = attrs.field(factory=dict, init=False)
    failure: str | None = attrs.field(default=None, init=False)
    """Why it has not passed; None while it may."""
    seconds: float = attrs.field(default=0.0, init=False)

    def put(self, name: str, value: Any, text: str | None = None) -> None:
        """Note a finding; ``text`` is what is printed of it, if the value itself is too much."""
        self.findings[name] = value
        if not self.quiet:
            print(f"{name}={_plain(value) if text is None else text}", flush=True)

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return self.failure is None

    def as_dict(self) -> dict[str, Any]:
        """What is printed as JSON."""
        verdict: dict[str, Any] = {"smoke": self.name, "passed": self.passed}
        if self.failure is not None:
            verdict["failure"] = self.failure
        return {**verdict, "seconds": round(self.seconds, 3), **_jsonable(self.findings)}


def _plain(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "none"
        case _:
            return str(value)


def _jsonable(value: Any) -> Any:
    """The value without numbers that JSON has no notation for."""
    match value:
        case dict():
            return {key: _jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [_jsonable(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


def print_json(reports: list[Report]) -> None:
    """Print one object: the only report, or all under the names of their smokes."""
    if len(reports) > 1:
        smokes = {report.name: report.as_dict() for report in reports}
        document = {"passed": all(report.passed for report in reports), "smokes": smokes}
    else:
        document = reports[0].as_dict()
    print(json.dumps(document, allow_nan=False), flush=True)


def print_table(reports: Iterable[Report]) -> None:
    """Print a line per smoke."""
    from rich.console import Console
    from rich.table import Table

    table = Table("smoke", "result", "seconds", "reason")
    for report in reports:
        result = "[green]passed" if report.passed else "[red]failed"
        table.add_row(report.name, result, f"{report.seconds:.1f}", report.failure or "")
    Console(soft_wrap=False, highlight=False).print(table)
