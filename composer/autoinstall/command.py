"""`composer autoinstall`: makes environments of repositories, a line each with what became of it."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections import Counter
from pathlib import Path

from composer.autoinstall.pipeline import Ended, Machinery, Result, autoinstall
from composer.autoinstall.record import Output
from composer.contract import SandboxBackend, SandboxLimits, Tool
from composer.endpoints import check_endpoint
from composer.errors import ConfigError
from composer.instantiate import GIVEN, check_target, instantiate
from composer.schema import Config
from composer.streams import say

EXIT_UNFINISHED = 1


def autoinstall_all(config: Config) -> int:
    """Make an environment of each of `autoinstall.repositories`; those that were finished before are only reported.

    Returns:
        0 if every one is installed or dropped, 1 if one has to be tried again.

    Raises:
        ConfigError: there is no repository, a tool is not there, an agent has no address or key, a limit is too large.
        MachineError: the output cannot be written.
    """
    if not config.autoinstall.repositories:
        raise ConfigError("autoinstall.repositories", [], "name a folder, a *.bundle or a git URL")
    _check_limits(config)
    tools = {agent: _tools(config, agent) for agent in ("proposer", "installer")}
    for agent in tools:
        check_endpoint(f"autoinstall.{agent}.url", getattr(config.autoinstall, agent).url)
    with Output(Path(config.autoinstall.output).expanduser().absolute()).opened() as output:
        results = asyncio.run(_all(config, tools, output))
    counts = Counter(result.ended for result in results)
    say(", ".join(f"{counts[ended]} {ended}" for ended in Ended if counts[ended]) + f": {output.folder}")
    return 0 if all(r.ended in (Ended.INSTALLED, Ended.DROPPED) for r in results) else EXIT_UNFINISHED


def _check_limits(config: Config) -> None:
    limits, target = config.autoinstall.limits, config.env.sandbox
    backend = check_target(target, config.plugins, key="env.sandbox", given=GIVEN["env.sandbox"])
    if getattr(backend, "files_in_memory", False) and limits.disk_bytes > limits.memory_bytes // 2:
        most = f"autoinstall.limits.memory_bytes ({limits.memory_bytes}), {limits.memory_bytes // 2}"
        remedy = f"files lie in memory, with what runs: at most half of {most}"
        raise ConfigError("autoinstall.limits.disk_bytes", limits.disk_bytes, remedy)


def _tools(config: Config, agent: str) -> list[Tool]:
    names, offered = getattr(config.autoinstall, agent).tools, config.env.tools
    if missing := [name for name in names if name not in offered]:
        remedy = f"is none of env.tools ({', '.join(offered)}): choose another env, such as env=coding, or leave it out"
        raise ConfigError(f"autoinstall.{agent}.tools", missing[0], remedy)
    return [instantiate(offered[name], config.plugins, key=f"env.tools.{name}") for name in names]


async def _all(config: Config, tools: dict[str, list[Tool]], output: Output) -> list[Result]:
    settings = config.autoinstall
    backend: SandboxBackend = instantiate(
        config.env.sandbox, config.plugins, key="env.sandbox", run_label="autoinstall"
    )
    limits = SandboxLimits(**dataclasses.asdict(settings.limits), network=True)
    machinery = Machinery(settings, config.seed, backend, config.env.sandbox._target_, limits, tools, output)
    slots, start = asyncio.Semaphore(settings.concurrency), time.monotonic()

    async def one(source: str) -> Result:
        async with slots:

            def progress(text: str) -> None:
                say(f"{time.monotonic() - start:6.0f} s  {source}: {text}", sys.stderr)

            result = await autoinstall(source, machinery, progress)
        again = " (before)" if result.again else ""
        say(f"{source}: {result.ended}{again}, {result.reason}")
        return result

    try:
        backend.sweep()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(source)) for source in dict.fromkeys(settings.repositories)]
        return [task.result() for task in running]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await backend.close()
