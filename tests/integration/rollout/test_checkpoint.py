"""Interrupted episodes go on from their checkpoints, in another process's backend; final files can be looked at."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from composer.errors import GeneratorError
from composer.pretrain.tokenizer import train_tokenizer
from composer.rollout.chat import Chat, format_calls, install_template
from composer.rollout.checkpoint import Keeping
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.types import Generation, Outcome, Task, ToolCall, Trajectory
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.tasks.micro import MicroTaskset
from envs.tools.files import ReadFile
from envs.tools.finish import Finish
from envs.tools.shell import Run
from envs.tools.todo import Todo

TASK = Task("t/train/0", "count", {"main.py": b"1\n"}, {})
TURNS = [
    ToolCall("run", {"command": "mkdir sub; cd sub; echo one > count; rm ../main.py"}),
    ToolCall("todo", {"items": [{"id": "a", "content": "look"}]}),
    ToolCall("run", {"command": "echo two >> count; pwd"}),
    ToolCall("todo", {"items": [{"id": "a", "status": "completed"}], "merge": True}),
    ToolCall("run", {"command": "cat count; ls .."}),
    ToolCall("finish", {}),
]


class Killed(BaseException):
    """Stands for the end of the process."""


class Policy:
    """Plays TURNS by how many have been generated, which it reads off the context; ends the process at `until`."""

    def __init__(self, chat: Chat, until: int | None = None, error: type[BaseException] = Killed) -> None:
        self.chat, self.until, self.error, self.asked = chat, until, error, []

    async def __call__(self, token_ids, *, max_tokens, episode_id):
        number = self.chat.decode(token_ids).count("<|im_start|>assistant") - 1
        self.asked.append(number)
        if number == self.until:
            raise self.error("the process ends")
        ids = [*self.chat.encode_generated(format_calls(self.chat.template, [TURNS[number]])), self.chat.end_token_id]
        return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop")


class Count:
    """Scores what is in sub/count."""

    name = "count"

    async def grade(self, task, files, backend, trajectory):
        from composer.contract import Grade

        return Grade(float(files == {"sub/count": b"one\ntwo\n"}))


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Chat:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([Path(asyncio.tasks.__file__).read_text()], 512, folder)
    install_template(folder, "compact")
    return Chat.load(folder)


def play(chat: Chat, policy: Policy, keeping: Keeping, size: int = 1) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        backend = BubblewrapBackend("checkpoint", profile="plain")
        env = Env(
            EnvSettings(max_turns=9, max_model_len=4096, limits=SandboxLimits()),
            chat=chat,
            taskset=MicroTaskset(),
            tools=[ReadFile(), Run(), Todo(), Finish()],
            rubric=Rubric({"count": Count()}),
            backend=backend,
            keeping=keeping,
        )
        try:
            return (await env.run_group(TASK, "g7", size, policy)).trajectories
        finally:
            await backend.close()

    return asyncio.run(run())


def ends(chat: Chat, until: int, keeping: Keeping) -> None:
    with contextlib.suppress(BaseExceptionGroup, Killed):
        play(chat, Policy(chat, until), keeping)
        pytest.fail("it was not interrupted")


def same(a: Trajectory, b: Trajectory) -> None:
    assert a.token_ids == b.token_ids and a.loss_mask == b.loss_mask and a.messages == b.messages
    assert (a.outcome, a.reward, a.metadata) == (b.outcome, b.reward, b.metadata)
    assert [t.observation for t in a.turns] == [t.observation for t in b.turns]


def test_an_interrupted_episode_goes_on_as_if_nothing_had_been(chat: Chat, tmp_path: Path) -> None:
    whole = play(chat, Policy(chat), Keeping())[0]
    assert (whole.outcome, whole.reward) == (Outcome.FINISHED, 1.0)
    assert whole.metadata["todo"] == [{"id": "a", "content": "look", "status": "completed"}]
    keeping = Keeping(tmp_path, every_turns=2)
    ends(chat, 3, keeping)
    assert sorted(p.name for p in (tmp_path / "open/g7/0").iterdir()) == ["turn-2.json", "turn-2.state"]
    # Interrupted twice: the second time two turns later.
    ends(chat, 5, keeping)
    assert sorted(p.name for p in (tmp_path / "open/g7/0").iterdir()) == ["turn-4.json", "turn-4.state"]
    policy = Policy(chat)
    same(play(chat, policy, keeping)[0], whole)
    assert policy.asked == [4, 5]  # what had been generated was not generated again
    assert not (tmp_path / "open/g7").exists()


def test_a_sibling_that_had_ended_is_not_played_again(chat: Chat, tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, every_turns=2)

    class OneEnds(Policy):
        async def __call__(self, token_ids, *, max_tokens, episode_id):
            if episode_id == "g7/1":
                await asyncio.sleep(3)
                raise Killed
            return await super().__call__(token_ids, max_tokens=max_tokens, episode_id=episode_id)

    with contextlib.suppress(BaseExceptionGroup, Killed):
        play(chat, OneEnds(chat), keeping, 2)
    assert [p.name for p in (tmp_path / "open/g7/0").iterdir()] == ["done.json"]
    policy = Policy(chat)
    first, second = play(chat, policy, keeping, 2)
    assert policy.asked == [0, 1, 2, 3, 4, 5]  # by the second alone
    assert first.reward == second.reward == 1.0
    assert (first.episode_id, second.episode_id) == ("g7/0", "g7/1")


def test_an_episode_that_failed_counts_as_unfinished(chat: Chat, tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, every_turns=1)
    failed = play(chat, Policy(chat, 2, GeneratorError), keeping)
    assert failed[0].outcome is Outcome.INFRASTRUCTURE_ERROR
    files = keeping.of("g7/0")
    files.end(failed[0])
    assert files.ended() is None


@pytest.mark.parametrize("damage", ["json", "state", "other prompt"])
def test_a_checkpoint_that_cannot_be_used_is_left_alone(chat: Chat, tmp_path: Path, damage: str, caplog) -> None:
    keeping = Keeping(tmp_path, every_turns=2)
    ends(chat, 3, keeping)
    folder = tmp_path / "open/g7/0"
    if damage == "json":
        (folder / "turn-2.json").write_text("{")
    elif damage == "state":
        (folder / "turn-2.state").write_bytes(b"no archive")
    else:
        text = (folder / "turn-2.json").read_text()
        (folder / "turn-2.json").write_text(text.replace('"ids": [', '"ids": [1, ', 1))
    policy = Policy(chat)
    assert play(chat, policy, keeping)[0].reward == 1.0
    assert policy.asked == [0, 1, 2, 3, 4, 5]
    assert "episode g7/0" in caplog.text.lower()


def test_final_files_are_kept_for_the_share_that_is_asked_for(chat: Chat, tmp_path: Path) -> None:
    play(chat, Policy(chat), Keeping(tmp_path, state_share=1.0), 2)
    assert sorted(p.name for p in (tmp_path / "states").iterdir()) == ["g7.0.state", "g7.1.state"]
    assert not (tmp_path / "open").exists()
    kept = [Keeping(tmp_path, state_share=0.25).of(f"g{i}/0").state is not None for i in range(2000)]
    assert 400 < sum(kept) < 600
    assert all(Keeping(tmp_path).of(f"g{i}/0").state is None for i in range(100))


def test_look_opens_them(chat: Chat, tmp_path: Path, capfd, monkeypatch) -> None:
    import io

    from composer.cli import main

    play(chat, Policy(chat), Keeping(tmp_path, state_share=1.0))
    state = f"look.state={tmp_path}/states/g7.0.state"
    assert main(["look", state, "look.command='cat sub/count; exit 4'"]) == 4
    assert capfd.readouterr().out == "one\ntwo\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("cd sub\nwc -l count\n"))
    assert main(["look", state]) == 0
    assert capfd.readouterr().out == "2 count\n"
    assert main(["look"]) == 2
    assert capfd.readouterr().err.strip().endswith("look.state='': name a file in <run dir>/episodes/states")
    assert main(["look", "look.state=/nowhere"]) == 2
    assert "look.state='/nowhere': cannot be opened (No such file or directory)" in capfd.readouterr().err
