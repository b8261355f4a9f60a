"""From sandbox to reward with stand-ins: every failure is attributed, and every sandbox is stopped."""

from __future__ import annotations

import asyncio
import errno

import pytest
from stand_in import LineGrader, Script, StandInBackend, small_tokenizer

from composer.errors import GeneratorError, GradingError, SandboxError, SandboxStartError, TaskError, TokenizerError
from composer.rollout.chat import Chat, format_calls
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.schema import EnvConfig
from composer.types import Group, Outcome, Split, ToolCall, Trajectory
from envs.tasks.micro import MicroTaskset
from envs.tools.edit import SearchReplace
from envs.tools.files import ReadFile
from envs.tools.finish import Finish
from envs.tools.shell import Run

TASKSET = MicroTaskset(expert_accuracy=1.0, varied=False)
TASK = TASKSET.task(Split.TRAIN, 2)  # scale_row, right operator *
RIGHT = "    return a * b"


@pytest.fixture
def chat(compact_tokenizer):
    return Chat(compact_tokenizer)


def make_env(chat, backend, graders=None, weights=None, **settings):
    rubric = Rubric(graders or {"line": LineGrader(RIGHT)}, weights or {})
    tools = [ReadFile(), SearchReplace(), Run(), Finish()]
    return Env(EnvSettings(**settings), chat=chat, taskset=TASKSET, tools=tools, rubric=rubric, backend=backend)


def expert_turns(chat, task=TASK):
    return [format_calls(chat.template, calls) for calls in TASKSET.expert(task, 0)]


def play(chat, backend, turns, **arguments) -> Trajectory:
    env = make_env(chat, backend, **arguments)
    t = asyncio.run(env.run_episode(TASK, "g", "g/0", Script(chat, turns)))
    assert all(s.stopped for s in backend.started)
    assert (t.reward is None) == (t.outcome is Outcome.INFRASTRUCTURE_ERROR) == bool(t.error)
    return t


def test_the_expert_gets_the_reward(chat):
    t = play(chat, StandInBackend(), expert_turns(chat))
    assert (t.outcome, t.reward, t.rewards, t.metadata) == (
        Outcome.FINISHED,
        1.0,
        {"line": 1.0},
        {"line": {"looked": True}},
    )
    assert (t.task_id, t.group_id, t.episode_id) == ("micro/train/2", "g", "g/0")
    assert t.oldest_policy_version == 3 and t.num_generated_tokens == sum(t.loss_mask)
    assert len(t.token_ids) == len(t.loss_mask) == len(t.log_probs)
    assert set(zip(t.loss_mask, t.log_probs, strict=True)) == {(True, -0.5), (False, 0.0)}
    assert Trajectory.from_dict(t.to_dict()) == t


def test_the_rubric_is_a_weighted_sum(chat):
    graders = {"a": LineGrader(RIGHT), "b": LineGrader("something else"), "c": LineGrader(RIGHT)}
    t = play(chat, StandInBackend(), expert_turns(chat), graders=graders, weights={"a": 0.5, "c": -0.25})
    assert t.rewards == {"a": 1.0, "b": 0.0, "c": 1.0} and t.reward == 0.25


@pytest.mark.parametrize(("turns", "outcome"), [(["nonsense"], Outcome.INVALID_CALL), ([0, 0], Outcome.MAX_TURNS)])
def test_without_the_finish_tool_nothing_is_graded_and_the_reward_is_zero(chat, turns, outcome):
    grader = LineGrader(RIGHT)
    turns = [expert_turns(chat)[1] if t == 0 else t for t in turns]
    t = play(chat, StandInBackend(), turns, graders={"line": grader}, max_turns=2)
    assert (t.outcome, t.reward, t.rewards, grader.seen) == (outcome, 0.0, {"line": 0.0}, [])
    assert outcome in t.metadata["not_graded"]


@pytest.mark.parametrize(
    ("backend", "turns", "grader_error", "cause"),
    [
        (StandInBackend(start_error=SandboxStartError("no namespaces")), None, None, "no namespaces"),
        (StandInBackend(), [GeneratorError("engine died")], None, "engine died"),
        (StandInBackend(files_error=SandboxError("gone")), None, None, "gone"),
        (StandInBackend(), None, GradingError("no verdict"), "no verdict"),
        (StandInBackend(), None, TaskError("no tests"), "no tests"),
        (StandInBackend(), None, KeyError("bug"), "grader 'line' failed on task micro/train/2 (KeyError('bug'), "),
        (StandInBackend(), [ConnectionError("bug")], None, "the agent raised ConnectionError: bug"),
    ],
)
def test_failures_of_the_machine_have_no_reward_but_a_cause(chat, backend, turns, grader_error, cause):
    t = play(chat, backend, turns or expert_turns(chat), graders={"line": LineGrader(RIGHT, grader_error)})
    assert (t.outcome, t.reward, t.rewards) == (Outcome.INFRASTRUCTURE_ERROR, None, {}) and t.error.startswith(cause)


def test_what_happened_before_a_failure_is_kept(chat):
    t = play(chat, StandInBackend(), [*expert_turns(chat)[:1], GeneratorError("engine died")])
    assert len(t.turns) == 1 and t.turns[0].observation.startswith("def scale_row")


def test_more_files_than_can_be_collected_is_the_agents_fault(chat):
    backend = StandInBackend(files_error=OSError(errno.EFBIG, "File too large"))
    t = play(chat, backend, expert_turns(chat))
    assert (t.outcome, t.reward) == (Outcome.FINISHED, 0.0)
    assert t.metadata["not_graded"] == "the files left behind cannot be collected: File too large"


def test_a_slow_generator_has_no_reward(chat):
    class Slow:
        async def __call__(self, token_ids, *, max_tokens, episode_id):
            await asyncio.sleep(30)

    backend = StandInBackend()
    env = make_env(chat, backend, episode_timeout_s=0.1)
    t = asyncio.run(env.run_episode(TASK, "g", "g/0", Slow()))
    assert t.error == "the agent did not end within 0.1 s, of which its commands took 0 s"
    assert t.outcome is Outcome.INFRASTRUCTURE_ERROR and backend.started[0].stopped


def test_an_agent_that_spends_the_time_itself_gets_zero(chat):
    sleep = format_calls(chat.template, [ToolCall("run", {"command": "sleep 30"})])
    t = play(chat, StandInBackend(exec_seconds=30), [sleep], episode_timeout_s=0.2)
    assert (t.outcome, t.reward) == (Outcome.TIMED_OUT, 0.0)


def test_cancelling_stops_the_sandboxes_and_releases_the_episodes(chat):
    backend, released = StandInBackend(), []

    class Never:
        async def __call__(self, token_ids, *, max_tokens, episode_id):
            await asyncio.Event().wait()

    async def main():
        env = make_env(chat, backend)
        group = asyncio.create_task(env.run_group(TASK, "g", 3, Never(), released.append))
        while len(backend.started) < 3:
            await asyncio.sleep(0)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    asyncio.run(main())
    assert all(s.stopped for s in backend.started)
    assert sorted(released) == ["g/0", "g/1", "g/2"]


def test_a_group_holds_all_siblings_failed_ones_too(chat):
    backend, most, now = StandInBackend(), 0, 0

    class Policy:
        """The expert; the second episode's engine fails."""

        def __init__(self):
            self.scripts = {}

        async def __call__(self, token_ids, *, max_tokens, episode_id):
            nonlocal most, now
            turns = [GeneratorError("down")] if episode_id == "s/1" else expert_turns(chat)
            script = self.scripts.setdefault(episode_id, Script(chat, turns))
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.001)
            now -= 1
            return await script(token_ids, max_tokens=max_tokens, episode_id=episode_id)

    group = asyncio.run(make_env(chat, backend, concurrency=2).run_group(TASK, "s", 5, Policy()))
    assert isinstance(group, Group) and (group.id, group.task_id) == ("s", "micro/train/2")
    assert [t.episode_id for t in group.trajectories] == [f"s/{i}" for i in range(5)]
    assert [t.reward for t in group.trajectories] == [1.0, None, 1.0, 1.0, 1.0]
    assert most == 2 and len({s.id for s in backend.started}) == 5


def test_settings_come_from_the_config_by_name():
    settings = EnvSettings.from_config(EnvConfig(max_turns=5, system_prompt="Fix.", concurrency=3), max_model_len=99)
    assert (settings.max_turns, settings.system_prompt, settings.concurrency) == (5, "Fix.", 3)
    assert settings.max_model_len == 99 and settings.limits.memory_bytes == 512 * 2**20


def test_a_template_that_cannot_render_the_tools_is_found_at_the_start():
    tokenizer = small_tokenizer("compact", ["text"])
    chat = Chat(tokenizer)
    chat._rendered.clear()
    chat.template = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}"
    with pytest.raises(TokenizerError, match="no tools here"):
        make_env(chat, StandInBackend())


@pytest.mark.parametrize(
    ("bounds_itself", "outcome"), [(True, Outcome.FINISHED), (False, Outcome.INFRASTRUCTURE_ERROR)]
)
def test_the_queue_of_a_grader_that_bounds_itself_is_no_failure(chat, bounds_itself, outcome):
    class Queue(LineGrader):
        async def grade(self, *arguments):
            await asyncio.sleep(1.5)
            return await super().grade(*arguments)

    grader = Queue(RIGHT)
    grader.bounds_itself = bounds_itself
    t = play(chat, StandInBackend(), expert_turns(chat), graders={"queue": grader}, episode_timeout_s=1)
    assert t.outcome is outcome and (not t.error or "grader 'queue' did not end within 1 s" in t.error)
