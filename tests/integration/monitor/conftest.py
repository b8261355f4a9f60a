"""A sandbox backend, an event loop, and a server that stands in for a judge: real HTTP, answers as scripted."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from envs.sandbox.bubblewrap import BubblewrapBackend


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def backend(runner):
    backend = BubblewrapBackend("monitor")
    yield backend
    runner.run(backend.close())


class StandInJudge:
    """Answers each request with the next of `script`, the last one for ever; keeps what it was asked.

    An answer is a list of findings, a text (the content of a message), bytes (the whole body), a status, or seconds to
    wait as a float.
    """

    def __init__(self) -> None:
        self.script: list[Any] = [[]]
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                judge.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                judge.keys.append(self.headers.get("Authorization"))
                answer = judge.script.pop(0) if len(judge.script) > 1 else judge.script[0]
                if isinstance(answer, float):
                    time.sleep(answer)
                    answer = []
                if isinstance(answer, list):
                    answer = json.dumps({"findings": answer})
                status = answer if isinstance(answer, int) else 200
                body = answer if isinstance(answer, bytes) else b""
                if isinstance(answer, str):
                    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]}).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def stop(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def judge_server() -> Iterator[StandInJudge]:
    judge = StandInJudge()
    yield judge
    judge.stop()
