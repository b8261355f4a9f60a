"""What tests of egress share: the policy they work under, and how they look at what happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.integration.envs.egress.upstream import Upstream

HOSTS = ["index.test", "files.test", "registry.test", "open.test", "api.test", "a.sub.test", "secret.test"]
DENIED = "403 Forbidden: this request is not allowed by the network policy.\n"
SECRET = "s3cr3t-of-the-company"
VARIABLE = "EGRESS_TEST_KEY"


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
