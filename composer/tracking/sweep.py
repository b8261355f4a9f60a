"""A multirun as one comparable MLflow run with a child a job: a Hydra callback, `hydra.callbacks.sweep` in conf.

Works with every launcher: whatever a job has to tell goes through files in the sweep directory (`mlflow.json` of the
parent, `jobs/<number>.json`), since Hydra may run the jobs in this process, in others, or on other machines.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from composer.shell import as_typed
from composer.terminal import printable, rich_console
from composer.tracking.console import duration_text, number_text
from composer.tracking.state import FAILED, FINISHED, KILLED, RUNNING, SWEEP_VARIABLE


class SweepCallback(Callback):
    """Opens the parent run, says how each job ended as soon as it has, and closes with a table of the jobs.

    Hydra calls it; a single run never reaches it. None of it can fail a sweep.
    """

    def __init__(self) -> None:
        """Start with no sweep."""
        self._record: Any = None
        self._sweep_dir: Path | None = None
        self._started: dict[int, float] = {}
        self._typed: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """What a launcher may carry to another process: all but the parent's open record."""
        return {**self.__dict__, "_record": None}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Open the parent run in the sweep directory."""
        from composer.tracking.mlflow import Record

        self._sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
        self._sweep_dir.mkdir(parents=True, exist_ok=True)
        self._typed = overrides = _overrides(config)
        settings = {
            "run_root": str(OmegaConf.select(config, "run_root") or self._sweep_dir.parent),
            "tracking": OmegaConf.to_container(config.tracking, resolve=True) if "tracking" in config else {},
            "sweep": dict(_split(override) for override in overrides),
        }
        settings["tracking"].update(system_metrics_every_s=None, run_name=None)
        self._record = Record.open(
            settings,
            self._sweep_dir,
            name=f"sweep {self._sweep_dir.name}",
            tags={"composer.sweep": " ".join(overrides)},
            warn=_say,
        )
        atexit.register(self._finish)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Tell the job's record where its parent is, and the user that the job starts."""
        if not _is_multirun(config):
            return
        sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
        os.environ[SWEEP_VARIABLE] = str(sweep_dir)
        number = int(config.hydra.job.num)
        self._started[number] = time.time()
        _write(
            _job_file(sweep_dir, number),
            {
                "number": number,
                "status": RUNNING,
                "started": self._started[number],
                "run_dir": str(config.hydra.runtime.output_dir),
                "overrides": _overrides(config),
            },
        )
        _say(f"sweep job {number} starts: {' '.join(_overrides(config)) or 'no overrides'}")

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Say how the job ended, at once, and leave it for the parent to read."""
        if not _is_multirun(config):
            return
        os.environ.pop(SWEEP_VARIABLE, None)
        sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
        number = int(config.hydra.job.num)
        error = getattr(job_return, "_return_value", None)
        job = {
            "number": number,
            "status": FAILED if isinstance(error, BaseException) else FINISHED,
            "error": str(error) if isinstance(error, BaseException) else "",
            "wall_s": time.time() - self._started.get(number, time.time()),
            "run_dir": str(config.hydra.runtime.output_dir),
            "results": _key_results(Path(str(config.hydra.runtime.output_dir))),
            "overrides": _overrides(config),
        }
        _write(_job_file(sweep_dir, number), job)
        _say(_job_line(job))
        if self._record is not None and job["results"]:
            self._record.log(number, job["results"])

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Close the parent with the table of all jobs."""
        self._finish()

    def _finish(self) -> None:
        """Also called at exit: Hydra leaves `on_multirun_end` out when a job failed or Ctrl-C was pressed."""
        record, self._record = self._record, None
        if record is None or self._sweep_dir is None:
            return
        atexit.unregister(self._finish)
        jobs = read_jobs(self._sweep_dir)
        statuses = {job["status"] for job in jobs}
        status = KILLED if RUNNING in statuses else FAILED if FAILED in statuses else FINISHED
        for job in jobs:
            if job["status"] == RUNNING:  # Hydra says nothing of the end of a job that was interrupted
                job.update(status=KILLED, wall_s=time.time() - job["started"])
        record.table("jobs.json", [_row(job) for job in jobs])
        record.close(status)
        _print_table(jobs, self._typed)
        if record.ui_command:
            _say(f"Compare the jobs with:  {record.ui_command}")
        _say(f"{'and see them at' if record.ui_command else 'Compare the jobs at'}:  {record.ui_address}")
        if record.report.sentence:
            _say(record.report.sentence)


def read_jobs(sweep_dir: Path) -> list[dict[str, Any]]:
    """What the jobs of a sweep left behind, by number. A file that cannot be read is left out."""
    jobs = []
    for path in (sweep_dir / "jobs").glob("*.json"):
        try:
            jobs.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return sorted(jobs, key=lambda job: job["number"])


def _job_file(sweep_dir: Path, number: int) -> Path:
    return sweep_dir / "jobs" / f"{number}.json"


def _is_multirun(config: DictConfig) -> bool:
    return getattr(config.hydra.mode, "name", str(config.hydra.mode)) == "MULTIRUN"


def _overrides(config: DictConfig) -> list[str]:
    """What was typed for this job: what all jobs have in common, and what tells it from its siblings."""
    return [as_typed(str(override)) for override in config.hydra.overrides.task]


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+~"), value


def _key_results(run_dir: Path) -> dict[str, float]:
    """The numbers of `summary.json` that tell whether a job was good; empty without one."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    results: dict[str, float] = {}
    for when in ("before", "after"):
        for key, value in ((summary.get("evaluation") or {}).get(when) or {}).items():
            if "_at_" in key and isinstance(value, (int, float)):
                results[f"evaluation/{when}/{key}"] = float(value)
        loss = (summary.get("codebase_loss") or {}).get(when)
        if isinstance(loss, (int, float)):
            results[f"codebase_loss/{when}"] = float(loss)
    return results


def _job_line(job: Mapping[str, Any]) -> str:
    took = duration_text(job["wall_s"])
    if job["status"] == FAILED:
        where = f" (run directory {job['run_dir']})" if Path(job["run_dir"]).exists() else ""
        return f"sweep job {job['number']} FAILED after {took}: {job['error']}{where}"
    results = job["results"]
    learnt = ""
    for name, after in results.items():
        key = name.removeprefix("evaluation/after/")
        if key != name and key.startswith("average_at_"):
            before = results.get(f"evaluation/before/{key}")
            learnt = f": {key.replace('_at_', '@')} {number_text(before)} -> {number_text(after)}"
    return f"sweep job {job['number']} finished after {took}{learnt}"


def _row(job: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "job": job["number"],
        **dict(_split(override) for override in job["overrides"]),
        "status": job["status"],
        **job.get("results", {}),
        "wall_s": job.get("wall_s"),
        "error": job.get("error", ""),
    }


def _when(name: str, when: str) -> str:
    """The name of the same result at another time: `evaluation/before/best_at_8`, `evaluation/after/best_at_8`."""
    return re.sub(r"(?<=/)(before|after|\*)(?=/|$)", when, name)


def _pair(before: float | None, after: float | None) -> str:
    return "-" if before is after is None else f"{number_text(before)} -> {number_text(after)}"


def _heading(name: str) -> str:
    """`average@8` of `evaluation/*/average_at_8`."""
    return name.removeprefix("evaluation/*/").removesuffix("/*").replace("_at_", "@").replace("_", " ")


def _print_table(jobs: Sequence[Mapping[str, Any]], typed: Sequence[str] = ()) -> None:
    """The jobs side by side: the overrides in which they differ and their results, before -> after.

    Args:
        jobs: what they left behind.
        typed: what was typed for the whole sweep. What stands there word for word tells no job from its siblings, also
            where an interrupt left only one of them.
    """
    if not jobs:
        return
    common = set.intersection(*(set(job["overrides"]) for job in jobs)) if len(jobs) > 1 else set()
    if any(override not in typed for job in jobs for override in job["overrides"]):
        common |= set(typed)
    from rich import box
    from rich.table import Table

    names = list(dict.fromkeys(_when(name, "*") for job in jobs for name in job.get("results", {})))
    table = Table(box=box.SIMPLE_HEAVY, title="Sweep", title_justify="left")
    for heading in ("job", "overrides", "status", *(_heading(name) for name in names), "time"):
        table.add_column(heading, no_wrap=heading != "overrides", overflow="fold")
    for job in jobs:
        found = job.get("results", {})
        cells = [
            str(job["number"]),
            "\n".join(override for override in job["overrides"] if override not in common),
            job["status"],
            *(_pair(found.get(_when(name, "before")), found.get(_when(name, "after"))) for name in names),
            duration_text(job.get("wall_s")),
        ]
        table.add_row(*cells)
    try:
        console = rich_console(highlight=False, width=None if sys.stdout.isatty() else 120)
        console.print(table)
    except (OSError, ValueError):
        return


def _write(path: Path, job: Mapping[str, Any]) -> None:
    """Leave a job's file, whole or not at all; a full disk is survived."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(job))
        partial.replace(path)
    except OSError as error:
        _say(f"{path} cannot be written ({error.strerror}): the table of the sweep will lack this job.")


def _say(line: str) -> None:
    try:
        print(f"{time.strftime('%H:%M:%S')} {printable(line)}", flush=True)
    except (OSError, ValueError):
        return
