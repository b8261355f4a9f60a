"""Expert sessions as text and as ids, next to a live episode with the same calls."""

from __future__ import annotations

import asyncio
import json

import pytest
from stand_in import Script, StandInBackend

from composer.contract import SandboxLimits
from composer.errors import SandboxStartError, TaskError
from composer.rollout.chat import TEMPLATES, Chat, format_calls
from composer.rollout.harness import Harness, HarnessLimits, ToolClock
from composer.rollout.parts import play_expert
from composer.rollout.sessions import Session, record_session, record_sessions, render_session, session_text
from composer.types import Outcome, Split, ToolCall
from envs.tasks.micro import MicroTaskset
from envs.tools.edit import SearchReplace
from envs.tools.files import ReadFile
from envs.tools.finish import Finish

TOOLS = [ReadFile(), SearchReplace(), Finish()]
TASKSET = MicroTaskset(expert_accuracy=1.0, varied=False)
TASK = TASKSET.task(Split.TRAIN, 2)
SYSTEM = "Fix the repository."
TEXT = """\
<|im_start|>system
Fix the repository. Tools: read_file(path), search_replace(path, old_text, new_text, replace_all), finish().<|im_end|>
<|im_start|>user
scale_row fails its tests in main.py<|im_end|>
<|im_start|>assistant
<tool_call>{"name": "read_file", "arguments": {"path": "main.py"}}</tool_call><|im_end|>
<|im_start|>user
<tool_response>
def scale_row(a, b):
    return a + b
</tool_response><|im_end|>
<|im_start|>assistant
<tool_call>{"name": "search_replace", "arguments": {"path": "main.py", "old_text": "return a + b", "new_text": "return a * b"}}</tool_call><|im_end|>
<|im_start|>user
<tool_response>
ok
</tool_response><|im_end|>
<|im_start|>assistant
<tool_call>{"name": "finish", "arguments": {}}</tool_call><|im_end|>"""  # noqa: E501


@pytest.fixture(params=["compact", "hermes"])
def chat(request, compact_tokenizer, hermes_tokenizer):
    return Chat(compact_tokenizer if request.param == "compact" else hermes_tokenizer)


@pytest.fixture(scope="module")
def session():
    return asyncio.run(record_sessions(TASKSET, 1, tools=TOOLS, backend=StandInBackend(), first_index=2))[0]


def test_a_session_in_full(session, compact_tokenizer):
    assert (session.task_id, session.request) == ("micro/train/2", "scale_row fails its tests in main.py")
    assert session.observations == [["def scale_row(a, b):\n    return a + b"], ["ok"], [""]]
    assert Session.from_dict(json.loads(json.dumps(session.to_dict()))) == session
    assert session_text(session, TEMPLATES["compact"], TOOLS, SYSTEM) == TEXT + "\n"
    ids, mask = render_session(session, Chat(compact_tokenizer), TOOLS, SYSTEM)
    assert compact_tokenizer.decode(ids) == TEXT
    shown = [compact_tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])]
    assert shown == ["".join(line for line in TEXT.split("\n") if line.startswith("<tool_call>"))]


@pytest.mark.parametrize("system", [SYSTEM, ""])
def test_ids_equal_those_of_a_live_episode(chat, session, system):
    harness = Harness(chat, TOOLS, system, HarnessLimits(max_model_len=4096))
    conversation = harness.open(TASK.request)
    turns = [format_calls(chat.template, calls) for calls in TASKSET.expert(TASK, 0)]

    async def live():
        sandbox = await StandInBackend().start(TASK.files, SandboxLimits())
        return await harness.run(conversation, sandbox, Script(chat, turns), "e", ToolClock())

    assert asyncio.run(live()) is Outcome.FINISHED
    assert render_session(session, chat, TOOLS, system) == (conversation.ids, conversation.loss_mask)


def test_calls_of_one_turn_are_recorded_as_a_live_episode_would(chat):
    both = [ToolCall("read_file", {"path": "main.py"}), ToolCall("read_file", {"path": "README.md"})]
    turns = [both, [ToolCall("finish", {})]]
    session = asyncio.run(record_session(TASK, turns, TOOLS, StandInBackend(), SandboxLimits(), 4096))
    assert session.turns == turns
    assert [len(answers) for answers in session.observations] == [2, 1]
    assert Session.from_dict(json.loads(json.dumps(session.to_dict()))) == session
    harness = Harness(chat, TOOLS, SYSTEM, HarnessLimits(max_model_len=4096))
    conversation = harness.open(TASK.request)

    async def live():
        sandbox = await StandInBackend().start(TASK.files, SandboxLimits())
        script = Script(chat, [format_calls(chat.template, calls) for calls in turns])
        return await harness.run(conversation, sandbox, script, "e", ToolClock())

    assert asyncio.run(live()) is Outcome.FINISHED
    ids, mask = render_session(session, chat, TOOLS, SYSTEM)
    assert (ids, mask) == (conversation.ids, conversation.loss_mask)
    text = session_text(session, chat.template, TOOLS, SYSTEM)
    assert text == chat.tokenizer.decode(ids) + "\n" and text.count("<tool_response>") == 2


def test_an_expert_may_play_calls_and_turns():
    class Mixed(MicroTaskset):
        played = ()

        def expert(self, task, seed):
            return self.played

    taskset, finish = Mixed(), ToolCall("finish", {})
    read = ToolCall("read_file", {"path": "main.py"})
    taskset.played = [read, (read, read), finish]
    assert play_expert(taskset, TASK, 0, None) == [[read], [read, read], [finish]]
    for wrong, sentence in (
        ([], "it plays nothing"),
        ([read, []], "it plays a turn without a call"),
        ([[read, "finish"]], "it plays 'finish', which is no"),
        (["finish"], "it plays 'finish', which is no"),
    ):
        taskset.played = wrong
        with pytest.raises(TaskError, match=sentence):
            play_expert(taskset, TASK, 0, None)


def test_sessions_come_in_order_and_every_sandbox_is_stopped():
    backend, done = StandInBackend(), []
    sessions = asyncio.run(record_sessions(TASKSET, 20, tools=TOOLS, backend=backend, progress=done.append))
    assert [s.task_id for s in sessions] == [f"micro/train/{i}" for i in range(20)]
    assert done == list(range(1, 21)) and len(backend.started) == 20 and all(s.stopped for s in backend.started)


def test_a_failing_sandbox_is_one_plain_error():
    with pytest.raises(SandboxStartError, match="no namespaces"):
        backend = StandInBackend(start_error=SandboxStartError("no namespaces"))
        asyncio.run(record_sessions(TASKSET, 20, tools=TOOLS, backend=backend))


def test_calls_after_the_end_are_not_recorded():
    calls = [ToolCall("finish", {}), ToolCall("read_file", {"path": "main.py"})]
    for turns in ([calls], [[call] for call in calls]):
        session = asyncio.run(record_session(TASK, turns, TOOLS, StandInBackend(), SandboxLimits(), 4096))
        assert session.turns == [calls[:1]] and session.observations == [[""]]
