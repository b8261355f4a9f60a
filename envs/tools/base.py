"""What all tools share: a name, a description, and arguments that are checked against a JSON schema before it runs.

An env chooses what its model sees: `name` and `description` of every tool may differ from the product's, and `strict`
says how a tool treats a model that is nearly right. A strict tool refuses arguments that it does not know; a lenient
one ignores them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator

from composer.contract import Sandbox, ToolResult

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""What the APIs of model vendors take as the name of a function."""


def text(description: str, max_length: int = 0) -> dict[str, Any]:
    """JSON schema of a non-empty string without NUL, which no path and no command may hold.

    Args:
        description: for the model.
        max_length: in characters; 0: as long as it likes.
    """
    schema = {"type": "string", "minLength": 1, "pattern": "^[^\\u0000]*$", "description": description}
    return schema | ({"maxLength": max_length} if max_length else {})


def integer(description: str, minimum: int = 1) -> dict[str, Any]:
    """JSON schema of a whole number from `minimum` on."""
    return {"type": "integer", "minimum": minimum, "description": description}


def boolean(description: str) -> dict[str, Any]:
    """JSON schema of true or false."""
    return {"type": "boolean", "description": description}


def parameters(**properties: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of an object whose `properties` are all required and the only ones allowed."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def with_optional(schema: dict[str, Any], **properties: dict[str, Any]) -> dict[str, Any]:
    """`schema`, as of `parameters`, with further properties that may be left out."""
    return schema | {"properties": schema["properties"] | properties}


class CheckedTool(ABC):
    """A tool whose `run` sees only arguments that fit `parameters`; all others are answered with what is wrong.

    Attributes:
        name: what the model calls.
        description: one sentence for the model.
        parameters: JSON schema of the arguments.
        strict: refuse arguments that are not in `parameters`, instead of ignoring them.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = True

    def __init__(self, *, name: str = "", description: str = "", strict: bool = True) -> None:
        """Choose how the model sees the tool.

        Args:
            name: what the model calls; "": the tool's own.
            description: for the model; "": the tool's own.
            strict: see the class.

        Raises:
            ValueError: the name is none that a model could call.
        """
        if name and not _NAME.fullmatch(name):
            raise ValueError(f"`name` must be letters, digits, '_' and '-', 64 at most, but is {name!r} instead")
        if name:
            self.name = name
        if description:
            self.description = description
        self.strict = strict

    @cached_property
    def _validator(self) -> Draft202012Validator:
        return Draft202012Validator(self.parameters)

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Check the arguments, then run; see `composer.contract.Tool`."""
        if fault := self.fault(arguments):
            return refuse(fault)
        return await self.run(self.known(arguments), sandbox)

    def fault(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with the arguments; empty if they fit."""
        for error in self._validator.iter_errors(self.known(arguments)):
            where = f"{'.'.join(map(str, error.path))}: " if error.path else ""
            return f"{where}{error.message[:200]}"
        return ""

    def known(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that count: all of them, unless a lenient tool ignores some."""
        if self.strict or self.parameters.get("additionalProperties") is not False:
            return dict(arguments)
        return {name: value for name, value in arguments.items() if name in self.parameters["properties"]}

    @abstractmethod
    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Do the work.

        Raises:
            SandboxError: the sandbox failed.
            ToolError: something outside of the sandbox that the tool needs failed.
        """


def refuse(reason: str) -> ToolResult:
    """A result that tells the model why nothing was done."""
    return ToolResult(f"error: {reason}", ok=False)


def require_positive(**numbers: float) -> None:
    """Check arguments of a constructor.

    Raises:
        ValueError: one of them is not above 0.
    """
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"`{name}` must be above 0, but is {number} instead")
