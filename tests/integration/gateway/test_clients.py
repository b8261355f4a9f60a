"""OpenAI's, Anthropic's and openai-agents' own clients, unmodified, against a gateway whose policy plays lines.

They run outside of sandboxes here, as a user's own harness may, and reach the gateway by its URL and the episode's key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import agents
import anthropic
import openai
import pytest

from composer.gateway.record import EpisodeRecord
from composer.gateway.server import Gateway
from composer.rollout.chat import Chat
from composer.rollout.harness import HarnessLimits
from composer.types import FRESH, PREVIOUS, ToolCall
from tests.unit.gateway.policy import Line, Policy, trajectory

CALL = '<tool_call>\n{"name": "sh", "arguments": {"command": "ls -l"}}\n</tool_call>'
LS = ToolCall("sh", {"command": "ls -l"})
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
LIMITS = HarnessLimits(max_turns=20, max_turn_tokens=200, max_model_len=4000)
CHAT_TOOLS = [{"type": "function", "function": {"name": "sh", "description": "Run.", "parameters": PARAMETERS}}]
RESPONSE_TOOLS = [{"type": "function", "name": "sh", "description": "Run.", "parameters": PARAMETERS, "strict": False}]
MESSAGE_TOOLS = [{"name": "sh", "description": "Run.", "input_schema": PARAMETERS}]


class Served:
    """An episode that is open to clients."""

    def __init__(self, record: EpisodeRecord, policy: Policy, url: str, key: str) -> None:
        self.record, self.policy, self.url, self.key = record, policy, url, key
        self.openai = openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", max_retries=2)
        self.anthropic = anthropic.AsyncAnthropic(api_key=key, base_url=url, max_retries=2)

    def is_one_path(self, num_turns: int) -> None:
        """One context, `num_turns` long, token for token what the policy was sent and has said."""
        assert [t.parent for t in self.record.turns] == [PREVIOUS] * num_turns, self.record.metadata
        assert self.policy.recorded_exactly(self.record)
        [path] = trajectory(self.record).paths
        assert path.token_ids == [*self.policy.sent[-1], *self.policy.said[-1]]
        assert sum(path.loss_mask) == sum(map(len, self.policy.said))


@contextlib.asynccontextmanager
async def served(chat: Chat, lines: list[Line], limits: HarnessLimits = LIMITS) -> AsyncIterator[Served]:
    gateway, record, policy = Gateway(), EpisodeRecord(chat, limits), Policy(chat, lines)
    record.open(policy, "g/0")
    await gateway.start()
    try:
        with gateway.serving(record) as key:
            yield Served(record, policy, gateway.url, key)
    finally:
        await gateway.stop()


@pytest.mark.parametrize("streaming", [False, True])
def test_openai_chat(runner: asyncio.Runner, chat: Chat, streaming: bool) -> None:
    async def play() -> None:
        async with served(chat, [f"I look.\n{CALL}{CALL}", "Done."]) as s:

            async def ask(messages: list):
                if not streaming:
                    done = await s.openai.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
                    assert done.usage.total_tokens == len(s.policy.sent[-1]) + len(s.policy.said[-1])
                    return done.choices[0]
                asking = s.openai.chat.completions.stream(
                    model="m", messages=messages, tools=CHAT_TOOLS, stream_options={"include_usage": True}
                )
                async with asking as stream:
                    deltas = [e.delta async for e in stream if e.type == "content.delta"]
                    done = await stream.get_final_completion()
                assert "".join(deltas) == (done.choices[0].message.content or "")
                assert done.usage.completion_tokens == len(s.policy.said[-1])
                return done.choices[0]

            messages: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List."}]
            first = await ask(messages)
            assert first.message.content == "I look." and first.finish_reason == "tool_calls"
            calls = first.message.tool_calls
            assert [(c.function.name, c.function.arguments) for c in calls] == [("sh", '{"command":"ls -l"}')] * 2
            # As the SDK's own examples do: the message object goes back as it is.
            messages.append(first.message)
            messages += [{"role": "tool", "tool_call_id": c.id, "content": f"file {i}"} for i, c in enumerate(calls)]
            second = await ask(messages)
            assert (second.message.content, second.finish_reason, second.message.tool_calls) == ("Done.", "stop", None)
            s.is_one_path(2)
            assert s.record.turns[0].tool_calls == [LS, LS] and s.record.turns[0].observation == "file 0\nfile 1"

    runner.run(play())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_openai_responses(runner: asyncio.Runner, chat: Chat, streaming: bool, by_id: bool) -> None:
    async def play() -> None:
        async with served(chat, [f"I look.\n{CALL}", CALL, "Done."]) as s:

            async def ask(items, previous: str | None):
                given = {"model": "m", "input": items, "instructions": "Be brief.", "tools": RESPONSE_TOOLS}
                if by_id and previous:
                    given["previous_response_id"] = previous
                if not streaming:
                    return await s.openai.responses.create(**given)
                async with s.openai.responses.stream(**given) as stream:
                    deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
                    done = await stream.get_final_response()
                assert "".join(deltas) == done.output_text
                return done

            first = await ask("List.", None)
            assert first.output_text == "I look." and first.status == "completed"
            items: list = [{"role": "user", "content": "List."}]
            previous, text = first, ""
            for _ in range(2):
                [call] = [item for item in previous.output if item.type == "function_call"]
                assert (call.name, call.arguments) == ("sh", '{"command":"ls -l"}')
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "main.py"}
                # With every field that there is, as openai's own documentation does, and ours has put there.
                items += [*(item.model_dump() for item in previous.output), result]
                previous = await ask([result] if by_id else items, previous.id)
                text = previous.output_text
            assert text == "Done." and previous.usage.input_tokens == len(s.policy.sent[-1])
            s.is_one_path(3)

    runner.run(play())


@pytest.mark.parametrize("streaming", [False, True])
def test_anthropic_messages(runner: asyncio.Runner, chat: Chat, streaming: bool) -> None:
    async def play() -> None:
        async with served(chat, [f"I look.\n{CALL}", CALL, "Done."]) as s:

            async def ask(messages: list):
                given = {"model": "m", "max_tokens": 100, "messages": messages, "tools": MESSAGE_TOOLS}
                given["system"] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
                if not streaming:
                    return await s.anthropic.messages.create(**given)
                async with s.anthropic.messages.stream(**given) as stream:
                    text = "".join([t async for t in stream.text_stream])
                    done = await stream.get_final_message()
                assert text == "".join(b.text for b in done.content if b.type == "text")
                return done

            messages: list = [{"role": "user", "content": "List."}]
            answer = await ask(messages)
            assert [b.type for b in answer.content] == ["text", "tool_use"] and answer.stop_reason == "tool_use"
            assert answer.content[1].input == {"command": "ls -l"}
            for number in range(2):
                result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": f"file {number}"}
                messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
                answer = await ask(messages)
            assert [b.text for b in answer.content] == ["Done."] and answer.stop_reason == "end_turn"
            usage = (answer.usage.input_tokens, answer.usage.output_tokens)
            assert usage == (len(s.policy.sent[-1]), len(s.policy.said[-1]))
            counted = await s.anthropic.messages.count_tokens(
                model="m", messages=[{"role": "user", "content": "List."}], tools=MESSAGE_TOOLS, system="Be brief."
            )
            assert counted.input_tokens == len(s.policy.sent[0])
            s.is_one_path(3)

    runner.run(play())


def test_parallel_calls_come_through_every_stream(runner: asyncio.Runner, chat: Chat) -> None:
    """Chat completions have them in their own test."""

    async def responses() -> None:
        async with served(chat, [f"I look.\n{CALL}{CALL}", "Done."]) as s:
            items: list = [{"role": "user", "content": "List."}]
            for number_of_calls in (2, 0):
                async with s.openai.responses.stream(model="m", input=items, tools=RESPONSE_TOOLS) as stream:
                    deltas = [e.delta async for e in stream if e.type == "response.function_call_arguments.delta"]
                    done = await stream.get_final_response()
                calls = [item for item in done.output if item.type == "function_call"]
                assert deltas == [c.arguments for c in calls] == ['{"command":"ls -l"}'] * number_of_calls
                assert len({c.call_id for c in calls}) == number_of_calls
                items += [item.model_dump() for item in done.output]
                items += [
                    {"type": "function_call_output", "call_id": c.call_id, "output": f"file {i}"}
                    for i, c in enumerate(calls)
                ]
            s.is_one_path(2)
            assert s.record.turns[0].observation == "file 0\nfile 1"

    async def messages() -> None:
        async with served(chat, [f"{CALL}{CALL}", "Done."]) as s:
            said: list = [{"role": "user", "content": "List."}]
            for number_of_calls in (2, 0):
                given = {"model": "m", "max_tokens": 100, "messages": said, "tools": MESSAGE_TOOLS}
                async with s.anthropic.messages.stream(**given) as stream:
                    pieces = [e.partial_json async for e in stream if e.type == "input_json"]
                    done = await stream.get_final_message()
                calls = [block for block in done.content if block.type == "tool_use"]
                assert pieces == ['{"command":"ls -l"}'] * number_of_calls == pieces[: len(calls)]
                results = [
                    {"type": "tool_result", "tool_use_id": c.id, "content": f"file {i}"} for i, c in enumerate(calls)
                ]
                said += [{"role": "assistant", "content": done.content}, {"role": "user", "content": results}]
            s.is_one_path(2)
            assert s.record.turns[0].tool_calls == [LS, LS] and s.record.turns[0].observation == "file 0\nfile 1"

    runner.run(responses())
    runner.run(messages())


def test_an_answer_of_nothing_goes_back_as_what_it_was(runner: asyncio.Runner, chat: Chat) -> None:
    async def play() -> None:
        async with served(chat, ["", "yes"]) as s:
            messages: list = [{"role": "user", "content": "Say nothing."}]
            first = await s.openai.chat.completions.create(model="m", messages=messages)
            assert first.choices[0].message.content == ""
            messages += [first.choices[0].message, {"role": "user", "content": "Now?"}]
            await s.openai.chat.completions.create(model="m", messages=messages)
            s.is_one_path(2)

    runner.run(play())


@pytest.mark.parametrize("streaming", [False, True])
def test_openai_agents(runner: asyncio.Runner, chat: Chat, streaming: bool) -> None:
    """An agent with a tool hands over to another agent, which has other tools and so another context."""
    agents.set_tracing_disabled(True)
    seen = []

    @agents.function_tool
    def sh(command: str) -> str:
        """Run."""
        seen.append(command)
        return "main.py"

    handoff = '<tool_call>\n{"name": "transfer_to_writer", "arguments": {}}\n</tool_call>'

    async def play() -> None:
        async with served(chat, [f"I look.\n{CALL}", CALL, handoff, "Done."]) as s:
            model = agents.OpenAIResponsesModel("m", s.openai)
            writer = agents.Agent("writer", instructions="Write.", model=model)
            coder = agents.Agent("coder", instructions="Code.", model=model, tools=[sh], handoffs=[writer])
            if streaming:
                run = agents.Runner.run_streamed(coder, "List.", max_turns=8)
                kinds = [e.type async for e in run.stream_events()]
                assert "raw_response_event" in kinds
            else:
                run = await agents.Runner.run(coder, "List.", max_turns=8)
            assert run.final_output == "Done." and seen == ["ls -l", "ls -l"]
            assert [t.parent for t in s.record.turns] == [PREVIOUS, PREVIOUS, PREVIOUS, FRESH]
            assert s.policy.recorded_exactly(s.record) and len(trajectory(s.record).paths) == 2

    runner.run(play())


def test_an_outage_is_an_error_in_every_client_and_asked_once(runner: asyncio.Runner, chat: Chat) -> None:
    async def play() -> None:
        for number in range(3):
            async with served(chat, [Policy.down()]) as s:
                with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
                    if number == 0:
                        await s.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
                    elif number == 1:
                        await s.openai.responses.create(model="m", input="a", stream=True)
                    else:
                        user = {"role": "user", "content": "a"}
                        await s.anthropic.messages.create(model="m", max_tokens=9, messages=[user])
                assert caught.value.status_code == 503 and s.record.turns == [] and s.record.failure is not None
                assert s.record.metadata["gateway"]["requests"] == 1, "no client asks again in vain"

    runner.run(play())


def test_a_full_context_is_the_error_that_agents_know(runner: asyncio.Runner, chat: Chat) -> None:
    async def play() -> None:
        long = {"role": "user", "content": "word " * 4000}
        async with served(chat, []) as s:
            with pytest.raises(openai.BadRequestError) as caught:
                await s.openai.chat.completions.create(model="m", messages=[long])
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError) as caught:
                await s.openai.responses.create(model="m", input=[long])
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await s.anthropic.messages.create(model="m", max_tokens=9, messages=[long])

    runner.run(play())


def test_litellm_knows_a_full_context_too(runner: asyncio.Runner, chat: Chat) -> None:
    litellm = pytest.importorskip(
        "litellm", reason="litellm is not installed: it comes with mini-swe-agent (extra `test`)"
    )

    async def play() -> None:
        async with served(chat, []) as s:
            with pytest.raises(litellm.ContextWindowExceededError):
                await litellm.acompletion(
                    "openai/m", [{"role": "user", "content": "word " * 4000}], api_base=f"{s.url}/v1", api_key=s.key
                )
            await litellm.close_litellm_async_clients()

    runner.run(play())


def test_a_client_that_hangs_up_leaves_nothing_and_its_retry_is_the_first(runner: asyncio.Runner, chat: Chat) -> None:
    async def play() -> None:
        async with served(chat, ["late", "in time"]) as s:
            s.policy.gate = asyncio.Event()
            impatient = s.openai.with_options(timeout=0.3, max_retries=1)
            user = {"role": "user", "content": "a"}

            async def open_the_gate() -> None:
                while not s.policy.num_cancelled:
                    await asyncio.sleep(0.01)
                s.policy.gate.set()

            opening = asyncio.create_task(open_the_gate())
            done = await impatient.chat.completions.create(model="m", messages=[user])
            await opening
            assert done.choices[0].message.content == "late" and s.policy.num_cancelled == 1
            s.is_one_path(1)

    runner.run(play())
