"""Spans of a hand-made episode: who is below whom, when, and what was said."""

from __future__ import annotations

import json
from typing import Any

from composer.tracking.traces import MAX_TEXT, plan_spans, trace_id
from composer.types import FRESH, Generation, Message, Outcome, ToolCall, Trajectory, Turn


def episode(**metadata: Any) -> Trajectory:
    read, edit = ToolCall("read_file", {"path": "main.py"}), ToolCall("edit_line", {"line": 2, "text": "+"})
    return Trajectory(
        task_id="micro/train/7",
        group_id="g1",
        episode_id="g1/0",
        turns=[
            Turn([1, 2, 3], Generation([4, 5], [-0.5, -1.5], [6, 7], "stop"), [read, edit], "both", 2.0, 1.0),
            Turn([8], Generation([9], [-0.25], [7], "length"), [], "", 1.0, 1.0),
        ],
        messages=[
            Message("system", "You repair code."),
            Message("user", "scale_price fails"),
            Message("assistant", "<tool_call>...", (read, edit)),
            Message("tool", "def scale_price"),
            Message("tool", "edited"),
            Message("assistant", "done"),
        ],
        outcome=Outcome.FINISHED,
        reward=0.75,
        rewards={"hidden_tests": 1.0, "brevity": 0.5},
        seconds=4.0,
        metadata=metadata,
    )


def test_the_tree_is_episode_turns_tools() -> None:
    spans = plan_spans(episode().to_dict(), end_ms=10_000)
    shape = [(span.name, span.kind, span.parent) for span in spans]
    assert shape == [
        ("episode", "AGENT", None),
        ("turn 1", "CHAT_MODEL", 0),
        ("read_file", "TOOL", 1),
        ("edit_line", "TOOL", 1),
        ("turn 2", "CHAT_MODEL", 0),
    ]


def test_inputs_and_outputs_show_what_was_new() -> None:
    root, first, read, edit, second = plan_spans(episode().to_dict(), end_ms=10_000)
    assert [message["role"] for message in first.inputs["messages"]] == ["system", "user"]
    assert first.outputs["tool_calls"][0]["function"] == {"name": "read_file", "arguments": {"path": "main.py"}}
    assert (read.inputs, read.outputs) == ({"path": "main.py"}, "def scale_price")
    assert (edit.inputs, edit.outputs) == ({"line": 2, "text": "+"}, "edited")
    assert [message["content"] for message in second.inputs["messages"]] == ["def scale_price", "edited"]
    assert second.outputs == {"role": "assistant", "content": "done"}
    assert root.outputs == {"outcome": "finished", "reward": 0.75, "last_message": "done"}


def test_rewards_tokens_and_versions_are_attributes() -> None:
    root, first, *_ = plan_spans(episode().to_dict(), end_ms=10_000)
    assert root.attributes["reward"] == 0.75
    assert root.attributes["reward.hidden_tests"] == 1.0
    assert root.attributes["num_generated_tokens"] == 3
    assert (root.attributes["policy_version.oldest"], root.attributes["policy_version.newest"]) == (6, 7)
    assert first.attributes["mean_log_prob"] == -1.0
    assert first.attributes["num_prompt_tokens"] == 3


def test_turns_follow_each_other_and_tools_share_what_is_left_of_a_turn() -> None:
    spans = plan_spans(episode().to_dict(), end_ms=10_000)
    seconds = [(span.start_ns / 1e9, span.end_ns / 1e9) for span in spans]
    assert seconds == [(6, 10), (6, 8), (7, 7.5), (7.5, 8), (8, 9)]


def test_an_episode_that_failed_before_its_first_turn() -> None:
    broken = Trajectory("t", "g", "e", [], [], Outcome.INFRASTRUCTURE_ERROR, None, error="the sandbox did not start")
    (root,) = plan_spans(broken.to_dict(), end_ms=1_000)
    assert root.error == "the sandbox did not start"
    assert root.outputs["reward"] is None
    assert root.start_ns == root.end_ns == 10**9


def test_it_works_on_what_json_kept() -> None:
    raw = json.loads(json.dumps(episode().to_dict()))
    assert plan_spans(raw, 10_000) == plan_spans(episode().to_dict(), 10_000)


def test_long_texts_are_cut_in_the_middle() -> None:
    long = episode()
    long.messages[1] = Message("user", "a" * MAX_TEXT + "b" * 10)
    shown = plan_spans(long.to_dict(), 1)[0].inputs["messages"][1]["content"]
    assert shown.endswith("b" * 10) and "[... 10 characters ...]" in shown


def test_an_episode_always_has_the_same_trace() -> None:
    assert trace_id("run", "e", 3) == trace_id("run", "e", 3)
    assert len({trace_id("run", "e", 3), trace_id("run", "e", 4), trace_id("run", "f", 3)}) == 3
    assert len(trace_id("run", "e", 3).removeprefix("tr-")) == 32


def test_turns_of_branches_keep_their_own_words() -> None:
    """Turn 2 starts anew from what an agent wrote itself: `history`, which is no answer of a turn."""
    t = episode()
    t.turns[1].parent = FRESH
    t.messages[5:5] = [Message("user", "so far"), Message("history", "edited main.py"), Message("user", "go on")]
    spans = plan_spans(t.to_dict(), end_ms=10_000)
    second = next(span for span in spans if span.name == "turn 2")
    assert second.outputs == {"role": "assistant", "content": "done"}
    assert [m["content"] for m in second.inputs["messages"]][-3:] == ["so far", "edited main.py", "go on"]
