"""Schedules that a real engine made, replayed: see ``tests/vectors/schedules/README.md``."""

from itertools import zip_longest
from pathlib import Path

import ormsgpack
import pytest
from tests.mock.replay import FOLDER, Json, OracleReplay, Replay, load

from trio_vllm.mock.kv_events import EventPublisher

RECORDED = sorted(set(FOLDER.glob("*.json.gz")) - set(FOLDER.glob("random*")))
RANDOM = [scenario for path in sorted(FOLDER.glob("random*")) for scenario in load(path)]


def same(got: Json | None, expected: Json | None) -> bool:
    """Whether two steps are equal, their usage to nine digits."""
    if got is None or expected is None:
        return got is expected
    usage = expected["stats"]["kv_cache_usage"]
    if got["stats"]["kv_cache_usage"] != pytest.approx(usage, abs=1e-9):
        return False
    stats = {**got["stats"], "kv_cache_usage": usage}
    return {**got, "stats": stats} == expected


def without_ids(step: Json | None) -> Json | None:
    """A recorded step without the tokens that the model sampled."""
    if step is None or "rows" not in step:
        return step
    rows = [{name: row[name] for name in row if name != "ids"} for row in step["rows"]]
    return {**step, "rows": rows}


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_recorded_schedules_are_made_again(path: Path, *, fast_path: bool) -> None:
    """Each step has the rows, statistics, events and ends that the real engine had."""
    recording = load(path)
    replay = Replay(recording, fast_path=fast_path)
    for phase in recording["phases"]:
        steps = zip_longest(replay.run(phase), phase["steps"])
        for number, (got, recorded) in enumerate(steps):
            expected = without_ids(recorded)
            assert same(got, expected), f"step {number}: {got} != {expected}"


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("scenario", RANDOM, ids=lambda scenario: str(scenario["seed"]))
def test_random_schedules_are_those_of_vllm(scenario: Json, *, fast_path: bool) -> None:
    """Besides what the recordings show: the same blocks for each request, and the same events."""
    replay = OracleReplay(scenario["settings"], fast_path=fast_path)
    for operation in scenario["operations"]:
        replay.perform(operation)
    for number, (got, expected) in enumerate(zip_longest(replay.steps, scenario["steps"])):
        assert got == expected, f"step {number}"


def test_kv_events_are_those_of_the_engine() -> None:
    """The event socket carries the same frames, byte for byte."""
    recording = load(FOLDER / "kv_events.json.gz")
    replay = Replay(recording)
    for phase in recording["phases"]:
        for _ in replay.run(phase):
            pass
    recorded = recording["kv_events"]
    times = [batch[0] for batch in recorded["decoded"]]
    publisher = EventPublisher(ormsgpack.packb, topic="kv-events")
    published = [publisher.publish(*batch) for batch in zip(replay.events, times, strict=True)]
    assert [[frame.hex() for frame in frames] for frames in published] == recorded["pub"]
    answers = publisher.replay([b"subscriber", b"", (2).to_bytes(8, "big")])
    assert [[frame.hex() for frame in frames[1:]] for frames in answers] == recorded[
        "replay_from_2"
    ]
