"""The proxy's process: mitmproxy with our rules. Runs in the environment that the set-up makes for it.

    owner (the backend's process: client.py)
    `- this process, which ends when its owner does
         control socket: `attach` from supervisors, with the sandbox's sockets; `detach` from the owner; counts to it
         forward.py takes the sandboxes' connections  ->  SOCKS5 on loopback  ->  mitmproxy  ->  the network

Names are resolved here and nowhere else, in the event loop: every connection that mitmproxy opens asks it for the
address, so that no answer of DNS can lead to this machine or its network after the rules have been asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from mitmproxy import certs, http, options, version
from mitmproxy.tools.dump import DumpMaster

from envs.egress import indexes, journal, names, policy
from envs.egress.forward import Gate, Settings

_KEY_BITS = 2048
_CONTROL_BYTES = 2**16
_SYSTEM_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_DENIED = b"403 Forbidden: this request is not allowed by the network policy.\n"
_LIMITED = b"429 Too Many Requests: the quota of this machine is used up.\n"


class AddressError(OSError):
    """A name leads to an address that no rule lets it have."""


class Loop(asyncio.SelectorEventLoop):
    """Resolves names as the policy says."""

    def __init__(self, rules: policy.Policy) -> None:
        """Of one proxy."""
        super().__init__()
        self._where = {host: policy.split_address(text) for host, text in (rules.addresses or {}).items()}
        self.private = frozenset(rule.host for rule in rules.rules if rule.private)

    async def getaddrinfo(self, host: Any, port: Any, **settings: Any) -> Any:
        """Also what `create_connection` asks.

        Raises:
            AddressError: one of the addresses is not of the open internet, and no rule of this host says `private`.
            OSError: there is none.
        """
        if isinstance(host, bytes):
            host = host.decode()
        if where := self._where.get(host):
            address, mapped = where
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, mapped or port))]
        found = await super().getaddrinfo(host, port, **settings)
        if host not in self.private and not all(policy.is_public(str(each[4][0])) for each in found):
            raise AddressError(f"{host} leads to an address of this machine's own network")
        return found


class Sandbox:
    """What one sandbox has used so far."""

    def __init__(self) -> None:
        """Nothing."""
        self.counts = {"requests": 0, "denied": 0, "failed": 0, "bytes": 0}


class Rules:
    """The addon: decides about every request, and about what comes back."""

    def __init__(
        self, rules: policy.Policy, headers: dict[str, str], log: journal.Journal, label: str, gates: Settings
    ) -> None:
        """Of one proxy.

        Args:
            rules: the policy.
            headers: values of the rules' added headers, by the name of their variable.
            log: of requests.
            label: of the run, which goes before a sandbox's name in the log.
            gates: their connections, some of which are broken off.
        """
        self._policy, self._headers, self._log, self._label, self._gates = rules, headers, log, label, gates
        self.password = secrets.token_hex(16)
        self.sandboxes: dict[str, Sandbox] = {}
        self._names: dict[str, str] = {}
        """Sandbox by mitmproxy's id of the connection."""
        self._files = indexes.Files()
        self._dropped = {name.lower() for name in rules.dropped_headers}

    def socks5_auth(self, data: Any) -> None:
        """Take connections from gates alone: any user of the machine could make one to this port."""
        known = data.username in self.sandboxes and secrets.compare_digest(data.password, self.password)
        data.valid = known
        if known:
            self._names[data.client_conn.id] = data.username

    def client_disconnected(self, client: Any) -> None:
        """Forget whose the connection was."""
        self._names.pop(client.id, None)

    async def request(self, flow: http.HTTPFlow) -> None:
        """Decide; what is allowed is freed of headers that have to stay here."""
        name = self._names.get(flow.client_conn.id, "")
        sandbox = self.sandboxes.get(name)
        request = flow.request
        address, port = request.host, request.port
        host = _host_of(flow)
        flow.metadata["egress"] = {"sandbox": name, "began": time.time(), "host": host or address, "target": request.path}
        if sandbox is None:
            flow.kill()
            return
        sandbox.counts["requests"] += 1
        verdict = await self._judge(flow, sandbox, host, address, port)
        flow.metadata["egress"]["verdict"] = verdict
        if not verdict.is_allowed:
            sandbox.counts["denied"] += 1
            text, status = (_LIMITED, 429) if verdict.reason == "limit" else (_DENIED, 403)
            flow.response = http.Response.make(status, text, {"Content-Type": "text/plain; charset=utf-8"})
            return
        assert verdict.rule is not None
        request.host = host  # mitmproxy connects to the name, and asks for its certificate
        request.port = port
        request.host_header = host
        request.authority = ""
        for header in [header for header in request.headers if header.lower() in self._dropped]:
            del request.headers[header]
        self._prepare(flow, self._policy.rules[verdict.rule])

    async def _judge(
        self, flow: http.HTTPFlow, sandbox: Sandbox, host: str, address: str, port: int
    ) -> policy.Verdict:
        request = flow.request
        if sandbox.counts["requests"] > self._policy.requests or sandbox.counts["bytes"] > self._policy.total_bytes:
            return policy.Verdict(False, "limit")
        # Who speaks TLS to port 443 alone: a key that a rule adds must not go out readable.
        is_https = flow.client_conn.tls_established
        if is_https != (port == 443) or request.method == "CONNECT" or "upgrade" in request.headers:
            return policy.Verdict(False, "protocol")
        if not host or (address != host if policy.is_address(host) else address != names.address_of(host)):
            return policy.Verdict(False, "host")
        if is_https and (flow.client_conn.sni or "") != ("" if policy.is_address(host) else host):
            return policy.Verdict(False, "host")
        verdict = policy.decide(self._policy, request.method, host, request.path)
        if not verdict.is_allowed or verdict.rule is None:
            return verdict
        rule = self._policy.rules[verdict.rule]
        if rule.index and not self._is_dated(rule, request.scheme, host, request.path):
            return policy.Verdict(False, "index", verdict.rule)
        if policy.is_address(host):
            if not rule.private and not policy.is_public(host):
                return policy.Verdict(False, "address", verdict.rule)
        else:
            try:
                await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except AddressError:
                return policy.Verdict(False, "address", verdict.rule)
            except OSError:
                pass  # an outage: mitmproxy will meet it again
        return verdict

    def _is_dated(self, rule: policy.Rule, scheme: str, host: str, target: str) -> bool:
        path = policy.plain_path(target) or ""
        kind = indexes.kind_of(rule.index, path)
        date = rule.before or self._policy.before
        return kind == "answer" or (
            kind == "file" and self._files.is_from_before(f"{scheme}://{host}{target}", date)
        )

    def _prepare(self, flow: http.HTTPFlow, rule: policy.Rule) -> None:
        headers = flow.request.headers
        if rule.header and flow.request.scheme == "https":
            headers[rule.header] = self._headers[rule.header_env]
        if not rule.index or indexes.kind_of(rule.index, policy.plain_path(flow.request.path) or "") != "answer":
            return
        # A whole answer, in a form that has dates and can be read here.
        flow.metadata["egress"]["index"] = (rule.index, rule.before or self._policy.before, headers.get("accept", ""))
        for name in ("if-none-match", "if-modified-since", "range", "if-range"):
            headers.pop(name, None)
        headers["accept"] = indexes.accepted(rule.index)
        headers["accept-encoding"] = "gzip, identity"

    def response(self, flow: http.HTTPFlow) -> None:
        """Bring indexes' answers back to their date; write down what became of the request."""
        entry = flow.metadata.get("egress")
        response = flow.response
        if entry is None or response is None:
            return
        if (index := entry.get("index")) and flow.request.method != "HEAD" and response.status_code == 200:
            kind, date, wanted = index
            url = f"{flow.request.scheme}://{entry['host']}{flow.request.path}"
            try:
                body, content_type = indexes.bring_back(
                    kind, url, response.get_content(strict=True) or b"", date, self._files, wanted
                )
            except ValueError:
                entry["verdict"] = policy.Verdict(False, "index", entry["verdict"].rule)
                flow.response = http.Response.make(403, _DENIED, {"Content-Type": "text/plain; charset=utf-8"})
            else:
                for name in ("etag", "last-modified", "content-encoding", "x-pypi-last-serial", "digest"):
                    response.headers.pop(name, None)
                response.content = body
                response.headers["content-type"] = content_type
        self._finish(flow, entry, "denied" if not entry["verdict"].is_allowed else "allowed")

    def error(self, flow: http.HTTPFlow) -> None:
        """The other side failed, or the program hung up: no page of ours is to look like an answer."""
        entry = flow.metadata.get("egress")
        if entry is None:  # before the request was whole: what came was no HTTP, or too much
            host = _host_of(flow) or flow.request.host
            entry = {"sandbox": self._names.get(flow.client_conn.id, ""), "began": time.time(), "host": host}
            entry["target"] = flow.request.path
        if sandbox := self.sandboxes.get(entry["sandbox"]):
            sandbox.counts["failed"] += 1
        self._finish(flow, entry, "failed")
        self._gates.abort(flow.client_conn.peername[1])

    def _finish(self, flow: http.HTTPFlow, entry: dict[str, Any], outcome: str) -> None:
        request, response = flow.request, flow.response
        sent = len(request.raw_content or b"")
        received = len(response.raw_content or b"") if response is not None and outcome != "failed" else 0
        if sandbox := self.sandboxes.get(entry["sandbox"]):
            sandbox.counts["bytes"] += sent + received
        verdict = entry.get("verdict")
        line = {
            "time": round(entry["began"], 3),
            "sandbox": f"{self._label}/{entry['sandbox']}",
            "method": request.method,
            "url": journal.shown_url(
                "https" if flow.client_conn.tls_established else "http",
                entry["host"],
                request.port,
                entry["target"],
            ),
            "rule": verdict.rule if verdict else None,
            "verdict": outcome,
            "reason": verdict.reason if verdict else "",
            "status": response.status_code if response is not None and outcome != "failed" else None,
            "bytes_sent": sent,
            "bytes_received": received,
            "seconds": round(time.time() - entry["began"], 3),
        }
        if flow.error is not None:
            line["error"] = flow.error.msg[:300]
        self._log.write(line)


def _host_of(flow: http.HTTPFlow) -> str:
    """The host that a request names, in small letters; "" if it names none, several, or another port."""
    request = flow.request
    named = request.headers.get_all("host")
    if len(named) != 1:
        return ""
    host, _, port = named[0].strip().lower().partition(":")
    if port and port != str(request.port):
        return ""
    # An absolute target names the host once more.
    if request.authority and request.authority.lower() not in (host, f"{host}:{request.port}"):
        return ""
    return host.removesuffix(".")


class Server:
    """The control socket: sandboxes come and go."""

    def __init__(self, control: socket.socket, rules: policy.Policy, addon: Rules, settings: Settings) -> None:
        """Of one proxy; `control` is the owner's."""
        self._control, self._addon, self._settings = control, addon, settings
        self._gates: dict[str, Gate] = {}
        self._private = frozenset(rule.host for rule in rules.rules if not rule.host.startswith("*"))
        self.port = 0
        self.is_over = asyncio.Event()
        self.was_killed = False
        """Whether the owner has gone without a word, and cannot clean up."""

    def on_message(self) -> None:
        """Read what came. Supervisors have this socket for a moment, before anything else runs in their sandbox."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _CONTROL_BYTES, 8)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        request = json.loads(data) if data else {"op": "killed", "id": ""}
        name = request["id"]
        if request["op"] in ("close", "killed"):
            self.was_killed = request["op"] == "killed"
            self.is_over.set()
        elif request["op"] == "attach":
            self._addon.sandboxes[name] = Sandbox()
            self._gates[name] = Gate(name, fds, self._addon.password, self.port, self._private, self._settings)
        elif gate := self._gates.pop(name, None):
            gate.close()
            counts = self._addon.sandboxes.pop(name).counts
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"id": name, "counts": counts}).encode())


def make_authority(folder: Path, organisation: str) -> tuple[str, str]:
    """The root certificate of this run, made unless it is there; its key stays in the folder, for its owner alone.

    Returns:
        The certificate (PEM), and OpenSSL's hash of its subject.
    """
    os.umask(0o077)
    if not (folder / "mitmproxy-ca.pem").exists():
        certs.CertStore.create_store(folder, "mitmproxy", _KEY_BITS, organisation, f"{organisation} Root CA")
    certificate = (folder / "mitmproxy-ca-cert.pem").read_text()
    from OpenSSL import crypto

    subject = crypto.load_certificate(crypto.FILETYPE_PEM, certificate.encode()).subject_name_hash()
    return certificate, f"{subject:08x}"


def trusted(folder: Path, further: str) -> str:
    """A file of the certificates by which servers are trusted: this machine's, and the policy's own."""
    import certifi

    system = next((path for path in _SYSTEM_BUNDLES if Path(path).is_file()), certifi.where())
    text = Path(system).read_text()
    if further:
        text += "\n" + Path(further).expanduser().read_text()
    target = folder / "trusted.pem"
    target.write_text(text)
    return str(target)


def end_with(owner: int, folder: Path) -> None:
    """End this process when its owner has ended, whatever the event loop is at, and take its files along."""
    pidfd = os.pidfd_open(owner)

    def watch() -> None:
        select.select([pidfd], [], [])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != owner:
        os._exit(0)


async def serve(control: socket.socket, settings: dict[str, Any], rules: policy.Policy) -> None:
    """Serve until the owner hangs up."""
    folder = Path(settings["folder"])
    certificate, subject = make_authority(folder, rules.organisation)
    gates = Settings(rules.connections, rules.timeout_s)
    log = journal.Journal(settings["log"])
    addon = Rules(rules, settings["headers"], log, settings["label"], gates)
    version.MITMPROXY = "proxy"  # of its few pages of its own
    master = DumpMaster(options.Options(confdir=str(folder)), with_termlog=False, with_dumper=False)
    master.options.update(
        mode=["socks5@127.0.0.1:0"],
        proxyauth="any",
        ssl_verify_upstream_trusted_ca=trusted(folder, rules.upstream_ca),
        http2=False,
        rawtcp=False,
        websocket=False,
        connection_strategy="lazy",
        upstream_cert=False,
        onboarding=False,
        body_size_limit=str(rules.body_bytes),
    )
    master.addons.add(addon)
    server = Server(control, rules, addon, gates)
    running = asyncio.create_task(master.run())
    ports: list[int] = []
    while not ports:
        if running.done():
            await running
            raise OSError("mitmproxy ended while it started")
        await asyncio.sleep(0.01)
        ports = [address[1] for each in master.addons.get("proxyserver").servers for address in each.listen_addrs]
    server.port = ports[0]
    control.send(json.dumps({"certificate": certificate, "hash": subject}).encode())
    asyncio.get_running_loop().add_reader(control, server.on_message)
    over = asyncio.create_task(server.is_over.wait())
    await asyncio.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
    if server.was_killed:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Become the proxy of `argv[1]` (the owner's PID) on the control socket `argv[2]`."""
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    settings = json.loads(control.recv(2**22))
    folder = Path(settings["folder"])
    end_with(int(sys.argv[1]), folder)
    control.setblocking(False)
    rules = policy.read_policy(settings["policy"])
    try:
        with asyncio.Runner(loop_factory=lambda: Loop(rules)) as runner:
            runner.run(serve(control, settings, rules))
    except Exception as e:  # noqa: BLE001 - the owner must learn why
        with contextlib.suppress(OSError):
            control.send(json.dumps({"error": f"{type(e).__name__}: {e}"}).encode())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
