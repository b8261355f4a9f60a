"""MCP servers in real sandboxes: a real one in plain Python, and what an agent may do to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError, ToolError
from envs.tools.mcp import McpTool

SERVER = rb"""
import json, os, sys, time

version = os.environ.get("VERSION", "2025-06-18")
count = 0
print("server starts", file=sys.stderr, flush=True)


def say(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": name, "inputSchema": schema}


def initialize(params):
    asked = params["protocolVersion"]
    if os.environ.get("PICKY") and asked != version:
        raise ValueError("Unsupported protocol version")
    return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "test", "version": "1"}}


def call(name, arguments):
    global count
    count += 1
    if name == "add":
        say({"method": "notifications/message", "params": {"level": "info", "data": "adding"}})
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
    if name == "count":
        return {"content": [{"type": "text", "text": f"{count} in {os.getcwd()}"}]}
    if name == "echo":
        return {"content": [{"type": "text", "text": arguments["text"]}]}
    if name == "fail":
        return {"content": [{"type": "text", "text": "it failed"}], "isError": True}
    if name == "sleep":
        time.sleep(arguments["seconds"])
        return {"content": [{"type": "text", "text": "slept"}]}
    if name == "die":
        os._exit(3)
    if name == "garble":
        print("Traceback (most recent call last):\n" + arguments.get("then", ""), flush=True)
        return {"content": [{"type": "text", "text": "all the same"}]}
    if name == "flood":
        print("x" * 2**21, flush=True)
    raise ValueError(f"no tool {name}")


if os.environ.get("BROKEN"):
    sys.exit("no such database")
for line in sys.stdin:
    request = json.loads(line)
    method, params, number = request["method"], request.get("params", {}), request.get("id")
    with open("log.txt", "a") as log:
        log.write(f"{method} {json.dumps(params)}\n")
    if number is None:
        continue
    try:
        if method == "initialize":
            result = initialize(params)
        elif method == "tools/list" and "cursor" not in params:
            result = {"tools": [tool("add", a={}, b={}), tool("count")], "nextCursor": "2"}
        elif method == "tools/list":
            result = {"tools": [tool("fail"), tool("sleep", seconds={}), tool("die"), tool("garble"), tool("flood")]}
        elif method == "tools/call":
            result = call(params["name"], params["arguments"])
        else:
            raise ValueError(f"no method {method}")
    except ValueError as error:
        data = {"supported": [version]}
        say({"id": number, "error": {"code": -32602, "message": str(error), "data": data}})
    else:
        say({"id": number, "result": result})
"""
NUMBER = {"type": "number"}


def tool(name: str, arguments: Sequence[str] = (), **more: Any) -> McpTool:
    schema = {"type": "object", "properties": dict.fromkeys(arguments, NUMBER), "required": list(arguments)}
    settings: dict[str, Any] = {"command": ["python3", "server.py"], "parameters": schema}
    return McpTool(tool=name, description=name, **(settings | more))


@pytest.fixture
def start(runner, backend):
    """Starts sandboxes, which are stopped afterwards."""
    started = []

    def start():
        sandbox = runner.run(backend.start({"server.py": SERVER}, SandboxLimits()))
        started.append(sandbox)
        return sandbox

    yield start
    for sandbox in started:
        runner.run(sandbox.stop())


@pytest.fixture
def call(runner):
    """Call a tool; returns what the model sees."""

    def call(tool, sandbox, **arguments):
        result = runner.run(asyncio.wait_for(tool.call(arguments, sandbox), 60))
        return result.content if result.ok else (result.content,)

    return call


def test_the_tools_of_a_server(start, call, runner):
    sandbox = start()
    add, fail, count = tool("add", ("a", "b")), tool("fail"), tool("count")
    assert call(add, sandbox, a=1, b=2) == "3"
    assert call(fail, sandbox) == ("it failed",)
    # One server an episode, which stands in the working directory; other commands run beside it.
    assert runner.run(sandbox.shell("echo beside")).output == b"beside\n"
    assert call(count, sandbox) == f"3 in {sandbox.workdir}"
    assert call(count, start()) == f"1 in {sandbox.workdir}"
    assert call(tool("unknown"), sandbox) == ("error: no tool unknown",)
    assert call(add, sandbox, a=1) == ("error: 'b' is a required property",)
    log = runner.run(sandbox.read("log.txt")).decode().split("\n")
    assert log[0].startswith('initialize {"protocolVersion": "2025-06-18"')
    assert log[1] == "notifications/initialized {}"
    assert log[2] == 'tools/call {"name": "add", "arguments": {"a": 1, "b": 2}}'


def test_older_servers_are_spoken_to_in_their_version(start, call):
    def count(**env: str) -> Any:
        return call(tool("count", (), env=env), start())

    assert count(VERSION="2024-11-05").startswith("1 in ")
    assert count(VERSION="2025-03-26", PICKY="1").startswith("1 in ")
    (said,) = count(VERSION="1999-01-01")
    assert "speaks version '1999-01-01' of the protocol" in said
    (said,) = count(VERSION="1999-01-01", PICKY="1")
    assert "Unsupported protocol version" in said


def test_what_a_server_does_wrong_is_a_result(start, call):
    sandbox, count = start(), tool("count")
    assert call(tool("die"), sandbox) == ("error: the tool's server failed: it ended",)
    # The next call starts another one, which has counted nothing.
    assert call(count, sandbox).startswith("1 in ")
    # What is no message is passed over, as other clients do.
    assert call(tool("garble"), sandbox) == "all the same"
    assert call(count, sandbox).startswith("3 in ")
    too_much = "error: the tool's server failed: it wrote a message of more than 1048576 bytes"
    assert call(tool("flood"), sandbox) == (too_much,)
    assert call(count, sandbox).startswith("1 in ")


def test_large_messages_go_both_ways(start, call):
    text = "x" * 300_000
    anything = {"type": "object"}
    assert call(tool("fail", parameters=anything), start(), padding=text) == ("it failed",)
    assert call(tool("echo", parameters=anything), start(), text=text) == text[: 2**17]


def test_a_slow_answer_is_not_waited_for(start, call, runner):
    sandbox = start()
    slow, count = tool("sleep", ("seconds",), timeout_s=1.0), tool("count", timeout_s=1.0)
    began = time.monotonic()
    assert call(slow, sandbox, seconds=2) == ("error: the tool's server failed: it did not answer within 1 s",)
    assert time.monotonic() - began < 10
    time.sleep(2)
    assert call(count, sandbox).startswith("2 in "), "the late answer is not taken for this one"
    log = runner.run(sandbox.read("log.txt")).decode()
    assert 'notifications/cancelled {"requestId": 2, "reason": "it took too long"}' in log


@pytest.mark.parametrize(
    "sabotage",
    [
        "rm server.py",
        "echo 'print(\"hello\")' > server.py",
        "echo 'import time; time.sleep(60)' > server.py",
        "echo 'while True: print()' > server.py",
        'printf \'while True: print("x" * 10**6, end="")\' > server.py',
        "mkdir server.py2; mv server.py server.py2; mkfifo server.py",
        "mkdir /tmp/mcp-python3-server.py.log",
    ],
)
def test_an_agent_that_breaks_its_server_learns_of_it(start, call, runner, sabotage):
    sandbox = start()
    runner.run(sandbox.shell(sabotage))
    began = time.monotonic()
    (said,) = call(tool("count", start_timeout_s=2.0), sandbox)
    assert said.startswith("error: the tool's server failed: it did not start: ")
    assert time.monotonic() - began < 20
    assert runner.run(sandbox.shell("echo fine")).output == b"fine\n"


def test_an_agent_that_kills_or_stops_the_server(start, call, runner):
    sandbox, count = start(), tool("count", timeout_s=2.0)
    assert call(count, sandbox).startswith("1 in ")
    runner.run(sandbox.shell("kill -STOP $(cat /tmp/mcp*/pid)"))
    assert call(count, sandbox) == ("error: the tool's server failed: it did not answer within 2 s",)
    runner.run(sandbox.shell("kill -KILL $(cat /tmp/mcp*/pid)"))
    (said,) = call(count, sandbox)
    assert said.startswith("error: the tool's server failed: it ")
    assert call(count, sandbox).startswith("1 in ")
    runner.run(sandbox.shell("kill -KILL $(cat /tmp/mcp*/pid); rm -rf /tmp/mcp*"))
    assert call(count, sandbox) == ("error: the tool's server failed: it ended",)
    assert call(count, sandbox).startswith("1 in ")
    # One that does not answer twice in a row is started anew: here nobody is at the other end of its pipe.
    runner.run(sandbox.shell("rm /tmp/mcp*/out; mkfifo $(ls -d /tmp/mcp*/)out"))
    late = ("error: the tool's server failed: it did not answer within 2 s",)
    assert [call(count, sandbox) for _ in range(2)] == [late, late]
    assert call(count, sandbox).startswith("1 in ")
    # A command that is killed at its deadline takes no server along.
    assert runner.run(sandbox.shell("sleep 60", timeout_s=0.3)).timed_out
    assert call(count, sandbox).startswith("2 in ")


def test_it_ends_with_the_sandbox(start, call, runner):
    sandbox, count = start(), tool("count")
    assert call(count, sandbox).startswith("1 in ")
    runner.run(sandbox.stop())
    with pytest.raises(SandboxError, match="is gone"):
        call(count, sandbox)


def test_a_sandbox_that_ends_under_a_call_is_no_result(start, runner):
    sandbox, slow = start(), tool("sleep", ("seconds",))

    async def work():
        asking = asyncio.ensure_future(slow.call({"seconds": 30}, sandbox))
        await asyncio.sleep(1)
        await sandbox.stop()
        with pytest.raises(SandboxError, match="is gone: it was stopped"):
            await asking

    runner.run(asyncio.wait_for(work(), 20))


def test_a_call_that_is_cancelled_leaves_nothing(start, runner):
    sandbox, slow = start(), tool("sleep", ("seconds",))

    async def work():
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await slow.call({"seconds": 30}, sandbox)
        assert time.monotonic() - began < 10
        assert [task for task in asyncio.all_tasks() if "exec" in repr(task)] == []

    runner.run(asyncio.wait_for(work(), 20))


def test_what_a_config_gets_wrong_is_an_error_before_the_run(start, runner):
    def check(made: McpTool) -> None:
        runner.run(asyncio.wait_for(made.check(start()), 60))

    check(tool("add", ("a", "b")))
    check(tool("sleep", ("seconds",)))
    with pytest.raises(ToolError, match="its server has no 'subtract', but add, count, fail, sleep, die, "):
        check(tool("subtract"))
    with pytest.raises(ToolError, match=r"arguments=\['a'\] in the config, but its server has \['a', 'b'\]"):
        check(tool("add", ("a",)))
    with pytest.raises(ToolError, match="could not be started: nowhere: not found"):
        check(tool("add", command=["nowhere"]))
    with pytest.raises(ToolError, match="it said: .*server starts\nno such database"):
        check(tool("add", env={"BROKEN": "1"}))
