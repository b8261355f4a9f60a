"""Print a plan for people: tables of stages, processes, meshes, memory, storage, ports and commands."""

from __future__ import annotations

import os
import sys
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer.plan import RunPlan
from composer.schema import Accelerator
from composer.shell import pasteable
from composer.terminal import rich_console

WIDTH_IN_LOGS = 150
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def print_plan(plan: RunPlan, console: Console | None = None) -> None:
    """Print a plan to a terminal or a log (default: stdout)."""
    # A log or a pipe has no width of its own; rich would cut at 80.
    console = console or rich_console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_IN_LOGS)
    share = plan.active_parameters / plan.parameters
    console.print(
        Text(plan.name, "bold"),
        f" {number(plan.parameters)} parameters, {number(plan.active_parameters)} active ({share:.0%})",
    )
    at_most = "<=" if console.options.ascii_only else "≤"
    console.print(_stages(plan, at_most))
    if any(stage.phases for stage in plan.stages):
        console.print(_mix(plan, at_most))
    if plan.tools:
        console.print(_tools(plan))
    console.print(_processes(plan))
    console.print(_mesh(plan))
    console.print(_memory(plan))
    console.print(_storage(plan))
    console.print(Text("Ports", "bold"))
    for what, where in plan.ports.items():
        console.print(f"  {what}: {where}", highlight=False, markup=False)
    console.print(Text("Commands", "bold"))
    for command in plan.commands:
        program, _, rest = command.partition(" ")
        # Unwrapped, so that it can be copied.
        console.print(f"  {pasteable(program)} {rest}".rstrip(), highlight=False, markup=False, soft_wrap=True)
    for warning in plan.warnings:
        console.print(Text("note", "yellow"), Text(warning))


def size(number_of_bytes: float) -> str:
    """Bytes in decimal units, as disks and GPUs are sold.

    Example:
        >>> size(1536), size(2.08e12)
        ('1.5 kB', '2.1 TB')
    """
    for unit in _UNITS[:-1]:
        if number_of_bytes < 1000:
            return (
                f"{number_of_bytes:.0f} {unit}"
                if unit == "B" or number_of_bytes >= 10
                else f"{number_of_bytes:.1f} {unit}"
            )
        number_of_bytes /= 1000
    return f"{number_of_bytes:.1f} {_UNITS[-1]}"


def number(count: float) -> str:
    """A count in words.

    Example:
        >>> number(1.04e12), number(2_500_000), number(60)
        ('1.04T', '2.50M', '60')
    """
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f}{unit}"
    return f"{count:.0f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        left = column.endswith("<")
        table.add_column(column.rstrip("<"), justify="left" if left else "right", no_wrap=not left, header_style="dim")
    return table


def _stages(plan: RunPlan, at_most: str) -> Table:
    table = _table("Stages", "stage<", "steps", "tokens", "episodes", "FLOP", "detail<")
    for stage in plan.stages:
        table.add_row(
            stage.stage.value,
            f"{stage.steps:,}" if stage.steps else "",
            "",
            f"{stage.episodes:,}" if stage.episodes else "",
            "",
            stage.detail,
        )
        for phase in stage.phases:
            bound, each = (at_most, "sessions of at most") if phase.is_bound else ("", "x")
            detail = (
                f"{phase.kind}: {phase.batch_size} {each} {phase.seq_len:,} tokens a step, {phase.sequences_per_rank} "
                "a rank"
            )
            tokens, flops = f"{bound}{number(phase.tokens)}", f"{bound}{phase.flops:.1e}"
            table.add_row(f"  {phase.name}", f"{phase.steps:,}", tokens, "", flops, detail)
    return table


def _mix(plan: RunPlan, at_most: str) -> Table:
    table = _table("Mix", "phase<", "tokens a sequence", "source<", "weight", "tokens", "kind<", "from<")
    for phase in (phase for stage in plan.stages for phase in stage.phases):
        for i, source in enumerate(phase.sources):
            begin = (phase.name, f"{phase.seq_len:,}") if i == 0 else ("", "")
            tokens = f"{at_most if phase.is_bound else ''}{number(source.tokens)}"
            table.add_row(*begin, source.name, f"{source.weight:g}", tokens, source.kind, source.where)
    return table


def _tools(plan: RunPlan) -> Table:
    table = _table("Tools", "tool<", "arguments<", "unknown arguments<", "differs from production<")
    for tool in plan.tools:
        strict = {True: "refused", False: "ignored", None: ""}[tool.strict]
        table.add_row(tool.name, ", ".join(tool.arguments), strict, "; ".join(tool.differs))
    for name in plan.missing_tools:
        table.add_row(name, "", "", "not here")
    return table


def _processes(plan: RunPlan) -> Table:
    table = _table("Processes", "role<", "count", "CPUs each", "GPUs each", "on<", "runs<", "detail<")
    for process in plan.processes:
        table.add_row(
            process.role,
            str(process.count),
            str(process.cpus),
            str(process.gpus),
            process.nodes,
            process.target,
            process.detail,
        )
    total = plan.resources
    where = f"{plan.num_nodes} machine(s)" if plan.accelerator is Accelerator.cuda else "this machine"
    table.add_row("all", "", str(total["CPU"]), str(total["GPU"]), where, "", "")
    return table


def _mesh(plan: RunPlan) -> Table:
    mesh = plan.mesh
    table = _table(
        "Trainer mesh",
        "ranks",
        "replicate",
        "shard",
        "context",
        "tensor",
        "pipeline",
        "expert",
        "data-parallel ranks",
        "sequence multiple",
    )
    row = (
        mesh.world_size,
        mesh.replicate,
        mesh.shard,
        mesh.context,
        mesh.tensor,
        mesh.pipeline,
        mesh.expert,
        mesh.data_parallel_ranks,
        mesh.sequence_multiple,
    )
    table.add_row(*map(str, row))
    return table


def _memory(plan: RunPlan) -> Table:
    table = _table("Memory (estimates)", "on one<", "part<", "size")
    for holder, lines in groupby(plan.memory, key=lambda m: m.holder):
        parts = [m for m in lines if m.bytes]
        for i, part in enumerate(parts):
            table.add_row(holder if i == 0 else "", part.part, size(part.bytes))
        if len(parts) > 1:
            table.add_row("", Text("together", "bold"), Text(size(plan.memory_bytes(holder)), "bold"))
    return table


def _storage(plan: RunPlan) -> Table:
    table = _table("Storage (estimates)", "what<", "where<", "size")
    for line in plan.storage:
        table.add_row(line.what, line.where, size(line.bytes))
    return table
