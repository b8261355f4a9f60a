"""A stand-in for the internet: an HTTPS server on loopback with an authority of its own; it notes what it is asked."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from envs.egress.client import venv

CHUNKED = "text/x-chunked"
"""Content type of pages that are served without a length."""

_CERTIFICATES = """
import sys
from pathlib import Path
from mitmproxy import certs
from cryptography import x509
folder, names = Path(sys.argv[1]), sys.argv[2:]
certs.CertStore.create_store(folder, "upstream", 2048, "Upstream", "Upstream Root")
store = certs.CertStore.from_store(folder, "upstream", 2048)
entry = store.get_cert(names[0], [x509.DNSName(name) for name in names], "Upstream")
from cryptography.hazmat.primitives import serialization as s
key = entry.privatekey.private_bytes(s.Encoding.PEM, s.PrivateFormat.TraditionalOpenSSL, s.NoEncryption())
(folder / "server.pem").write_bytes(key + entry.cert.to_pem())
"""


@dataclass
class Upstream:
    """The server."""

    port: int
    authority: Path
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path and headers (names in small letters) of what arrived."""
    pages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """Content type and body by host and path; anything else is answered with `hello from <host>`."""
    statuses: dict[str, int] = field(default_factory=dict)
    """Status by host and path, in place of 200; 0: it hangs up without an answer, -1: it never answers."""
    locations: dict[str, str] = field(default_factory=dict)
    """Where a page leads to, by host and path."""
    over: threading.Event = field(default_factory=threading.Event)
    """The server ends."""

    def page(self, url: str, content: object, kind: str = "application/json") -> None:
        """Serve something at `host/path`."""
        self.pages[url] = (kind, content if isinstance(content, bytes) else json.dumps(content).encode())

    def arrived(self) -> list[str]:
        """Host and path of what arrived since the last call."""
        found = [f"{headers.get('host')}{path}" for _, path, headers in self.requests]
        self.requests.clear()
        return found


@contextmanager
def serve(folder: Path, hosts: list[str]) -> Iterator[Upstream]:
    """Run the server for `hosts` until the block ends."""
    subprocess.run([venv() / "bin/python", "-I", "-c", _CERTIFICATES, folder, *hosts], check=True, timeout=60)
    upstream = Upstream(0, folder / "upstream-ca-cert.pem")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.rfile.read(int(headers.get("content-length", 0)))
            upstream.requests.append((self.command, self.path, headers))
            url = f"{headers.get('host', '').partition(':')[0]}{self.path.partition('?')[0]}"
            kind, body = upstream.pages.get(url, ("text/plain", f"hello from {headers.get('host')}\n".encode()))
            status = upstream.statuses.get(url, 302 if url in upstream.locations else 200)
            if status <= 0:
                upstream.over.wait(60.0 if status else 0.0)
                self.close_connection = True
                return
            self.send_response(status)
            if url in upstream.locations:
                self.send_header("Location", upstream.locations[url])
            self.send_header("Content-Type", kind)
            if kind == CHUNKED:
                self.send_header("Transfer-Encoding", "chunked")
                body = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
            else:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    upstream.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield upstream
    finally:
        upstream.over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
