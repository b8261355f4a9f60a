"""One repository from its source to an environment's folder, or to the reason why there is none."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from composer import __version__
from composer.autoinstall.client import Endpoint
from composer.autoinstall.installer import Installation, Try, install
from composer.autoinstall.proposer import Proposal, choose, propose
from composer.autoinstall.record import DROPPED, INSTALLED, Output
from composer.autoinstall.repository import Repository, RepositoryError, name_of, read_repository
from composer.autoinstall.verify import Verifier
from composer.contract import SandboxBackend, SandboxLimits, Tool
from composer.errors import GeneratorError, SandboxError, ToolError
from composer.schema import AutoinstallConfig

Progress = Callable[[str], None]


class Ended(StrEnum):
    """How it ended with a repository."""

    INSTALLED = "installed"
    DROPPED = "dropped"
    """The models did not get it to work: a verdict on the repository, kept."""
    OUTAGE = "outage"
    """An endpoint or a sandbox failed: no verdict; it is done again next time."""
    UNREADABLE = "unreadable"
    """Its files could not be read: done again next time."""


@dataclass(frozen=True)
class Result:
    """A line of the report."""

    source: str
    name: str
    ended: Ended
    reason: str
    again: bool = False
    """It was finished by an earlier command."""


@dataclass(frozen=True)
class Machinery:
    """What all repositories share."""

    config: AutoinstallConfig
    seed: int
    backend: SandboxBackend
    backend_target: str
    """The class of the backend, which must load the snapshots again."""
    limits: SandboxLimits
    tools: dict[str, list[Tool]]
    """By agent."""
    output: Output


@dataclass
class _Work:
    """What there is so far."""

    repository: Repository
    started: float = field(default_factory=time.time)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    proposal: Proposal | None = None
    chosen: Sequence[Any] = ()
    installation: Installation | None = None


async def autoinstall(source: str, machinery: Machinery, progress: Progress) -> Result:
    """Make the environment of a repository, unless that was done before.

    Args:
        source: where the repository is.
        machinery: what all share.
        progress: told what is going on.

    Raises:
        ConfigError: an agent's key is not there.
        MachineError: the record cannot be written.
    """
    name = name_of(source)
    if kind := machinery.output.finished(name):
        record = machinery.output.read(kind, name)
        return Result(source, name, Ended(kind), str(record.get("reason", "")), again=True)
    config = machinery.config
    try:
        repository = await read_repository(source, machinery.backend, machinery.limits, config.max_repository_bytes)
    except RepositoryError as error:
        return Result(source, name, Ended.UNREADABLE, str(error))
    except SandboxError as error:
        return Result(source, name, Ended.OUTAGE, str(error))
    work = _Work(repository)
    for agent in ("proposer", "installer"):
        work.endpoints[agent] = Endpoint(
            getattr(config, agent),
            f"autoinstall.{agent}",
            config.request_timeout_s,
            config.outage_timeout_s,
            machinery.seed,
            notice=progress,
        )
    reason = ""
    try:
        deadline = asyncio.timeout(config.repository_timeout_s)
        try:
            async with deadline:
                reason = await _agents(work, machinery, progress)
        except TimeoutError:
            if not deadline.expired():
                raise
            lost_s = sum(endpoint.lost_s for endpoint in work.endpoints.values())
            if lost_s > config.repository_timeout_s / 2:
                raise GeneratorError(
                    f"autoinstall.repository_timeout_s={config.repository_timeout_s:g}: {lost_s:.0f} s of it went to "
                    "attempts at which the endpoints failed: look at them, then start the command again."
                ) from None
            reason = f"it was not done within {config.repository_timeout_s:g} s"
        ended = Ended.DROPPED if reason else Ended.INSTALLED
        if not reason:
            assert work.installation is not None
            num = len(work.installation.tries)
            replay = (
                "its script leads there again" if not work.installation.replay else "its script does not: snapshot only"
            )
            reason = f"in {num} {'try' if num == 1 else 'tries'}, {replay}"
        await _write(work, machinery, ended, reason)
        return Result(source, name, ended, reason)
    except (GeneratorError, SandboxError, ToolError) as error:
        return Result(source, name, Ended.OUTAGE, str(error))
    finally:
        if work.installation is not None and work.installation.snapshot is not None:
            await machinery.backend.drop(work.installation.snapshot)
        for endpoint in work.endpoints.values():
            await endpoint.close()


async def _agents(work: _Work, machinery: Machinery, progress: Progress) -> str:
    """Let both work; why the repository is dropped, or nothing."""
    config = machinery.config
    verifier = Verifier(work.repository, machinery.backend, machinery.limits, config.command_timeout_s, config.rounds)
    work.proposal = await propose(
        verifier,
        work.endpoints["proposer"],
        machinery.tools["proposer"],
        config.num_commands,
        lambda text: progress(f"proposer, {text}"),
    )
    if work.proposal.trouble:
        return work.proposal.trouble
    work.chosen = choose(work.proposal.commands, config.num_chosen, machinery.seed, work.repository.sha256)
    work.installation = await install(
        verifier,
        work.endpoints["installer"],
        machinery.tools["installer"],
        work.chosen,
        config.tries,
        lambda text: progress(f"installer, {text}"),
    )
    return work.installation.trouble


async def _write(work: _Work, machinery: Machinery, ended: Ended, reason: str) -> None:
    installation, proposal = work.installation, work.proposal
    transcripts = {}
    if proposal is not None:
        transcripts["proposer"] = proposal.messages
    if installation is not None:
        transcripts["installer"] = installation.messages
    snapshot = installation.snapshot if ended is Ended.INSTALLED and installation is not None else None
    await machinery.output.write(
        INSTALLED if snapshot else DROPPED,
        work.repository.name,
        _record(work, machinery, ended, reason),
        script=installation.script if installation is not None else "",
        files=work.repository.files if snapshot else None,
        transcripts=transcripts,
        snapshot=(machinery.backend, snapshot) if snapshot else None,
    )


def _record(work: _Work, machinery: Machinery, ended: Ended, reason: str) -> dict[str, Any]:
    repository, proposal, installation = work.repository, work.proposal, work.installation
    tries = installation.tries if installation is not None else []
    passed = tries[-1].declared if tries and tries[-1].verdict.ok else None
    chosen = {command.command for command in work.chosen}
    agents = {
        agent: work_done.agent if work_done is not None else work.endpoints[agent].to_dict()
        for agent, work_done in (("proposer", proposal), ("installer", installation))
    }
    return {
        "outcome": str(ended),
        "reason": reason,
        "repository": {
            "source": repository.source,
            "commit": repository.commit,
            "sha256": repository.sha256,
            "num_files": len(repository.files),
            "left_out": list(repository.left_out),
        },
        "models": _models(work),
        "sandbox": {
            "backend": machinery.backend_target,
            "image": installation.snapshot.image if installation and installation.snapshot else "",
            "workdir": installation.workdir if installation else "",
        },
        "variables": dict(passed.variables) if passed else {},
        "mocks": dict(passed.mocks) if passed else {},
        "generated": list(passed.generated) if passed else [],
        "commands": [
            {
                **command.to_dict(),
                "chosen": command.command in chosen,
                "verified": command.command in chosen and bool(passed),
            }
            for command in (proposal.commands if proposal else [])
        ],
        "refused": proposal.refused if proposal else [],
        "tries": [_try(number, one) for number, one in enumerate(tries, 1)],
        "replay": _replay(installation),
        "agents": agents,
        "seed": machinery.seed,
        "rounds": machinery.config.rounds,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(work.started)),
        "seconds": round(time.time() - work.started, 1),
        "versions": {"composer": __version__, "python": platform.python_version()},
    }


def _models(work: _Work) -> str:
    """What can be said of who made it: never more than is known."""
    kinds = {agent: endpoint.kind() for agent, endpoint in work.endpoints.items() if endpoint.names}
    if len(set(kinds.values())) == 1:
        return next(iter(kinds.values()))
    return "; ".join(f"{agent}: {kind}" for agent, kind in kinds.items()) or "none has answered"


def _try(number: int, one: Try) -> dict[str, Any]:
    return {
        "number": number,
        "ok": one.verdict.ok,
        "lacked": one.verdict.summary(),
        "mocks": dict(one.declared.mocks),
        "num_steps": one.num_steps,
        "seconds": round(one.verdict.seconds, 1),
    }


def _replay(installation: Installation | None) -> str:
    if installation is None or installation.snapshot is None:
        return ""
    return f"snapshot only: {installation.replay}" if installation.replay else "same verdict"
