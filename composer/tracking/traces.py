"""A trajectory as the spans of a trace: the episode, its turns, their tool calls. Pure: no MLflow.

Messages become inputs and outputs; each turn shows only what was new to the model, so a long episode is not written
once a turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_TEXT = 20_000
"""Characters of one message kept in a trace."""


@dataclass(frozen=True)
class SpanPlan:
    """One span. Times are Unix nanoseconds."""

    name: str
    kind: str
    """MLflow's span type: AGENT, CHAT_MODEL or TOOL."""
    parent: int | None
    """Index of the parent in the plan; None for the root."""
    start_ns: int
    end_ns: int
    inputs: Any = None
    outputs: Any = None
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def trace_id(run_key: str, episode_id: str, step: int) -> str:
    """An id that is the same when the same episode is sent again."""
    digest = hashlib.md5(f"{run_key}/{episode_id}/{step}".encode(), usedforsecurity=False)
    return f"tr-{digest.hexdigest()}"


def plan_spans(trajectory: Mapping[str, Any], end_ms: int) -> list[SpanPlan]:
    """Lay out an episode as spans.

    Args:
        trajectory: `composer.types.Trajectory.to_dict()`. Turns follow each other, each for its `seconds`; what is
            left after its `generation_seconds` is shared by its tool calls.
        end_ms: when the episode ended, Unix milliseconds.

    Returns:
        Root first; a parent comes before its children.
    """
    turns = trajectory["turns"]
    messages = trajectory["messages"]
    times = _turn_times(trajectory)
    seconds = max([trajectory["seconds"], *(end for _, _, end in times)])
    start_ns = end_ms * 1_000_000 - int(seconds * 1e9)

    def at(offset: float) -> int:
        return start_ns + int(offset * 1e9)

    opening, replies = _split_messages(messages)
    generated = sum(len(turn["generation"]["token_ids"]) for turn in turns)
    versions = [version for turn in turns for version in turn["generation"]["policy_versions"]]
    root = SpanPlan(
        name="episode",
        kind="AGENT",
        parent=None,
        start_ns=start_ns,
        end_ns=at(seconds),
        inputs={"messages": [_message(message) for message in opening]},
        outputs={
            "outcome": str(trajectory["outcome"]),
            "reward": trajectory["reward"],
            "last_message": _cut(messages[-1]["content"]) if messages else "",
        },
        attributes={
            "task_id": trajectory["task_id"],
            "group_id": trajectory["group_id"],
            "episode_id": trajectory["episode_id"],
            "reward": trajectory["reward"],
            **{f"reward.{grader}": score for grader, score in trajectory["rewards"].items()},
            "outcome": str(trajectory["outcome"]),
            "num_turns": len(turns),
            "num_generated_tokens": generated,
            "policy_version.oldest": min(versions, default=0),
            "policy_version.newest": max(versions, default=0),
        },
        error=trajectory["error"],
    )
    spans = [root]
    fresh: list[Any] = list(opening)
    for index, (turn, (start, generated_at, end)) in enumerate(zip(turns, times, strict=True)):
        generation = turn["generation"]
        said, results = replies[index] if index < len(replies) else (None, [])
        turn_index = len(spans)
        spans.append(
            SpanPlan(
                name=f"turn {index + 1}",
                kind="CHAT_MODEL",
                parent=0,
                start_ns=at(start),
                end_ns=at(end),
                inputs={"messages": [_message(message) for message in fresh]},
                outputs=_message(said) if said else {"tool_calls": turn["tool_calls"]},
                attributes=_turn_attributes(turn, generation),
            )
        )
        calls = turn["tool_calls"]
        texts = [message["content"] for message in results]
        if len(texts) != len(calls):
            texts = [turn["observation"]] * len(calls)
        for number, (call, text) in enumerate(zip(calls, texts, strict=True)):
            width = (end - generated_at) / len(calls)
            spans.append(
                SpanPlan(
                    name=call["name"],
                    kind="TOOL",
                    parent=turn_index,
                    start_ns=at(generated_at + number * width),
                    end_ns=at(generated_at + (number + 1) * width),
                    inputs=call["arguments"],
                    outputs=_cut(text),
                )
            )
        fresh = results
    return spans


def _turn_attributes(turn: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    log_probs = generation["log_probs"]
    versions = generation["policy_versions"]
    attributes = {
        "num_prompt_tokens": len(turn["prompt_ids"]),
        "num_generated_tokens": len(generation["token_ids"]),
        "finish_reason": generation["finish_reason"],
    }
    if log_probs:
        attributes["mean_log_prob"] = sum(log_probs) / len(log_probs)
    if versions:
        attributes["policy_version.oldest"] = min(versions)
        attributes["policy_version.newest"] = max(versions)
    return attributes


def _turn_times(trajectory: Mapping[str, Any]) -> list[tuple[float, float, float]]:
    """(start, generated, end) of each turn, in seconds from the episode's start."""
    turns = trajectory["turns"]
    times = []
    clock = 0.0
    for turn in turns:
        end = clock + turn["seconds"]
        times.append((clock, clock + turn["generation_seconds"], end))
        clock = end
    return times


def _split_messages(messages: list[Any]) -> tuple[list[Any], list[tuple[Any, list[Any]]]]:
    """What came before the first answer, and each answer with what followed it."""
    opening: list[Any] = []
    replies: list[tuple[Any, list[Any]]] = []
    for message in messages:
        if message["role"] == "assistant":
            replies.append((message, []))
        elif replies:
            replies[-1][1].append(message)
        else:
            opening.append(message)
    return opening, replies


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message["role"], "content": _cut(message["content"])}
    if message["tool_calls"]:
        shown["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in message["tool_calls"]
        ]
    return shown


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT // 2]}\n[... {len(text) - MAX_TEXT} characters ...]\n{text[-(MAX_TEXT // 2) :]}"
