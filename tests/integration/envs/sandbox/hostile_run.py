"""Hostile programs one after the other in the sandboxes of a backend, whatever it is: what came of each of them.

`COMPOSER_HOSTILE_PROGRAMS=500` runs so many.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from composer.contract import Sandbox, SandboxBackend, SandboxLimits
from composer.errors import SandboxError
from tests.integration.envs.sandbox.hostile_programs import DEADLINE_S, HostileProgram, hostile_programs

COUNT = int(os.environ.get("COMPOSER_HOSTILE_PROGRAMS", "40"))
IN_ONE = 5
"""Programs that a sandbox has to bear."""
LONGEST_S = 30.0
"""From the start of a program to the answer of the next command: its deadline, killing it, and a new shell."""
LIMITS = SandboxLimits(
    memory_bytes=128 * 2**20, num_processes=64, file_bytes=32 * 2**20, disk_bytes=32 * 2**20, cpu_seconds=5
)


@dataclass
class Report:
    """What happened."""

    seconds: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    num_sandboxes: int = 0

    def __str__(self) -> str:
        """In one line."""
        ordered = sorted(self.seconds)
        return (
            f"{len(ordered)} hostile programs in {self.num_sandboxes} sandboxes, {len(self.lost)} lost: "
            f"median {ordered[len(ordered) // 2]:.1f} s, longest {ordered[-1]:.1f} s"
        )

    def check(self) -> None:
        """Nobody waited for too long, and hardly a sandbox was lost."""
        assert not self.slow, self.slow
        # What a program does to its own sandbox is no failure of the machine's.
        assert len(self.lost) <= max(1, len(self.seconds) // 50), self.lost


async def attack(sandbox: Sandbox, program: HostileProgram, report: Report) -> bool:
    """Run one program; false if the sandbox was lost, which is then what every call says."""
    began = time.monotonic()
    try:
        result = await sandbox.shell(program.command, timeout_s=DEADLINE_S)
        assert len(result.output) <= LIMITS.output_bytes + 200
        answer = await sandbox.exec(["/bin/echo", "there"])
        assert answer.exit_code in (0, 126, 127, 137) or b"there" in answer.output, (program, answer)
        await sandbox.read("main.py")
    except FileNotFoundError:
        pass  # it was deleted
    except PermissionError:
        pass  # or closed
    except SandboxError as error:
        report.lost.append(f"{program.name}: {error}")
        return False
    finally:
        seconds = time.monotonic() - began
        report.seconds.append(seconds)
        if seconds > LONGEST_S:
            report.slow.append(f"{program.name}: {seconds:.1f} s")
    return True


async def attack_all(
    backend: SandboxBackend, witness: Sandbox, begun: Callable[[Sandbox], None] = lambda sandbox: None
) -> Report:
    """Run them all beside a `witness`, whose shell has COUNT=7; `begun` is told of each sandbox."""
    report = Report()
    sandbox, uses = None, 0
    for number, program in enumerate(hostile_programs(COUNT)):
        if sandbox is None:
            sandbox, uses = await backend.start({"main.py": b"x = 1\n"}, LIMITS), 0
            report.num_sandboxes += 1
            begun(sandbox)
        uses += 1
        is_there = await attack(sandbox, program, report)
        if not is_there or uses == IN_ONE or number == COUNT - 1:
            await sandbox.stop()
            sandbox = None
        assert (await witness.shell("echo $COUNT")).output == b"7\n", f"a neighbour was hit by {program}"
    return report
