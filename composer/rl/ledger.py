"""The ledger of an RL stage: an append-only file of what was started, finished, trained and lost.

It is what makes resuming exact. A group that was finished before a crash is never sampled again: groups of optimizer
steps after the last checkpoint are trained again *as recorded*, finished groups that no step had taken yet are
queued, and a group that was started but not finished is started again under its name: no task is trained twice, and
none is lost.

One JSON object a line, flushed before the event it records takes effect:

    {"event": "start", "group": "g17", "index": 17, "version": 2}
    {"event": "crash", "group": "g17", "reason": "..."}          what ran it died, and the run with it
    {"event": "restart", "group": "g17", "version": 3}           a later start of the run runs it again
    {"event": "group", "group": "g17", "data": {...}}            a finished group, trajectories included
    {"event": "drop", "group": "g18", "reason": "..."}
    {"event": "step", "step": 3, "groups": ["g16", "g17"]}       step 3 took these groups
    {"event": "rollback", "step": 2}                             steps after 2 were lost with their weights
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer.errors import ResumeError
from composer.types import Group

_BLOCK_BYTES = 2**20


@dataclass
class Unfinished:
    """A group that was started and has neither finished nor been dropped."""

    index: int
    crashes: int = 0
    """How often the run has failed with it."""


@dataclass
class LedgerState:
    """What a ledger says when it is read from its start."""

    next_index: int = 0
    """The first task that was never started."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Finished groups that are not yet part of the weights, by id, in the order they finished."""
    unfinished: dict[str, Unfinished] = field(default_factory=dict)
    """By id, in the order they were first started."""
    steps: dict[int, list[str]] = field(default_factory=dict)
    """Step -> ids of the groups it trained on, rolled-back steps left out."""
    num_dropped: int = 0


class Ledger:
    """Appends events; one writer at a time."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; a half-written last line (the writer was killed) is cut off."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def start(self, group_id: str, index: int, version: int) -> None:
        """A task goes out to an env worker."""
        self._append({"event": "start", "group": group_id, "index": index, "version": version})

    def restart(self, group_id: str, version: int) -> None:
        """A group that an interrupted run had started goes out again."""
        self._append({"event": "restart", "group": group_id, "version": version})

    def crash(self, group_id: str, reason: str) -> None:
        """The run fails since what ran this group did; the group may be the cause."""
        self._append({"event": "crash", "group": group_id, "reason": reason})

    def group(self, group: Group) -> None:
        """A group is finished."""
        self._append({"event": "group", "group": group.id, "data": group.to_dict()})

    def drop(self, group_id: str, reason: str) -> None:
        """A group will never be trained on."""
        self._append({"event": "drop", "group": group_id, "reason": reason})

    def step(self, step: int, group_ids: Sequence[str]) -> None:
        """An optimizer step is done with these groups."""
        self._append({"event": "step", "step": step, "groups": list(group_ids)})

    def rollback(self, step: int) -> None:
        """The weights are those after `step` again."""
        self._append({"event": "rollback", "step": step})

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _append(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_ledger(path: Path, checkpoints: Mapping[int, Path]) -> LedgerState:
    """What a run that continues from its newest checkpoint finds in the ledger.

    Args:
        path: the ledger; a missing file is an empty ledger.
        checkpoints: folders of the checkpoints that are there, by the optimizer steps that they hold.

    Returns:
        The state, with the groups of the lost steps first (in step order) and the waiting ones after them.

    Raises:
        ResumeError: a line cannot be read, or the newest checkpoint holds steps that the ledger does not know.
    """
    state = LedgerState()
    step = max(checkpoints, default=0)
    finished: dict[str, tuple[int, int]] = {}  # where each group's line begins, and its number: most are not needed
    dropped: set[str] = set()
    started: dict[str, Unfinished] = {}
    if not path.exists():
        if step:
            raise _behind(f"{path} is missing", 0, checkpoints)
        return state
    _cut_torn_line(path)
    with path.open("rb") as lines:
        place = 0
        for number, line in enumerate(lines, 1):
            with _damage(path, number):
                event = json.loads(line)
                kind = event["event"]
                if kind == "start":
                    started[event["group"]] = Unfinished(int(event["index"]))
                    state.next_index = max(state.next_index, int(event["index"]) + 1)
                elif kind == "crash":
                    started[event["group"]].crashes += 1
                elif kind == "group":
                    finished[event["group"]] = (place, number)
                elif kind == "drop":
                    dropped.add(event["group"])
                elif kind == "step":
                    state.steps[int(event["step"])] = [str(g) for g in event["groups"]]
                elif kind == "rollback":
                    state.steps = {s: g for s, g in state.steps.items() if s <= int(event["step"])}
            place += len(line)
    known = 0
    while known + 1 in state.steps:
        known += 1
    if known < step:
        raise _behind(f"{path} knows the steps up to {known}", known, checkpoints)
    lost = [g for s in sorted(state.steps) if s > step for g in state.steps[s]]
    state.steps = {s: g for s, g in state.steps.items() if s <= step}
    trained = {g for ids in state.steps.values() for g in ids}
    waiting = [g for g in finished if g not in trained and g not in dropped and g not in set(lost)]
    with path.open("rb") as lines:
        for group_id in (*lost, *waiting):
            if group_id in finished:  # a damaged line may have been deleted
                place, number = finished[group_id]
                lines.seek(place)
                with _damage(path, number):
                    state.groups[group_id] = Group.from_dict(json.loads(lines.readline())["data"])
    ended = {*finished, *dropped, *trained}
    state.unfinished = {group_id: group for group_id, group in started.items() if group_id not in ended}
    state.num_dropped = len(dropped)
    return state


@contextlib.contextmanager
def _damage(path: Path, number: int) -> Iterator[None]:
    """Around the reading of a line."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as e:
        raise ResumeError(f"{path}, line {number}, is damaged ({e}); delete that line to lose only its group") from e


def _behind(what: str, known: int, checkpoints: Mapping[int, Path]) -> ResumeError:
    """Which checkpoints to delete: those with a step of which nobody knows what it was trained on."""
    newer = [str(folder) for step, folder in checkpoints.items() if step > known]
    rest = max((step for step in checkpoints if step <= known), default=0)
    return ResumeError(
        f"{what}, but the newest checkpoint holds {max(checkpoints)}: delete {' and '.join(newer)}, and resume from "
        f"{f'step {rest}' if rest else 'the start of RL'}"
    )


def _cut_torn_line(path: Path) -> None:
    """Drop a last line that has no newline: the event it would have recorded did not take effect."""
    with path.open("rb+") as f:
        size = f.seek(0, os.SEEK_END)
        if not size:
            return
        f.seek(size - 1)
        if f.read(1) == b"\n":
            return
        end = size
        while end:  # backwards, since a ledger can be larger than the memory
            begin = max(0, end - _BLOCK_BYTES)
            f.seek(begin)
            newline = f.read(end - begin).rfind(b"\n")
            if newline >= 0:
                f.truncate(begin + newline + 1)
                return
            end = begin
        f.truncate(0)
