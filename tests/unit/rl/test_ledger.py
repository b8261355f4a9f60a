"""The ledger: what a resumed run finds, also after a kill in the middle of a line."""

import pytest

from composer.errors import ResumeError
from composer.rl.ledger import Ledger, read_ledger
from composer.types import Generation, Group, Message, Outcome, ToolCall, Trajectory, Turn


def group(group_id, reward=1.0):
    turn = Turn([1, 2], Generation([3, 4], [-0.5, -0.25], [7, 8], "stop"), [ToolCall("f", {"a": 1})], "ok", 0.5)
    messages = [Message("user", "do"), Message("assistant", "f", (ToolCall("f", {"a": 1}),))]
    return Group(group_id, "task", [Trajectory("task", group_id, "e0", [turn], messages, Outcome.FINISHED, reward)])


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
    state = read_ledger(path, step=1)
    assert list(state.groups) == ["g0", "g2", "g3", "g5"]
    assert state.next_index == 7, "g6 was started and never finished: its task is left out for ever"
    assert state.steps == {1: ["g1"]}
    assert state.num_dropped == 1


def test_a_rolled_back_step_is_not_counted_twice(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [("group", group("a")), ("group", group("b")), ("step", 1, ["a"]), ("step", 2, ["b"])])
    assert list(read_ledger(path, 1).groups) == ["b"]
    write(path, [("rollback", 1), ("step", 2, ["b"])])
    state = read_ledger(path, 2)
    assert state.groups == {}
    assert state.steps == {1: ["a"], 2: ["b"]}


def test_trajectories_survive_to_the_last_bit(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [("group", group("a", reward=1 / 3))])
    assert read_ledger(path, 0).groups["a"] == group("a", reward=1 / 3)


def test_a_torn_last_line_is_cut_off(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [("start", "g0", 0, 0), ("group", group("g0"))])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event":"gro')
    assert list(read_ledger(path, 0).groups) == ["g0"]
    write(path, [("start", "g1", 1, 0)])
    assert read_ledger(path, 0).next_index == 2


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"start"}',
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
        read_ledger(path, 0)


def test_deleting_the_line_of_a_group_loses_only_that_group(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [("group", group("a")), ("group", group("b")), ("step", 1, ["a", "b"])])
    kept = [line for line in path.read_text().splitlines() if '"group":"a"' not in line]
    path.write_text("\n".join(kept) + "\n")
    assert list(read_ledger(path, 0).groups) == ["b"]


def test_a_checkpoint_newer_than_the_ledger_is_refused(tmp_path):
    with pytest.raises(ResumeError, match="missing"):
        read_ledger(tmp_path / "none.jsonl", 3)
    write(tmp_path / "l.jsonl", [("group", group("a")), ("step", 1, ["a"])])
    with pytest.raises(ResumeError, match="ends at step 1"):
        read_ledger(tmp_path / "l.jsonl", 3)
