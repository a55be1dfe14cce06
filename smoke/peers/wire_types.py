"""vLLM's own types read what we write, and we read what vLLM's encoder writes.

No engine runs: vLLM's Python imports its types, reads messages of every kind, and writes them again.
Also, vLLM's types refuse what we refuse to send.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import CheckError, ok
from provision import BUILT_VERSION, Peers
from trio_vllm import DecodeError
from trio_vllm.client.input_processing import RequestLimits, check_request
from trio_vllm.errors import InvalidFieldError
from wire.cases import Case, cases, request_from
from wire.plain_views import view
from wire.requests import deadly_requests

SMOKE = Path(__file__).parents[1]

IMPORT_TIMEOUT = 240.0
"""Seconds for all of it; to import vLLM alone takes 15."""

ONLY_IN_0_33 = frozenset(
    {
        "coord_store_port",
        "coordinator_input_address",
        "coordinator_output_address",
        "error",
        "late_chunking_params",
    }
)
"""Fields that the older vLLM does not know yet."""

SET_BY_CONSTRUCTORS = frozenset({"skip_reading_prefix_cache", "stop_token_ids"})
"""Where vLLM's classes replace None."""

SETS = frozenset({"all_stop_token_ids", "finished_requests"})
"""Fields without an order, in vLLM's classes."""


def differences(ours: Any, theirs: Any, unknown: frozenset[str], path: str = "") -> Iterator[str]:
    """Where a view of vLLM's value says something else than ours; it may say more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, item in ours.items():
            if key not in theirs:
                if key not in unknown:
                    yield f"{path}.{key} is missing"
            elif key in SETS and item is not None:
                yield from differences(sorted(item), sorted(theirs[key]), unknown, f"{path}.{key}")
            elif item is not None or key not in SET_BY_CONSTRUCTORS:
                yield from differences(item, theirs[key], unknown, f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) > len(theirs) or any(item is not None for item in theirs[len(ours) :]):
            yield f"{path} has {len(theirs)} items, not {len(ours)}"
        for index, (item, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(item, other, unknown, f"{path}[{index}]")
    elif ours != theirs or (type(ours) is not type(theirs) and type(theirs) is not float):
        yield f"{path} is {theirs!r}, not {ours!r}"


def our_view(value: Any) -> Any:
    """Our value, named as vLLM names it."""
    shown = view(value)
    if isinstance(shown, dict) and "call_id" in (shown.get("output") or ()):
        shown["utility_output"] = shown.pop("output")
    return shown


def ask_vllm(peers: Peers, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let vLLM's Python work through them."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "cases.json"), Path(folder, "results.json")
        asked.write_text(json.dumps(questions))
        paths = (str(SMOKE), peers.environment.get("PYTHONPATH", ""))
        variables = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(
            [peers.python, "-m", "wire.vllm_types", asked, answered],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT,
            env={**os.environ, **peers.environment, **variables},
        )
        if done.returncode:
            raise CheckError(f"vLLM's Python ended with {done.returncode}:\n{done.stderr}")
        answers: list[dict[str, Any]] = json.loads(answered.read_text())
        return answers


def check_understood(case: Case, answer: dict[str, Any], unknown: frozenset[str]) -> list[str]:
    """What is wrong with vLLM's reading of a message, and with ours of its answer."""
    if "error" in answer:
        return [f"{case.name}: vLLM does not read it: {answer['error']}"]
    expected = our_view(case.value)
    found = [f"vLLM reads: {line}" for line in differences(expected, answer["view"], unknown)]
    again = our_view(case.read([bytes.fromhex(frame) for frame in answer["frames"]]))
    found += [f"we read: {line}" for line in differences(again, answer["view"], unknown)]
    return [f"{case.name}: {line}" for line in found]


def check_refused(name: str, frames: list[bytes], answer: dict[str, Any]) -> list[str]:
    """Whether both sides refuse a request because of this field."""
    found = [] if "error" in answer else [f"vLLM takes a bad {name}"]
    refused = refused_field(frames)
    if name not in refused:
        found.append(f"we refuse {refused or 'nothing'} for a bad {name}")
    return found


def refused_field(frames: list[bytes]) -> str:
    """What we refuse of an ADD, whether it cannot be read or must not be sent on."""
    try:
        check_request(request_from(frames), RequestLimits(max_model_len=512))
    except DecodeError as error:
        return error.where
    except InvalidFieldError as error:
        return error.field
    return ""


def main(peers: Peers) -> None:
    """Ask once, compare everything."""
    good = list(cases())
    bad = list(deadly_requests())
    asked = [(case.type, case.frames) for case in good] + [("request", frames) for _, frames in bad]
    answers = ask_vllm(
        peers,
        [{"type": kind, "frames": [frame.hex() for frame in frames]} for kind, frames in asked],
    )
    unknown = ONLY_IN_0_33 if peers.version == BUILT_VERSION else frozenset[str]()
    wrong = []
    for case, answer in zip(good, answers, strict=False):
        wrong += check_understood(case, answer, unknown)
    for (name, frames), answer in zip(bad, answers[len(good) :], strict=True):
        wrong += check_refused(name, frames, answer)
    if wrong:
        raise CheckError("\n".join(wrong))
    ok(f"{len(good)} messages understood both ways, {len(bad)} refused by both sides")
