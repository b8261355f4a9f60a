"""What a person sees: progress bars in a terminal, plain lines in a log, the closing table, `summary.json`."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from composer.terminal import printable, rich_console

logger = logging.getLogger(__name__)
LOG_EVERY_S = 10.0
LOG_WIDTH = 100
_STREAM_FAILS = (AttributeError, OSError, ValueError)  # there is none, it cannot be written, it is closed
_EVALUATION_LABELS = {
    "generated_tokens": "generated tokens an episode",
    "turns": "turns an episode",
    "seconds": "seconds an episode",
    "valid_share": "share of valid episodes",
    "lost_episodes": "episodes lost to infrastructure",
}


class Console:
    """Writes to a terminal or to a log, whichever the stream is. A stream that fails never stops a run.

    Example:
        >>> console = Console()
        >>> with console.stage("rl", total=60) as bar:                          # doctest: +SKIP
        ...     bar.update(1, {"reward": 0.41, "loss": 0.02})
    """

    def __init__(
        self, stream: IO[str] | None = None, *, every_s: float = LOG_EVERY_S, terminal: bool | None = None
    ) -> None:
        """Look at the stream.

        Args:
            stream: None: standard output.
            every_s: in a log, at most one line of progress a stage in so many seconds.
            terminal: None: ask the stream (and `TERM`).
        """
        self.stream = stream or sys.stdout
        self.terminal = _is_terminal(self.stream) if terminal is None else terminal
        self.every_s = every_s
        self._lock = threading.RLock()
        self._progress: Any = None
        self._num_bars = 0

    def info(self, text: str) -> None:
        """One line of news, above the bars if there are any."""
        self._line(text, "")

    def warn(self, text: str) -> None:
        """One line of warning, above the bars if there are any."""
        self._line(text, "warning: ")

    def stage(self, name: str, total: int, unit: str = "steps", done: int = 0) -> StageProgress:
        """Show the progress of a stage; use it as a context manager.

        Args:
            name: of the stage.
            total: how many units it has.
            unit: what is counted.
            done: how many of them an earlier session did (resumed runs).
        """
        return StageProgress(self, name, total, unit, done)

    def closing_table(
        self,
        summary: Mapping[str, Any],
        ui_command: str = "",
        ui_address: str = "",
        resume_command: str = "",
        note: str = "",
    ) -> None:
        """What was learnt, what it cost, and what to type next.

        Args:
            summary: the content of `summary.json`; values that are missing are shown as `-`.
            ui_command: serves MLflow on the record; empty if a server does.
            ui_address: where the run is seen then.
            resume_command: continues the run; empty if it is finished.
            note: trouble that a user has to know of (`RecordReport.sentence`).
        """
        with self._lock:
            self._print(lambda console: _print_closing(console, summary))
            if ui_command:
                self._write(f"Open the record with:  {ui_command}\n")
            if ui_address:
                self._write(f"{'and see the run at' if ui_command else 'See the run at'}:  {ui_address}\n")
            if resume_command:
                self._write(f"Interrupted. Continue with:  {resume_command}\n")
            if note:
                self._write(f"{note}\n")

    def _line(self, text: str, prefix: str) -> None:
        logger.info("%s%s", prefix, text)  # for composer.log; a warning would come to the terminal once more
        with self._lock:
            if not self.terminal:
                self._write(f"{time.strftime('%H:%M:%S')} {prefix}{text}\n")
                return
            self._print(lambda console: console.print(prefix + text, style="yellow" if prefix else None))

    def _print(self, draw: Any) -> None:
        """Let `draw` print on a rich console: the bars' own while there are bars, so that it lands above them."""
        try:
            draw(self._progress.console if self._progress else self._rich_console())
        except _STREAM_FAILS:
            return

    def _rich_console(self) -> Any:
        return rich_console(
            file=self.stream,
            force_terminal=self.terminal,
            width=None if self.terminal else LOG_WIDTH,
            no_color=None if self.terminal else True,
            highlight=False,
            soft_wrap=True,
        )

    def _write(self, text: str) -> None:
        """Write as it is: a command must not be wrapped."""
        try:
            self.stream.write(printable(text))
            self.stream.flush()
        except _STREAM_FAILS:
            return

    def _start_bar(self) -> Any:
        with self._lock:
            if self._progress is None:
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
                from rich.table import Column

                def text(template: str) -> TextColumn:
                    return TextColumn(template, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))

                progress = Progress(
                    text("{task.description}"),
                    BarColumn(bar_width=12),
                    MofNCompleteColumn(table_column=Column(no_wrap=True)),
                    text("{task.fields[unit]}, ETA"),
                    TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
                    text("{task.fields[numbers]}"),
                    console=self._rich_console(),
                    refresh_per_second=4,
                )
                progress.start()
                self._progress = progress
            self._num_bars += 1
            return self._progress

    def _stop_bar(self) -> None:
        with self._lock:
            self._num_bars -= 1
            if self._num_bars == 0 and self._progress is not None:
                progress, self._progress = self._progress, None
                progress.stop()


class StageProgress:
    """The bar, or the lines, of one stage."""

    def __init__(self, console: Console, name: str, total: int, unit: str, done: int) -> None:
        """Use `Console.stage`."""
        self.name, self.total, self.unit, self.done = name, total, unit, done
        self._console = console
        self._first: tuple[int, float] | None = None
        self._numbers: Mapping[str, float] = {}
        self._started = self._shown = time.monotonic()
        self._progress: Any = None
        self._bar: Any = None

    def update(self, done: int, numbers: Mapping[str, float] | None = None) -> None:
        """Say how far it is.

        Args:
            done: units done in all, those of earlier sessions included.
            numbers: the two or three that matter now (loss, reward, staleness, tokens/s); None: those said before.
        """
        self.done = done
        if self._first is None:
            self._first = done, time.monotonic()
        if numbers is not None:
            self._numbers = numbers
        if self._progress is not None:
            shown = "  ".join(f"{name} {number_text(value)}" for name, value in self._numbers.items())
            try:
                self._progress.update(self._bar, completed=done, numbers=shown)
            except _STREAM_FAILS:
                return
        elif done < self.total and time.monotonic() - self._shown >= self._console.every_s:
            self._say(self._eta())

    def __enter__(self) -> Self:
        """Show it."""
        self._started = self._shown = time.monotonic()
        if self._console.terminal:
            try:
                self._progress = self._console._start_bar()
                self._bar = self._progress.add_task(
                    self.name, total=self.total, completed=self.done, unit=self.unit, numbers=""
                )
            except _STREAM_FAILS:
                if self._progress is not None:
                    with contextlib.suppress(*_STREAM_FAILS):
                        self._console._stop_bar()
                self._progress = None
        else:
            self._console.info(f"{self.name}: {self.total - self.done} {self.unit} to do")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the last state on the screen."""
        if self._progress is not None:
            with contextlib.suppress(*_STREAM_FAILS):
                self._progress.stop_task(self._bar)
            with contextlib.suppress(*_STREAM_FAILS):
                self._console._stop_bar()
        else:
            ending = "done" if kind is None else "stopped"
            self._say(f"{ending} after {duration_text(time.monotonic() - self._started)}")

    def _eta(self) -> str:
        """From the pace since the first update: before it were an earlier start's steps, and the start of processes."""
        done, at = self._first or (self.done, 0.0)
        if self.done <= done:
            return "ETA unknown"
        left = (time.monotonic() - at) / (self.done - done) * max(0, self.total - self.done)
        return f"ETA {duration_text(left)}"

    def _say(self, ending: str) -> None:
        self._shown = time.monotonic()
        shown = "".join(f", {name} {number_text(value)}" for name, value in self._numbers.items())
        self._console.info(f"{self.name}: {self.done}/{self.total} {self.unit}, {ending}{shown}")


def write_summary(run_dir: Path | str, summary: Mapping[str, Any]) -> Path:
    """Write `<run_dir>/summary.json`: whole or not at all.

    Raises:
        OSError: it cannot be written; a summary that was there stays.
    """
    path = Path(run_dir) / "summary.json"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(_plain(summary), indent=2, allow_nan=False, default=str) + "\n")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return path


def number_text(value: float | None) -> str:
    """A number in at most about seven characters: 0.0312, 1.25, 1,234, 5.1e+09."""
    if value is None:
        return "-"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.1e}"
    return f"{value:.3g}"


def duration_text(seconds: float | None) -> str:
    """`12.3s`, `3m 10s` or `2h 5m`."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    return f"{minutes // 60}h {minutes % 60}m"


def bytes_text(size: float | None) -> str:
    """`512 B`, `1.5 MiB`, `5.1 GiB`."""
    if size is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _print_closing(console: Any, summary: Mapping[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    evaluation = summary.get("evaluation") or {}
    before, after = evaluation.get("before") or {}, evaluation.get("after") or {}
    learnt = Table("", "before", "after", "change", box=box.SIMPLE_HEAVY, title="What was learnt", title_justify="left")
    for column in learnt.columns[1:]:
        column.justify = "right"
    plus_minus = "+-" if console.options.ascii_only else "±"
    for label, first, last in _loss_rows(summary.get("codebase_loss") or {}):
        learnt.add_row(label, number_text(first), number_text(last), _change(first, last))
    for key, label in _evaluation_labels([*before, *after]).items():
        scores = (_score_text(evaluation, key, plus_minus) for evaluation in (before, after))
        learnt.add_row(label, *scores, _change(before.get(key), after.get(key)))
    console.print(learnt)
    cost = Table("", "", box=box.SIMPLE, show_header=False, title="What it took", title_justify="left")
    cost.columns[1].justify = "right"
    for name, stage in (summary.get("stages") or {}).items():
        cost.add_row(name, f"{_reached(stage)}{duration_text(stage.get('wall_s'))}")
    starts = summary.get("starts", 1)
    cost.add_row("wall time" if starts == 1 else f"wall time of {starts} starts", duration_text(summary.get("wall_s")))
    cost.add_row("peak memory", bytes_text(summary.get("peak_rss_bytes")))
    console.print(cost)


def _loss_rows(loss: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(label, before, after). What SFT, which reads no code, makes of the loss stands beside what pretraining did."""
    rows = [("codebase loss, pretraining (nats a token)", loss.get("before"), loss.get("after"))]
    if loss.get("after_all_phases") not in (None, loss.get("after")):
        rows.append(("codebase loss, all phases (nats a token)", loss.get("before"), loss["after_all_phases"]))
    return rows


def _evaluation_labels(keys: Iterable[str]) -> dict[str, str]:
    """Key -> label of what an evaluation says, average@k and best@k first."""
    keys = dict.fromkeys(keys)
    scores = [m for kind in ("average", "best") for key in keys if (m := re.fullmatch(rf"({kind})_at_(\d+)", key))]
    labels = {score[0]: f"{score[1]}@{score[2]} on unseen tasks" for score in scores}
    return labels | {key: label for key, label in _EVALUATION_LABELS.items() if key in keys}


def _score_text(evaluation: Mapping[str, Any], key: str, plus_minus: str) -> str:
    """A number of an evaluation; average@k with its standard error."""
    error = evaluation.get("standard_error") if key.startswith("average_at_") else None
    known = error is not None and math.isfinite(error)
    return number_text(evaluation.get(key)) + (f" {plus_minus} {error:.2g}" if known else "")


def _change(first: float | None, last: float | None) -> str:
    return "-" if first is None or last is None else f"{last - first:+.3g}"


def _reached(stage: Mapping[str, Any]) -> str:
    """What stands before a stage's time: its steps, or where it was interrupted."""
    if "of" in stage:
        return f"interrupted at {stage['unit']} {stage['done']:,} of {stage['of']:,}, "
    return f"{number_text(stage['steps'])} steps, " if stage.get("steps") is not None else ""


def _is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    except (AttributeError, ValueError):
        return False


def _plain(value: Any) -> Any:
    """Mappings and lists as JSON has them; NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
