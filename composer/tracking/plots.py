"""Curves of a run as PNG files, drawn from `metrics.jsonl`. matplotlib is imported by `draw`, not before."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.tracking.journal import Journal, decode_number

Series = dict[str, list[tuple[int, float]]]
"""Metric name -> (step, value), in the order of the steps."""


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    metric: str
    label: str


@dataclass(frozen=True)
class Plot:
    """One PNG file: curves of one stage over its steps."""

    file: str
    title: str
    stage: str
    curves: tuple[Curve, ...]
    y_label: str
    x_label: str = "optimizer step"
    logarithmic: bool = False


REWARD = Plot(
    "reward_curve.png",
    "Reward during RL",
    "rl",
    (Curve("reward/mean", "mean of the episodes"), Curve("reward/best", "best of each group")),
    "reward",
)
PLOTS = (
    REWARD,
    Plot(
        "pretrain_loss.png",
        "Continued pretraining",
        "pretrain",
        (Curve("loss/train", "training"), Curve("loss/codebase", "held-out codebase")),
        "loss (nats a token)",
    ),
    Plot("rl_loss.png", "Policy loss", "rl", (Curve("loss/policy", "policy loss"),), "loss"),
    Plot(
        "mismatch.png",
        "Generator against trainer log-probabilities",
        "rl",
        (
            Curve("mismatch/k3", "k3 KL"),
            Curve("mismatch/p90", "p90 |difference|"),
            Curve("mismatch/p99", "p99 |difference|"),
            Curve("mismatch/max", "max |difference|"),
        ),
        "nats",
        logarithmic=True,
    ),
    Plot(
        "staleness.png",
        "Staleness of the samples",
        "rl",
        (Curve("staleness/mean", "mean"), Curve("staleness/max", "max")),
        "policy versions",
    ),
    Plot(
        "throughput.png",
        "Throughput of RL",
        "rl",
        (Curve("throughput/generated_tokens_per_s", "generated tokens"),),
        "tokens/s",
    ),
)


def read_metrics(run_dir: Path | str) -> dict[str, Series]:
    """Read a run's own copy of its metrics.

    Args:
        run_dir: holds `metrics.jsonl`.

    Returns:
        Stage name ("" for the parent run) -> series. Of a step that was recorded twice (it was done again after a
        resume) the later value counts.
    """
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    journal = Journal(Path(run_dir) / "metrics.jsonl")
    position = 0
    while True:
        records, following = journal.read(position)
        if following == position:
            break
        position = following
        for record in records:
            series = found[record.get("stage") or ""]
            for name, value in record.get("metrics", {}).items():
                series[name][record["step"]] = decode_number(value)
    return {stage: {name: sorted(points.items()) for name, points in series.items()} for stage, series in found.items()}


def draw(run_dir: Path | str, folder: Path | str | None = None) -> list[Path]:
    """Draw every plot for which there are numbers.

    Args:
        run_dir: holds `metrics.jsonl`.
        folder: where the files go; None: `<run_dir>/plots`.

    Returns:
        The files written, in the order of `PLOTS`.

    Raises:
        OSError: a file cannot be written.
    """
    metrics = read_metrics(run_dir)
    target = Path(folder) if folder else Path(run_dir) / "plots"
    written = []
    for plot in PLOTS:
        curves = [(curve.label, _finite(metrics, plot.stage, curve.metric)) for curve in plot.curves]
        curves = [(label, points) for label, points in curves if points]
        if not curves:
            continue
        marks = _evaluation_marks(metrics, curves) if plot is REWARD else []
        target.mkdir(parents=True, exist_ok=True)
        written.append(_draw(plot, curves, marks, target / plot.file))
    return written


def _draw(plot: Plot, curves: list[tuple[str, list[tuple[int, float]]]], marks: list[Any], path: Path) -> Path:
    # The object interface: no pyplot, no global state, safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = ("#1f6feb", "#d1741f", "#6e7781")
    for (label, points), color in zip(curves, colors, strict=False):
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        smooth = _smooth(values)
        axes.plot(
            steps, values, color=color, alpha=0.35 if smooth else 1.0, linewidth=1.2, label=None if smooth else label
        )
        if smooth:
            axes.plot(steps, smooth, color=color, linewidth=2.2, label=label)
    for step, value, label, marker in marks:
        axes.plot([step], [value], marker, color="#1a7f37", markersize=9, label=label, linestyle="none", zorder=5)
    if plot.logarithmic and all(value > 0 for _, points in curves for _, value in points):
        axes.set_yscale("log")
    axes.set_title(plot.title, loc="left", fontsize=12)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial)
    partial.replace(path)
    return path


def _evaluation_marks(metrics: dict[str, Series], curves: list[tuple[str, list[tuple[int, float]]]]) -> list[Any]:
    """average@k and best@k on unseen tasks, at the first and after the last RL step."""
    last = max(step for _, points in curves for step, _ in points)
    marks = []
    for prefix, marker in (("average_at_", "o"), ("best_at_", "^")):
        for stage, step in (("evaluate_before", 0), ("evaluate_after", last)):
            for name, points in sorted(metrics.get(stage, {}).items()):
                short = name.rpartition("/")[2]
                if short.startswith(prefix) and points and math.isfinite(points[-1][1]):
                    label = f"{short.replace('_at_', '@')}, unseen tasks"
                    known = any(mark[2] == label for mark in marks)
                    marks.append((step, points[-1][1], None if known else label, marker))
                    break
    return marks


def _finite(metrics: dict[str, Series], stage: str, name: str) -> list[tuple[int, float]]:
    return [(step, value) for step, value in metrics.get(stage, {}).get(name, []) if math.isfinite(value)]


def _smooth(values: list[float]) -> list[float]:
    """Centred moving mean over about a tenth of the points; empty where there are too few to smooth."""
    half = len(values) // 20
    if half < 1:
        return []
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
