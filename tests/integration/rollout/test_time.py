"""Whose time it is, in real sandboxes: the agent's is its own, and nothing that the framework does counts for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer.contract import Grade, SandboxLimits
from composer.pretrain.tokenizer import train_tokenizer
from composer.rollout import checkpoint
from composer.rollout.chat import Chat, format_calls, install_template
from composer.rollout.checkpoint import Keeping
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.rollout.pool import PoolSettings, SandboxPool
from composer.types import Generation, Outcome, Pressure, Task, ToolCall, Trajectory
from envs.grading.pytest_grader import PytestGrader
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.tasks.micro import MicroTaskset
from envs.tools.finish import Finish
from envs.tools.shell import Run

FREE, FULL = Pressure(0.0, 2**40, 2**40), Pressure(99.0, 2**40, 2**40)
FINISH = ToolCall("finish", {})
TEST = b"from composer_solution import call\n\n\ndef test_it():\n    assert call('main.double', 2) == 4\n"
TASK = Task("t/train/0", "double", {"main.py": b"def double(x):\n    return 2 * x\n"}, {"test_it.py": TEST})


def run(command: str) -> ToolCall:
    return ToolCall("run", {"command": command})


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([Path(asyncio.tasks.__file__).read_text()], 512, folder)
    install_template(folder, "compact")
    return Chat.load(folder)


class Free:
    """A grader that starts a sandbox, and bounds nothing by itself."""

    name = "free"

    async def grade(self, task: Task, files: Any, backend: Any, trajectory: Any) -> Grade:
        sandbox = await backend.start(files, SandboxLimits())
        await sandbox.stop()
        return Grade(1.0)


class Played:
    """Plays calls, one a turn; a function among them is called when its turn comes."""

    def __init__(self, chat: Chat, *calls: Any) -> None:
        self.chat, self.calls = chat, list(calls)

    async def __call__(self, token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
        while callable(self.calls[0]):
            self.calls.pop(0)()
        call = self.calls.pop(0) if len(self.calls) > 1 else self.calls[0]
        ids = [*self.chat.encode_generated(format_calls(self.chat.template, [call])), self.chat.end_token_id]
        return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop")


def play(
    chat: Chat,
    *calls: Any,
    task: Task = TASK,
    graders: Any = None,
    size: int = 1,
    timeout_s: float = 3.0,
    keeping: Keeping = Keeping(),  # noqa: B008 - frozen
    monitor: Any = None,
    read_pressure: Any = None,
    beside: Any = None,
) -> list[Trajectory]:
    """Play a group; `beside` is run with the pool at the same time."""

    async def main() -> list[Trajectory]:
        pool = SandboxPool(BubblewrapBackend("time"), PoolSettings(warm=0), read_pressure or (lambda: FREE))
        limits = SandboxLimits(lifetime_s=timeout_s, exec_timeout_s=60.0)
        env = Env(
            EnvSettings(max_turns=9, max_model_len=8192, episode_timeout_s=timeout_s, limits=limits),
            chat=chat,
            taskset=MicroTaskset(),
            tools=[Run(timeout_s=60.0), Finish()],
            rubric=Rubric(graders or {"tests": PytestGrader()}),
            backend=pool,
            monitor=monitor,
        )
        aside = asyncio.ensure_future(beside(pool)) if beside is not None else None
        try:
            group = await env.run_group(task, "g", size, Played(chat, *calls), keeping=keeping)
            if aside is not None:
                await aside
            return group.trajectories
        finally:
            await pool.close()

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 2])
def test_an_agent_that_stalls_after_a_long_setup_is_timed_out(chat: Chat, size: int) -> None:
    """The sandbox's life, which is as long as the episode's time, begins before it, and the setup takes most of it."""
    task = Task("t/train/0", "wait", TASK.files, TASK.hidden_tests, setup="sleep 2")
    for t in play(chat, run("sleep 60"), task=task, size=size):
        assert (t.outcome, t.reward, t.error) == (Outcome.TIMED_OUT, 0.0, "")


def test_an_agent_that_stalls_is_timed_out_to_the_last_second(chat: Chat) -> None:
    [t] = play(chat, *[run("sleep 0.5")] * 9, timeout_s=2.0)
    assert (t.outcome, t.reward, t.error) == (Outcome.TIMED_OUT, 0.0, "")


def test_checkpoints_and_kept_states_do_not_count(chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, saved = checkpoint.save_state, []

    async def slow(sandbox: Any, backend: Any, path: Path) -> None:
        await asyncio.sleep(1.5)
        await real(sandbox, backend, path)
        saved.append(path.name)

    monkeypatch.setattr(checkpoint, "save_state", slow)
    [t] = play(chat, run("sleep 0.1"), run("true"), FINISH, timeout_s=2.5, keeping=Keeping(tmp_path, 1, 1.0))
    assert (t.outcome, t.reward, t.error) == (Outcome.FINISHED, 1.0, "")
    assert saved == ["turn-1.state", "turn-2.state", "g.0.state"]


def test_there_are_no_more_checkpoints_when_they_have_taken_too_long(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "_MOST_S", 0.001)
    keeping = Keeping(tmp_path, 1)
    [t] = play(chat, run("true"), run("true"), run("true"), FINISH, keeping=keeping)
    assert t.reward == 1.0
    assert [record.getMessage() for record in caplog.records if "no further checkpoints" in record.getMessage()] == [
        "Episode g/0 has no further checkpoints: these took too long"
    ]


def test_the_monitors_part_does_not_count(chat: Chat) -> None:
    class Slow:
        async def begin(self, sandbox: Any) -> None:
            await asyncio.sleep(2.0)

        async def end(self, sandbox: Any, files: Any) -> Any:
            await asyncio.sleep(2.0)
            return files

        async def settle(self, t: Trajectory) -> None:
            t.metadata["monitor"] = "looked"

    [t] = play(chat, run("true"), FINISH, timeout_s=1.5, monitor=SimpleNamespace(watch=lambda *_: Slow()))
    assert (t.outcome, t.reward, t.error, t.metadata["monitor"]) == (Outcome.FINISHED, 1.0, "", "looked")


@pytest.mark.parametrize("grader", [Free(), PytestGrader(timeout_s=5.0)])
def test_the_graders_wait_for_room_does_not_count(chat: Chat, grader: Any) -> None:
    """The machine is pressed, and somebody else holds a sandbox: first for long, then as others come and go."""
    dial = SimpleNamespace(now=FREE)

    def press() -> None:
        dial.now = FULL

    async def hold(pool: SandboxPool) -> None:
        sandbox = await pool.start({}, SandboxLimits())
        while dial.now is FREE:
            await asyncio.sleep(0.01)
        await asyncio.sleep(3.0)
        await sandbox.stop()  # then one is let in, and its second with it, however hard the machine is pressed

    graders, calls = {"it": grader}, (run("true"), press, FINISH)
    [t] = play(chat, *calls, graders=graders, timeout_s=1.5, read_pressure=lambda: dial.now, beside=hold)
    assert (t.outcome, t.reward, t.error) == (Outcome.FINISHED, 1.0, "")


def test_a_setup_that_a_grader_waits_for_does_not_count(chat: Chat) -> None:
    """An only child has no snapshot: its grader is the first to need one, and the setup runs once more for it."""
    task = Task("t/train/0", "double", TASK.files, TASK.hidden_tests, setup="sleep 1.2")
    [t] = play(chat, FINISH, task=task, graders={"it": Free()}, timeout_s=1.5)
    assert (t.outcome, t.reward, t.error) == (Outcome.FINISHED, 1.0, "")
