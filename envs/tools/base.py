"""What all tools share: arguments are checked against the tool's JSON schema before it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator

from composer.contract import Sandbox, ToolResult


def text(description: str) -> dict[str, Any]:
    """JSON schema of a non-empty string without NUL, which no path and no command may hold."""
    return {"type": "string", "minLength": 1, "pattern": "^[^\\u0000]*$", "description": description}


def parameters(**properties: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of an object whose `properties` are all required and the only ones allowed."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class CheckedTool(ABC):
    """A tool whose `run` sees only arguments that fit `parameters`; all others are answered with what is wrong.

    Attributes:
        name: what the model calls.
        description: one sentence for the model.
        parameters: JSON schema of the arguments.
    """

    name: str
    description: str
    parameters: dict[str, Any]

    @cached_property
    def _validator(self) -> Draft202012Validator:
        return Draft202012Validator(self.parameters)

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Check the arguments, then run; see `composer.contract.Tool`."""
        for error in self._validator.iter_errors(dict(arguments)):
            where = f"{'.'.join(map(str, error.path))}: " if error.path else ""
            return ToolResult(f"error: {where}{error.message[:200]}", ok=False)
        return await self.run(arguments, sandbox)

    @abstractmethod
    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Do the work.

        Raises:
            SandboxError: the sandbox failed.
        """


def refuse(reason: str) -> ToolResult:
    """A result that tells the model why nothing was done."""
    return ToolResult(f"error: {reason}", ok=False)
