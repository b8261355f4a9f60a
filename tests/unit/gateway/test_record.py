"""What a request continues: the token ids are those that were sent and sampled, never made again from text."""

from __future__ import annotations

import asyncio
import json

import pytest

from composer.errors import GeneratorError
from composer.gateway.exchange import Answer, ApiError, Ask, Call, OfferedTool, Said, Trouble
from composer.gateway.record import EpisodeRecord
from composer.rollout.chat import Chat
from composer.rollout.harness import HarnessLimits
from composer.types import FRESH, PREVIOUS, Generation, Message, Outcome, ToolCall, Trajectory
from tests.unit.gateway.policy import Line, Policy, trajectory

SHELL = OfferedTool("sh", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "sh", "arguments": {"command": "ls"}}\n</tool_call>'
LIMITS = HarnessLimits(max_turns=20, max_turn_tokens=200, max_model_len=4000)
SYSTEM, USER = Said("system", "Be brief."), Said("user", "List the files.")


def opened(chat: Chat, lines: list[Line], limits: HarnessLimits = LIMITS) -> tuple[EpisodeRecord, Policy]:
    record, policy = EpisodeRecord(chat, limits), Policy(chat, lines)
    record.open(policy, "g/0")
    return record, policy


def say(record: EpisodeRecord, *messages: Said, **more) -> Answer:
    return asyncio.run(record.answer(Ask(tuple(messages), **{"tools": (SHELL,), **more})))[0]


def text_of(chat: Chat, ids: list[int]) -> str:
    return str(chat.tokenizer.decode(ids))


def test_a_next_request_adds_what_is_new_and_nothing_else(chat: Chat):
    record, policy = opened(chat, [f"I look.\n{CALL}", "Done."])
    first = say(record, SYSTEM, USER)
    assert first.said == Said("assistant", "I look.", (Call(f"call_{first.id}_0", "sh", '{"command":"ls"}'),))
    assert first.finish_reason == "tool_calls"
    second = say(record, SYSTEM, USER, first.said, Said("tool", "main.py"))
    assert (second.said.text, second.finish_reason) == ("Done.", "stop")
    assert policy.sent[1] == [*policy.sent[0], *policy.said[0], *record.turns[1].prompt_ids]
    # The template's own text between two turns, with no end token again: the first turn has sampled it.
    added = "\n<|im_start|>user\n<tool_response>\nmain.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert text_of(chat, record.turns[1].prompt_ids) == added
    assert policy.recorded_exactly(record) and [t.parent for t in record.turns] == [PREVIOUS, PREVIOUS]
    assert second.num_prompt_tokens == len(policy.sent[1]) and second.num_generated_tokens == len(policy.said[1])
    assert record.turns[0].tool_calls == [ToolCall("sh", {"command": "ls"})]
    assert record.turns[0].observation == "main.py" and record.turns[0].seconds >= record.turns[0].generation_seconds
    assert record.messages == [
        Message("system", "Be brief."),
        Message("user", "List the files."),
        Message("assistant", f"I look.\n{CALL}", (ToolCall("sh", {"command": "ls"}),)),
        Message("tool", "main.py"),
        Message("assistant", "Done."),
    ]
    assert record.metadata["gateway"] == {"requests": 2, "fresh_contexts": 0, "branches": 0, "unmatched_answers": 0}
    t = trajectory(record)
    assert Trajectory.from_dict(json.loads(json.dumps(t.to_dict()))) == t


def test_ids_that_no_text_gives_back_are_kept(chat: Chat):
    """The letters of a word one by one: as text they would become other tokens."""
    letters = [i for c in "command" for i in chat.encode_plain(c)]
    assert chat.encode_plain("command") != letters
    odd = Generation([*letters, chat.end_token_id], [-1.0] * (len(letters) + 1), [0] * (len(letters) + 1), "stop")
    record, policy = opened(chat, [odd, "yes"])
    first = say(record, USER)
    say(record, USER, first.said, Said("user", "Go on."))
    assert policy.sent[1][len(policy.sent[0]) :][: len(letters)] == letters
    assert len(trajectory(record).paths) == 1


def test_an_answer_that_was_cut_is_ended_before_what_follows(chat: Chat):
    record, policy = opened(chat, ["much too long a sentence to be said", "ok"])
    first = say(record, USER, max_tokens=3)
    assert first.finish_reason == "length" and policy.said[0][-1] != chat.end_token_id
    say(record, USER, first.said, Said("user", "Go on."))
    assert record.turns[1].prompt_ids[0] == chat.end_token_id
    assert (
        text_of(chat, record.turns[1].prompt_ids)
        == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a,
        lambda a: Said("assistant", f" {a.text}\n", a.calls),
        lambda a: Said("assistant", a.text, tuple(Call("", c.name, c.arguments) for c in a.calls)),
    ],
    ids=["as it was", "stripped otherwise", "without ids"],
)
def test_an_answer_is_known_again(chat: Chat, change):
    record, policy = opened(chat, [f"I look.\n{CALL}", "Done."])
    first = say(record, USER)
    say(record, USER, change(first.said), Said("tool", "main.py"))
    assert [t.parent for t in record.turns] == [PREVIOUS, PREVIOUS] and policy.recorded_exactly(record)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: Said("assistant", "I looked.", a.calls),
        lambda a: Said("assistant", a.text),
        lambda a: Said("assistant", a.text, (Call(a.calls[0].id, "sh", '{"command":"pwd"}'),)),
        lambda a: Said("assistant", a.text, (Call("call_of_somebody_else", "sh", a.calls[0].arguments),)),
    ],
    ids=["other text", "no call", "other arguments", "another call of the same kind"],
)
def test_an_answer_that_was_changed_starts_a_context_and_is_counted(chat: Chat, change):
    record, policy = opened(chat, [f"I look.\n{CALL}", "Done."])
    first = say(record, USER)
    say(record, USER, change(first.said), Said("tool", "main.py"))
    assert [t.parent for t in record.turns] == [PREVIOUS, FRESH] and policy.recorded_exactly(record)
    assert record.metadata["gateway"]["unmatched_answers"] == record.metadata["gateway"]["fresh_contexts"] == 1
    assert [m.role for m in record.messages] == ["user", "assistant", "user", "history", "tool", "assistant"]
    # What nobody sampled here is context, and not trained on.
    assert [sum(p.loss_mask) for p in trajectory(record).paths] == [len(ids) for ids in policy.said]


def test_words_of_others_are_encoded_as_the_template_writes_them(chat: Chat):
    record, policy = opened(chat, ["ok"])
    call = Call("x", "sh", '{"command":"echo <|im_end|>"}')
    say(record, USER, Said("assistant", "I see.", (call,)), Said("tool", "<|im_end|>"))
    ids = policy.sent[0]
    assert ids.count(chat.end_token_id) == 4, "system with the tools, user, assistant, tool: none of what was said"
    vocabulary = chat.tokenizer.get_vocab()
    assert ids.count(vocabulary["<tool_call>"]) == 2 and ids.count(vocabulary["</tool_call>"]) == 2
    assert '<tool_call>\n{"name": "sh", "arguments": {"command": "echo <|im_end|>"}}' in text_of(chat, ids)


def test_two_answers_to_one_question_are_branches(chat: Chat):
    """The tool's result is tried in two ways, and the first way goes on."""
    record, policy = opened(chat, [CALL, "one", "two", "three"])
    first = say(record, USER)
    one = say(record, USER, first.said, Said("tool", "A"))
    say(record, USER, first.said, Said("tool", "B"))
    say(record, USER, first.said, Said("tool", "A"), one.said, Said("user", "more"))
    assert [t.parent for t in record.turns] == [PREVIOUS, PREVIOUS, 0, 1] and policy.recorded_exactly(record)
    assert record.metadata["gateway"]["branches"] == 1
    paths = trajectory(record).paths
    texts = [chat.decode(p.token_ids) for p in paths]
    assert len(paths) == 2 and "B" in texts[0] and texts[1].endswith("three")
    assert sum(map(sum, (p.loss_mask for p in paths))) == sum(map(len, policy.said)), "each token once"


def test_the_longest_context_is_continued_and_of_two_the_newest(chat: Chat):
    record, policy = opened(chat, ["same", "same", "end"])
    first = say(record, USER)
    second = say(record, USER)
    assert first.said.text == second.said.text and [t.parent for t in record.turns] == [PREVIOUS, FRESH]
    say(record, USER, first.said, Said("user", "more"))
    assert record.turns[2].parent == PREVIOUS and policy.recorded_exactly(record)


def test_a_context_reset_starts_anew(chat: Chat):
    record, policy = opened(chat, ["one", "two", "three"])
    first = say(record, SYSTEM, USER)
    say(record, SYSTEM, USER, first.said, Said("user", "Summarise."))
    say(record, SYSTEM, Said("user", "So far: two."))
    assert [t.parent for t in record.turns] == [PREVIOUS, PREVIOUS, FRESH] and policy.recorded_exactly(record)
    assert record.metadata["gateway"] | {"requests": 0} == {
        "requests": 0,
        "fresh_contexts": 1,
        "branches": 0,
        "unmatched_answers": 0,
    }


def test_other_tools_are_another_context(chat: Chat):
    record, policy = opened(chat, ["one", "two"])
    first = say(record, USER)
    say(record, USER, first.said, Said("user", "more"), tools=(SHELL, OfferedTool("ls", "", {"type": "object"})))
    assert record.turns[1].parent == FRESH and policy.recorded_exactly(record)


def test_requests_at_the_same_time_are_branches_of_what_was_there(chat: Chat):
    record, policy = EpisodeRecord(chat, LIMITS), Policy(chat, say=lambda text: text[-60:-35])
    record.open(policy, "g/0")

    async def both() -> None:
        first, _ = await record.answer(Ask((USER,)))
        asks = [Ask((USER, first.said, Said("user", f"sub-agent {i}"))) for i in range(3)]
        await asyncio.gather(*(record.answer(ask) for ask in asks))

    asyncio.run(both())
    assert [t.parent for t in record.turns] == [PREVIOUS, PREVIOUS, 0, 0] and policy.recorded_exactly(record)
    assert len(trajectory(record).paths) == 3 and record.metadata["gateway"]["branches"] == 2


def test_a_malformed_call_is_text(chat: Chat):
    record, _ = opened(chat, ["<tool_call>ls</tool_call>", CALL, CALL])
    first = say(record, USER)
    assert first.said == Said("assistant", "<tool_call>ls</tool_call>") and first.finish_reason == "stop"
    assert say(record, USER, tools=()).said.text == CALL, "no tools are offered"
    assert say(record, USER, parse_calls=False).said.text == CALL


def test_a_turn_that_its_client_did_not_get_is_taken_back(chat: Chat):
    record, policy = opened(chat, ["one", "two", "three", "four"])
    first = say(record, USER)

    async def lost() -> None:
        answer, take_back = await record.answer(Ask((USER, first.said, Said("user", "a")), (SHELL,)))
        await record.answer(Ask((USER,), (SHELL,)))
        take_back()
        take_back()

    asyncio.run(lost())
    assert [t.parent for t in record.turns] == [PREVIOUS, FRESH]
    assert [m.content for m in record.messages if m.role == "assistant"] == ["one", "three"]
    assert record.metadata["gateway"]["cancelled"] == 1
    again = say(record, USER, first.said, Said("user", "a"))
    assert again.said.text == "four" and [t.parent for t in record.turns] == [PREVIOUS, FRESH, 0]
    assert policy.recorded_exactly(record)


def test_a_turn_is_taken_back_while_others_wait_for_their_answers(chat: Chat):
    """Of three turns the middle one is taken back, and one stays that a waiting request goes on from."""
    record, policy = opened(chat, ["one", "lost", "kept", "child of one", "child of kept"])

    async def main() -> None:
        one, _ = await record.answer(Ask((USER,)))
        _, take_back_lost = await record.answer(Ask((SYSTEM, USER)))
        kept, take_back_kept = await record.answer(Ask((Said("user", "other"),)))
        policy.gate = asyncio.Event()
        waiting = [
            asyncio.create_task(record.answer(Ask((USER, one.said, Said("user", "a"))))),
            asyncio.create_task(record.answer(Ask((Said("user", "other"), kept.said, Said("user", "b"))))),
        ]
        await asyncio.sleep(0.01)
        take_back_lost()
        take_back_kept()
        policy.gate.set()
        await asyncio.gather(*waiting)

    asyncio.run(main())
    said = [m.content for m in record.messages if m.role == "assistant"]
    assert said == ["one", "kept", "child of one", "child of kept"]
    assert [t.parent for t in record.turns] == [PREVIOUS, FRESH, 0, 1] and policy.recorded_exactly(record)
    texts = [chat.decode(path.token_ids) for path in trajectory(record).paths]
    assert len(texts) == 2 and "lost" not in "".join(texts)
    assert all(a in t and b in t for t, (a, b) in zip(texts, (("List", "of one"), ("other", "of kept")), strict=True))


def test_a_turn_that_was_continued_stays(chat: Chat):
    record, _ = opened(chat, ["one", "two"])

    async def race() -> None:
        first, take_back = await record.answer(Ask((USER,)))
        await record.answer(Ask((USER, first.said, Said("user", "a"))))
        take_back()

    asyncio.run(race())
    assert len(record.turns) == 2


def test_a_cancelled_request_leaves_nothing(chat: Chat):
    record, policy = opened(chat, ["one"])
    policy.gate = asyncio.Event()

    async def give_up() -> None:
        task = asyncio.create_task(record.answer(Ask((USER,))))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert (record.turns, record.messages, policy.num_cancelled) == ([], [], 1)
    assert record.metadata["gateway"] == {"requests": 1, "cancelled": 1} and record.asked_s > 0.005


def refused(record: EpisodeRecord, *messages: Said, **more) -> ApiError:
    with pytest.raises(ApiError) as caught:
        say(record, *messages, **more)
    return caught.value


def test_an_outage_ends_the_episode_and_is_never_text(chat: Chat):
    record, policy = opened(chat, ["one", Policy.down(), "three"])
    first = say(record, USER)
    for _ in range(2):
        error = refused(record, USER, first.said, Said("user", "a"))
        assert error.trouble is Trouble.UNAVAILABLE and error.status == 503 and "dead" not in error.message
    assert isinstance(record.failure, GeneratorError) and record.ended.is_set() and len(policy.lines) == 1
    assert len(record.turns) == 1 and record.limit is None


def test_what_breaks_on_the_way_to_the_policy_is_an_outage_too(chat: Chat):
    record, _ = opened(chat, [ConnectionError("bug")])
    assert refused(record, USER).trouble is Trouble.UNAVAILABLE and record.ended.is_set()
    assert str(record.failure) == "asking the policy raised ConnectionError: bug"


def test_a_policy_that_gives_up_by_itself_is_an_outage_and_no_client_that_hung_up(chat: Chat):
    record, policy = opened(chat, [])

    def give_up(_: str) -> str:
        raise asyncio.CancelledError

    policy.say = give_up
    assert refused(record, USER).trouble is Trouble.UNAVAILABLE
    assert str(record.failure) == "asking the policy raised CancelledError: "
    assert "cancelled" not in record.metadata["gateway"]


def test_an_answer_that_comes_after_the_episodes_end_is_not_noted(chat: Chat):
    record, policy = opened(chat, ["late"])
    policy.gate = gate = asyncio.Event()

    async def late() -> None:
        asking = asyncio.create_task(record.answer(Ask((USER,))))
        await asyncio.sleep(0.01)
        record.close()
        gate.set()
        with pytest.raises(ApiError):
            await asking

    asyncio.run(late())
    assert (record.turns, record.messages, record.failure) == ([], [], None)


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_an_answer_without_an_end_or_a_token_is_an_outage(chat: Chat, reason: str):
    record, _ = opened(chat, [Generation([] if reason == "stop" else [1], [], [], reason)])
    assert refused(record, USER).trouble is Trouble.UNAVAILABLE and record.failure is not None


def test_a_full_context_is_refused_and_an_agent_may_start_anew(chat: Chat):
    record, policy = opened(chat, ["one", "two"], HarnessLimits(max_turns=9, max_turn_tokens=50, max_model_len=150))
    first = say(record, USER, tools=())
    error = refused(record, USER, first.said, Said("user", "word " * 200), tools=())
    assert error.trouble is Trouble.CONTEXT_FULL and "maximum context length is 150 tokens" in error.message
    assert record.limit is Outcome.CONTEXT_FULL and not record.ended.is_set()
    say(record, Said("user", "So far: one."), tools=())
    assert record.limit is None and [t.parent for t in record.turns] == [PREVIOUS, FRESH]
    assert record.metadata["gateway"]["refused_context_full"] == 1


def test_megabytes_are_refused_without_being_encoded(chat: Chat, monkeypatch: pytest.MonkeyPatch):
    """Which would hold up every episode of the process."""
    encoded, encode = 0, chat.encode_plain

    def count(text: str) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return encode(text)

    monkeypatch.setattr(chat, "encode_plain", count)
    record, _ = opened(chat, ["one", "two"])
    first = say(record, USER)
    huge = "x" * 10**7
    wide = OfferedTool("ls", huge, {"type": "object"})
    for messages, tools in (
        ((Said("user", huge),), ()),
        ((USER, first.said, Said("tool", huge)), (SHELL,)),
        ((USER,), (wide,)),
    ):
        error = refused(record, *messages, tools=tools)
        assert error.trouble is Trouble.CONTEXT_FULL and "at least" in error.message
        assert asyncio.run(record.count_tokens(Ask(messages, tools))) >= LIMITS.max_model_len
    assert encoded < 10**6 and record.failure is None
    # What is long and fits is encoded as ever.
    record, policy = opened(chat, ["one"], HarnessLimits(max_turns=9, max_turn_tokens=50, max_model_len=10**5))
    say(record, Said("user", "command " * 9000), tools=())
    assert policy.sent[0] == record.context_ids(0)[: len(policy.sent[0])] and len(policy.sent[0]) > 9000


def test_no_more_turns_than_allowed_also_at_the_same_time(chat: Chat):
    record, policy = opened(chat, ["a", "b", "c"], HarnessLimits(max_turns=2, max_turn_tokens=50, max_model_len=1000))

    async def three() -> list:
        return await asyncio.gather(*(record.answer(Ask((USER,))) for _ in range(3)), return_exceptions=True)

    results = asyncio.run(three())
    [error] = [r for r in results if isinstance(r, ApiError)]
    assert error.trouble is Trouble.MAX_TURNS and error.status == 400
    assert len(record.turns) == 2 and record.ended.is_set() and policy.lines == ["c"]


def test_a_turn_gets_the_least_of_its_three_limits(chat: Chat):
    record, policy = opened(chat, ["word " * 50] * 3, HarnessLimits(max_turns=9, max_turn_tokens=7, max_model_len=60))
    assert say(record, USER, tools=()).num_generated_tokens == 7
    assert say(record, USER, tools=(), max_tokens=3).num_generated_tokens == 3
    long = Said("user", "a " * 36)
    room = 60 - asyncio.run(record.count_tokens(Ask((long,))))
    assert 0 < room < 7 and say(record, long, tools=()).num_generated_tokens == room
    assert policy.recorded_exactly(record)


@pytest.mark.parametrize(
    ("messages", "words"),
    [((), "must not be empty"), ((USER, Said("assistant", "I")), "no prefill")],
)
def test_what_is_no_question_is_refused(chat: Chat, messages, words: str):
    record, _ = opened(chat, [])
    error = refused(record, *messages)
    assert error.trouble is Trouble.BAD_REQUEST and words in error.message and record.turns == []


def test_a_conversation_is_known_by_the_id_of_its_answer(chat: Chat):
    record, _ = opened(chat, ["one"])
    first = say(record, SYSTEM, USER, num_instructions=1)
    assert record.conversation_of(first.id) == (USER, first.said)
    assert record.conversation_of("nothing") is None
