"""The agent loop against a script, with files in memory; every ending."""

from __future__ import annotations

import asyncio

import pytest
from stand_in import Script, StandInSandbox

from composer.contract import ToolResult
from composer.errors import GeneratorError
from composer.rollout.chat import Chat, format_calls
from composer.rollout.harness import Harness, HarnessLimits, ToolClock, cut_middle
from composer.types import Generation, Outcome, ToolCall
from envs.tools.files import EditLine, ReadFile
from envs.tools.finish import Finish

READ = ToolCall("read_file", {"path": "main.py"})
EDIT = ToolCall("edit_line", {"path": "main.py", "line": 2, "text": "    return a * b"})
FINISH = ToolCall("finish", {})
FILES = {"main.py": b"def f(a, b):\n    return a - b\n"}


@pytest.fixture
def chat(compact_tokenizer):
    return Chat(compact_tokenizer)


def play(chat, turns, tools=(), **limits):
    """Run the loop on a script; turns that are lists of calls are formatted."""
    harness = Harness(chat, [ReadFile(), EditLine(), Finish(), *tools], "Fix.", HarnessLimits(**limits))
    script = Script(chat, [format_calls(chat.template, t) if isinstance(t, list) else t for t in turns])
    conversation, sandbox = harness.open("f fails"), StandInSandbox(0, FILES)
    outcome = asyncio.run(harness.run(conversation, sandbox, script, "e", ToolClock()))
    return outcome, conversation, sandbox, script


def test_finish_ends_it_and_everything_is_recorded(chat):
    outcome, conversation, sandbox, script = play(chat, [[READ], [EDIT], [FINISH]])
    assert outcome is Outcome.FINISHED
    assert sandbox.content["main.py"] == b"def f(a, b):\n    return a * b\n"
    assert [t.observation for t in conversation.turns] == ["def f(a, b):\n    return a - b", "ok", ""]
    assert [t.tool_calls for t in conversation.turns] == [[READ], [EDIT], [FINISH]]
    # Each prompt is the whole context so far, and the last token of all is the policy's.
    ids: list[int] = []
    for turn, prompt in zip(conversation.turns, script.prompts, strict=True):
        assert prompt == ids + turn.prompt_ids
        ids = prompt + turn.generation.token_ids
    assert conversation.ids == ids and conversation.loss_mask[-1]
    assert [m.role for m in conversation.messages] == ["system", "user"] + ["assistant", "tool"] * 3


def test_without_a_prompt_nothing_is_said_of_the_tools_and_they_work(chat):
    harness = Harness(chat, [ReadFile(), EditLine(), Finish()], "Fix.", HarnessLimits())
    conversation = harness.open("f fails", with_prompt=False)
    assert chat.tokenizer.decode(conversation.ids) == "<|im_start|>user\nf fails<|im_end|>\n<|im_start|>assistant\n"
    script = Script(chat, [format_calls(chat.template, [call]) for call in (READ, FINISH)])
    outcome = asyncio.run(harness.run(conversation, StandInSandbox(0, FILES), script, "e", ToolClock()))
    assert outcome is Outcome.FINISHED
    assert [m.role for m in conversation.messages] == ["user"] + ["assistant", "tool"] * 2
    assert conversation.turns[0].observation == "def f(a, b):\n    return a - b"


def test_several_calls_in_a_turn_run_in_order_and_nothing_after_the_end(chat):
    late = ToolCall("edit_line", {"path": "main.py", "line": 1, "text": "no"})
    outcome, conversation, sandbox, _ = play(chat, [[READ, EDIT, READ], [FINISH, late]])
    assert outcome is Outcome.FINISHED
    shown = ["def f(a, b):\n    return a - b", "ok", "def f(a, b):\n    return a * b"]
    assert [m.content for m in conversation.messages if m.role == "tool"] == [*shown, ""]
    assert sandbox.content["main.py"].startswith(b"def f")


def test_too_many_turns(chat):
    outcome, conversation, _, script = play(chat, [[READ]] * 3, max_turns=3)
    assert outcome is Outcome.MAX_TURNS and len(script.prompts) == 3
    assert conversation.turns[-1].observation.startswith("def f")
    assert conversation.loss_mask[-1], "no ids are added after the last turn"


@pytest.mark.parametrize("bad", ["hello", [ToolCall("rm", {})], '<tool_call>{"name": "finish"}</tool_call>'])
def test_malformed_turns_are_answered_until_too_many(chat, bad):
    outcome, conversation, _, _ = play(chat, [bad])
    assert outcome is Outcome.INVALID_CALL and len(conversation.turns) == 1
    outcome, conversation, _, _ = play(chat, [bad, [READ], bad, [FINISH]], invalid_calls_allowed=2)
    assert outcome is Outcome.FINISHED
    answers = [t.observation for t in conversation.turns]
    assert answers[0].startswith("error: ") and answers[0] == answers[2]
    assert answers[0] in chat.tokenizer.decode(conversation.ids)
    outcome, conversation, _, _ = play(chat, [bad, bad, bad], invalid_calls_allowed=2)
    assert outcome is Outcome.INVALID_CALL and len(conversation.turns) == 3


def test_no_call_of_a_turn_runs_if_one_is_unknown(chat):
    outcome, _, sandbox, _ = play(chat, [[EDIT, ToolCall("rm", {})]])
    assert outcome is Outcome.INVALID_CALL and sandbox.content == FILES


def test_wrong_arguments_are_a_result_and_not_an_invalid_call(chat):
    wrong = ToolCall("edit_line", {"path": "main.py", "line": "2", "text": ""})
    outcome, conversation, sandbox, _ = play(chat, [[wrong], [FINISH]])
    assert outcome is Outcome.FINISHED and sandbox.content == FILES
    assert conversation.turns[0].observation == "error: line: '2' is not of type 'integer'"


def test_context_full_before_and_within_a_turn(chat):
    _, conversation, _, _ = play(chat, [[FINISH]])
    prompt, whole = len(conversation.turns[0].prompt_ids), len(conversation.ids)
    assert play(chat, [[FINISH]], max_model_len=whole)[0] is Outcome.FINISHED
    outcome, conversation, _, script = play(chat, [[FINISH]], max_model_len=whole - 1)
    assert outcome is Outcome.CONTEXT_FULL and script.budgets == [whole - 1 - prompt]
    assert len(conversation.ids) == whole - 1
    outcome, conversation, _, script = play(chat, [[FINISH]], max_model_len=prompt)
    assert outcome is Outcome.CONTEXT_FULL and not conversation.turns and not script.prompts


def test_a_tool_result_that_fills_the_context_ends_it(chat):
    _, conversation, _, _ = play(chat, [[READ]], max_turns=1)
    outcome, conversation, _, _ = play(chat, [[READ], [FINISH]], max_model_len=len(conversation.ids) + 3)
    assert outcome is Outcome.CONTEXT_FULL and len(conversation.turns) == 1


def test_a_turn_longer_than_allowed_is_malformed(chat):
    outcome, conversation, _, _ = play(chat, [[READ]], max_turn_tokens=5)
    assert outcome is Outcome.INVALID_CALL and len(conversation.turns[0].generation.token_ids) == 5


@pytest.mark.parametrize("bad", [Generation([5], [0.0], [0], "abort"), Generation([], [], [], "stop")])
def test_an_aborted_generation_is_the_generators_fault(chat, bad):
    with pytest.raises(GeneratorError, match="episode e"):
        play(chat, [bad])


def test_long_tool_results_are_cut_in_the_middle(chat):
    class Shout:
        name, description, parameters = "shout", "", {"type": "object", "properties": {}}

        async def call(self, arguments, sandbox):
            return ToolResult("a" * 50 + "b" * 50)

    shout = ToolCall("shout", {})
    _, conversation, _, _ = play(chat, [[shout], [FINISH]], tools=[Shout()], max_observation_bytes=20)
    assert conversation.turns[0].observation == f"{'a' * 10}\n[... 80 bytes left out ...]\n{'b' * 10}"


@pytest.mark.parametrize(
    ("text", "max_bytes", "expected"),
    [
        ("abcd", 4, "abcd"),
        ("abcde", 4, "ab\n[... 1 bytes left out ...]\nde"),
        ("abcde", 3, "ab\n[... 2 bytes left out ...]\ne"),
        ("ééé", 3, "é\n[... 4 bytes left out ...]\n"),  # 2 bytes each: the tail's one byte is half a character
    ],
)
def test_cut_middle(text, max_bytes, expected):
    assert cut_middle(text, max_bytes) == expected
