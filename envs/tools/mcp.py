"""Tools of MCP servers that run inside the sandbox: the Model Context Protocol over standard input and output.

A model is told its tools before there is a sandbox, so the config names those that it gets, with their schemas:

    tools:
      show_issue:
        _target_: envs.tools.mcp.McpTool
        args:
          command: [python3, /opt/mcp/issues.py]
          tool: show_issue
          description: Show an issue.
          parameters: {type: object, properties: {number: {type: integer}}, required: [number]}

Tools with the same command share one server an episode. `McpTool.check` compares the config with what the server lists.
What a server may do wrong without voiding a reward is said in server.py. Protocol: modelcontextprotocol.io,
2025-06-18; older servers are spoken to in their own version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from composer.contract import Sandbox, ToolResult
from composer.errors import ToolError
from envs.tools.base import CheckedTool, refuse
from envs.tools.rpc import PeerError, RpcConnection, RpcError
from envs.tools.server import SandboxServer

VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Of the protocol, the preferred one first."""
_CLIENT = {"name": "composer", "version": "1.0"}
_MAX_PAGES = 100
"""Of a list of tools."""
_MAX_CONTENT = 2**17
"""Characters of a result; the harness cuts further."""
_CANCEL_S = 1.0


class McpServer(SandboxServer):
    """An MCP server in the sandbox of each episode."""

    async def greet(self, connection: RpcConnection) -> None:
        """The `initialize` handshake.

        Raises:
            PeerError: the server does not answer it, or speaks none of `VERSIONS`.
        """
        try:
            answer = await self._initialize(connection, VERSIONS[0])
        except RpcError as error:
            offered = error.data.get("supported") if isinstance(error.data, dict) else None
            common = [v for v in VERSIONS if isinstance(offered, list) and v in offered]
            if not common:
                raise
            answer = await self._initialize(connection, common[0])
        version = answer.get("protocolVersion") if isinstance(answer, dict) else None
        if version not in VERSIONS:
            raise PeerError(f"it speaks version {version!r:.40} of the protocol, and not {', '.join(VERSIONS)}")
        await connection.notify("notifications/initialized", {}, self.start_timeout_s)

    async def give_up(self, connection: RpcConnection, number: int) -> None:
        """Cancel a request.

        Raises:
            PeerError: the server does not listen.
        """
        params = {"requestId": number, "reason": "it took too long"}
        await connection.notify("notifications/cancelled", params, _CANCEL_S)

    async def tools(self, sandbox: Sandbox) -> list[dict[str, Any]]:
        """What the server lists: `name`, `inputSchema` and more of each tool.

        Raises:
            PeerError: it lists none, or something else.
            SandboxError: the sandbox failed.
        """
        found: list[dict[str, Any]] = []
        params: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            page = await self.request(sandbox, "tools/list", params)
            tools = page.get("tools") if isinstance(page, dict) else None
            if not isinstance(tools, list) or not all(isinstance(t, dict) and "name" in t for t in tools):
                raise PeerError("it lists no tools")
            found += tools
            if not (cursor := page.get("nextCursor")):
                return found
            params = {"cursor": cursor}
        raise PeerError(f"its list of tools has more than {_MAX_PAGES} pages")

    async def _initialize(self, connection: RpcConnection, version: str) -> Any:
        params = {"protocolVersion": version, "capabilities": {}, "clientInfo": _CLIENT}
        return await connection.request("initialize", params, self.start_timeout_s)


_servers: WeakValueDictionary[tuple[object, ...], McpServer] = WeakValueDictionary()


def _shared(command: Sequence[str], env: Mapping[str, str], start_timeout_s: float, timeout_s: float) -> McpServer:
    """The one server for a command: its tools are made one by one, each from its own part of the config."""
    key = (*command, None, *sorted(env.items()), start_timeout_s, timeout_s)
    if key not in _servers:
        words = [re.sub(r"[^\w.-]", "_", word.rpartition("/")[2]) for word in command if not word.startswith("-")]
        server = McpServer(
            command, name=f"mcp-{'-'.join(words)[:40]}", env=env, start_timeout_s=start_timeout_s, timeout_s=timeout_s
        )
        _servers[key] = server
        return server
    return _servers[key]


class McpTool(CheckedTool):
    """One tool of an MCP server inside the sandbox."""

    def __init__(
        self,
        command: list[str],
        tool: str,
        description: str,
        parameters: dict[str, Any],
        env: dict[str, str] | None = None,
        start_timeout_s: float = 30.0,
        timeout_s: float = 60.0,
        *,
        name: str = "",
        strict: bool = True,
    ) -> None:
        """Name the tool as the model shall know it; nothing starts yet.

        Args:
            command: the server's program and its arguments, as the sandbox knows them.
            tool: its name there.
            description: for the model.
            parameters: JSON schema of its arguments.
            env: the server's variables on top of the sandbox's own.
            start_timeout_s: wall time of the server's start.
            timeout_s: wall time of one call.
            name: what the model calls; "": as there.
            strict: refuse arguments that the schema does not have, if it forbids others; otherwise they are dropped.

        Raises:
            ValueError: the schema is none of an object, or as of `CheckedTool` or `SandboxServer`.
        """
        super().__init__(name=name or tool, description=description, strict=strict)
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            raise ValueError(f"`parameters` must be a JSON schema: {error.message[:200]}") from None
        if parameters.get("type") != "object":
            raise ValueError(f"`parameters` must be a schema of type object, but is {parameters!r:.200} instead")
        self.parameters = {"properties": {}, **parameters}
        self.tool = tool
        self.server = _shared(command, env or {}, start_timeout_s, timeout_s)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with what the server says, or with how it failed."""
        params = {"name": self.tool, "arguments": dict(arguments)}
        try:
            return _result(await self.server.request(sandbox, "tools/call", params))
        except RpcError as error:
            return refuse(str(error) or f"the tool's server answers with error {error.code}")
        except PeerError as error:
            return refuse(f"the tool's server failed: {error}")
        except RecursionError:
            return refuse("the arguments are nested too deeply")

    async def begin(self, sandbox: Sandbox) -> None:
        """Start the server before the agent can have anything to do with it.

        Raises:
            ToolError: it does not start.
            SandboxError: the sandbox failed.
        """
        await self.server.check(sandbox)

    async def check(self, sandbox: Sandbox) -> None:
        """Compare the config with the server, in a sandbox in which no model has done anything.

        Raises:
            ToolError: the server does not start, or has no such tool, or one with other arguments.
            SandboxError: the sandbox failed.
        """
        await self.server.check(sandbox)
        try:
            listed = {tool["name"]: tool for tool in await self.server.tools(sandbox)}
        except PeerError as error:
            raise ToolError(f"{self.server.name}: {error}: mend the server") from error
        if self.tool not in listed:
            raise ToolError(f"tool {self.name!r}: its server has no {self.tool!r}, but {', '.join(listed) or 'none'}")
        theirs = listed[self.tool].get("inputSchema")
        if not isinstance(theirs, dict):
            raise ToolError(f"tool {self.name!r}: its server lists it without an inputSchema: mend the server")
        for what, ours, its in (
            ("arguments", self.parameters["properties"], theirs.get("properties", {})),
            ("required arguments", self.parameters.get("required", []), theirs.get("required", [])),
        ):
            if set(ours) != set(its):
                raise ToolError(
                    f"tool {self.name!r}: {what}={sorted(ours)} in the config, but its server has {sorted(its)}: "
                    "take the server's"
                )


def _result(answer: Any) -> ToolResult:
    """What the model sees of a `tools/call` result.

    Raises:
        PeerError: it is none.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("content", []), list):
        raise PeerError("it answered what is no result of a tool")
    blocks = answer.get("content", [])
    shown = [_block(block) for block in blocks if isinstance(block, dict)]
    if not blocks and "structuredContent" in answer:
        try:
            shown = [json.dumps(answer["structuredContent"], ensure_ascii=False)]
        except RecursionError:
            raise PeerError("it answered what is nested too deeply") from None
    return ToolResult("\n".join(shown)[:_MAX_CONTENT], ok=answer.get("isError") is not True)


def _block(block: Mapping[str, Any]) -> str:
    """One block of content as text; what is no text is named."""
    resource = block.get("resource")
    text = resource.get("text") if isinstance(resource, dict) else block.get("text")
    if isinstance(text, str):
        return text
    what = [block.get("mimeType"), block.get("uri"), resource.get("uri") if isinstance(resource, dict) else None]
    return f"[{' '.join([str(block.get('type', 'content'))[:40], *(w[:200] for w in what if isinstance(w, str))])}]"
