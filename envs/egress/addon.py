"""What mitmproxy asks of us: whose a connection is, what becomes of a request, and what of the answer.

Runs in the proxy's process (proxy.py), in the environment that the set-up makes for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mitmproxy import http  # pyright: ignore[reportMissingImports] - of the proxy's environment
from mitmproxy.flow import Error as flow_error  # pyright: ignore[reportMissingImports]

from envs.egress import indexes, journal, names, policy
from envs.egress.forward import Settings
from envs.egress.policy import Policy, Rule, Verdict
from envs.egress.resolver import AddressError, Resolver

_DENIED = b"403 Forbidden: this request is not allowed by the network policy.\n"
_LIMITED = b"429 Too Many Requests: the quota of this machine is used up.\n"
_TEXT = {"Content-Type": "text/plain; charset=utf-8"}
_LINES_OVER_QUOTA = 20
"""That a sandbox may add to the log when it may ask for nothing more."""
_HEADERS_BYTES, _TARGET_BYTES = 2**14, 2**13
"""Of a request; servers differ in what they make of longer ones, and some just hang up."""
_HUNG_UP = "Client disconnected."
_TOO_LARGE = "body exceeds"
_UNREACHABLE = ("Errno -", "Errno 101", "Errno 110", "Errno 113")
"""DNS's errors, and the kernel's for hosts to which nothing gets through."""
_NO_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)


@dataclass
class Request:
    """One request, from its headers to the line of the log."""

    sandbox: str
    host: str
    """That it names; the address that it went to if it names none, or not clearly."""
    is_clear: bool
    """Whether it names one host, and the port that it went to."""
    address: str
    """Where the program meant to connect to."""
    port: int
    target: str
    is_https: bool
    began: float = field(default_factory=time.time)
    verdict: Verdict | None = None
    received: int = 0
    """Bytes of the answer that went on as they came."""
    index: tuple[str, str, str] | None = None
    """What is brought back to a date: the kind of index, the date, and the program's header `Accept`."""
    is_nobody: bool = False
    """Its host has no address, says DNS, and only a pattern allows it: the program has made the name up."""


class Addon:
    """The hooks that mitmproxy calls, by their names."""

    def __init__(
        self, rules: Policy, headers: dict[str, str], log: journal.Journal, label: str, gates: Settings
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
        self.on_outage: Callable[[str, str], None] = lambda sandbox, reason: None
        """Told what an allowed host failed at, before the program can see it."""
        self._counts: dict[str, dict[str, int]] = {}
        self._dates: dict[str, str] = {}
        self._under_way: dict[int, tuple[http.HTTPFlow, Request]] = {}
        """Allowed requests without an answer, by the port that their connection comes from."""
        self._answered: set[tuple[str, int]] = set()
        """Hosts and ports at which somebody has been."""
        self._names: dict[str, str] = {}
        """Sandbox by mitmproxy's id of the connection."""
        self._files = indexes.Files()
        self._dropped = {name.lower() for name in rules.dropped_headers}

    def begin(self, sandbox: str, before: str) -> None:
        """Know a sandbox from now on, and the date of its task; "": it has none."""
        self._counts[sandbox] = {"requests": 0, "denied": 0, "failed": 0, "outages": 0, "bytes": 0}
        self._dates[sandbox] = before

    def knows(self, sandbox: str) -> bool:
        """Whether it has begun and not ended."""
        return sandbox in self._counts

    def end(self, sandbox: str) -> dict[str, int]:
        """Forget a sandbox; returns what it used."""
        self._dates.pop(sandbox, None)
        return self._counts.pop(sandbox, {})

    def stalled(self, port: int) -> None:
        """Nothing has moved for long on a connection: if a request of it has no answer, that is an outage."""
        if port in self._under_way:
            flow, entry = self._under_way[port]
            self._report(flow, entry, "it did not answer in time")

    def socks5_auth(self, data: Any) -> None:
        """Take connections from gates alone: any user of the machine could make one to this port."""
        is_ours = secrets.compare_digest(data.password.encode(), self.password.encode())
        data.valid = is_ours and data.username in self._counts
        if data.valid:
            self._names[data.client_conn.id] = data.username

    def client_disconnected(self, client: Any) -> None:
        """Forget whose the connection was."""
        self._names.pop(client.id, None)

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Count it, and break off what would send too much: a body is read before the rules can answer."""
        request = flow.request
        host = _host_of(flow)
        is_https = flow.client_conn.tls_established
        name = self._names.get(flow.client_conn.id, "")
        flow.metadata["egress"] = entry = Request(
            name, host or request.host, bool(host), request.host, request.port, request.path, is_https
        )
        counts = self._counts.get(name)
        if counts is None:
            flow.kill()
            return
        counts["requests"] += 1
        length = request.headers.get("content-length", "0")
        num_bytes = sum(len(name) + len(value) for name, value in request.headers.fields)
        if (
            "transfer-encoding" in request.headers
            or not length.isdecimal()
            or int(length) > self._policy.request_bytes
            or num_bytes > _HEADERS_BYTES
            or len(request.path) > _TARGET_BYTES
        ):
            entry.verdict = Verdict(False, "limit")
            counts["denied"] += 1
            self._finish(flow, entry, "denied")
            flow.metadata.pop("egress")
            flow.kill()
            self._gates.abort(flow.client_conn.peername[1])

    async def request(self, flow: http.HTTPFlow) -> None:
        """Decide; what is allowed is freed of headers that have to stay here."""
        entry: Request | None = flow.metadata.get("egress")
        if entry is None or (counts := self._counts.get(entry.sandbox)) is None:
            flow.kill()
            return
        try:
            verdict = await self._judge(flow, entry, counts)
        except Exception:  # noqa: BLE001 - mitmproxy would let it pass
            verdict = Verdict(False, "error")
        entry.verdict = verdict
        if not verdict.is_allowed or verdict.rule is None:
            counts["denied"] += 1
            is_quota = verdict.reason == "limit"
            flow.response = http.Response.make(429 if is_quota else 403, _LIMITED if is_quota else _DENIED, _TEXT)
            return
        request = flow.request
        # mitmproxy connects to the name, whatever the program connected to, and asks for its certificate.
        request.host, request.port = entry.host, entry.port
        request.host_header, request.authority = entry.host, ""
        for header in [header for header in request.headers if header.lower() in self._dropped]:
            request.headers.pop(header, None)
        self._prepare(flow, entry, self._policy.rules[verdict.rule])
        self._under_way[flow.client_conn.peername[1]] = flow, entry

    async def _judge(self, flow: http.HTTPFlow, entry: Request, counts: dict[str, int]) -> Verdict:
        if counts["requests"] > self._policy.requests or counts["bytes"] > self._policy.total_bytes:
            return Verdict(False, "limit")
        # TLS is spoken to port 443, and there alone: what a rule adds must not go out readable.
        if (
            entry.is_https != (entry.port == 443)
            or flow.request.method == "CONNECT"
            or "upgrade" in flow.request.headers
        ):
            return Verdict(False, "protocol")
        # The address, the name in the handshake and the name in the request are three words for one host.
        is_address = policy.is_address(entry.host)
        if not entry.is_clear or entry.address != (entry.host if is_address else names.address_of(entry.host)):
            return Verdict(False, "host")
        if entry.is_https and (flow.client_conn.sni or "").lower() != ("" if is_address else entry.host):
            return Verdict(False, "host")
        verdict = policy.decide(self._policy, flow.request.method, entry.host, entry.target)
        if not verdict.is_allowed or verdict.rule is None:
            return verdict
        rule = self._policy.rules[verdict.rule]
        if rule.index and not self._is_dated(rule, entry):
            return Verdict(False, "index", verdict.rule)
        if not await _may_connect(entry, rule, (entry.host, entry.port) in self._answered):
            return Verdict(False, "address", verdict.rule)
        return verdict

    def _is_dated(self, rule: Rule, entry: Request) -> bool:
        kind = indexes.kind_of(rule.index, policy.plain_path(entry.target) or "")
        url = f"{'https' if entry.is_https else 'http'}://{entry.host}{entry.target}"
        return kind == "answer" or (kind == "file" and self._files.is_from_before(url, self._date(rule, entry.sandbox)))

    def _date(self, rule: Rule, sandbox: str) -> str:
        of_task = self._dates.get(sandbox, "")
        if of_task and rule.before:
            return min(of_task, rule.before, key=policy.read_date)
        return of_task or rule.before or self._policy.before

    def _prepare(self, flow: http.HTTPFlow, entry: Request, rule: Rule) -> None:
        headers = flow.request.headers
        if rule.header and entry.is_https:
            headers[rule.header] = self._headers[rule.header_env]
        if not rule.index or indexes.kind_of(rule.index, policy.plain_path(entry.target) or "") != "answer":
            return
        # A whole answer, in a form that has dates and can be read here.
        entry.index = (rule.index, self._date(rule, entry.sandbox), headers.get("accept", ""))
        for name in ("if-none-match", "if-modified-since", "range", "if-range"):
            headers.pop(name, None)
        headers["accept"] = indexes.accepted(rule.index)
        headers["accept-encoding"] = "gzip, identity"

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """What has not to be read here goes on as it comes, and is counted."""
        entry: Request | None = flow.metadata.get("egress")
        if flow.response is None or entry is None or not (entry.verdict and entry.verdict.is_allowed):
            return
        self._answered.add((entry.host, entry.port))
        status = flow.response.status_code
        if self._rule_of(entry).index and (status >= 500 or status == 429):
            # An index in trouble says nothing about packages.
            self._report(flow, entry, f"it answered with {status}")
            self._gates.abort(flow.client_conn.peername[1])
            return
        if entry.index is not None:
            return
        port = flow.client_conn.peername[1]

        def count(data: bytes) -> bytes:
            entry.received += len(data)
            counts = self._counts.get(entry.sandbox, {"bytes": 0})
            counts["bytes"] += len(data)
            if entry.received <= self._policy.body_bytes and counts["bytes"] <= self._policy.total_bytes:
                return data
            entry.verdict = Verdict(False, "limit", entry.verdict.rule if entry.verdict else None)
            self._gates.abort(port)
            return b""

        flow.response.stream = count

    def response(self, flow: http.HTTPFlow) -> None:
        """Bring indexes' answers back to their date; write down what became of the request."""
        entry: Request | None = flow.metadata.get("egress")
        if entry is None or flow.response is None:
            return
        self._under_way.pop(flow.client_conn.peername[1], None)
        if entry.verdict is not None and entry.verdict.reason == "outage":
            self._finish(flow, entry, "failed")
            return
        if entry.index is not None and flow.request.method != "HEAD" and flow.response.status_code == 200:
            self._bring_back(flow, entry, *entry.index)
        is_allowed = entry.verdict is not None and entry.verdict.is_allowed
        self._finish(flow, entry, "allowed" if is_allowed else "denied")

    def _bring_back(self, flow: http.HTTPFlow, entry: Request, index: str, date: str, wanted: str) -> None:
        response = flow.response
        assert response is not None
        url = f"{'https' if entry.is_https else 'http'}://{entry.host}{entry.target}"
        try:
            content = response.get_content(strict=True) or b""
            body, kind = indexes.bring_back(index, url, content, date, self._files, wanted)
        except Exception:  # noqa: BLE001 - mitmproxy would let it pass
            entry.verdict = Verdict(False, "index", entry.verdict.rule if entry.verdict else None)
            flow.response = http.Response.make(403, _DENIED, _TEXT)
            return
        for name in ("etag", "last-modified", "content-encoding", "x-pypi-last-serial", "digest"):
            response.headers.pop(name, None)
        response.content = body
        response.headers["content-type"] = kind

    def error(self, flow: http.HTTPFlow) -> None:
        """The other side failed, or the program hung up: no page of ours is to look like an answer."""
        entry: Request | None = flow.metadata.get("egress")
        self._under_way.pop(flow.client_conn.peername[1], None)
        if entry is not None:
            if self._is_outage(flow, entry):
                self._report(flow, entry, flow.error.msg if flow.error else "it hung up")
            outcome = "failed" if entry.verdict is None or entry.verdict.is_allowed else "denied"
            if counts := self._counts.get(entry.sandbox):
                counts[outcome] += 1
            self._finish(flow, entry, outcome)
        self._gates.abort(flow.client_conn.peername[1])

    def _rule_of(self, entry: Request) -> Rule:
        assert entry.verdict is not None and entry.verdict.rule is not None
        return self._policy.rules[entry.verdict.rule]

    def _is_outage(self, flow: http.HTTPFlow, entry: Request) -> bool:
        """Whether a request failed through no doing of its program's, which could else void what it has done."""
        message = flow.error.msg if flow.error else ""
        if entry.verdict is None or not entry.verdict.is_allowed or entry.verdict.rule is None or entry.is_nobody:
            return False
        if message in (_HUNG_UP, flow_error.KILLED_MESSAGE) or _TOO_LARGE in message:
            return False
        # That a host does not speak plain HTTP may be news to a program alone.
        is_known = entry.is_https or (entry.host, entry.port) in self._answered
        return is_known or any(word in message for word in _UNREACHABLE)

    def _report(self, flow: http.HTTPFlow, entry: Request, what: str) -> None:
        """An allowed host has failed: its sandbox cannot go on."""
        assert entry.verdict is not None
        if entry.verdict.reason == "outage":
            return
        entry.verdict = dataclasses.replace(entry.verdict, reason="outage")
        if counts := self._counts.get(entry.sandbox):
            counts["outages"] += 1
        where = f"{'https' if entry.is_https else 'http'}://{entry.host}"
        self.on_outage(entry.sandbox, f"{where}, which its network policy allows, cannot be reached: {what[:200]}")

    def _finish(self, flow: http.HTTPFlow, entry: Request, outcome: str) -> None:
        request, response = flow.request, None if outcome == "failed" else flow.response
        sent = len(request.raw_content or b"")
        held = len(response.raw_content or b"") if response is not None else 0
        if counts := self._counts.get(entry.sandbox):
            counts["bytes"] += sent + held
            if counts["requests"] > self._policy.requests + _LINES_OVER_QUOTA:
                return
        line = {
            "time": round(entry.began, 3),
            "sandbox": f"{self._label}/{entry.sandbox}",
            "method": request.method,
            "url": journal.shown_url("https" if entry.is_https else "http", entry.host, entry.port, entry.target),
            "rule": entry.verdict.rule if entry.verdict else None,
            "verdict": outcome,
            "reason": entry.verdict.reason if entry.verdict else "",
            "status": response.status_code if response is not None else None,
            "bytes_sent": sent,
            "header_bytes": sum(len(name) + len(value) for name, value in request.headers.fields),
            "bytes_received": held + entry.received,
            "seconds": round(time.time() - entry.began, 3),
        }
        if flow.error is not None:
            line["error"] = flow.error.msg[:300]
        self._log.write(line)


async def _may_connect(entry: Request, rule: Rule, is_known: bool) -> bool:
    """Whether the host is where it may be. One that has no address at all is found out again when it is gone to."""
    if policy.is_address(entry.host):
        return rule.private or policy.is_public(entry.host)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Resolver)
    try:
        await loop.resolve(entry.host, entry.port, may_be_private=rule.private, type=socket.SOCK_STREAM)
    except AddressError:
        return False
    except socket.gaierror as e:
        entry.is_nobody = rule.host.startswith("*.") and e.errno in _NO_NAME and not is_known
    except OSError:
        pass
    return True


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
