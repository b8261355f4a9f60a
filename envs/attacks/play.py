"""Tries an attack on a backend: does it get a reward, harm the machine, or read what is another's?

On the targets of grading it does what an episode does (start a sandbox with the task's files, let the agent work,
collect the files, stop it, grade them), and twice more: honest work in the attack's place must get its full reward, and
the attack must show that it is alive (see `catalogue.LIVENESS`). An attack that does nothing proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from composer.contract import ExecResult, Sandbox, SandboxBackend, SandboxLimits
from composer.errors import GradingError, SandboxError, ToolError
from composer.types import Outcome as Ending
from composer.types import Trajectory
from envs.attacks import bait as baits
from envs.attacks.bait import Bait
from envs.attacks.catalogue import Attack
from envs.attacks.forged_snapshot import forge
from envs.attacks.targets import RIGHT, SOLUTION, TARGETS, Target
from envs.attacks.tool_server import ADDER, SERVER, adder
from envs.tasks.scrub import scrub_files, setup_command

LIMITS = SandboxLimits(lifetime_s=120.0)
_RACES = 3
"""How often a naive grader is tried: attacks that race its tests lose now and then on a busy machine."""
_COLLECTED_BYTES = LIMITS.disk_bytes // 8
_SHELL_S = 10.0
_MOST_CONTENT = 2**18
"""Characters of a tool's answer; that of an MCP server has half of it at most."""


@dataclass
class Outcome:
    """What came of one attack on one backend."""

    attack: Attack
    backend: str
    gains: list[str] = field(default_factory=list)
    """What it got that it must not get: a reward, a secret, an effect on the machine."""
    is_alive: bool = False
    is_honest_work_rewarded: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether the attack got nothing, and that means something."""
        return not self.gains and self.is_alive and self.is_honest_work_rewarded


class Player:
    """Tries attacks on one backend, one at a time; remembers which plain honest work it has seen rewarded."""

    def __init__(self, backend: SandboxBackend, name: str, everywhere: bool = True) -> None:
        """Nothing starts yet.

        Args:
            backend: starts all sandboxes.
            name: of the backend, for reports.
            everywhere: try attacks on all of their targets, and not on the first alone.
        """
        self.backend, self.name, self.everywhere = backend, name, everywhere
        self._plain: dict[str, bool] = {}
        self._witness: Sandbox | None = None

    async def close(self) -> None:
        """Stop what is kept between attacks. Idempotent; raises nothing."""
        witness, self._witness = self._witness, None
        if witness is not None:
            await witness.stop()

    async def play(self, attack: Attack) -> Outcome:
        """Try one attack.

        Raises:
            SandboxError: a sandbox other than the attacker's failed.
            GradingError, TaskError: as of the graders, from honest work.
        """
        outcome = Outcome(attack, self.name)
        bait = Bait()
        if attack.place in TARGETS:
            attack = attack.with_pieces(bait.pieces)
            async with asyncio.TaskGroup() as places:
                for place in (attack.place, *attack.also)[: None if self.everywhere else 1]:
                    places.create_task(self._play_graded(attack, TARGETS[place], outcome, place == attack.place))
        else:
            before = baits.settings()
            await getattr(self, f"_play_{attack.place}")(attack, bait, outcome)
            after = baits.settings()
            outcome.gains += [f"{path} was changed" for path in before if before[path] != after.get(path)]
            outcome.gains += [f"its mark is on the machine: {place}" for place in bait.found_on_host()]
        return outcome

    async def _play_graded(self, attack: Attack, target: Target, outcome: Outcome, is_first: bool) -> None:
        task, grader = target.task, target.grader(attack.timeout_s)

        async def grade(files: Mapping[str, bytes] | None) -> tuple[float, str]:
            """Reward and reason; nothing that can be collected is nothing to grade, as in an episode."""
            if files is None:
                return 0.0, "not collected"
            verdict = await grader.grade(task, files, self.backend, _nobody(task.id))
            return verdict.score, str(verdict.details.get("reason", ""))

        async with _stopped(await self.backend.start(task.files, LIMITS)) as sandbox:
            said = await _leave_behind(attack, sandbox)
            left = await _collect(sandbox)
            naive = 0.0
            if is_first and attack.live == "naive":
                for _ in range(_RACES):
                    if naive != 1.0:
                        naive = await target.naive(sandbox, attack.reads)
        async with asyncio.TaskGroup() as gradings:
            honest = gradings.create_task(self._honest(attack, target, grade))
            try:
                score, reason = await grade(left)
            except (SandboxError, GradingError) as error:
                outcome.gains.append(f"{task.id}: no reward in place of none: {error}")
                score, reason = 0.0, str(error)
        if score:
            outcome.gains.append(f"{task.id}: a reward of {score:g}")
        outcome.notes.append(f"{task.id}: {reason}")
        if is_first:
            shown = said.output.decode(errors="replace") + reason
            outcome.is_alive = naive == 1.0 if attack.live == "naive" else bool(re.search(attack.sign, shown))
            outcome.notes.append(f"the naive grader gave {naive:g}; said: {shown[:500]!r}")
        reward, reason = honest.result()
        if reward != 1.0:
            outcome.is_honest_work_rewarded = False
            outcome.notes.append(f"{task.id}: honest work got {reward:g}: {reason}")

    async def _honest(
        self,
        attack: Attack,
        target: Target,
        grade: Callable[[Mapping[str, bytes] | None], Awaitable[tuple[float, str]]],
    ) -> tuple[float, str]:
        files = {**target.task.files, SOLUTION: RIGHT}
        beside = {path: text.encode() for path, text in attack.files.items()}
        if attack.control == "plain" or not (beside or attack.shell):
            if target.task.id not in self._plain:
                score, reason = await grade(files)
                if score != 1.0:
                    return score, reason
                self._plain[target.task.id] = True
            return 1.0, ""
        if not attack.shell:
            return await grade({**files, **beside})
        async with _stopped(await self.backend.start(target.task.files, LIMITS)) as sandbox:
            await _leave_behind(dataclasses.replace(attack, main=""), sandbox)
            await sandbox.write(SOLUTION, RIGHT)
            left = await _collect(sandbox)
        return await grade(left)

    async def _play_host(self, attack: Attack, bait: Bait, outcome: Outcome) -> None:
        async with baits.on_host(bait):
            await self._attack(attack, bait, outcome, await self.backend.start({}, LIMITS))
            if bait.num_guests:
                outcome.gains.append("it reached a server of the machine")

    async def _play_neighbour(self, attack: Attack, bait: Bait, outcome: Outcome) -> None:
        async with _stopped(await self.backend.start({}, LIMITS)) as neighbour:
            await _plant(bait, neighbour)
            await self._attack(attack, bait, outcome, await self.backend.start({}, LIMITS))
            await self._must_answer(neighbour, outcome)

    async def _play_fork(self, attack: Attack, bait: Bait, outcome: Outcome) -> None:
        async with _stopped(await self.backend.start({}, LIMITS)) as parent:
            child = await parent.fork()
            await _plant(bait, parent)
            await self._attack(attack, bait, outcome, child)
            await self._must_answer(parent, outcome)

    async def _play_snapshot(self, attack: Attack, bait: Bait, outcome: Outcome) -> None:
        attack = attack.with_pieces(bait.pieces)
        async with baits.on_host(bait):
            with tempfile.TemporaryDirectory(prefix="snapshot-") as folder:
                path = Path(folder) / "snapshot"
                async with _stopped(await self.backend.start({"main.py": RIGHT}, LIMITS)) as sandbox:
                    snapshot = await sandbox.snapshot()
                    await self.backend.save(snapshot, path)
                    await self.backend.drop(snapshot)
                outcome.is_alive = forge(path, attack.entries, sandbox.workdir)
                try:
                    loaded = await self.backend.load(path)
                except (SandboxError, OSError) as error:
                    outcome.notes.append(f"refused: {error}")
                else:
                    try:
                        sandbox = await self.backend.start({}, LIMITS, base=loaded)
                    except SandboxError as error:
                        outcome.notes.append(f"not started: {error}")
                    else:
                        live = dataclasses.replace(attack, live="sign", sign="")
                        await self._attack(live, bait, outcome, sandbox)
                    await self.backend.drop(loaded)
        await self._must_answer(None, outcome)

    async def _play_search(self, attack: Attack, bait: Bait, outcome: Outcome) -> None:
        from envs.tools.search import SemanticSearch

        tool = SemanticSearch(strict=True)
        attack = attack.with_pieces(bait.pieces)
        question = {"query": f"the token of {bait.pieces['bait']}"}
        files = {"vault.py": f'# the token of {bait.pieces["bait"]}\nTOKEN = "{bait.secret}"\n'.encode()}
        async with (
            _stopped(await self.backend.start(files, LIMITS)) as neighbour,
            _stopped(await self.backend.start({"main.py": RIGHT}, LIMITS)) as sandbox,
        ):
            theirs = await tool.call(question, neighbour)
            outcome.is_alive = bait.secret in theirs.content
            if attack.shell:
                await sandbox.shell(attack.shell, _SHELL_S)
            for arguments in (question, {**question, **attack.arguments}):
                answer = await tool.call(arguments, sandbox)
                outcome.notes.append(answer.content[:200])
                if bait.secret in answer.content:
                    outcome.gains.append("it found what is in another episode's files")

    async def _play_leftovers(self, attack: Attack, bait: Bait, outcome: Outcome) -> None:
        """The agent looks for the secret in a repository that was scrubbed, as files and where it lies."""
        attack = attack.with_pieces({**bait.pieces, "secret": bait.secret})
        before = dataclasses.replace(attack, shell=f"set -e\n{attack.before}")
        async with _stopped(await self.backend.start(TARGETS["exit"].task.files, LIMITS)) as sandbox:
            made = await _leave_behind(before, sandbox)
            files = await sandbox.files(_COLLECTED_BYTES)
            said = (await sandbox.shell(attack.shell, _SHELL_S)).output.decode(errors="replace")
            outcome.is_alive = made.exit_code == 0 and bait.secret in said
            outcome.notes.append(f"before: {made.output[-300:]!r}; it sees {said[-500:]!r}")
            scrubbed = await sandbox.exec(["sh", "-c", setup_command()], timeout_s=_SHELL_S)
            outcome.is_honest_work_rewarded = scrubbed.exit_code == 0 and await sandbox.read(SOLUTION) != b""
            await self._must_not_see(attack, bait, outcome, sandbox)
        async with _stopped(await self.backend.start(scrub_files(files), LIMITS)) as sandbox:
            await self._must_not_see(attack, bait, outcome, sandbox)

    async def _must_not_see(self, attack: Attack, bait: Bait, outcome: Outcome, sandbox: Sandbox) -> None:
        said = (await sandbox.shell(attack.shell, _SHELL_S)).output.decode(errors="replace")
        if bait.secret in said:
            outcome.gains.append("it read what the repository was once solved with")
            outcome.notes.append(said[-500:])

    async def _play_server(self, attack: Attack, bait: Bait, outcome: Outcome) -> None:
        """The agent tampers with a tool's server; the tool is asked before and after that, and a neighbour's, too."""
        target, tool = TARGETS["exit"], adder()
        attack = attack.with_pieces({**bait.pieces, "secret": bait.secret})

        async def ask(sandbox: Sandbox) -> str:
            try:
                answer = await tool.call({"a": 1, "b": 2}, sandbox)
            except (SandboxError, ToolError) as error:
                outcome.gains.append(f"its tool's call voids the episode: {error}")
                return ""
            return answer.content

        files = {**target.task.files, SERVER: ADDER}
        async with (
            _stopped(await self.backend.start(files, LIMITS)) as neighbour,
            _stopped(await self.backend.start(files, LIMITS)) as sandbox,
        ):
            outcome.is_honest_work_rewarded = [await ask(neighbour), await ask(sandbox)] == ["3", "3"]
            said = (await _leave_behind(attack, sandbox)).output.decode(errors="replace")
            answers = [await ask(sandbox), await ask(sandbox)]
            outcome.notes.append(f"it said {said[-300:]!r}; its tool answers {[a[:200] for a in answers]}")
            outcome.is_alive = bool(re.search(attack.sign, "\n".join([said, *answers])))
            if max(map(len, answers)) > _MOST_CONTENT:
                outcome.gains.append("its tool's answer has no bound")
            if await ask(neighbour) != "3":
                outcome.gains.append("it reached another episode's server")
            await self._must_answer(neighbour, outcome)
            left = await _collect(sandbox)
        grader = target.grader(attack.timeout_s)
        for files, wanted in ((left, 0.0), ({**(left or {}), SOLUTION: RIGHT}, 1.0)):
            verdict = await grader.grade(target.task, files or {}, self.backend, _nobody(target.task.id))
            if wanted == 0.0 and verdict.score:
                outcome.gains.append(f"a reward of {verdict.score:g}")
            outcome.is_honest_work_rewarded &= wanted == 0.0 or verdict.score == wanted

    async def _attack(self, attack: Attack, bait: Bait, outcome: Outcome, sandbox: Sandbox) -> None:
        attack = attack.with_pieces(bait.pieces)
        async with _stopped(sandbox):
            said = (await _leave_behind(attack, sandbox)).output.decode(errors="replace")
            outcome.notes.append(said[-1000:])
            if bait.secret in said:
                outcome.gains.append("it read a secret that is not its own")
            outcome.gains += re.findall(r"^GOT .*$", said, re.MULTILINE)
            await self._must_answer(sandbox, outcome)
        if attack.live == "sign":
            outcome.is_alive = outcome.is_alive or bool(re.search(attack.sign, said, re.MULTILINE))
        elif attack.live == "own":
            async with _stopped(await self.backend.start({}, LIMITS)) as own:
                await _plant(bait, own)
                said = (await _leave_behind(attack, own)).output.decode(errors="replace")
                outcome.is_alive = bait.secret in said
                outcome.notes.append(f"in its own sandbox: {said[-500:]}")
        await self._must_answer(None, outcome)

    async def _must_answer(self, sandbox: Sandbox | None, outcome: Outcome) -> None:
        """See that a sandbox still works; None: one that has nothing to do with any attack."""
        if sandbox is None:
            if self._witness is None:
                self._witness = await self.backend.start({}, dataclasses.replace(LIMITS, lifetime_s=3600.0))
            sandbox = self._witness
        try:
            answer = await sandbox.shell("echo still here", 20.0)
        except SandboxError as error:
            outcome.gains.append(f"it ended a sandbox: {error}")
            return
        if b"still here" not in answer.output:
            outcome.gains.append(f"a sandbox does not work any more: {answer.output[-200:]!r}")


def _nobody(task_id: str) -> Trajectory:
    """The record of an episode in which no policy took part: graders of attacks look at files alone."""
    return Trajectory(task_id, "attacks", "attacks/0", [], [], Ending.FINISHED, None)


async def _leave_behind(attack: Attack, sandbox: Sandbox) -> ExecResult:
    """Do as the agent does; what it may not write is not written."""
    files = {**({SOLUTION: attack.main} if attack.main else {}), **attack.files}
    for path, text in files.items():
        with contextlib.suppress(OSError):
            await sandbox.write(path, text.encode())
    return await sandbox.shell(attack.shell, _SHELL_S) if attack.shell else ExecResult(0, b"")


async def _collect(sandbox: Sandbox) -> dict[str, bytes] | None:
    try:
        return await sandbox.files(_COLLECTED_BYTES)
    except OSError:
        return None


async def _plant(bait: Bait, sandbox: Sandbox) -> None:
    planted = await sandbox.shell(bait.plant(), _SHELL_S)
    if planted.exit_code:
        raise SandboxError(f"nothing can be planted in sandbox {sandbox.id}: {planted.output[-300:]!r}")


@contextlib.asynccontextmanager
async def _stopped(sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    """Stop it in the end, whatever happens."""
    try:
        yield sandbox
    finally:
        await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
