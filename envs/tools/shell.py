"""Tool `run`: a command in the sandbox's persistent shell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer.contract import Sandbox, ToolResult
from envs.tools.base import CheckedTool, parameters, require_positive, text


class Run(CheckedTool):
    """Runs a command line; `cd` and variables last from call to call. Products call it `shell` (`name: shell`)."""

    name = "run"
    description = "Run a shell command."
    parameters = parameters(command=text("the command line"))

    def __init__(self, timeout_s: float = 30.0, *, name: str = "", description: str = "", strict: bool = True) -> None:
        """Choose the wall time of one command, in seconds.

        Raises:
            ValueError: it is not above 0, or as of `CheckedTool`.
        """
        super().__init__(name=name, description=description, strict=strict)
        require_positive(timeout_s=timeout_s)
        self.timeout_s = timeout_s

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the output, and with how the command ended if it did not end well."""
        result = await sandbox.shell(arguments["command"], timeout_s=self.timeout_s)
        lines = [result.output.decode(errors="replace").removesuffix("\n")]
        if result.timed_out:
            lines.append(f"[stopped after {self.timeout_s:g} s]")
        elif result.exit_code != 0:
            lines.append(f"[exit code {result.exit_code}]")
        return ToolResult("\n".join(line for line in lines if line), ok=not result.timed_out and result.exit_code == 0)
