"""Whatever an agent does with what it was answered, the record holds the token ids that were sent and sampled."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer.gateway import anthropic_messages, openai_chat, openai_responses
from composer.gateway.record import EpisodeRecord
from composer.rollout.chat import Chat
from composer.rollout.harness import HarnessLimits
from composer.types import Generation, Trajectory
from tests.unit.gateway.policy import Policy, trajectory

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "sh", "arguments": {"command": "%s"}}\n</tool_call>'
TEXTS = st.text(alphabet="ab é<|\n", max_size=6)
SAID = st.one_of(
    TEXTS,
    st.lists(TEXTS.filter(lambda t: "\n" not in t).map(lambda t: CALL % t), min_size=1, max_size=2).map("\n".join),
    st.just("<tool_call>ls</tool_call>"),
    st.lists(st.integers(0, 200), min_size=1, max_size=8),
)
"""What is sampled: a text, calls, malformed ones, or ids that no text may give back."""


@dataclass
class Api:
    """How a client of one API writes its conversation."""

    module: ModuleType
    body: Callable[[list[Any]], dict[str, Any]]
    user: Callable[[str], list[Any]]
    echo: Callable[[Any], list[Any]]
    """An answer as it is sent back."""
    results: Callable[[Any, str], list[Any]]
    """Of the calls in it."""


def _chat_results(answer: Any, text: str) -> list[Any]:
    calls = answer["choices"][0]["message"].get("tool_calls", [])
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]


def _responses_results(answer: Any, text: str) -> list[Any]:
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": text} for call in calls]


def _messages_results(answer: Any, text: str) -> list[Any]:
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": text} for call in calls]
    return [{"role": "user", "content": results}] if results else []


APIS = {
    "chat": Api(
        openai_chat,
        lambda m: {"messages": m, "tools": [{"type": "function", "function": {"name": "sh", "parameters": SCHEMA}}]},
        lambda text: [{"role": "user", "content": text}],
        lambda answer: [answer["choices"][0]["message"]],
        _chat_results,
    ),
    "responses": Api(
        openai_responses,
        lambda m: {"input": m, "tools": [{"type": "function", "name": "sh", "parameters": SCHEMA}]},
        lambda text: [{"role": "user", "content": text}],
        lambda answer: answer["output"],
        _responses_results,
    ),
    "messages": Api(
        anthropic_messages,
        lambda m: {"messages": m, "max_tokens": 99, "tools": [{"name": "sh", "input_schema": SCHEMA}]},
        lambda text: [{"role": "user", "content": [{"type": "text", "text": text}]}],
        lambda answer: [{"role": "assistant", "content": answer["content"]}],
        _messages_results,
    ),
}


class Sampler(Policy):
    """Says what it is told to, and gives every token a log-probability of its own."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self.numbers = itertools.count(1)
        self.next: tuple[str | list[int], bool] = "", True

    async def __call__(self, token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
        said, ends = self.next
        ids = self.chat.encode_generated(said) if isinstance(said, str) else [*said]
        ids = [i for i in ids if i != self.chat.end_token_id] or [5]
        ids += [self.chat.end_token_id] * ends
        log_probs = [-float(next(self.numbers)) for _ in ids]
        self.lines = [Generation(ids, log_probs, [0] * len(ids), "stop" if ends else "length")]
        return await super().__call__(token_ids, max_tokens=max_tokens, episode_id=episode_id)


@pytest.mark.parametrize("name", APIS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_recorded_is_what_was_sampled(chat: Chat, name: str, data: st.DataObject) -> None:
    """Of any tree of conversations: new and straight ones, branches, changed histories, turns taken back."""
    api, sampler = APIS[name], Sampler(chat)
    record = EpisodeRecord(chat, HarnessLimits(max_turns=99, max_turn_tokens=200, max_model_len=20000))
    record.open(sampler, "g/0")
    kept: list[tuple[list[Any], Any, int]] = []
    """Conversations up to an answer, the answer, and which call of the sampler it was."""

    async def one() -> None:
        action = data.draw(st.sampled_from(["new", "on", "on", "on", "changed"] if kept else ["new"]))
        before: int | None = None
        if action == "new":
            history = api.user(data.draw(TEXTS))
        else:
            history, answer, before = data.draw(st.sampled_from(kept))
            text = data.draw(TEXTS)
            history = [*history, *api.echo(answer), *api.results(answer, text), *api.user(text)]
            if action == "changed":
                history = [*api.user("other "), *history]
        sampler.next = data.draw(st.tuples(SAID, st.booleans()))
        answer, take_back = await record.answer(api.module.read(json.loads(json.dumps(api.body(history)))))
        ask = api.module.read(api.body(history))
        number = len(sampler.sent) - 1
        if action == "on" and before is not None:
            whole = [*sampler.sent[before], *sampler.said[before]]
            assert sampler.sent[number][: len(whole)] == whole, "what was sampled is sent as it was sampled"
        if data.draw(st.integers(0, 5)) == 0:
            take_back()
            gone.append(number)
        else:
            kept.append((history, json.loads(json.dumps(api.module.write(answer, ask))), number))

    async def main() -> None:
        for _ in range(data.draw(st.integers(1, 8))):
            await one()

    gone: list[int] = []
    asyncio.run(main())
    numbers = [number for number in range(len(sampler.sent)) if number not in gone]
    assert [record.context_ids(n) for n in range(len(record.turns))] == [
        [*sampler.sent[number], *sampler.said[number]] for number in numbers
    ]
    t = trajectory(record)
    assert Trajectory.from_dict(json.loads(json.dumps(t.to_dict()))) == t
    sampled = {
        p: i for turn in record.turns for i, p in zip(turn.generation.token_ids, turn.generation.log_probs, strict=True)
    }
    trained = [
        (p, i) for path in t.paths for i, p, m in zip(path.token_ids, path.log_probs, path.loss_mask, strict=True) if m
    ]
    assert len(trained) == len(sampled) == sum(len(sampler.said[number]) for number in numbers), "each token once"
    assert dict(trained) == sampled and record.failure is None
