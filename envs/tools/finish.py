"""Tool `finish`: the model hands in its work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer.contract import Sandbox, ToolResult
from envs.tools.base import CheckedTool, parameters


class Finish(CheckedTool):
    """Ends the episode; what is in the sandbox then is graded."""

    name = "finish"
    description = "Hand in the work."
    parameters = parameters()

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """End the episode."""
        return ToolResult("", ends_episode=True)
