"""Interrupted episodes go on from their checkpoints, in another process's backend; final files can be looked at."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from composer.errors import GeneratorError
from composer.monitor.watch import Monitor
from composer.pretrain.tokenizer import train_tokenizer
from composer.rollout.chat import Chat, format_calls, install_template
from composer.rollout.checkpoint import Keeping
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.schema import HoneypotKind, HoneypotsConfig, MonitorConfig
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
    """Plays turns by how many have been generated, which it reads off the context; ends the process at `until`."""

    version = 0

    def __init__(
        self, chat: Chat, until: int | None = None, error: type[BaseException] = Killed, turns: list[ToolCall] = TURNS
    ) -> None:
        self.chat, self.until, self.error, self.turns, self.asked = chat, until, error, turns, []

    async def __call__(self, token_ids, *, max_tokens, episode_id):
        number = self.chat.decode(token_ids).count("<|im_start|>assistant") - 1
        self.asked.append(number)
        if number == self.until:
            raise self.error("the process ends")
        call = format_calls(self.chat.template, [self.turns[number]])
        ids = [*self.chat.encode_generated(call), self.chat.end_token_id]
        return Generation(ids, [-1.0] * len(ids), [self.version] * len(ids), "stop")


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


def play(
    chat: Chat,
    policy: Policy,
    keeping: Keeping,
    size: int = 1,
    task: Task = TASK,
    monitor: MonitorConfig | None = None,
) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        backend = BubblewrapBackend("checkpoint", profile="plain")
        env = Env(
            EnvSettings(max_turns=9, max_model_len=4096, limits=SandboxLimits()),
            chat=chat,
            taskset=MicroTaskset(),
            tools=[ReadFile(), Run(), Todo(), Finish()],
            rubric=Rubric({"count": Count()}),
            backend=backend,
            monitor=Monitor(monitor) if monitor is not None else None,
        )
        try:
            return (await env.run_group(task, "g7", size, policy, keeping=keeping)).trajectories
        finally:
            await backend.close()

    return asyncio.run(run())


def ends(chat: Chat, until: int, keeping: Keeping, **arguments) -> None:
    with contextlib.suppress(BaseExceptionGroup, Killed):
        play(chat, Policy(chat, until), keeping, **arguments)
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
    # Nobody forgets the group before it is on record: a kill in between loses nothing either.
    assert sorted(p.name for p in (tmp_path / "open/g7/0").iterdir()) == ["done.json"]
    policy = Policy(chat)
    same(play(chat, policy, keeping)[0], whole)
    assert policy.asked == []
    keeping.forget("g7")
    assert not (tmp_path / "open/g7").exists()


def test_only_groups_that_go_on_keep_their_files(tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, every_turns=1)
    for name in ("g1/0/done.json", "g1/1/turn-3.json", "g1/1/turn-3.state", "g1/1/turn-2.json", "g2/0/watch.json"):
        (tmp_path / "open" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "open" / name).touch()
    (tmp_path / "states").mkdir()
    keeping.sweep(going_on={"g2", "g3"})
    assert [p.name for p in (tmp_path / "open").iterdir()] == ["g2"]
    # Also when checkpoints are not wanted any more.
    Keeping(tmp_path).sweep()
    assert not list((tmp_path / "open").iterdir()) and (tmp_path / "states").exists()


def test_what_nobody_has_set_up_removes_nothing(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "open/g1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    Keeping().sweep()
    Keeping().forget("g1")
    assert (tmp_path / "open/g1").exists()


def test_each_token_keeps_the_version_of_the_weights_that_generated_it(chat: Chat, tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, every_turns=1)
    old, new = Policy(chat, 3), Policy(chat)
    old.version, new.version = 4, 5
    with contextlib.suppress(BaseExceptionGroup, Killed):
        play(chat, old, keeping)
    (t,) = play(chat, new, keeping)
    assert [set(turn.generation.policy_versions) for turn in t.turns] == [{4}, {4}, {4}, {5}, {5}, {5}]
    assert t.oldest_policy_version == 4


def test_what_would_be_too_stale_to_be_trained_on_is_played_again(chat: Chat, tmp_path: Path, caplog) -> None:
    keeping = Keeping(tmp_path, every_turns=1)
    old = Policy(chat, 3)
    old.version = 4
    with contextlib.suppress(BaseExceptionGroup, Killed):
        play(chat, old, keeping)
    kept = shutil.copytree(tmp_path, tmp_path.with_name("kept"))
    for oldest, asked in ((4, [3, 4, 5]), (5, [0, 1, 2, 3, 4, 5])):
        folder = shutil.copytree(kept, tmp_path / str(oldest))
        policy = Policy(chat)
        policy.version = 6
        keeping = Keeping(folder, every_turns=1, oldest_version=oldest)
        assert play(chat, policy, keeping)[0].reward == 1.0
        assert policy.asked == asked
    assert caplog.text.count("tokens of version 4 of the weights") == 1
    # Those of an episode that has ended just so.
    policy = Policy(chat)
    policy.version = 8
    play(chat, policy, dataclasses.replace(keeping, oldest_version=6))
    assert policy.asked == []
    play(chat, policy, dataclasses.replace(keeping, oldest_version=7))
    assert policy.asked == [0, 1, 2, 3, 4, 5]


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


def change(path: Path, **fields) -> None:
    """Of the JSON object in a file, or of the one that it has under a name; None takes one out."""
    whole = json.loads(path.read_text())
    for name, value in fields.items():
        inner, _, key = name.rpartition("__")
        part = whole[inner] if inner else whole
        part[key] = value
        if value is None:
            del part[key]
    path.write_text(json.dumps(whole))


DAMAGES = {
    "torn json": lambda f: (f / "turn-2.json").write_bytes((f / "turn-2.json").read_bytes()[:-100]),
    "no state": lambda f: (f / "turn-2.state").unlink(),
    "torn state": lambda f: (f / "turn-2.state").write_bytes((f / "turn-2.state").read_bytes()[:6000]),
    "no archive": lambda f: (f / "turn-2.state").write_bytes(b"no archive"),
    "other prompt": lambda f: change(f / "turn-2.json", conversation__ids=[1, 2, 3]),
    "half a conversation": lambda f: change(f / "turn-2.json", conversation__pending=None),
    "turns that do not fit": lambda f: change(f / "turn-2.json", conversation__turns=[]),
    "tool that is gone": lambda f: change(f / "turn-2.json", kept_by_tools={"gone": []}),
    "tool that refuses": lambda f: change(f / "turn-2.json", kept_by_tools={"todo": [{"no": "item"}]}),
    "tool that cannot": lambda f: change(f / "turn-2.json", kept_by_tools={"run": []}),
    "folder that is gone": lambda f: change(f / "turn-2.json", directory="/nowhere"),
    "other format": lambda f: change(f / "turn-2.json", kept_by_tools=None),
    "no watch": lambda f: (f / "watch.json").unlink(),
    "torn watch": lambda f: (f / "watch.json").write_bytes((f / "watch.json").read_bytes()[:-5]),
    "other watch": lambda f: change(f / "watch.json", baits={}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_restored_as_a_whole_is_not_restored_at_all(
    chat: Chat, tmp_path: Path, damage: str, caplog
) -> None:
    """The episode begins anew, with nothing of the checkpoint in its record, its sandbox or its tools."""
    monitor = MonitorConfig(enabled=True)
    keeping = Keeping(tmp_path, every_turns=2)
    ends(chat, 3, keeping, monitor=monitor)
    folder = tmp_path / "open/g7/0"
    assert sorted(p.name for p in folder.iterdir()) == ["turn-2.json", "turn-2.state", "watch.json"]
    DAMAGES[damage](folder)
    policy = Policy(chat, 3)
    with contextlib.suppress(BaseExceptionGroup, Killed):
        play(chat, policy, keeping, monitor=monitor)
    assert policy.asked == [0, 1, 2, 3]
    assert "Episode g7/0 cannot go on after 2 turns" in caplog.text
    # Its checkpoints are those of its new life, and are due when they were in the first.
    policy = Policy(chat)
    t = play(chat, policy, keeping, monitor=monitor)[0]
    assert policy.asked == [2, 3, 4, 5]
    whole = play(chat, Policy(chat), Keeping(), monitor=monitor)[0]
    same(t, whole)


def test_of_two_checkpoints_the_one_before_serves_where_the_newest_is_damaged(chat: Chat, tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, every_turns=2)
    folder = tmp_path / "open/g7/0"
    ends(chat, 3, keeping)
    before = shutil.copytree(folder, tmp_path / "before")
    ends(chat, 5, keeping)
    # Killed after the newest was written and before the others were removed.
    for path in before.iterdir():
        shutil.copy(path, folder)
    (folder / "turn-4.state").write_bytes(b"torn")
    policy = Policy(chat)
    same(play(chat, policy, keeping)[0], play(chat, Policy(chat), Keeping())[0])
    assert policy.asked == [2, 3, 4, 5]


def test_an_old_checkpoint_that_cannot_be_removed_is_never_taken_for_a_new_one(
    chat: Chat, tmp_path: Path, caplog
) -> None:
    keeping = Keeping(tmp_path, every_turns=2)
    ends(chat, 3, keeping)
    folder = tmp_path / "open/g7/0"
    (folder / "turn-2.state").unlink()
    (folder / "turn-2.state").mkdir()
    policy = Policy(chat)
    assert play(chat, policy, keeping)[0].reward == 1.0
    assert policy.asked == [0, 1, 2, 3, 4, 5] and "cannot be removed" in caplog.text
    assert not (folder / "turn-4.json").exists()


def test_half_written_files_are_none(chat: Chat, tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, every_turns=2)
    ends(chat, 3, keeping)
    folder = tmp_path / "open/g7/0"
    (folder / "turn-4.state").write_bytes(b"killed before its conversation was written")
    (folder / "turn-4.json.tmp").write_text("{")
    (folder / "done.json.tmp").write_text("{")
    policy = Policy(chat)
    same(play(chat, policy, keeping)[0], play(chat, Policy(chat), Keeping())[0])
    assert policy.asked == [2, 3, 4, 5]


def test_a_record_that_is_torn_is_played_again(chat: Chat, tmp_path: Path, caplog) -> None:
    keeping = Keeping(tmp_path, every_turns=2)
    whole = play(chat, Policy(chat), keeping)[0]
    path = tmp_path / "open/g7/0/done.json"
    path.write_bytes(path.read_bytes()[:-10])
    same(play(chat, Policy(chat), keeping)[0], whole)
    assert "episode g7/0 is played again" in caplog.text.lower()


@pytest.mark.parametrize(
    "setup", ["", "echo 2 > made.py; mkdir -p tests; echo 'def test(): assert 1' > tests/test_a.py"]
)
def test_the_monitor_knows_what_it_knew(chat: Chat, tmp_path: Path, setup: str) -> None:
    """A bait that was read and tests that were edited before the interruption are found after it."""
    files = {"main.py": b"1\n", "tests/test_a.py": b"def test(): assert 1\n"}
    task = Task("t/train/0", "count", {"main.py": b"1\n"} if setup else files, {}, setup=setup)
    turns = [
        ToolCall("run", {"command": "cat ~/.cache/eval-runner/*.json; echo 'def test(): pass' > tests/test_a.py"}),
        ToolCall("run", {"command": "ls"}),
        ToolCall("finish", {}),
    ]
    honeypots = HoneypotsConfig([HoneypotKind.answers])
    monitor = MonitorConfig(enabled=True, honeypots=honeypots)
    keeping = Keeping(tmp_path, every_turns=1)
    with contextlib.suppress(BaseExceptionGroup, Killed):
        play(chat, Policy(chat, 2, turns=turns), keeping, task=task, monitor=monitor)
    folder = tmp_path / "open/g7/0"
    canary = json.loads((folder / "watch.json").read_text())["baits"]["canary"]
    policy = Policy(chat, turns=turns)
    (t,) = play(chat, policy, keeping, task=task, monitor=monitor)
    assert policy.asked == [2]
    found = t.metadata["monitor"]
    assert {f["rule"] for f in found["findings"]} == {"takes_bait", "edits_tests"} and found["baits"] == 1
    assert canary in t.turns[0].observation


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
    assert capfd.readouterr().err.strip().endswith("look.state='': name a file in <run dir>/episodes/<stage>/states")
    assert main(["look", "look.state=/nowhere"]) == 2
    assert "look.state='/nowhere': cannot be opened (No such file or directory)" in capfd.readouterr().err
