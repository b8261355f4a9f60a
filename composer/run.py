"""Walks the plan's stages: starts the processes, runs what is not done yet, and closes the record.

    config, plan -> pretrain -> evaluate_before -> rl -> evaluate_after -> summary

A stage that is finished has left `done.json`; one that was interrupted continues from its own checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from composer import cluster
from composer.clock import Clock
from composer.contract import Finding, Launcher, SandboxBackend
from composer.doctor import examine
from composer.errors import ClusterError, ComposerError, MachineError
from composer.evaluation.stage import read_groups
from composer.instantiate import instantiate
from composer.interrupts import ENDING, no_lost_interrupt
from composer.layout import Layout
from composer.plan import RunPlan, StagePlan
from composer.rehearsal import rehearse
from composer.rl.ledger import read_ledger
from composer.rollout import engine
from composer.rundir import RunDirectory, Status
from composer.schema import Config, Stage
from composer.shell import pasteable
from composer.streams import say_error
from composer.tracking.console import Console, write_summary
from composer.tracking.mlflow import Record
from composer.tracking.plots import read_metrics
from composer.tracking.state import FAILED

GIVE_UP_DEADLINE_S = 3.0
"""How long the record may still be sent before a driver that hangs inside Ray is ended."""


def run(config: Config, plan: RunPlan, run_dir: Path) -> int:
    """Run a plan to its end, or as far as it gets.

    Args:
        config: the resolved config.
        plan: made from it.
        run_dir: claimed by this process, with config.yaml in it.

    Returns:
        0, or 130 after SIGINT, SIGTERM or SIGHUP.

    Raises:
        ComposerError: the run cannot go on; everything finished is on disk, and `resume` continues it.
    """
    console = Console()
    layout = Layout(run_dir)
    clock = Clock(layout.times)
    label = run_label(run_dir)
    with no_lost_interrupt():
        launcher: Launcher = instantiate(
            config.launcher, config.plugins, key="launcher", run_label=label, resources=plan.resources
        )
        backend = instantiate(config.env.sandbox, config.plugins, key="env.sandbox", run_label=label)
        swept = launcher.sweep() + backend.sweep() + engine.sweep() + _sweep_weights(config)
        if swept:
            console.info(f"removed what runs that were killed on this machine had left behind ({swept})")
        check_machine(examine(config, plan))
        missing = [s for s in config.stages if layout.results(s) is None]
        for warning in rehearse(config) if missing else ():
            console.warn(warning)
        check_left(missing, layout)
        record = Record.open(config, run_dir, warn=console.warn, tags={"name": plan.name})
    clock.save()  # after the record has read when an earlier start was killed

    def give_up(error: ClusterError) -> None:
        clock.save()
        record_failed = functools.partial(record.close, FAILED, GIVE_UP_DEADLINE_S)
        end_process(error, RunDirectory(run_dir), (launcher.stop, backend.sweep, engine.sweep, record_failed))

    interrupted = False
    try:
        with record:
            for name in ("config.yaml", "plan.yaml"):
                record.artifact(run_dir / name, folder="config")
            if missing:
                console.info("starting Ray and the first workers, and trying out the tests of a task: some ten seconds")
                with _cluster(launcher, backend, cluster.Watch(run_dir / "logs", give_up)) as watch:
                    try:
                        asyncio.run(_run_stages(missing, config, layout, label, record, console, plan, clock, watch))
                    except asyncio.CancelledError:  # a signal ended it
                        raise KeyboardInterrupt from None
            summary = summarise(layout, plan, config, clock, record.peak_rss_bytes)
            record.results(summary)
            record.plots()
            try:
                write_summary(run_dir, summary)
                record.artifact(run_dir / "summary.json")
            except OSError as e:
                console.warn(f"summary.json could not be written ({e.strerror}); its numbers are in the table below")
    except KeyboardInterrupt:
        interrupted = True
        summary = summarise(layout, plan, config, clock, record.peak_rss_bytes)
    finally:
        clock.save()
    resume = pasteable("composer", f"resume={run_dir}")
    if interrupted and not summary["stages"]:
        console.info(f"interrupted; continue with: {resume}")
        return 130
    console.closing_table(
        summary,
        ui_command=record.ui_command,
        ui_address=record.ui_address,
        note=record.report.sentence if record.report else "",
        resume_command=resume if interrupted else "",
    )
    return 130 if interrupted else 0


async def _run_stages(
    stages: list[Stage],
    config: Config,
    layout: Layout,
    label: str,
    record: Record,
    console: Console,
    plan: RunPlan,
    clock: Clock,
    watch: cluster.Watch,
) -> None:
    """Walk the stages that are not finished, and take their processes down.

    Raises:
        ClusterError: Ray itself has ended, whatever went wrong because of that.
    """
    # Here and not above: Ray reads its environment, which the launcher sets, when it is first imported.
    from composer.stages import STAGES, Run

    ended = _end_early(watch)
    run = Run(config, layout, label, record, console, plan)
    saving = asyncio.create_task(clock.keep_saving())
    try:
        await run.rollouts.check_tasks()
        for stage in stages:
            with clock.stage(stage.value):
                results = await STAGES[stage](run, stage)
            layout.finish(stage, {**results, "wall_s": clock.stages[stage.value]})
            clock.save()
    except asyncio.CancelledError:
        if ended:
            raise ended[0] from None
        raise
    except Exception as error:
        cause = watch.error if isinstance(error, ComposerError) else await cluster.cause_of_death()
        raise cause or error from error.__cause__
    finally:
        await run.stop()
        saving.cancel()
        clock.save()


def _end_early(watch: cluster.Watch) -> list[ClusterError]:
    """Let the first signal of `ENDING`, or the end of Ray, end the run in an orderly way; nothing cuts that short.

    After the cluster's start, since Ray installs a handler of its own for SIGTERM.

    Returns:
        A list that gets the error, if it is Ray's end that the stages are cancelled for.
    """
    stages, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert stages is not None
    begun = False
    errors: list[ClusterError] = []

    def end(*error: ClusterError) -> None:
        nonlocal begun
        if not begun:
            begun = True
            errors.extend(error)
            stages.cancel()

    def ray_ended(error: ClusterError) -> None:
        watch.acknowledge()
        end(error)

    watch.on_end(lambda error: loop.call_soon_threadsafe(ray_ended, error))
    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores it, and means it
            loop.add_signal_handler(number, end)
    return errors


@contextlib.contextmanager
def _cluster(launcher: Launcher, backend: SandboxBackend, watch: cluster.Watch) -> Iterator[cluster.Watch]:
    """The Ray cluster. Outside the event loop, so that Ctrl-C ends a start that is under way."""
    # Those of before the start: Ray replaces one, and an event loop that closes leaves the system's defaults.
    before = {number: signal.getsignal(number) for number in ENDING}
    with watch:
        try:
            with no_lost_interrupt(again_s=1.0):
                launcher.start()
            cluster.keep_rays_messages_off_the_console()
            yield watch
        finally:
            watch.expect_end()
            # What is on its way to its end is not to be cut short; whoever is in a hurry still has SIGKILL.
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)
            try:
                launcher.stop()
                # A worker that hung was killed, and its sandboxes' watchdog with it; so may a generator have been.
                backend.sweep()
                engine.sweep()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)


def end_process(error: ComposerError, directory: RunDirectory, endings: Iterable[Callable[[], object]]) -> NoReturn:
    """End this process while its main thread hangs inside Ray, which would end it a minute later without a word.

    Args:
        error: why; said as the command says it.
        directory: of the run, which has failed.
        endings: called one after the other, whatever becomes of each.
    """
    directory.note_what_is_left(error)
    say_error(error)
    directory.set_status(Status.failed)
    for end in endings:
        with contextlib.suppress(Exception):
            end()
    os._exit(error.exit_code)


def check_machine(findings: Iterable[Finding]) -> None:
    """Refuse to start where something required is missing.

    Raises:
        MachineError: names what is missing; a note for each says what to do.
    """
    missing = [f for f in findings if f.required and not f.ok]
    if missing:
        error = MachineError(f"this machine lacks what the run needs: {', '.join(f.name for f in missing)}")
        for f in missing:
            error.add_note(f"{f.name}: {f.detail}" + (f" -> {f.remedy}" if f.remedy else ""))
        raise error


def check_left(stages: Iterable[Stage], layout: Layout) -> None:
    """Read what interrupted stages left: what is wrong with it is to be said before anything slow starts.

    Raises:
        ResumeError: a file is damaged, or does not fit the checkpoints; it says what to delete.
    """
    for stage in stages:
        if stage is Stage.rl:
            read_ledger(layout.ledger, layout.checkpoints(layout.stage(stage)))
        elif stage is not Stage.pretrain:
            read_groups(layout.stage(stage))


def run_label(run_dir: Path) -> str:
    """A short name by which the run's processes, sandboxes and shared memory are known on this machine."""
    return "".join(c if c.isalnum() else "-" for c in f"{run_dir.parent.name}-{run_dir.name}")[-40:].strip("-") + (
        f"-{os.getpid()}"
    )


def summarise(layout: Layout, plan: RunPlan, config: Config, clock: Clock, peak_rss_bytes: int) -> dict[str, Any]:
    """The closing table as data, from what the stages left. Times are in seconds, of all starts together."""
    results = {s: r for s in config.stages if (r := layout.results(s)) is not None}
    stages = {s.value: {"wall_s": r["wall_s"], **r.get("summary", {})} for s, r in results.items()}
    begun = clock.stages
    for stage in plan.stages:
        if (name := stage.stage.value) in begun and name not in stages:
            stages[name] = {"wall_s": begun[name], **_reached(layout, stage, config)}
    summary: dict[str, Any] = {
        "seed": config.seed,
        "evaluation": {},
        "stages": stages,
        "wall_s": clock.wall_s,
        "starts": len(clock.starts),
        "peak_rss_bytes": peak_rss_bytes,
    }
    for stage, name in ((Stage.evaluate_before, "before"), (Stage.evaluate_after, "after")):
        if stage in results:
            summary["evaluation"][name] = results[stage]["metrics"]
    if Stage.pretrain in results:
        summary["codebase_loss"] = results[Stage.pretrain]["codebase_loss"]
    return summary


def _reached(layout: Layout, stage: StagePlan, config: Config) -> dict[str, Any]:
    """How far an unfinished stage came, by what is on disk."""
    if stage.steps:
        series = read_metrics(layout.run_dir).get(stage.stage.value, {})
        done = max((step for points in series.values() for step, _ in points), default=0)
        return {"unit": "step", "done": done, "of": stage.steps}
    groups = layout.stage(stage.stage) / "groups.jsonl"
    done = groups.read_bytes().count(b"\n") if groups.exists() else 0
    return {"unit": "task", "done": done, "of": config.evaluation.num_tasks}


def _sweep_weights(config: Config) -> int:
    from composer.weight_sync.store import SHARED_MEMORY, sweep

    places = {SHARED_MEMORY, *([Path(config.weight_sync.directory)] if config.weight_sync.directory else [])}
    return sum(sweep(place) for place in places)
