"""The ledger: what a resumed run finds, also after a kill in the middle of a line."""

import re
from pathlib import Path

import pytest

from composer.errors import ResumeError
from composer.rl.ledger import Ledger, Unfinished, read_ledger
from composer.types import Generation, Group, Message, Outcome, ToolCall, Trajectory, Turn


def group(group_id, reward=1.0):
    turn = Turn([1, 2], Generation([3, 4], [-0.5, -0.25], [7, 8], "stop"), [ToolCall("f", {"a": 1})], "ok", 0.5)
    messages = [Message("user", "do"), Message("assistant", "f", (ToolCall("f", {"a": 1}),))]
    return Group(group_id, "task", [Trajectory("task", group_id, "e0", [turn], messages, Outcome.FINISHED, reward)])


def saved(*steps):
    """Checkpoints at these steps, where none is looked into."""
    return {step: Path(f"/run/checkpoints/step-{step}") for step in steps}


def write(path, events):
    ledger = Ledger(path)
    for name, *args in events:
        getattr(ledger, name)(*args)
    ledger.close()


def test_groups_of_lost_steps_come_first_then_waiting_ones(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(
        path,
        [
            *[("start", f"g{i}", i, 0) for i in range(7)],
            *[("group", group(f"g{i}")) for i in (1, 0, 2, 3, 5)],
            ("drop", "g4", "stuck"),
            ("step", 1, ["g1"]),
            ("step", 2, ["g0", "g2"]),
        ],
    )
    state = read_ledger(path, saved(1))
    assert list(state.groups) == ["g0", "g2", "g3", "g5"]
    assert state.next_index == 7 and state.unfinished == {"g6": Unfinished(6)}
    assert state.steps == {1: ["g1"]}
    assert state.num_dropped == 1


def test_unfinished_groups_are_those_that_nothing_became_of(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(
        path,
        [
            *[("start", f"g{i}", i, 0) for i in (3, 0, 4, 1, 2, 5, 6)],
            ("group", group("g0")),
            ("drop", "g1", "stuck"),
            ("group", group("g2")),
            ("drop", "g2", "stale"),
            # The lines of g5 and g6 were damaged and have been deleted, after steps had taken them.
            ("step", 1, ["g5"]),
            ("step", 2, ["g6"]),
        ],
    )
    state = read_ledger(path, saved(1))
    assert list(state.unfinished) == ["g3", "g4", "g6"], "g5 is in the weights, g6 is not any more"
    assert [g.index for g in state.unfinished.values()] == [3, 4, 6]
    assert list(state.groups) == ["g0"] and state.next_index == 7


def test_crashes_are_counted(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [("start", "g0", 0, 0), ("start", "g1", 1, 0), ("crash", "g1", "died"), ("restart", "g0", 0)])
    write(path, [("restart", "g1", 0), ("crash", "g1", "died")])
    assert read_ledger(path, {}).unfinished == {"g0": Unfinished(0), "g1": Unfinished(1, crashes=2)}
    write(path, [("group", group("g1"))])
    assert list(read_ledger(path, {}).unfinished) == ["g0"]


def test_a_rolled_back_step_is_not_counted_twice(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [("group", group("a")), ("group", group("b")), ("step", 1, ["a"]), ("step", 2, ["b"])])
    assert list(read_ledger(path, saved(1)).groups) == ["b"]
    write(path, [("rollback", 1), ("step", 2, ["b"])])
    state = read_ledger(path, saved(2))
    assert state.groups == {}
    assert state.steps == {1: ["a"], 2: ["b"]}


def test_trajectories_survive_to_the_last_bit(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [("group", group("a", reward=1 / 3))])
    assert read_ledger(path, {}).groups["a"] == group("a", reward=1 / 3)


@pytest.mark.parametrize("block", [3, 2**20])
def test_a_torn_last_line_is_cut_off(block, tmp_path, monkeypatch):
    monkeypatch.setattr("composer.rl.ledger._BLOCK_BYTES", block)
    path = tmp_path / "ledger.jsonl"
    write(path, [("start", "g0", 0, 0), ("group", group("g0"))])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event":"gro')
    assert list(read_ledger(path, {}).groups) == ["g0"]
    assert path.read_bytes() == whole
    write(path, [("start", "g1", 1, 0)])
    assert read_ledger(path, {}).next_index == 2
    path.write_bytes(b'{"event":"gro')
    assert read_ledger(path, {}).groups == {} and path.read_bytes() == b""


def test_only_groups_that_are_still_needed_are_read(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    write(path, [("group", group("g0")), ("group", group("g1")), ("step", 1, ["g0"]), ("group", group("g2"))])
    read = []
    monkeypatch.setattr(Group, "from_dict", classmethod(lambda cls, data: read.append(data["id"]) or group(data["id"])))
    assert list(read_ledger(path, {1: tmp_path}).groups) == ["g1", "g2"] == read


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"start"}',
        b'{"event":"crash","group":"g0","reason":""}',
        b'{"event":"start","index":0,"group":"\xff\xfe"}',
        b'{"event":"step","step":"one","groups":[]}',
        b'{"event":"step","step":1,"groups":null}',
        b'{"event":"group","group":"g0","data":{}}',
        b"[1]",
        b"",
    ],
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(ResumeError, match="line 1"):
        read_ledger(path, {})


def test_deleting_the_line_of_a_group_loses_only_that_group(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [("group", group("a")), ("group", group("b")), ("step", 1, ["a", "b"])])
    kept = [line for line in path.read_text().splitlines() if '"group":"a"' not in line]
    path.write_text("\n".join(kept) + "\n")
    assert list(read_ledger(path, {}).groups) == ["b"]


@pytest.mark.parametrize(
    ("steps", "at", "words"),
    [
        ([], (2, 3), "missing, but the newest checkpoint holds 3: delete {2} and {3}, and resume from the start of RL"),
        (
            [1],
            (3,),
            "knows the steps up to 1, but the newest checkpoint holds 3: delete {3}, and resume from the start",
        ),
        ([1, 2], (2, 3), "up to 2, but the newest checkpoint holds 3: delete {3}, and resume from step 2"),
        (
            [1, 3, 4],
            (2, 4),
            "up to 1, but the newest checkpoint holds 4: delete {2} and {4}, and resume from the start",
        ),
    ],
)
def test_a_ledger_behind_the_checkpoint_says_what_to_delete(tmp_path, steps, at, words):
    path, checkpoints = tmp_path / "ledger.jsonl", saved(*at)
    for step in steps:
        write(path, [("group", group(f"g{step}")), ("step", step, [f"g{step}"])])
    with pytest.raises(ResumeError) as caught:
        read_ledger(path, checkpoints)
    found = {str(step): folder for step, folder in checkpoints.items()}
    assert re.sub(r"\{(\d)\}", lambda n: str(found[n[1]]), words) in str(caught.value)
    # What it says helps: the rest continues, and what is trained again is what no weights have seen.
    rest = {step: folder for step, folder in checkpoints.items() if str(folder) not in str(caught.value)}
    state = read_ledger(path, rest)
    assert list(state.groups) == [f"g{step}" for step in steps if step > max(rest, default=0)]
