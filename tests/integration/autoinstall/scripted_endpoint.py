"""A stand-in for a model's endpoint: a real HTTP server whose answers are scripted, and that says so.

A script is a list of turns for each agent, by the path of its requests (`/proposer/v1`, `/installer/v1`). A turn is a
list of calls `(tool, arguments)`, a text, or a `Trouble`. What the agents were told is in `requests`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Turn = list[tuple[str, dict[str, Any]]] | str


@dataclass(frozen=True)
class Trouble:
    """An answer that is none."""

    status: int = 200
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    wait_s: float = 0.0


class ScriptedEndpoint:
    """One server for both agents."""

    def __init__(self, scripts: dict[str, list[Turn | Trouble]], *, says_so: bool = True) -> None:
        self.scripts, self.says_so = scripts, says_so
        self.requests: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.authorizations: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    def url(self, agent: str) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/{agent}/v1"

    def told(self, agent: str) -> list[str]:
        """The tool results that an agent saw, all of its conversation."""
        messages = self.requests[agent][-1]["messages"] if self.requests[agent] else []
        return [message["content"] for message in messages if message["role"] == "tool"]

    @contextmanager
    def serving(self) -> Iterator[ScriptedEndpoint]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(self, agent: str, request: dict[str, Any]) -> Trouble:
        number = len(self.requests[agent])
        self.requests[agent].append(request)
        script = self.scripts[agent]
        turn = script[min(number, len(script) - 1)]
        if isinstance(turn, Trouble):
            return turn
        message: dict[str, Any] = {"role": "assistant", "content": turn if isinstance(turn, str) else None}
        if not isinstance(turn, str):
            message["tool_calls"] = [
                {
                    "id": f"call-{number}-{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(turn)
            ]
        body = {
            "id": f"answer-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": f"script-{agent}",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
        }
        if self.says_so:
            body["system_fingerprint"] = "scripted-stand-in"
        return Trouble(200, json.dumps(body))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.authorizations.append(self.headers.get("authorization", ""))
                answer = endpoint.answer(self.path.split("/")[1], request)
                time.sleep(answer.wait_s)
                try:
                    self.send_response(answer.status)
                    for name, value in (("content-type", "application/json"), *answer.headers):
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(answer.body.encode())
                except OSError:  # the client has given up
                    return

            def log_message(self, format: str, *args: Any) -> None:
                return

        return Handler
