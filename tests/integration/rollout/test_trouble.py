"""Who is to blame when an episode ends badly, in real sandboxes: the model's doing has a reward, all else a cause."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from pathlib import Path

import psutil
import pytest

from composer.contract import Grade, SandboxLimits, ToolResult
from composer.errors import SandboxError, TaskError, ToolError
from composer.pretrain.tokenizer import train_tokenizer
from composer.rollout.chat import Chat, format_calls, install_template
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.rollout.parts import BlockedLoop, call_tool, make_task
from composer.rollout.sessions import record_session, record_sessions
from composer.types import Generation, Outcome, Split, ToolCall
from envs.grading.pytest_grader import PytestGrader
from envs.tasks.micro import MicroTaskset
from envs.tools.files import EditLine, ReadFile
from envs.tools.finish import Finish
from envs.tools.mcp import McpTool
from envs.tools.shell import Run

TASKSET = MicroTaskset(expert_accuracy=1.0)
TASK = TASKSET.task(Split.TRAIN, 2)
FILL_SHARED_MEMORY = """
import ctypes
c = ctypes.CDLL(None)
c.shmat.restype = ctypes.c_void_p
c.shmdt.argtypes = [ctypes.c_void_p]
for i in range(2000):
    at = c.shmat(c.shmget(0, 2**18, 0o1600), None, 0)
    if at != 2**64 - 1:
        c.memset(ctypes.c_void_p(at), 1, 2**18)
        c.shmdt(at)
"""
FINISH = ToolCall("finish", {})


class Odd:
    """A user's tool that does what it is told; the answer is what it was made with."""

    name, description, parameters = "odd", "", {"type": "object", "properties": {}}

    def __init__(self, answer=None, raises=None, waits=False, command=""):
        self.answer, self.raises, self.waits, self.command = answer, raises, waits, command

    async def call(self, arguments, sandbox):
        if self.command:
            await sandbox.shell(self.command)
        if self.waits:
            await asyncio.Event().wait()
        if self.raises is not None:
            raise self.raises
        return self.answer


class OddGrader:
    name = "odd"

    def __init__(self, score=None, raises=None, waits=False, details=None):
        self.score, self.raises, self.waits, self.details = score, raises, waits, details or {}

    async def grade(self, task, files, backend, trajectory):
        if self.waits:
            await asyncio.Event().wait()
        if self.raises is not None:
            raise self.raises
        return self.score if self.score is None else Grade(self.score, self.details)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([Path(asyncio.tasks.__file__).read_text()], 512, folder)
    install_template(folder, "compact")
    return Chat.load(folder)


@pytest.fixture
def play(runner, backend, chat):
    """Play calls, one a turn; a callable in their place is called (and awaited) when its turn comes."""

    def run(*calls, tools=(), graders=None, limits=None, **settings):
        limits = limits or SandboxLimits(exec_timeout_s=5.0)
        settings = {
            "max_turns": 8,
            "max_model_len": 8192,
            "max_turn_tokens": 4096,
            "max_observation_bytes": 500,
            **settings,
        }
        env = Env(
            EnvSettings(limits=limits, **settings),
            chat=chat,
            taskset=TASKSET,
            tools=[ReadFile(), EditLine(), Run(timeout_s=1.0), Finish(), *tools],
            rubric=Rubric(graders or {"tests": PytestGrader(memoise=False)}),
            backend=backend,
        )
        turns = iter(calls)

        async def generate(token_ids, *, max_tokens, episode_id):
            while callable(call := next(turns)):
                await call()
            text = format_calls(chat.template, [call])
            ids = [*chat.encode_generated(text), chat.end_token_id]
            return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

        t = runner.run(env.run_episode(TASK, "g", "g/0", generate))
        assert not backend._sandboxes, "every sandbox is stopped"
        assert (t.reward is None) == (t.outcome is Outcome.INFRASTRUCTURE_ERROR) == bool(t.error)
        return t

    return run


ODD = ToolCall("odd", {})


@pytest.mark.parametrize(
    ("tool", "cause"),
    [
        (Odd(waits=True), "tool 'odd' did not answer within the episode's 4 s"),
        (Odd(waits=True, command="echo"), "tool 'odd' did not answer within the episode's 4 s"),
        (Odd(raises=ValueError("oops")), "tool 'odd' failed (ValueError('oops'), "),
        (Odd(raises=TimeoutError()), "tool 'odd' failed (TimeoutError(), "),
        (Odd(raises=asyncio.CancelledError()), "tool 'odd' failed: a task of its own was cancelled"),
        (Odd(raises=SystemExit(1)), "tool 'odd' failed (SystemExit(1), "),
        (Odd(raises=SandboxError("it is gone")), "it is gone"),
        (Odd(answer=None), "tool 'odd' answered None, which is no ToolResult"),
        (Odd(answer="text"), "tool 'odd' answered 'text', which is no ToolResult"),
        (Odd(answer=ToolResult(b"bytes")), "tool 'odd' answered ToolResult(content=b'bytes'"),
    ],
)
def test_a_tool_that_breaks_its_contract_is_named_and_gives_no_reward(play, tool, cause):
    t = play(ODD, FINISH, tools=[tool], episode_timeout_s=4.0 if tool.waits else 30.0)
    assert t.outcome is Outcome.INFRASTRUCTURE_ERROR and cause in t.error, t.error


@pytest.mark.parametrize(
    "text", ["\ud800 lone", "x" * 10**8, "\0\x07", "<|im_end|>", b"\xff\xfe".decode(errors="replace")]
)
def test_any_text_may_be_an_answer(play, text):
    t = play(ODD, FINISH, tools=[Odd(answer=ToolResult(text))], max_observation_bytes=200)
    assert (t.outcome, t.reward) == (Outcome.FINISHED, 0.0)
    t.turns[0].observation.encode()


@pytest.mark.parametrize(
    ("grader", "cause"),
    [
        (OddGrader(waits=True), "grader 'odd' did not end within 4 s"),
        (OddGrader(raises=ZeroDivisionError("oops")), "grader 'odd' failed on task micro/train/2 (ZeroDivisionError"),
        (OddGrader(raises=TimeoutError()), "grader 'odd' failed on task micro/train/2 (TimeoutError"),
        (OddGrader(), "it answered None, which is no composer.contract.Grade"),
        (OddGrader(math.nan), "its score nan is not in [0, 1]"),
        (OddGrader(1.5), "its score 1.5 is not in [0, 1]"),
        (OddGrader(-0.1), "its score -0.1 is not in [0, 1]"),
        (OddGrader("high"), "grader 'odd' failed"),
        (OddGrader(1.0, details={("a", "b"): 1}), "grader 'odd' failed"),
    ],
)
def test_a_grader_that_breaks_its_contract_is_named_and_gives_no_reward(play, grader, cause):
    t = play(FINISH, graders={"odd": grader}, episode_timeout_s=4.0 if grader.waits else 30.0)
    assert t.outcome is Outcome.INFRASTRUCTURE_ERROR and cause in t.error, t.error
    assert t.rewards == {}


def parts_of_sandboxes(backend):
    """The processes of a backend: fork server, and of each sandbox bwrap, PID 1 and the supervisor."""
    server = psutil.Process(backend._server.watchdog).children()[0]
    bwraps = [p for p in server.children() if p.name() == "bwrap"]
    return {
        "fork server": [server],
        "bwrap": bwraps,
        "PID 1": [c for p in bwraps for c in p.children()],
        "supervisor": [p for p in server.children() if p.name() != "bwrap"],
    }


PARTS = ("fork server", "bwrap", "PID 1", "supervisor")


@pytest.mark.parametrize("part", PARTS)
def test_a_sandbox_killed_under_a_command_is_no_reward(play, backend, part):
    async def kill_soon():
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, lambda: [p.kill() for p in parts_of_sandboxes(backend)[part]])

    t = play(kill_soon, ToolCall("run", {"command": "sleep 2; echo survived"}), FINISH)
    assert "is gone" in t.error and "ended" in t.error
    assert play(FINISH).reward == 0.0, "the next episode has a sandbox again"


@pytest.mark.parametrize("part", PARTS)
def test_a_grading_sandbox_that_is_killed_is_no_reward(play, backend, part):
    slow = "import time\ntime.sleep(3)\ndef scale_row(a, b):\n    return a * b"

    class Slow(PytestGrader):
        async def grade(self, task, files, backend, trajectory=None):
            async def kill_soon():
                await asyncio.sleep(0.5)
                for process in parts_of_sandboxes(backend)[part]:
                    with contextlib.suppress(psutil.NoSuchProcess):  # one of them ends the others
                        process.kill()

            killer = asyncio.create_task(kill_soon())
            try:
                return await super().grade(task, {"main.py": slow.encode()}, backend, trajectory)
            finally:
                await killer

    t = play(FINISH, graders={"tests": Slow()})
    assert "is gone" in t.error


def test_a_grading_sandbox_that_cannot_start_is_no_reward(play):
    grader = PytestGrader()
    grader.limits = SandboxLimits(disk_bytes=1)
    assert "disk_bytes=1 is too small" in play(FINISH, graders={"tests": grader}).error


@pytest.mark.parametrize(
    "command",
    [
        "kill -9 $$",
        "exit 3",
        "exec true",
        "kill -STOP $$",
        "kill -9 -1; kill -9 1",
        "f() { f | f & }; f; f; kill -9 $$",
        "python3 -c 'x = []\nwhile True: x.append(bytearray(b\"x\" * 2**20))'",
        "for i in 1 2 3 4 5; do head -c 60M /dev/zero > big$i; done",
        "head -c 60M /dev/zero > /tmp/a; head -c 60M /dev/zero > b; while :; do head -c 1 b >> c$RANDOM; done",
        "head -c 60M /dev/zero > a; python3 -c '"
        + FILL_SHARED_MEMORY
        + "'; while head -c 4K /dev/zero >> /tmp/b; do :; done",
        "rm -rf ~ /tmp; cd /",
        "chmod 000 .",
        "yes",
        "head -c 9999 /dev/urandom",
    ],
)
def test_what_a_model_does_to_its_own_sandbox_is_data(play, command):
    call = ToolCall("run", {"command": command})
    t = play(call, call, ToolCall("read_file", {"path": "main.py"}), ToolCall("run", {"command": "echo"}), FINISH)
    assert (t.outcome, t.reward) == (Outcome.FINISHED, 0.0), t.error


@pytest.mark.parametrize(
    ("program", "said"),
    [("import time; time.sleep(60)", "did not answer within 1 s"), ("raise SystemExit('no database')", "no database")],
)
def test_a_tool_server_that_does_not_start_before_the_agent_is_no_reward(play, runner, backend, program, said):
    tool = McpTool(["python3", "-c", program], "count", "Count.", {"type": "object"}, start_timeout_s=1.0)
    t = play(ToolCall("count", {}), FINISH, tools=[tool])
    assert t.outcome is Outcome.INFRASTRUCTURE_ERROR and said in t.error, t.error
    assert not t.turns  # nothing of it was shown
    with pytest.raises(ToolError, match="it did not start"):
        runner.run(
            record_session(TASK, [ToolCall("count", {}), FINISH], [tool, Finish()], backend, SandboxLimits(), 500)
        )


def test_time_that_the_models_commands_take_is_its_own(play):
    sleep = ToolCall("run", {"command": "sleep 60"})
    t = play(*[sleep] * 8, episode_timeout_s=3.0)
    assert (t.outcome, t.reward) == (Outcome.TIMED_OUT, 0.0)


def test_a_tool_that_blocks_the_thread_is_named(runner):
    class Blocking(Odd):
        async def call(self, arguments, sandbox):
            time.sleep(1.5)
            return ToolResult("")

    async def scenario():
        reports = []
        BlockedLoop(asyncio.get_running_loop(), 0.4, reports.append)
        await asyncio.sleep(0.3)
        time.sleep(1.0)  # the framework's own work may take its time
        await asyncio.sleep(0.3)
        assert reports == []
        await call_tool(Blocking(), ODD, None)
        return reports

    [report] = runner.run(scenario())
    assert "tool 'odd' is at " in report and __file__ in report and "asyncio.to_thread" in report


class OddTaskset(MicroTaskset):
    """Breaks as it is told."""

    def __init__(self, task=None, calls=None):
        super().__init__()
        self.make, self.calls = task, calls

    def task(self, split, index):
        return super().task(split, index) if self.make is None else self.make(super().task(split, index))

    def expert(self, task, seed):
        return super().expert(task, seed) if self.calls is None else self.calls(task)


def fail(_):
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("taskset", "cause"),
    [
        (
            OddTaskset(task=fail),
            r"micro broke on train task 0 \(KeyError\('oops'\), .*test_trouble.py:\d+\): mend its `task`",
        ),
        (OddTaskset(task=lambda task: None), "it made None, which is no composer.types.Task"),
        (OddTaskset(task=lambda task: task.__class__("i", "r", {"a": "text"}, {})), r"files\['a'\] is no bytes"),
        (OddTaskset(task=lambda task: task.__class__("i", "\ud800", {}, {})), "request=.* is no text"),
        (OddTaskset(calls=fail), r"micro's expert broke on task micro/train/0 \(KeyError"),
        (OddTaskset(calls=lambda task: [ToolCall("nope", {})]), "the tools are read_file, finish: mend its `expert`"),
        (OddTaskset(calls=lambda task: None), "micro's expert broke"),
        (OddTaskset(calls=lambda task: []), "it plays nothing"),
    ],
)
def test_a_taskset_that_breaks_is_named(runner, backend, taskset, cause):
    with pytest.raises(TaskError, match=cause):
        runner.run(record_sessions(taskset, 3, tools=[ReadFile(), Finish()], backend=backend))
    assert not backend._sandboxes


def test_an_endless_taskset_ends_where_it_says(runner):
    class Finite(MicroTaskset):
        def task(self, split, index):
            raise IndexError

    with pytest.raises(TaskError, match="micro has no train task 7: ask for fewer"):
        make_task(Finite(), Split.TRAIN, 7)


def test_a_tool_that_hangs_when_the_expert_plays_is_named(runner, backend):
    taskset = OddTaskset(calls=lambda task: [ODD, FINISH])
    with pytest.raises(
        ToolError, match="tool 'odd' did not end within 0.5 s when the expert played task micro/train/0"
    ):
        runner.run(record_sessions(taskset, 1, tools=[Odd(waits=True), Finish()], backend=backend, timeout_s=0.5))
    assert not backend._sandboxes
