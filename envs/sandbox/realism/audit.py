"""Runs the probe in a sandbox and says, tell by tell, what gives it away."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from composer.contract import Finding, Sandbox
from composer.errors import SandboxError
from envs.sandbox.realism.tells import Remedy, Tell, judge, parse

PROBE = Path(__file__).with_name("probe.sh")
TIMEOUT_S = 60.0


async def audit(sandbox: Sandbox, remedies: Mapping[str, str] | None = None) -> list[Finding]:
    """Look at a sandbox as a program in it would.

    Args:
        sandbox: one that has just started.
        remedies: tell -> what would hide it, where a backend knows better than tells.py.

    Returns:
        A finding a tell, `ok` if it does not give it away; `required` are those by which backends are compared.

    Raises:
        SandboxError: the probe did not run to its end.
    """
    # In the persistent shell: it is where the agent's own commands run, and has what they have.
    await sandbox.write("/tmp/.probe", PROBE.read_bytes())
    result = await sandbox.shell("sh /tmp/.probe; rm -f /tmp/.probe", timeout_s=TIMEOUT_S)
    facts = parse(result.output.decode(errors="replace"))
    if result.timed_out or "memory_limit" not in facts:
        shown = " ".join(result.output[-300:].decode(errors="replace").split())
        raise SandboxError(f"the probe of sandbox {sandbox.id} ended early (exit code {result.exit_code}): {shown}")
    return [
        Finding(
            verdict.tell.name,
            not verdict.shown,
            verdict.shown or "looks like a computer's",
            _remedy(verdict.tell, remedies or {}),
            required=not verdict.tell.is_further,
        )
        for verdict in judge(facts)
    ]


def _remedy(tell: Tell, remedies: Mapping[str, str]) -> str:
    return remedies.get(tell.name, "" if tell.remedy is Remedy.NEVER else str(tell.remedy))
