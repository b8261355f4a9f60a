"""What each stage of a run does with its processes. The loops themselves stand in pretrain/, rl/ and evaluation/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.checks.common import optimizer_steps, wants_sessions
from composer.errors import TrainingError
from composer.evaluation.metrics import value
from composer.evaluation.stage import evaluate, read_groups
from composer.layout import Layout
from composer.monitor.report import FILE, MonitorLog
from composer.processes import Rollouts, Trainers, WeightSync
from composer.rl.controller import Controller, Step
from composer.rl.ledger import Ledger, read_ledger
from composer.rollout.checkpoint import Keeping
from composer.schema import Accelerator, Config, PhaseKind, Stage, SyncMethod
from composer.tracking.console import Console
from composer.tracking.mlflow import Record
from composer.tracking.plots import read_metrics
from composer.types import Group, Trajectory

if TYPE_CHECKING:
    from composer.plan import RunPlan

FIRST_PROBE = list(range(8, 72))
"""Token ids on which the engines compare log-probabilities before the first episode; any ids do."""


class Run:
    """A run's processes, each started when a stage first needs it and kept for the next one."""

    def __init__(
        self, config: Config, layout: Layout, label: str, record: Record, console: Console, plan: RunPlan
    ) -> None:
        """Nothing starts yet."""
        self.config, self.layout, self.label = config, layout, label
        self.record, self.console, self.plan = record, console, plan
        self._weights: Any = None
        self._generators_started = False

    @cached_property
    def trainers(self) -> Trainers:
        """The trainer's ranks."""
        return Trainers(self.config, self.layout, self._options("trainer"))

    @cached_property
    def rollouts(self) -> Rollouts:
        """Env workers, and generators once a model is there."""
        return Rollouts(self.config, self.layout, self.label, self._options, self.console.warn)

    async def prepare(self) -> None:
        """Make what all stages read, unless it is there: the tokenizer, and the expert's sessions for fine-tuning."""
        if self.layout.sessions.exists():  # written last
            return
        if wants_sessions(self.config):
            self.console.info("recording the expert's sessions, then preparing the tokenizer: about half a minute")
            count = self.config.mix.sessions.num_sessions
            with self.console.stage("expert", total=count, unit="sessions") as bar:
                await self.rollouts.prepare(bar.update)
                bar.update(count)
        else:
            self.console.info("preparing the tokenizer: some seconds")
            await self.rollouts.prepare(lambda count: None)

    async def start_generators(self, model: Path, policy_version: int = 0) -> None:
        """Start the generators unless they run already."""
        await self.prepare()
        if not self._generators_started:
            about = "about half a minute" if self.config.parallel.accelerator is Accelerator.cpu else "minutes"
            what = f"{self.config.generator.num_replicas} generator(s) on {model}"
            self.console.info(f"starting {what}: {about}")
            await self.rollouts.start_generators(model, policy_version)
            self._generators_started = True

    def weight_sync(self) -> WeightSync:
        """The store of weight versions and the generators that load from it."""
        from composer.weight_sync.store import VersionStore

        if self._weights is None:
            self._weights = VersionStore.create(
                weights_directory(self.config, self.layout, self.label),
                keep_versions=self.config.weight_sync.keep_versions,
            )
        assert self.rollouts.pool is not None, "generators start first"
        return WeightSync(self.config, self._weights, self.rollouts.pool)

    @property
    def start_model(self) -> Path:
        """The Hugging Face folder that RL starts from."""
        phases = list(self.config.mix.phases) if Stage.pretrain in self.config.stages else []
        if phases:
            return self.layout.export(self.layout.phase(phases[-1]))
        assert self.config.model.checkpoint is not None, "the plan checks it"
        return Path(self.config.model.checkpoint)

    @property
    def newest_model(self) -> Path:
        """The policy after RL if it is there, else the one that RL starts from."""
        trained = self.layout.export(self.layout.stage(Stage.rl))
        return trained if trained.exists() else self.start_model

    def keeping(self, stage: Stage) -> Keeping:
        """What a stage's episodes leave on disk."""
        env = self.config.env
        return Keeping(self.layout.episodes(stage), env.checkpoint_turns, env.kept_states)

    @property
    def newest_version(self) -> int:
        """How many optimizer steps of RL `newest_model` has seen."""
        return self.config.algorithm.num_steps if self.newest_model != self.start_model else 0

    async def stop(self) -> None:
        """End the processes that were started."""
        if "rollouts" in self.__dict__:
            await self.rollouts.stop()
        if self._weights is not None:
            self._weights.remove()

    def _options(self, role: str) -> dict[str, Any]:
        """Ray options of a role: its seat or its GPUs, and never a silent restart."""
        gpu = self.config.parallel.accelerator is Accelerator.cuda
        gpus = {"trainer": 1, "generator": self.config.generator.tensor_parallel}.get(role, 0) if gpu else 0
        threads = str(self.config.parallel.threads_per_process)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        return {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "runtime_env": {"env_vars": environment}}


def weights_directory(config: Config, layout: Layout, label: str) -> Path:
    """Where versions of the weights are published."""
    from composer.weight_sync.store import default_directory

    sync = config.weight_sync
    if sync.directory is not None:
        return Path(sync.directory) / label
    return default_directory(label) if sync.method is SyncMethod.shared_memory else layout.run_dir / "weights"


async def pretrain_stage(run: Run, stage: Stage) -> dict[str, Any]:
    """Train the phases of the mix, one after the other."""
    config, layout = run.config, run.layout
    trainers = run.trainers  # starts while the env workers prepare
    await run.prepare()
    model = Path(config.model.checkpoint) if config.model.checkpoint else None
    done = 0
    with run.record.stage(stage.value) as record:
        for name, phase in config.mix.phases.items():
            exported, total = layout.export(layout.phase(name)), optimizer_steps(phase)
            if not exported.exists():
                sessions = layout.sessions if phase.kind is PhaseKind.sft else None
                first = max(layout.checkpoints(layout.phase(name)), default=0)
                with run.console.stage(name, total=total, unit="steps", done=first) as bar:
                    async for step, metrics in trainers.train_phase(name, model, sessions):
                        if step or not done:  # a later phase starts from what the phase before logged last
                            record.log(done + step, metrics)
                        bar.update(step, _short(metrics, loss="loss/train", codebase="loss/codebase"))
            model = exported
            done += total
    run.record.plots()
    return {"codebase_loss": codebase_losses(config, layout), "summary": {"steps": done}}


def codebase_losses(config: Config, layout: Layout) -> dict[str, float]:
    """The held-out codebase's loss before all phases, after continued pretraining, and after all phases.

    From the record in the run directory, since an earlier process may have trained part of it.
    """
    series = dict(read_metrics(layout.run_dir).get(Stage.pretrain.value, {}).get("loss/codebase", []))
    if not series:
        return {}
    pretrained = sum(optimizer_steps(p) for p in config.mix.phases.values() if p.kind is PhaseKind.pretrain)
    named = {"before": min(series), "after": pretrained, "after_all_phases": max(series)}
    return {name: series[step] for name, step in named.items() if step in series}


async def evaluate_stage(run: Run, stage: Stage) -> dict[str, Any]:
    """Evaluate the newest model on unseen tasks."""
    evaluation = run.config.evaluation
    finished = read_groups(run.layout.stage(stage))
    await run.start_generators(run.newest_model, run.newest_version)
    with (
        run.record.stage(stage.value) as record,
        run.console.stage(stage.value, total=evaluation.num_tasks, unit="tasks", done=len(finished)) as bar,
    ):
        rewards = [r for g in finished for t in g.trajectories if (r := value(t)) is not None]

        def progress(done: int, group: Group) -> None:
            rewards.extend(r for t in group.trajectories if (r := value(t)) is not None)
            bar.update(done, {"reward": sum(rewards) / max(1, len(rewards))})

        metrics, groups = await evaluate(
            evaluation, run.rollouts, run.layout.stage(stage), progress, run.console.warn, run.keeping(stage)
        )
        record.log(0, {f"evaluation/{name}": float(value) for name, value in metrics.to_dict().items()})
        record.table(f"{stage.value}.json", [_row(t) for g in groups for t in g.trajectories])
        found = _MonitorRecord(run, stage)
        found.log(0, groups)
        found.close()
        for group in groups[: run.config.tracking.traces_per_step]:
            record.trace(group.trajectories[0], 0)
    return {"metrics": metrics.to_dict(), "summary": {"tasks": metrics.num_tasks}}


async def rl_stage(run: Run, stage: Stage) -> dict[str, Any]:
    """Reinforcement learning from the pretrained model to `algorithm.num_steps`."""
    config, layout, algorithm = run.config, run.layout, run.config.algorithm
    check_start(config, layout)
    await run.start_generators(run.start_model)
    sync = run.weight_sync()
    version = await run.trainers.open_policy(run.start_model, sync)
    checkpoints = layout.checkpoints(layout.stage(stage))
    assert version == max(checkpoints, default=0), "the trainer restores the newest checkpoint"
    state = read_ledger(layout.ledger, checkpoints)
    if not state.next_index and wants_sessions(config):
        state.next_index = config.mix.sessions.num_sessions  # SFT has seen the tasks before
    ledger = Ledger(layout.ledger)
    if version or state.groups or state.unfinished:
        ledger.rollback(version)
        run.console.info(
            f"continuing after step {version} with {len(state.groups)} finished groups from the ledger and "
            f"{len(state.unfinished)} unfinished ones"
        )
    keeping = run.keeping(stage)
    keeping.sweep(going_on=state.unfinished)
    await run.trainers.synchronise(version, FIRST_PROBE[: config.generator.max_model_len - 1])
    with (
        run.record.stage(stage.value) as record,
        run.console.stage(stage.value, total=algorithm.num_steps, unit="steps", done=version) as bar,
    ):
        found = _MonitorRecord(run, stage)

        def report(step: Step) -> None:
            record.log(step.step, step.metrics)
            found.log(step.step, step.groups)
            shown = {
                "reward": "reward/mean",
                "best": "reward/best",
                "stale": "staleness/mean",
                "tokens/s": "throughput/generated_tokens_per_s",
            }
            bar.update(step.step, _short(step.metrics, **shown))
            for trajectory in [t for g in step.groups for t in g.trajectories][: config.tracking.traces_per_step]:
                record.trace(trajectory, step.step)

        controller = Controller(
            algorithm, run.rollouts, run.trainers, ledger, state, version, 0, report, run.console.warn, keeping
        )
        try:
            await controller.run()
        finally:
            ledger.close()
            found.close()
        keeping.sweep()
        await run.trainers.export(layout.export(layout.stage(stage)))
    return {"summary": {"steps": algorithm.num_steps}}


def check_start(config: Config, layout: Layout) -> None:
    """Refuse to start RL from a policy that never succeeds.

    Raises:
        TrainingError: average@k before RL is under `algorithm.min_start_average`.
    """
    results = layout.results(Stage.evaluate_before)
    if results is None:
        return
    k, least = config.evaluation.samples_per_task, config.algorithm.min_start_average
    average = results["metrics"][f"average_at_{k}"]
    if average < least:
        raise TrainingError(
            f"average@{k} before RL is {average:.3f}, under algorithm.min_start_average={least:g}: a policy that "
            "hardly ever succeeds learns nothing. Go on all the same with algorithm.min_start_average=0, or start a "
            "new run that trains longer on sessions (mix.phases.sft.tokens)"
        )


def _short(metrics: Mapping[str, float], **names: str) -> dict[str, float]:
    return {short: metrics[name] for short, name in names.items() if name in metrics}


def _row(t: Trajectory) -> dict[str, Any]:
    """One episode in an evaluation's table."""
    return {
        "task": t.task_id,
        "episode": t.episode_id,
        "reward": t.reward,
        "outcome": t.outcome.value,
        "generated_tokens": t.num_generated_tokens,
        "turns": len(t.turns),
        "seconds": t.seconds,
        "error": t.why_no_reward,
    }


class _MonitorRecord:
    """What the cheat monitor found, in a stage's record. Raises nothing."""

    def __init__(self, run: Run, stage: Stage) -> None:
        self._record, self._stage, self._warn = run.record, stage.value, run.console.warn
        self._found = MonitorLog(run.layout.stage(stage) / FILE)

    def log(self, step: int, groups: Sequence[Group]) -> None:
        """Metrics of a step's episodes."""
        if metrics := self._found.add(step, groups):
            self._record.log(step, metrics, self._stage)
            self._write()

    def close(self) -> None:
        """Send the file, and the examples as a table."""
        if self._write():
            self._record.artifact(self._found.path, "monitor", self._stage)
            self._record.table(f"{self._stage}_monitor.json", self._found.table, self._stage)

    def _write(self) -> bool:
        try:
            return self._found.write()
        except OSError as error:
            self._warn(f"{self._found.path} cannot be written ({error.strerror}): the monitor's examples are lost")
            return False


STAGES = {
    Stage.pretrain: pretrain_stage,
    Stage.evaluate_before: evaluate_stage,
    Stage.rl: rl_stage,
    Stage.evaluate_after: evaluate_stage,
}
