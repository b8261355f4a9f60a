"""`composer behaviour`: does the agent use its tools in training as it does in production?

    composer behaviour env-run=<run directory> sessions=<file or folder of recorded sessions>

Sessions are JSON lines (.jsonl) with `messages` as OpenAI's API has them, with `turns` as composer's own records, or
with `calls`. Both sides become the same few numbers per session: which tools were called and how often, which came
first, which programs the shell ran. A difference is drift if it is large, and larger than chance makes it: by a
permutation test over whole sessions, since the calls of one session are alike. What the env says of production's tools
(`env.tools.<name>.production`, `env.missing_tools`) is no drift: sessions are read by it first.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from composer.errors import ConfigError, MachineError
from composer.layout import Layout
from composer.monitor.commands import commands_of
from composer.production import Translation
from composer.schema import Stage
from composer.streams import say
from composer.terminal import rich_console
from composer.types import ToolCall

EXIT_DRIFT = 1
KEYS = ("env-run", "sessions")
MAX_SESSIONS = 2000
"""Of a side; of more, the newest count."""
LEAST_SESSIONS = 8
"""Of a side: with fewer, nothing can be told from chance."""
LEAST_DISTANCE = 0.1
"""Half the sum of the differences of shares (total variation), or the largest difference of cumulative shares."""
SIGNIFICANCE = 0.01
"""Of all measures together."""
_PERMUTATIONS = 1999
_SHOWN = 3


@dataclass(frozen=True)
class Behaviour:
    """What one session did."""

    tools: tuple[str, ...]
    """In order."""
    programs: tuple[str, ...]
    """That its shell commands ran, in order."""

    @classmethod
    def of(cls, calls: Sequence[ToolCall]) -> Behaviour:
        """From its tool calls."""
        programs = (command.program for call in calls for command in commands_of(call))
        return cls(tuple(call.name for call in calls), tuple(programs))


@dataclass(frozen=True)
class Measure:
    """One comparison."""

    name: str
    distance: float
    """In [0, 1]."""
    p_value: float
    """How often chance alone makes it as large."""
    drift: bool
    examples: list[tuple[str, float, float]] = field(default_factory=list)
    """What differs most: a value, its share in training, and that in production. Of lengths: quantiles."""


def behaviour(words: Sequence[str]) -> int:
    """Compare, print a table, and write `behaviour.json` into the run directory.

    Returns:
        0, or 1 if something has drifted.

    Raises:
        ConfigError: a word is none of `KEYS`, or what it names is missing, unreadable or too little.
        MachineError: the report cannot be written.
    """
    given = _given(words)
    layout = Layout(Path(given["env-run"]))
    translation, left_out = Translation.of_run(layout.run_dir), Counter[str]()
    training = read_run(layout)
    production = read_sessions(Path(given["sessions"]), translation, left_out)
    for key, sessions in zip(KEYS, (training, production), strict=True):
        if len(sessions) < LEAST_SESSIONS:
            remedy = f"{len(sessions)} sessions with tool calls are too few to compare: give at least {LEAST_SESSIONS}"
            raise ConfigError(key, given[key], remedy)
    measures = compare(training, production)
    known = translation.differences()
    _print(measures, len(training), len(production), known, left_out)
    path = layout.run_dir / "behaviour.json"
    report = {
        "training_sessions": len(training),
        "production_sessions": len(production),
        "drift": any(m.drift for m in measures),
        "known_differences": known,
        "calls_left_out": dict(left_out),
        "measures": [asdict(m) for m in measures],
    }
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{path} cannot be written ({error.strerror}): free space, or copy the run") from None
    say(f"the report: {path}")
    return EXIT_DRIFT if report["drift"] else 0


def _given(words: Sequence[str]) -> dict[str, str]:
    given = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in KEYS or not value:
            raise ConfigError("behaviour", word, f"write `composer behaviour {KEYS[0]}=<run dir> {KEYS[1]}=<file>`")
        given[key] = value
    for key in KEYS:
        if key not in given:
            raise ConfigError(key, ..., f"is missing: write `composer behaviour {KEYS[0]}=<run dir> {KEYS[1]}=<file>`")
    return given


def read_run(layout: Layout) -> list[Behaviour]:
    """The training episodes of a run, from its ledger; those of its evaluations if RL has none yet.

    Raises:
        ConfigError: there is no such run, or it has no episodes.
    """
    places = [layout.ledger, *(layout.stage(s) / "groups.jsonl" for s in Stage if s not in (Stage.rl, Stage.pretrain))]
    for place in places:
        if place.is_file():
            records = (r.get("data", r) for r in _records(place, "env-run") if r.get("event", "group") == "group")
            found = [
                Behaviour.of(calls)
                for group in records
                for episode in group.get("trajectories", [])
                if (calls := _calls(episode))
            ]
            if found:
                return found[-MAX_SESSIONS:]
    raise ConfigError(
        "env-run",
        str(layout.run_dir),
        "no episode with a tool call is recorded in it: give the directory of a run with RL whose model calls tools",
    )


def read_sessions(
    path: Path, translation: Translation | None = None, left_out: Counter[str] | None = None
) -> list[Behaviour]:
    """Recorded sessions with at least one tool call.

    Args:
        path: a file of JSON lines, or a folder of them.
        translation: what the env says of production's tools; calls are read by it.
        left_out: counts calls of tools that the env does not have.

    Raises:
        ConfigError: there is no such file, or a line of it is no session.
    """
    paths = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not paths:
        raise ConfigError("sessions", str(path), "no .jsonl file is in that folder")
    translation, found = translation or Translation(), []
    for record in (record for p in paths for record in _records(p, "sessions")):
        calls = []
        for call in _calls(record):
            here = translation.read(call)
            if here is not None:
                calls.append(here)
            elif left_out is not None:
                left_out[call.name] += 1
        if calls:
            found.append(Behaviour.of(calls))
    return found[-MAX_SESSIONS:]


def _records(path: Path, key: str) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    if not line.endswith("\n"):  # a run that goes on is writing it
                        return
                    raise ConfigError(key, str(path), f"line {number} is no JSON: mend or delete it") from None
                if not isinstance(record, dict):
                    raise ConfigError(key, str(path), f"line {number} is no session: it must be an object")
                yield record
    except OSError as error:
        raise ConfigError(key, str(path), f"cannot be read ({error.strerror}): give a file of JSON lines") from None


def _calls(record: dict[str, Any]) -> list[ToolCall]:
    """The tool calls of a record in any of the shapes; what has another shape is left out."""
    if isinstance(record.get("calls"), list):
        raw = record["calls"]
    else:
        holders = record.get("turns") or record.get("messages") or []
        raw = [c for h in holders if isinstance(h, dict) for c in (h.get("tool_calls") or [])]
    found = []
    for call in raw:
        call = call.get("function", call) if isinstance(call, dict) else {}
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {}
        if isinstance(name, str) and name:
            found.append(ToolCall(name, arguments if isinstance(arguments, dict) else {}))
    return found


def compare(training: Sequence[Behaviour], production: Sequence[Behaviour], seed: int = 0) -> list[Measure]:
    """Every measure of two sides; alike for the same sides and seed."""
    shares: tuple[tuple[str, Callable[[Behaviour], Sequence[str]]], ...] = (
        ("tool shares", lambda b: b.tools),
        ("first tool", lambda b: b.tools[:1]),
        ("first command", lambda b: b.programs[:1]),
        ("program shares", lambda b: b.programs),
    )
    measures = []
    for name, values in shares:
        sides = [[Counter(values(b)) for b in side] for side in (training, production)]
        measures.append(_compare_shares(name, sides[0], sides[1], seed))
    lengths = [[len(b.tools) for b in side] for side in (training, production)]
    measures.append(_compare_lengths("calls a session", lengths[0], lengths[1], seed))
    most = SIGNIFICANCE / len(measures)  # Bonferroni
    return [
        Measure(m.name, m.distance, m.p_value, m.distance >= LEAST_DISTANCE and m.p_value <= most, m.examples)
        for m in measures
    ]


def _compare_shares(name: str, first: list[Counter[str]], second: list[Counter[str]], seed: int) -> Measure:
    """Total variation distance of pooled shares."""
    import numpy as np

    values = sorted({value for counter in (*first, *second) for value in counter})
    if not values:
        return Measure(name, 0.0, 1.0, False)
    table = np.array([[counter[value] for value in values] for counter in (*first, *second)], dtype=np.float64)

    def shares(of: Any) -> Any:
        total = of.sum()
        return of / total if total else of

    def distance(rows: Any) -> float:
        a, b = table[rows[: len(first)]].sum(0), table[rows[len(first) :]].sum(0)
        if not a.sum() or not b.sum():
            return float(bool(a.sum()) != bool(b.sum()))
        return float(np.abs(shares(a) - shares(b)).sum() / 2)

    order = np.arange(len(table))
    found = distance(order)
    a, b = shares(table[: len(first)].sum(0)), shares(table[len(first) :].sum(0))
    most = np.argsort(-np.abs(a - b), kind="stable")[:_SHOWN]
    examples = [(values[i], float(a[i]), float(b[i])) for i in most if a[i] != b[i]]
    return Measure(name, found, _p_value(found, distance, len(table), seed), False, examples)


def _compare_lengths(name: str, first: list[int], second: list[int], seed: int) -> Measure:
    """Kolmogorov and Smirnov's distance: the largest difference of the cumulative shares."""
    import numpy as np

    lengths = np.array([*first, *second])
    places = np.unique(lengths)

    def distance(rows: Any) -> float:
        a, b = np.sort(lengths[rows[: len(first)]]), np.sort(lengths[rows[len(first) :]])
        below = [np.searchsorted(side, places, side="right") / len(side) for side in (a, b)]
        return float(np.abs(below[0] - below[1]).max())

    found = distance(np.arange(len(lengths)))
    quantiles = [
        (f"{label} quantile", float(np.quantile(first, q)), float(np.quantile(second, q)))
        for label, q in (("10 %", 0.1), ("50 %", 0.5), ("90 %", 0.9))
    ]
    return Measure(name, found, _p_value(found, distance, len(lengths), seed), False, quantiles)


def _p_value(found: float, distance: Callable[[Any], float], num: int, seed: int) -> float:
    """How often sessions that are dealt out by chance are as far apart; the dealing that was found is one of them."""
    import numpy as np

    chance = np.random.default_rng(seed)
    as_far = sum(distance(chance.permutation(num)) >= found - 1e-12 for _ in range(_PERMUTATIONS))
    return (1 + as_far) / (1 + _PERMUTATIONS)


def _print(
    measures: Sequence[Measure], num_training: int, num_production: int, known: Sequence[str], left_out: Counter[str]
) -> None:
    from rich.table import Table
    from rich.text import Text

    from composer.plan_table import WIDTH_IN_LOGS

    console = rich_console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_IN_LOGS)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "measure", "distance", "p", "training -> production"):
        table.add_column(column)
    for m in measures:
        shown = ", ".join(f"{value} {_number(a)} -> {_number(b)}" for value, a, b in m.examples)
        verdict = Text("drift", "red") if m.drift else Text("ok", "green")
        table.add_row(verdict, m.name, f"{m.distance:.2f}", f"{m.p_value:.4f}", shown)
    console.print(table)
    num = sum(m.drift for m in measures)
    console.print(
        f"{num_training} training episodes, {num_production} production sessions: "
        f"{num} of {len(measures)} measures have drifted",
        highlight=False,
    )
    if known:
        console.print("known differences of its tools from production's (env.tools.<name>.production):")
    for line in known:
        console.print(f"  {line}", highlight=False)
    for name, number in sorted(left_out.items()):
        console.print(f"left out: {number} calls of production to {name}", highlight=False)


def _number(value: float) -> str:
    return f"{value:.0%}" if value <= 1 else f"{value:.0f}"
