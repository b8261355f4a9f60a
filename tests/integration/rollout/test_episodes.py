"""Episodes with everything real but the policy: chat format, tools, sandboxes, hidden tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from composer.pretrain.tokenizer import train_tokenizer
from composer.rollout.chat import TEMPLATES, Chat, format_calls, install_template
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.rollout.sessions import record_sessions, render_session, session_text
from composer.types import Generation, Outcome, Split, ToolCall
from envs.grading.pytest_grader import PytestGrader
from envs.tasks.micro import MicroTaskset
from envs.tools.edit import SearchReplace
from envs.tools.files import ReadFile
from envs.tools.finish import Finish
from envs.tools.grep import Grep
from envs.tools.listing import ListDir
from envs.tools.shell import Run

TOOLS = [ReadFile(), SearchReplace(), ListDir(), Grep(), Run(timeout_s=10.0, name="shell"), Finish()]
TASKSET = MicroTaskset(expert_accuracy=0.5)
SYSTEM = "Fix the repository."


@pytest.fixture(scope="module")
def sessions(runner, backend):
    return runner.run(record_sessions(TASKSET, 24, tools=TOOLS, backend=backend, first_index=100))


@pytest.fixture(scope="module")
def chat(sessions, tmp_path_factory):
    """The run's own way to a tokenizer: learned from text and sessions."""
    folder = tmp_path_factory.mktemp("tokenizer")
    source = "".join(p.read_text() for p in sorted(Path(asyncio.__file__).parent.glob("*.py")))
    texts = [session_text(s, TEMPLATES["compact"], TOOLS, SYSTEM) for s in sessions]
    train_tokenizer([source, *texts * 20], 1024, folder)
    install_template(folder, "compact")
    return Chat.load(folder)


class Policy:
    """Plays one list of turns an episode, by the episode's number."""

    def __init__(self, chat, play):
        self.chat, self.play, self.turn = chat, play, {}

    async def __call__(self, token_ids, *, max_tokens, episode_id):
        number = self.turn.setdefault(episode_id, 0)
        self.turn[episode_id] += 1
        turn = self.play(int(episode_id.split("/")[-1]))[number]
        calls = turn if isinstance(turn, list) else [turn]
        ids = [*self.chat.encode_generated(format_calls(self.chat.template, calls)), self.chat.end_token_id]
        return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop")


@pytest.fixture(scope="module")
def env(chat, backend):
    settings = EnvSettings(system_prompt=SYSTEM, max_turns=4, limits=SandboxLimits(exec_timeout_s=10.0))
    rubric = Rubric({"hidden_tests": PytestGrader()})
    return Env(settings, chat=chat, taskset=TASKSET, tools=TOOLS, rubric=rubric, backend=backend)


def test_a_group_gets_the_rewards_that_its_edits_deserve(runner, backend, env, chat):
    task = TASKSET.task(Split.TRAIN, 2)  # must multiply

    def play(number):
        operator = ["*", "+", "-", "*", "//", "%", "*", "+"][number]
        arguments = {"path": "main.py", "old_text": "return a + b", "new_text": f"return a {operator} b"}
        edit = ToolCall("search_replace", arguments)
        return [ToolCall("read_file", {"path": "main.py"}), edit, ToolCall("finish", {})]

    group = runner.run(env.run_group(task, "g", 8, Policy(chat, play)))
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert {t.outcome for t in group.trajectories} == {Outcome.FINISHED}
    assert group.trajectories[0].turns[0].observation == "def scale_row(a, b):\n    return a + b"
    assert not backend._sandboxes, "every sandbox is stopped"


def test_the_expert_is_rewarded_on_unseen_tasks_exactly_when_it_is_right(runner, env, chat):
    expert = MicroTaskset(expert_accuracy=0.5)

    async def play_all():
        tasks = [TASKSET.task(Split.EVALUATION, i) for i in range(10)]
        groups = (
            env.run_group(t, f"e{i}", 1, Policy(chat, lambda _, t=t: expert.expert(t, 0))) for i, t in enumerate(tasks)
        )
        return tasks, await asyncio.gather(*groups)

    tasks, groups = runner.run(play_all())
    for task, group in zip(tasks, groups, strict=True):
        [edit] = expert.expert(task, 0)[-2]
        old, new = edit.arguments["old_text"].encode(), edit.arguments["new_text"].encode()
        right = task.files["main.py"].replace(old, new) == expert.reference(task)["main.py"]
        assert group.trajectories[0].reward == float(right)


def test_an_episode_is_short_in_the_quickstarts_tokens(sessions, chat):
    for session in sessions:
        ids, mask = render_session(session, chat, TOOLS, SYSTEM)
        assert len(ids) <= 304 and sum(mask) <= 115


def test_commands_of_the_agent_have_real_effects(runner, env, chat):
    task = TASKSET.task(Split.TRAIN, 2)
    fix = ToolCall("shell", {"command": "sed -i 's/a + b/a * b/' main.py && python3 -m pytest -q test_main.py"})
    group = runner.run(env.run_group(task, "r", 1, Policy(chat, lambda _: [fix, ToolCall("finish", {})])))
    trajectory = group.trajectories[0]
    assert "1 passed" in trajectory.turns[0].observation and trajectory.reward == 1.0


def test_a_sandbox_that_dies_under_the_agent_is_no_reward(runner, backend, env, chat):
    task = TASKSET.task(Split.TRAIN, 2)

    class Killer(Policy):
        async def __call__(self, token_ids, *, max_tokens, episode_id):
            if episode_id in self.turn:  # after the first tool call
                for sandbox in list(backend._sandboxes.values()):
                    await sandbox.stop()
            return await super().__call__(token_ids, max_tokens=max_tokens, episode_id=episode_id)

    policy = Killer(chat, lambda _: TASKSET.expert(task, 0))
    trajectory = runner.run(env.run_group(task, "k", 1, policy)).trajectories[0]
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_ERROR and trajectory.reward is None and trajectory.error
    assert len(trajectory.turns) == 2


def test_ctrl_c_leaves_no_sandbox(runner, backend, env, chat):
    async def main():
        forever = ToolCall("shell", {"command": "sleep 60"})
        group = asyncio.create_task(
            env.run_group(TASKSET.task(Split.TRAIN, 2), "c", 3, Policy(chat, lambda _: [forever]))
        )
        while len(backend._sandboxes) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    runner.run(main())
    assert not backend._sandboxes
