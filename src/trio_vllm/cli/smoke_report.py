"""`Report`: what one smoke has found, as lines, as JSON and as XML of JUnit."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Sequence
from typing import Any, Literal
from xml.etree import ElementTree

import attrs

from trio_vllm.cli.app import one_line, write_output
from trio_vllm.values import define

Result = Literal["passed", "failed", "skipped"]

SHORT = ("model", "engine_count", "vllm_version")
"""Findings that are in the small JSON object, too."""


@define
class Report:
    """What one smoke has found out; prints each finding at once, unless told to be quiet."""

    name: str
    quiet: bool = False
    findings: dict[str, Any] = attrs.field(factory=dict, init=False)
    figures: dict[str, Any] = attrs.field(factory=dict, init=False)
    """Findings that are the purpose of the smoke."""
    skipped: list[str] = attrs.field(factory=list, init=False)
    """What was left out, because it was not wanted."""
    warnings: list[str] = attrs.field(factory=list, init=False)
    result: Result | None = attrs.field(default=None, init=False)
    """None while it is not over."""
    failure: str | None = attrs.field(default=None, init=False)
    """Why it has not passed."""
    failure_kind: str | None = attrs.field(default=None, init=False)
    """The exception's name; None if it was skipped."""
    seconds: float = attrs.field(default=0.0, init=False)
    awaited: str = attrs.field(default="", init=False)
    """What the smoke is waiting for, or has waited for last."""
    engine_log: Sequence[str] = attrs.field(default=(), init=False)
    """The last lines that its engines have printed, if they are ours."""

    def put(self, name: str, value: Any, text: str | None = None) -> None:
        """Note a finding; ``text`` is what is printed of it, if the value itself is too much."""
        self.findings[name] = value
        self._print(f"{name}={_plain(value) if text is None else text}")

    def put_skipped(self, name: str) -> None:
        """Note that something was left out."""
        self.skipped.append(name)
        self.put(name, "skipped")

    def put_heading(self) -> None:
        """Begin a section of lines, where there are several."""
        self._print(f"[{self.name}]")

    def _print(self, line: str) -> None:
        if not self.quiet:
            write_output(line)

    def end(self, result: Result, reason: str | None = None, kind: str | None = None) -> None:
        """Note how it ended."""
        self.result, self.failure, self.failure_kind = result, reason, kind

    @property
    def passed(self) -> bool:
        """Whether it was run, and nothing was wrong."""
        return self.result == "passed"

    def as_dict(self, *, full: bool) -> dict[str, Any]:
        """What is printed as JSON."""
        document: dict[str, Any] = {
            "smoke": self.name,
            "passed": self.passed,
            "result": self.result,
            "seconds": round(self.seconds, 3),
            "trio_vllm_version": version(),
        }
        if self.failure is not None:
            document["failure"] = self.failure
        if self.failure_kind is not None:
            document["failure_kind"] = self.failure_kind
        short = {name: self.findings[name] for name in SHORT if name in self.findings}
        findings = self.findings if full else {**short, **self.figures}
        lists = {"skipped": self.skipped, "warnings": self.warnings}
        if full and self.log_of_failure:
            lists["engine_log"] = self.log_of_failure
        return {**document, **_jsonable(findings), **lists}

    @property
    def log_of_failure(self) -> list[str]:
        """The last lines of the engines' log, if the smoke has failed."""
        return [*self.engine_log] if self.result == "failed" else []


def version() -> str:
    """The version of this package."""
    return importlib.metadata.version("trio-vllm")


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


# Several reports ----------------------------------------------------------------------------------


def as_json(reports: Sequence[Report], *, full: bool, fault: str | None = None) -> str:
    """One object: the only report, or all under the names of their smokes.

    ``fault`` is why a run has failed whose smokes have passed.
    """
    document = reports[0].as_dict(full=full) if len(reports) == 1 else _of_all(reports, full=full)
    if fault is not None and document["passed"]:
        document |= {"passed": False, "result": "failed", "failure": fault}
        document["failure_kind"] = "OSError"
    return json.dumps(document, allow_nan=False)


def _of_all(reports: Sequence[Report], *, full: bool) -> dict[str, Any]:
    return {
        "passed": all(report.passed for report in reports),
        "skipped": [report.name for report in reports if report.result == "skipped"],
        "seconds": round(sum(report.seconds for report in reports), 3),
        "trio_vllm_version": version(),
        "smokes": {report.name: report.as_dict(full=full) for report in reports},
    }


def print_verdicts(reports: Sequence[Report]) -> None:
    """The last section of lines, about all."""
    write_output("[all]")
    for report in reports:
        write_output(f"{report.name}={report.result}")
        write_output(f"{report.name}.seconds={report.seconds:.1f}")
        if report.failure is not None:
            write_output(f"{report.name}.reason={report.failure}")


def as_junit(reports: Sequence[Report]) -> str:
    """The XML that CI systems show: a test case for each smoke."""
    results = [report.result for report in reports]
    counts = {
        "tests": str(len(reports)),
        "failures": str(results.count("failed")),
        "skipped": str(results.count("skipped")),
        "errors": "0",
        "time": f"{sum(report.seconds for report in reports):.3f}",
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "llm-smoke", **counts})
    for report in reports:
        _add_case(suite, report)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _add_case(suite: ElementTree.Element, report: Report) -> None:
    attributes = {"classname": "llm-smoke", "name": report.name, "time": f"{report.seconds:.3f}"}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    reason = _printable(report.failure or "")
    if report.result == "failed":
        kind = report.failure_kind or ""
        ElementTree.SubElement(case, "failure", {"type": kind, "message": reason})
    elif report.result == "skipped":
        ElementTree.SubElement(case, "skipped", {"message": reason})
    lines = [one_line(f"{name}={_plain(value)}") for name, value in report.findings.items()]
    ElementTree.SubElement(case, "system-out").text = _printable("\n".join(lines))
    errors = [*report.warnings, *report.log_of_failure]
    ElementTree.SubElement(case, "system-err").text = _printable("\n".join(errors))


def _printable(text: str) -> str:
    """A text without what XML has no notation for."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
