"""Plays the scripted expert once under a run's limits before anything starts: what it cannot do, no policy ever will.

Limits of a sandbox and of time are tried out. Tokens are estimated from bytes until there is a tokenizer, and counted
when the sessions are recorded. What fails under roomy limits too is not their fault: whoever meets it next says it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import Any

from composer.checks.common import generates
from composer.contract import SandboxBackend, SandboxLimits, Taskset, Tool
from composer.errors import ComposerError, ConfigError, CorpusError, PlanError
from composer.instantiate import instantiate
from composer.rollout.harness import cut_middle
from composer.rollout.parts import call_tool, make_task, play_expert
from composer.rollout.prepare import prepare
from composer.schema import ChatTemplate, Config, EnvConfig, LimitsConfig, PhaseKind, Stage
from composer.types import Split, Task, ToolCall

_USUAL_BYTES, _MOST_BYTES = 4, 6
"""Of text a token: what tokenizers make of code and prose, and what none of them reaches on average."""
_TASKS_LOOKED_AT = 32
"""For tools that are missing."""
_TIME = "episode_timeout_s"
_ROOMY: dict[str, float] = {**asdict(LimitsConfig()), _TIME: EnvConfig.episode_timeout_s}


def rehearse(config: Config, told: Callable[[str], None] = lambda trouble: None) -> list[str]:
    """Play the expert's first task, if a stage of the run has tasks.

    Args:
        config: the resolved config.
        told: of what kept the expert from its end under roomy limits too, so that nothing is known of the limits.

    Returns:
        Warnings: what a policy that does as the expert does cannot do, and an estimate of tokens that may not fit.

    Raises:
        PlanError: a limit is too small for the expert, or tokens do not fit whatever the tokenizer.
        ConfigError: a target refuses its arguments, or a tool is missing without which no session is ever complete.
    """
    tuned = [n for n, p in config.mix.phases.items() if p.kind is PhaseKind.sft] * (Stage.pretrain in config.stages)
    if not tuned and (not generates(config) or config.env.agent.command):  # an agent has tools of its own
        return []
    return asyncio.run(_rehearse(config, tuned, told))


def check_lengths(config: Config, lengths: Sequence[int], turns: Sequence[int]) -> None:
    """The same for tokens that were counted: of each session of the expert, and of its longest turn.

    Raises:
        CorpusError: a session does not fit into a phase that reads it, or not one fits into an episode.
    """
    if not lengths:
        return
    needs = [
        (f"mix.phases.{name}.seq_len", phase.seq_len, "the longest session has", max(lengths))
        for name, phase in config.mix.phases.items()
        if phase.kind is PhaseKind.sft
    ]
    if generates(config):
        needs += [
            ("generator.max_model_len", config.generator.max_model_len, "even the shortest session has", min(lengths)),
            ("env.max_turn_tokens", config.env.max_turn_tokens, "every session has a turn of at least", min(turns)),
        ]
    for key, limit, what, found in needs:
        if found > limit:
            raise CorpusError(f"{key}={limit}: {what} {found} tokens; start a new run with at least {found}")


async def _rehearse(config: Config, tuned: Collection[str], told: Callable[[str], None]) -> list[str]:
    env = config.env

    def make(target: Any, key: str, **given: Any) -> Any:
        return instantiate(target, config.plugins, key=key, **given)

    backend: SandboxBackend = make(env.sandbox, "env.sandbox", run_label="rehearsal")
    # An expert that errs on purpose would hide what the limits do to it.
    taskset: Taskset = make(env.taskset, "env.taskset", expert_accuracy=1.0, seed=config.seed)
    made: list[Tool] = [make(t, f"env.tools.{name}") for name, t in env.tools.items()]
    tools = {tool.name: tool for tool in made}
    try:
        task = make_task(taskset, Split.TRAIN, 0)
        turns = play_expert(taskset, task, config.seed, None)
    except ComposerError:  # no expert, or one that is broken, which recording its sessions says
        return []
    calls = list(chain.from_iterable(turns))
    others = _calls_of_others(taskset, config.seed)
    if missing := [call.name for call in (*others, *calls) if call.name not in tools]:
        return _without(missing, calls, tools, taskset.name, bool(tuned))
    stage = _Stage(task, calls, tools, backend, env.max_observation_bytes)
    try:
        observations = await stage.find_limit(_settings(env), told)
    finally:
        await backend.close()
    written = ["".join(_written(call) for call in turn) for turn in turns]
    signatures = " ".join(f"{t.name}({', '.join(t.parameters.get('properties', {}))})" for t in made)
    texts = [f"{env.system_prompt} {signatures}", task.request, *written, *observations[:-1]]
    needs = {f"mix.phases.{name}.seq_len": (config.mix.phases[name].seq_len, texts) for name in tuned}
    warnings = []
    if generates(config):
        needs["generator.max_model_len"] = (config.generator.max_model_len, texts)
        needs["env.max_turn_tokens"] = (env.max_turn_tokens, [max(written, key=len)])
        if len(turns) > env.max_turns:
            warnings.append(f"env.max_turns={env.max_turns}: the expert takes {len(turns)} turns for task {task.id}")
    marks = 1 if env.chat_template is ChatTemplate.own else 3  # a turn's start, its role, its end
    return [*warnings, *_too_long(needs, task, marks)]


def _calls_of_others(taskset: Taskset, seed: int) -> list[ToolCall]:
    """What the expert calls on the next few tasks: it need not use every tool on the first."""
    calls: list[ToolCall] = []
    with suppress(ComposerError):  # a finite taskset ends; what is broken, recording the sessions says
        for index in range(1, _TASKS_LOOKED_AT):
            calls += chain.from_iterable(play_expert(taskset, make_task(taskset, Split.TRAIN, index), seed, None))
    return calls


def _written(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def _without(
    missing: list[str], calls: list[ToolCall], tools: Mapping[str, Tool], taskset: str, is_recorded: bool
) -> list[str]:
    """A warning that the expert lacks tools.

    Raises:
        ConfigError: its sessions are to be recorded, or it is the tool that ends the episode.
    """
    name = missing[-1]
    if is_recorded or name == calls[-1].name:
        does = "ends every episode with it" if name == calls[-1].name else "calls it in the sessions of SFT"
        remedy = f"`{name}` is missing, and the expert of {taskset} {does}: add `env.tools.{name}` again"
        raise ConfigError("env.tools", ", ".join(tools), remedy)
    return [f"env.tools: the expert of {taskset} calls `{name}`, which is missing: it was not tried under the limits"]


def _settings(env: EnvConfig) -> dict[str, float]:
    return {**{name: getattr(env.limits, name) for name in asdict(LimitsConfig())}, _TIME: env.episode_timeout_s}


def _too_long(needs: Mapping[str, tuple[int, list[str]]], task: Task, marks: int) -> Iterator[str]:
    """A warning for each number of tokens that the expert's texts will probably exceed.

    Args:
        needs: key -> its value, and the texts that have to fit.
        task: the expert's.
        marks: control tokens around each text.

    Raises:
        PlanError: they exceed it for certain.
    """
    for key, (limit, texts) in needs.items():
        least, usual = (sum(marks + math.ceil(len(t.encode()) / n) for t in texts) for n in (_MOST_BYTES, _USUAL_BYTES))
        what = "the longest turn" if key == "env.max_turn_tokens" else "the session"
        if least > limit:
            remedy = f"{what} of the expert on task {task.id} has at least {least} tokens, probably {usual}: raise it"
            raise PlanError(key, limit, remedy)
        if usual > limit:
            yield f"{key}={limit}: {what} of the expert on task {task.id} probably has more tokens, about {usual}"


class _Stage:
    """A task, its expert, and where they meet."""

    def __init__(
        self,
        task: Task,
        calls: list[ToolCall],
        tools: Mapping[str, Tool],
        backend: SandboxBackend,
        max_observation_bytes: int,
    ) -> None:
        """Nothing is played yet."""
        self.task, self.calls, self.tools, self.backend = task, calls, tools, backend
        self.max_observation_bytes = max_observation_bytes
        self.observations = [""] * len(calls)

    async def find_limit(self, settings: dict[str, float], told: Callable[[str], None]) -> list[str]:
        """What the tools answered under `settings`.

        Raises:
            PlanError: names the setting but for which the expert would get through.
        """
        trouble = await self._play(settings) and await self._play(settings)  # the first sandbox takes longer to start
        small = [name for name, value in settings.items() if value < _ROOMY[name]]
        if not trouble:
            return self.observations
        if anyway := await self._play({n: max(v, _ROOMY[n]) for n, v in settings.items()}):
            told(anyway)
            return self.observations
        for name in small:
            if not await self._play({**settings, name: _ROOMY[name]}):
                key = f"env.{name}" if name == _TIME else f"env.limits.{name}"
                raise PlanError(key, settings[name], f"{trouble}; with {_ROOMY[name]} the expert gets through")
        raise PlanError("env.limits", {n: settings[n] for n in small}, f"{trouble}; with the defaults it gets through")

    async def _play(self, settings: dict[str, float]) -> str:
        """Play the expert; returns what kept it from its end, empty if nothing did."""
        limits = SandboxLimits(**{n: v for n, v in settings.items() if n != _TIME})  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(settings[_TIME]):
                sandbox = await prepare(self.task, self.backend, limits)
                try:
                    for number, call in enumerate(self.calls):
                        result = await call_tool(self.tools[call.name], call, sandbox)
                        self.observations[number] = cut_middle(result.content, self.max_observation_bytes)
                        if not result.ok:
                            return f"on task {self.task.id}, {call.name} answers the expert {result.content[:80]!r}"
                finally:
                    await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
        except TimeoutError:
            return f"the expert does not finish task {self.task.id} within {settings[_TIME]:g} s"
        except ComposerError as error:
            return f"the expert cannot play task {self.task.id} ({error})"
        return ""
