"""One episode from sandbox to reward, and the env that runs groups of them.

What fails is attributed where it happens: a model's mistake has a reward, a failing machine has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from composer.contract import Grader, Sandbox, SandboxBackend, SandboxLimits, Taskset, Tool
from composer.errors import ComposerError, GradingError
from composer.monitor.watch import Monitor
from composer.rollout.chat import Chat
from composer.rollout.checkpoint import Keeping, kept_by_tools
from composer.rollout.deadline import Deadline
from composer.rollout.harness import Generate, Harness, HarnessLimits, Plays, Recording, ToolClock
from composer.rollout.parts import begin_tools, grade
from composer.rollout.prepare import OWN_S, PreparedTask, prepared
from composer.types import Group, Outcome, Task, Trajectory

logger = logging.getLogger(__name__)
COLLECTED_SHARE = 8
"""An agent may leave behind the task's files and this part of its disk; more is not graded and gets 0."""


@dataclass(frozen=True)
class Rubric:
    """Graders by name with their weights; the reward is the weighted sum of their scores."""

    graders: Mapping[str, Grader]
    weights: Mapping[str, float] = field(default_factory=dict)
    """1.0 where a grader is absent."""

    async def grade(
        self, task: Task, files: Mapping[str, bytes], backend: SandboxBackend, t: Trajectory, timeout_s: float
    ) -> None:
        """Fill the trajectory's reward, its parts and the graders' details.

        Raises:
            SandboxError, GradingError, TaskError: as of `composer.contract.Grader.grade`.
            GradingError: a grader broke its contract, or did not end within `timeout_s` (of all graders together,
                but for those that bound themselves: these may queue for as long as it takes). What they wait for room
                on the machine does not count.
        """
        left_s = timeout_s
        for name, grader in self.graders.items():
            deadline = None if getattr(grader, "bounds_itself", False) else Deadline(left_s)
            try:
                async with deadline or contextlib.nullcontext():
                    t.rewards[name], t.metadata[name] = await grade(name, grader, task, files, backend, t)
            except TimeoutError:
                raise GradingError(
                    f"grader {name!r} did not end within {timeout_s:g} s on task {task.id}: make it faster, "
                    "or raise env.episode_timeout_s"
                ) from None
            if deadline is not None:
                left_s = deadline.left_s
        t.reward = sum(self.weights.get(name, 1.0) * score for name, score in t.rewards.items())

    def zero(self, t: Trajectory, reason: str) -> None:
        """The reward of an episode that left nothing to grade."""
        t.rewards = dict.fromkeys(self.graders, 0.0)
        t.reward = 0.0
        t.metadata["not_graded"] = reason


async def run_episode(
    prepared_task: PreparedTask,
    *,
    harness: Plays,
    rubric: Rubric,
    generate: Generate,
    limits: SandboxLimits,
    timeout_s: float,
    group_id: str,
    episode_id: str,
    with_prompt: bool = True,
    keeping: Keeping = Keeping(),  # noqa: B008 - frozen
    monitor: Monitor | None = None,
) -> Trajectory:
    """Run the agent in a sandbox of its own, then grade what it left behind.

    Only an episode that ended with the finish tool, or whose agent program ended by itself, is graded: all others hand
    nothing in and get 0. An episode has no reward (`INFRASTRUCTURE_ERROR`, with its cause in `error`) when the
    generator, the sandbox, a tool or a grader failed, or when they were too slow; if the agent's own commands used more
    than half of the time, it gets 0 as `TIMED_OUT`.

    Args:
        prepared_task: the task; starts the sandboxes of the agent and of the graders.
        harness: the agent loop with its tools, or an agent program of somebody else's.
        rubric: what the final files are worth.
        generate: asks the policy.
        limits: limits of the agent's sandbox.
        timeout_s: wall time of the agent once its sandbox is there, and again of the grading; see `Rubric.grade`. What
            the framework does in between (checkpoints, the monitor's part, collecting the files) does not count.
        group_id: the group this episode belongs to.
        episode_id: its own name.
        with_prompt: whether the conversation begins with the system message.
        keeping: what the episode leaves on disk, and where it goes on from if it was interrupted.
        monitor: looks at what was done, when the reward is known, and may change it; None: nobody does.

    Returns:
        The record, whatever happened; only cancellation comes out as an exception, after the sandbox is stopped.
    """
    start, task, files_of = time.monotonic(), prepared_task.task, keeping.of(episode_id)
    if (ended := files_of.ended()) is not None:
        return ended
    conversation: Recording = harness.open(task.request, with_prompt)
    t = Trajectory(
        task_id=task.id,
        group_id=group_id,
        episode_id=episode_id,
        turns=conversation.turns,
        messages=conversation.messages,
        outcome=Outcome.INFRASTRUCTURE_ERROR,
        reward=None,
        metadata=conversation.metadata if with_prompt else {"no_prompt": True},
    )
    watch = monitor.watch(task, episode_id, _most_collected(task, limits)) if monitor is not None else None
    clock, deadline = ToolClock(), Deadline(timeout_s)
    phase = "the agent's sandbox"
    try:
        sandbox = await files_of.start(prepared_task, conversation, harness.tools, watch)
        try:
            phase = "getting ready"
            async with asyncio.timeout(OWN_S):
                if not conversation.turns:  # of one that goes on, the agent has been in the sandbox
                    await begin_tools(harness.tools.values(), sandbox)
                if watch is not None:
                    await files_of.begin(watch, sandbox, conversation)
            phase = "the agent"
            asked = files_of.watching(generate, conversation, sandbox, prepared_task.agents_backend, harness.tools)
            async with deadline:
                outcome = await harness.run(conversation, sandbox, asked, episode_id, clock)
            phase = "collecting what the agent left behind"
            async with asyncio.timeout(OWN_S):
                t.metadata |= kept_by_tools(harness.tools, sandbox)
                finished = outcome is Outcome.FINISHED
                files = await _collect(task, sandbox, limits) if finished else f"the episode ended with {outcome}"
                if watch is not None:
                    files = await watch.end(sandbox, files)
                await files_of.keep_state(sandbox, prepared_task.agents_backend)
        finally:
            await _stop(sandbox)
        if isinstance(files, str):
            rubric.zero(t, reason=files)
        else:
            phase = "grading"
            await rubric.grade(task, files, prepared_task.backend, t, timeout_s)
        t.outcome = outcome
    except TimeoutError:
        if not deadline.expired:
            _fail(t, f"{phase} did not end in time: see what keeps the machine busy")
        elif clock.command_s > timeout_s / 2:
            t.outcome = Outcome.TIMED_OUT
            rubric.zero(t, reason=f"the agent's commands took {clock.command_s:.0f} of {timeout_s:g} s")
        elif clock.stuck:
            _fail(
                t,
                f"tool {clock.stuck!r} did not answer within the episode's {timeout_s:g} s: give every wait in it a "
                "deadline, or raise env.episode_timeout_s",
            )
        else:
            _fail(t, f"{phase} did not end within {timeout_s:g} s, of which its commands took {clock.command_s:.0f} s")
    except ComposerError as error:
        if error.__cause__ is not None:
            logger.warning("Episode %s broke in %s", episode_id, phase, exc_info=error)
        _fail(t, str(error))
    except Exception as error:  # a backend that breaks its contract must not take other episodes along
        logger.exception("Episode %s broke in %s", episode_id, phase)
        _fail(t, f"{phase} raised {type(error).__name__}: {error}")
    t.seconds = time.monotonic() - start
    if watch is not None:
        await watch.settle(t)
    files_of.end(t)
    return t


async def _collect(task: Task, sandbox: Sandbox, limits: SandboxLimits) -> dict[str, bytes] | str:
    """The files left behind, or why there are none to grade.

    All that fits on the agent's disk would not fit into memory several times, here and in the grading sandbox.
    """
    try:
        return await sandbox.files(_most_collected(task, limits))
    except OSError as error:
        return f"the files left behind cannot be collected: {error.strerror or error}"


def _most_collected(task: Task, limits: SandboxLimits) -> int:
    # What files an image has, or a setup makes, is not known here.
    known = sum(map(len, task.files.values())) if not (task.image or task.setup) else limits.disk_bytes
    return known + limits.disk_bytes // COLLECTED_SHARE


def _fail(t: Trajectory, cause: str) -> None:
    t.outcome, t.reward, t.error = Outcome.INFRASTRUCTURE_ERROR, None, cause
    t.rewards.clear()


async def _stop(sandbox: Sandbox) -> None:
    """Stop for certain: a second Ctrl-C while it stops does not leave it half alive."""
    await asyncio.shield(asyncio.ensure_future(sandbox.stop()))


@dataclass(frozen=True)
class EnvSettings(HarnessLimits):
    """Numbers of an env; named as in `composer.schema.EnvConfig`."""

    system_prompt: str = ""
    episode_timeout_s: float = 120.0
    concurrency: int = 32
    """Episodes at a time."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Of the agent's sandbox."""

    @classmethod
    def from_config(cls, env: Any, max_model_len: int) -> EnvSettings:
        """Take what belongs here from an `EnvConfig`; `max_model_len` is the generator's."""
        values = {f.name: getattr(env, f.name) for f in fields(cls) if f.name not in ("limits", "max_model_len")}
        limits = SandboxLimits(**{f.name: getattr(env.limits, f.name) for f in fields(env.limits)})
        return cls(**values, limits=limits, max_model_len=max_model_len)


class Env:
    """Tasks, tools and ending of episodes, and the machines they happen on."""

    def __init__(
        self,
        settings: EnvSettings,
        *,
        chat: Chat,
        taskset: Taskset,
        tools: Sequence[Tool],
        rubric: Rubric,
        backend: SandboxBackend,
        harness: Plays | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        """Put the parts together, and render a first prompt so that a chat template that cannot is found now.

        With a `harness`, that one plays, and not the product's own with these tools.

        Raises:
            TokenizerError: the chat template cannot render the tools.
        """
        self.settings, self.chat, self.taskset, self.backend, self.rubric = settings, chat, taskset, backend, rubric
        self.monitor = monitor
        self.harness: Plays = harness or Harness(chat, tools, settings.system_prompt, settings)
        self.harness.open("")
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def run_group(
        self,
        task: Task,
        group_id: str,
        size: int,
        generate: Generate,
        release: Callable[[str], None] | None = None,
        with_prompt: bool = True,
        keeping: Keeping = Keeping(),  # noqa: B008 - frozen
    ) -> Group:
        """Run sibling episodes of a task; failed ones are in the group with their cause.

        Args:
            task: what all of them try.
            group_id: its name; episodes are `<group_id>/<number>`.
            size: how many episodes.
            generate: asks the policy.
            release: told each episode's name when the policy is not needed for it any more.
            with_prompt: whether the episodes begin with the system message; all siblings do, or none.
            keeping: what they leave on disk, until the caller forgets it.
        """
        async with prepared(task, self.backend, self.settings.limits, size) as state, asyncio.TaskGroup() as siblings:
            running = [
                siblings.create_task(
                    self.run_episode(task, group_id, name, generate, release, with_prompt, state, keeping)
                )
                for name in (f"{group_id}/{i}" for i in range(size))
            ]
        return Group(group_id, task.id, [episode.result() for episode in running])

    async def run_episode(
        self,
        task: Task,
        group_id: str,
        episode_id: str,
        generate: Generate,
        release: Callable[[str], None] | None = None,
        with_prompt: bool = True,
        state: PreparedTask | None = None,
        keeping: Keeping = Keeping(),  # noqa: B008 - frozen
    ) -> Trajectory:
        """Run one episode when one of `concurrency` places is free; see `run_episode` of this module.

        Its sandbox starts from the `state` that it shares with its siblings, if it has any.
        """
        alone = prepared(task, self.backend, self.settings.limits)
        async with self._slots, alone if state is None else contextlib.nullcontext(state) as own:
            try:
                return await run_episode(
                    own,
                    harness=self.harness,
                    rubric=self.rubric,
                    generate=generate,
                    limits=self.settings.limits,
                    timeout_s=self.settings.episode_timeout_s,
                    group_id=group_id,
                    episode_id=episode_id,
                    with_prompt=with_prompt,
                    keeping=keeping,
                    monitor=self.monitor,
                )
            finally:
                if release is not None:
                    release(episode_id)
