"""`composer look`: the files that an agent ended with, in a sandbox as the agent had it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from composer.contract import Sandbox, SandboxBackend, SandboxLimits
from composer.errors import ConfigError, MachineError, SandboxError, SandboxStartError
from composer.instantiate import instantiate
from composer.rollout.episode import EnvSettings
from composer.schema import Config
from composer.terminal import printable


def look(config: Config) -> int:
    """Start a sandbox from `look.state`, and run `look.command` in it, or what is typed.

    Returns:
        The command's exit code; 0 for what was typed.

    Raises:
        ConfigError: no state was named, or the file is none of this env's backend.
        SandboxError: the sandbox failed.
        MachineError: it cannot start here.
    """
    if not config.look.state:
        raise ConfigError("look.state", config.look.state, "name a file in <run dir>/episodes/<stage>/states")
    limits = EnvSettings.from_config(config.env, config.generator.max_model_len).limits
    backend: SandboxBackend = instantiate(config.env.sandbox, config.plugins, key="env.sandbox", run_label="look")
    try:
        return asyncio.run(_look(backend, Path(config.look.state).expanduser(), config.look.command, limits))
    except SandboxStartError as error:
        raise MachineError(f"{error}; `composer doctor` says what this machine lacks") from error


async def _look(backend: SandboxBackend, path: Path, command: str, limits: SandboxLimits) -> int:
    try:
        try:
            snapshot = await backend.load(path)
        except (OSError, SandboxError) as error:
            if isinstance(error, SandboxStartError):
                raise
            why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise ConfigError("look.state", str(path), f"cannot be opened ({why}): name a state of this env") from error
        sandbox = await backend.start({}, limits, base=snapshot)
        if command:
            return await _run(sandbox, command)
        if sys.stdin.isatty():
            print(f"{sandbox.workdir}: type command lines; end with Ctrl-D", file=sys.stderr)
        while line := await asyncio.to_thread(_typed):
            await _run(sandbox, line)
        return 0
    finally:
        await backend.close()


def _typed() -> str:
    if sys.stdin.isatty():
        print("$ ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


async def _run(sandbox: Sandbox, command: str) -> int:
    result = await sandbox.shell(command)
    output = result.output.decode(errors="replace")
    # A terminal obeys what it is shown; a file or a pipe gets every byte.
    sys.stdout.write(printable(output.replace("\r\n", "\n")) if sys.stdout.isatty() else output)
    sys.stdout.flush()
    return result.exit_code
