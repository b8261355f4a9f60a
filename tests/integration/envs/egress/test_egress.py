"""What sandboxes of each backend reach under a policy, what they do not, and what the log says of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer.contract import SandboxLimits
from tests.integration.envs.egress.upstream import CHUNKED, Upstream
from tests.integration.envs.egress.world import DENIED, SECRET, egress, lines, status

# --- What is allowed just works ---------------------------------------------------------------------------------------


def test_curl_and_python_reach_an_allowed_host(sh: Callable, upstream: Upstream) -> None:
    assert sh("curl -sS https://open.test/a?b=c") == (0, "hello from open.test\n")
    program = "import urllib.request as u; print(u.urlopen('https://open.test/p').read().decode(), end='')"
    assert sh(f'python3 -c "{program}"') == (0, "hello from open.test\n")
    assert upstream.arrived() == ["open.test/a?b=c", "open.test/p"]


def test_node_reaches_it(sh: Callable) -> None:
    if sh("command -v node")[0]:
        pytest.skip("no node in the sandbox")
    program = "require('https').get('https://open.test/n', r => r.on('data', d => process.stdout.write(d)))"
    assert sh(f'node -e "{program}"') == (0, "hello from open.test\n")


def test_no_variable_names_a_proxy(sh: Callable) -> None:
    assert sh("env | grep -i proxy")[0] == 1
    assert (
        "Northgate Systems Ltd"
        in sh("openssl storeutl -noout -text -certs /etc/ssl/certs/ca-certificates.crt | grep Northgate")[1]
    )
    assert sh("grep -rl mitmproxy /etc /home 2>/dev/null")[1] == ""


def test_a_name_below_a_suffix_is_allowed_and_the_suffix_itself_is_not(sh: Callable) -> None:
    assert status(sh, "https://a.sub.test/") == "200"
    assert status(sh, "https://sub.test/") == "403"


# --- Rules ------------------------------------------------------------------------------------------------------------


def test_what_no_rule_allows_is_denied_in_plain_words(sh: Callable, upstream: Upstream, log: Path) -> None:
    code, text = sh("curl -sS -i https://elsewhere.test/x")
    assert code == 0
    assert text.startswith("HTTP/1.1 403 ") and "Content-Type: text/plain" in text
    assert text.endswith("not allowed by the network policy.\n")
    assert "mitm" not in text.lower()
    assert upstream.arrived() == []
    last = lines(log)[-1]
    assert (last["url"], last["verdict"], last["reason"], last["rule"]) == (
        "https://elsewhere.test/x",
        "denied",
        "default",
        None,
    )


def test_methods_and_paths_decide(sh: Callable, upstream: Upstream) -> None:
    assert status(sh, "https://api.test/v1/x") == "200"
    assert status(sh, "-d a=1 https://api.test/v1/x") == "200"
    assert status(sh, "-X DELETE https://api.test/v1/x") == "403"
    assert status(sh, "https://api.test/v2/x") == "403"
    assert status(sh, "https://api.test/v1/private/x") == "403"
    assert status(sh, "-d a=1 https://open.test/") == "403"
    assert upstream.arrived() == ["api.test/v1/x"] * 2


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../v2/x",
        "/v1/%2e%2e/v2/x",
        "/v1/..%2fv2/x",
        "/v1/%252e%252e/v2",
        "/v1//../private",
        "/v1/%70rivate/x",
        "/v1/a%5c..%5cb",
    ],
)
def test_a_path_cannot_be_dressed_up(sh: Callable, upstream: Upstream, path: str) -> None:
    assert status(sh, f"--path-as-is 'https://api.test{path}'") == "403"
    assert upstream.arrived() == []


def test_sensitive_headers_stay_behind_and_secrets_are_added_outside(
    sh: Callable, upstream: Upstream, log: Path
) -> None:
    secrets = "-H 'Authorization: mine' -H 'COOKIE: a=b' -H 'x-api-key: k' -H 'X-Kept: yes'"
    assert status(sh, f"{secrets} https://open.test/") == "200"
    ((_, _, headers),) = upstream.requests
    assert headers["x-kept"] == "yes"
    assert not {"authorization", "cookie", "x-api-key"} & set(headers)
    upstream.requests.clear()
    assert status(sh, "-H 'Authorization: mine' https://secret.test/") == "200"
    assert upstream.requests[0][2]["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in sh("env; cat /proc/*/environ 2>/dev/null; curl -sS -i https://secret.test/")[1]
    assert SECRET not in "".join(file.read_text() for file in log.iterdir())
    # Nothing readable goes out with it.
    upstream.requests.clear()
    sh("curl -sS -m 5 http://secret.test/")
    assert upstream.requests == []


def test_the_log_has_a_line_a_request_and_no_values(sh: Callable, log: Path) -> None:
    before = len(lines(log))
    sh("curl -sS -H 'X-Mine: hidden1' 'https://open.test/q?token=hidden2&page=7'")
    (entry,) = lines(log)[before:]
    assert entry["url"] == "https://open.test/q?token=<7>&page=<1>"
    assert (entry["method"], entry["verdict"], entry["status"], entry["rule"]) == ("GET", "allowed", 200, 0)
    assert entry["bytes_received"] == len("hello from open.test\n")
    assert entry["sandbox"].startswith("egress/")
    assert 0 <= entry["seconds"] < 10
    assert "hidden" not in json.dumps(entry)


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_quotas_hold(kind: str, upstream: Upstream, log: Path, runner: asyncio.Runner, make: Callable) -> None:
    more = {"requests": 4, "body_bytes": 1000, "total_bytes": 2000, "timeout_s": 2.0}
    backend = make(f"quota-{kind}", egress(upstream, log, **more))
    upstream.page("open.test/large", b"x" * 1001, "text/plain")
    upstream.page("open.test/endless", b"x" * 1001, CHUNKED)
    upstream.page("open.test/fits", b"x" * 1000, CHUNKED)
    get = "curl -sS -m 10 -o /dev/null -w '%{http_code} %{size_download}\n' https://open.test/"

    async def use() -> tuple[list[str], list[str], str]:
        # The first three at once: they wait for one and the same proxy.
        one, two, three = await asyncio.gather(*(backend.start({}, SandboxLimits(network=True)) for _ in range(3)))
        found = []
        for sandbox, pages in ((one, ["", "large", "endless", "", ""]), (two, ["fits", "fits", "fits", "fits"])):
            results = [await sandbox.shell(get + page) for page in pages]
            found.append([result.output.decode().strip().splitlines()[-1] for result in results])
        began = time.monotonic()
        await three.shell("python3 -c \"import socket; socket.create_connection(('open.test', 443)).recv(1)\"")
        assert 1 < time.monotonic() - began < 8  # a connection on which nothing happens
        return found[0], found[1], one.id

    one, two, first = runner.run(use())
    endless = one.pop(2)
    assert int(endless.split()[1]) < 1001  # broken off, whether its headers had come through or not
    assert [line.split()[0] for line in one] == ["200", "000", "200", "429"]  # by number
    assert two[:2] == ["200 1000"] * 2 and two[2].endswith(" 0") and two[3].startswith("429 ")  # by bytes
    assert [line["reason"] for line in lines(log) if line["sandbox"] == first][2:] == [
        "limit",
        "allowed",
        "limit",
    ]


# --- Several sandboxes, ends and outages ------------------------------------------------------------------------------


def test_two_sandboxes_do_not_see_each_other(backend: Any, runner: asyncio.Runner, log: Path) -> None:
    async def use() -> tuple[bytes, bytes]:
        one, two = await asyncio.gather(*(backend.start({}, SandboxLimits(network=True)) for _ in range(2)))
        await one.shell("python3 -m http.server 8000 --bind 0.0.0.0 >/dev/null 2>&1 & sleep 1")
        own = await one.shell("curl -sS -m 3 -o /dev/null -w '%{http_code}' http://127.0.0.1:8000/")
        other = await two.shell("for h in 127.0.0.1 10.0.2.15 open.test; do curl -sS -m 2 http://$h:8000/ 2>&1; done")
        await asyncio.gather(one.shell("curl -sS https://open.test/one"), two.shell("curl -sS https://open.test/two"))
        asked = {line["url"]: line["sandbox"] for line in lines(log)}
        assert asked["https://open.test/one"] == one.id
        assert asked["https://open.test/two"] == two.id
        await one.stop()
        await two.stop()
        return own.output, other.output

    own, other = runner.run(use())
    assert own == b"200"
    assert other.count(b"curl: (7)") == 3


def test_a_fork_of_a_sandbox_has_a_network_of_its_own(sandbox: Any, runner: asyncio.Runner) -> None:
    async def use() -> bytes:
        fork = await sandbox.fork()
        result = await fork.shell("curl -sS https://open.test/")
        await fork.stop()
        return result.output

    assert runner.run(use()) == b"hello from open.test\n"


def test_the_owner_hears_how_much_was_denied(backend: Any, runner: asyncio.Runner) -> None:
    async def use() -> dict[str, int]:
        sandbox = await backend.start({}, SandboxLimits(network=True))
        await sandbox.shell("curl -sS https://open.test/; curl -sS https://no.test/; curl -sS https://no.test/2")
        await sandbox.stop()
        assert backend.proxy is not None
        async with asyncio.timeout(5):
            while not (counts := backend.proxy.counts.get(sandbox.id.rpartition("/")[2])):
                await asyncio.sleep(0.02)
        return counts

    counts = runner.run(use())
    assert (counts["requests"], counts["denied"], counts["failed"], counts["outages"]) == (3, 2, 0, 0)
    assert counts["bytes"] == len("hello from open.test\n") + 2 * len(DENIED)


def test_many_requests_at_a_time(sandbox: Any, runner: asyncio.Runner) -> None:
    command = "for i in $(seq 40); do curl -sS -m 20 https://open.test/$i & done; wait"
    assert runner.run(sandbox.shell(command, 30)).output.count(b"hello from open.test") == 40
    assert threading.active_count() < 100


# --- Whose the network is ---------------------------------------------------------------------------------------------


def test_graders_and_checks_have_none(backend: Any, runner: asyncio.Runner, upstream: Upstream) -> None:
    async def use() -> bytes:
        sandbox = await backend.start({}, SandboxLimits())
        result = await sandbox.shell("curl -sS -m 3 https://open.test/ 2>&1; curl -sS -m 3 https://1.1.1.1/ 2>&1")
        await sandbox.stop()
        return result.output

    upstream.requests.clear()
    output = runner.run(use())
    assert output.startswith(b"curl: (6)") and b"curl: (7)" in output, output
    assert upstream.arrived() == []


def test_graders_have_one_where_the_policy_says_so(
    make: Callable, runner: asyncio.Runner, upstream: Upstream, log: Path
) -> None:
    backend = make("graders", egress(upstream, log, graders=True))

    async def use() -> bytes:
        sandbox = await backend.start({}, SandboxLimits())
        return (await sandbox.shell("curl -sS -m 3 https://open.test/ 2>&1")).output

    assert runner.run(use()) == b"hello from open.test\n"


def test_a_container_gains_no_right_by_it(kind: str, backend: Any, sandbox: Any, sh: Callable) -> None:
    values = dict(line.split(":\t", 1) for line in sh("cat /proc/self/status")[1].splitlines() if ":\t" in line)
    assert [int(values[name], 16) for name in ("CapPrm", "CapEff", "CapAmb", "CapInh")] == [0] * 4
    assert (values["NoNewPrivs"].strip(), values["Seccomp"].strip()) == ("1", "2")
    if kind != "docker":
        return
    inspected = backend._engine.call_now("look", lambda client: client.inspect_container(sandbox.name))["HostConfig"]
    assert (inspected["CapAdd"], inspected["CapDrop"]) == (["CAP_KILL"], ["ALL"]) or inspected["CapAdd"] == ["KILL"]
    assert (inspected["NetworkMode"], inspected["Privileged"], inspected["Binds"]) == ("none", False, None)
    relay = backend._engine.call_now("look", lambda client: client.top(f"{sandbox.name}-net", "-eo pid,user,args"))
    owners = {row[relay["Titles"].index("USER")] for row in relay["Processes"]}
    assert owners <= {"nobody", "65534"}, relay
