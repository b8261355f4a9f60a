"""The time of a run: all its starts together, killed ones too."""

import asyncio
import json
from pathlib import Path

import pytest

from composer import clock as clocks
from composer.clock import Clock


class Now:
    """Stands in for `time.monotonic`."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    now = Now()
    monkeypatch.setattr(clocks.time, "monotonic", now)
    return now


def test_starts_add_up(tmp_path: Path, now: Now) -> None:
    path = tmp_path / "times.json"
    first = Clock(path)
    now.seconds += 2
    with first.stage("pretrain"):
        now.seconds += 10
    with pytest.raises(KeyboardInterrupt), first.stage("rl"):
        now.seconds += 5
        raise KeyboardInterrupt
    now.seconds += 1
    first.save()
    now.seconds += 1000
    second = Clock(path)
    with second.stage("rl"):
        now.seconds += 7
    assert second.wall_s == 18 + 7
    assert second.stages == {"pretrain": 10, "rl": 12}
    assert [start["wall_s"] for start in second.starts] == [18, 7]


async def _killed(clock: Clock) -> None:
    saving = asyncio.create_task(clock.keep_saving())
    await asyncio.sleep(0)
    saving.cancel()


def test_a_killed_start_counts_with_the_stage_it_was_in(tmp_path: Path, now: Now) -> None:
    clock = Clock(tmp_path / "times.json")
    with clock.stage("rl"):
        now.seconds += 3
        asyncio.run(_killed(clock))
        assert Clock(tmp_path / "times.json").stages == {"rl": 3}


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '[{"wall_s": null, "stages": {}}]'])
def test_a_damaged_file_counts_as_none(content: str, tmp_path: Path, now: Now) -> None:
    path = tmp_path / "times.json"
    path.write_text(content)
    clock = Clock(path)
    now.seconds += 1
    clock.save()
    assert json.loads(path.read_text()) == [{"wall_s": 1, "stages": {}}]


def test_a_full_disk_is_survived(tmp_path: Path) -> None:
    Clock(tmp_path / "not there" / "times.json").save()
