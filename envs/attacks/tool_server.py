"""The MCP server that attacks tamper with: it adds two numbers."""

from __future__ import annotations

from envs.tools.mcp import McpTool

SERVER = "server.py"
ADDER = b"""\
import json, sys

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "adder"}}
    else:
        given = asked["params"]["arguments"]
        result = {"content": [{"type": "text", "text": str(given["a"] + given["b"])}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def adder() -> McpTool:
    """Its tool, which does not wait long."""
    number = {"type": "number"}
    return McpTool(
        command=["python3", SERVER],
        tool="add",
        description="Add two numbers.",
        parameters={"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]},
        start_timeout_s=10.0,
        timeout_s=3.0,
    )
