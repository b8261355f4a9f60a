"""Ways around the policy that were tried elsewhere, one a test, on each backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from envs.egress import client, names
from tests.integration.envs.egress.upstream import CHUNKED, Upstream
from tests.integration.envs.egress.world import DENIED, SECRET, egress, lines, raw, status

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


