"""`composer audit`: what gives this env's sandboxes away to a program that looks closely."""

from __future__ import annotations

import asyncio
import os
import sys

from rich.table import Table
from rich.text import Text

from composer.contract import Finding, SandboxBackend
from composer.errors import MachineError, SandboxStartError
from composer.instantiate import instantiate
from composer.plan_table import WIDTH_IN_LOGS
from composer.schema import Config
from composer.terminal import rich_console


def audit(config: Config) -> int:
    """Start one sandbox as an episode gets it, look at it from inside, and print what shows.

    Returns:
        0, whatever shows: how much is too much is for the user to say.

    Raises:
        SandboxError: the sandbox failed.
        MachineError: it cannot start here.
    """
    backend: SandboxBackend = instantiate(config.env.sandbox, config.plugins, key="env.sandbox", run_label="audit")
    try:
        findings = asyncio.run(_look(backend))
    except SandboxStartError as error:
        raise MachineError(f"{error}; `composer doctor` says what this machine lacks") from error
    console = rich_console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_IN_LOGS)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for column in ("", "tell", "seen"):
        table.add_column(column, no_wrap=column != "seen")
    for f in findings:
        hides = f"\n-> {f.remedy}" if f.remedy and not f.ok else ""
        table.add_row(Text("ok", "green") if f.ok else Text("shows", "red"), f.name, f.detail + hides)
    console.print(table)
    compared = [f for f in findings if f.required]
    console.print(
        f"{config.env.name}: {_count(compared)} of the {len(compared)} tells by which backends are compared give its "
        f"sandboxes away, and {_count(findings) - _count(compared)} of {len(findings) - len(compared)} further ones",
        highlight=False,
    )
    return 0


def _count(findings: list[Finding]) -> int:
    return sum(not f.ok for f in findings)


async def _look(backend: SandboxBackend) -> list[Finding]:
    try:
        return await backend.audit()
    finally:
        await backend.close()
