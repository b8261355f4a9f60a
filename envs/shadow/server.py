"""The shadow backend's HTTP service: indices of workspaces and of a folder of pages, as JSON on a loopback address.

    GET  /health   -> {"status": "ok", "workspaces": 3, "pages": 120}
    POST /index    {"workspace": id, "files": {path: text}, "removed": [path], "replace": bool}
                   -> {"files": 12, "passages": 40}
    POST /search   {"workspace": id, "query": text, "limit": 5, "under": folder}
                   -> {"results": [{"path", "start_line", "end_line", "score", "text"}]}
    POST /web      {"query": text, "limit": 5} -> {"results": [{"url", "title", "score", "text"}]}

`removed`, `replace`, `limit` and `under` may be left out. Every request but /health carries `Authorization: Bearer
<token>`. What is wrong comes as {"error": text} with 400, 401, 404 (no such workspace: index it with `replace`), 413
(too large) or 503 (not done before its deadline). A backend of a user's own keeps the same promises.

    COMPOSER_SHADOW_TOKEN=... python -m envs.shadow.server --port 8123 --corpus pages/
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web
from jsonschema import Draft202012Validator

from envs.shadow.pages import Pages, read_folder
from envs.shadow.python_pages import CORPUS, python_pages
from envs.shadow.workspaces import UnknownWorkspace, Workspaces, WorkspaceTooLarge

TOKEN_ENV = "COMPOSER_SHADOW_TOKEN"
MAX_BODY_BYTES = 64 * 2**20
DEADLINE_S = 55.0
"""Less than a client waits, so that it learns why."""
_MAX_LIMIT = 50

_TEXT = {"type": "string", "minLength": 1, "maxLength": 4096}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT}


def _object(required: list[str], **properties: Any) -> Draft202012Validator:
    return Draft202012Validator({"type": "object", "properties": properties, "required": required})


_SCHEMAS = {
    "/index": _object(
        ["workspace", "files"],
        workspace=_TEXT,
        files={"type": "object", "additionalProperties": {"type": "string"}},
        removed={"type": "array", "items": {"type": "string"}},
        replace={"type": "boolean"},
    ),
    "/search": _object(["workspace", "query"], workspace=_TEXT, query=_TEXT, limit=_LIMIT, under={"type": "string"}),
    "/web": _object(["query"], query=_TEXT, limit=_LIMIT),
}


class ShadowServer:
    """Answers requests; holds everything in memory."""

    def __init__(self, token: str, corpus: str = "", deadline_s: float = DEADLINE_S) -> None:
        """Read the corpus.

        Args:
            token: what requests have to show.
            corpus: folder of pages for /web; `envs.shadow.python_pages.CORPUS`: Python's documentation; "": nothing.
            deadline_s: wall time of one request, waiting for its turn included.

        Raises:
            OSError: the corpus cannot be read.
            ValueError: the token is empty.
        """
        if not token:
            raise ValueError("`token` must not be empty")
        self._token, self._deadline_s = token, deadline_s
        self._workspaces = Workspaces()
        self._pages = Pages(python_pages() if corpus == CORPUS else read_folder(Path(corpus)) if corpus else ())
        # One thread: indexing and ranking hold the interpreter anyway, and the indices need no lock.
        self._worker = ThreadPoolExecutor(1, "shadow")
        self._answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "/index": self._index,
            "/search": self._search,
            "/web": self._web,
        }

    def app(self) -> web.Application:
        """The application, for aiohttp to serve."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        for path in self._answers:
            app.router.add_post(path, self._post)
        app.middlewares.append(self._guard)
        return app

    def close(self) -> None:
        """End the worker; what waits for it is dropped."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Authorization, the deadline, and errors as JSON."""
        shown = request.headers.get("Authorization", "")
        right = hmac.compare_digest(shown.encode(errors="replace"), f"Bearer {self._token}".encode())
        if not right and request.path != "/health":
            return _error(401, "the token is missing or wrong: send `Authorization: Bearer <token>`")
        try:
            async with asyncio.timeout(self._deadline_s):
                return await handler(request)
        except TimeoutError:
            return _error(503, f"not done within {self._deadline_s:g} s")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send the files in several requests")
        except web.HTTPException as error:
            return _error(error.status, error.reason)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "workspaces": len(self._workspaces), "pages": len(self._pages)})

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.read()
        loop = asyncio.get_running_loop()
        status, answer = await loop.run_in_executor(self._worker, self._answer, request.path, body)
        return web.Response(status=status, body=answer, content_type="application/json")

    def _answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer; in the worker's thread."""
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            return 400, _error_body("the body is not JSON")
        for fault in _SCHEMAS[path].iter_errors(given):
            return 400, _error_body(f"{'.'.join(map(str, fault.path)) or 'body'}: {fault.message[:200]}")
        try:
            return 200, json.dumps(self._answers[path](given)).encode()
        except UnknownWorkspace as error:
            return 404, _error_body(str(error))
        except WorkspaceTooLarge as error:
            return 413, _error_body(str(error))

    def _index(self, given: dict[str, Any]) -> dict[str, Any]:
        removed, replace = given.get("removed", ()), given.get("replace", False)
        index = self._workspaces.index(given["workspace"], given["files"], removed, replace)
        return {"files": len(index), "passages": index.num_passages}

    def _search(self, given: dict[str, Any]) -> dict[str, Any]:
        hits = self._workspaces.search(
            given["workspace"], given["query"], given.get("limit", 5), given.get("under", "")
        )
        results = [
            {"path": h.name, "start_line": h.start, "end_line": h.end, "score": h.score, "text": h.text} for h in hits
        ]
        return {"results": results}

    def _web(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"results": [asdict(hit) for hit in self._pages.search(given["query"], given.get("limit", 5))]}


def _error_body(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=_error_body(message), content_type="application/json")


async def serve(server: ShadowServer, host: str, port: int, announce: Callable[[int], None]) -> None:
    """Serve until cancelled.

    Args:
        server: what answers.
        host: a loopback address.
        port: 0: a free one.
        announce: told the port.

    Raises:
        ValueError: the host is no loopback address.
        OSError: the port is taken.
    """
    if not ipaddress.ip_address(host).is_loopback:
        raise ValueError(f"`host` must be a loopback address, but is {host!r} instead")
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        announce(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
        server.close()


async def _run(arguments: argparse.Namespace) -> None:
    server = ShadowServer(os.environ.get(TOKEN_ENV, ""), arguments.corpus)
    serving = asyncio.ensure_future(
        serve(server, arguments.host, arguments.port, lambda port: print(json.dumps({"port": port}), flush=True))
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    if arguments.owned:
        # The pipe ends with its owner, however that ends.
        loop.add_reader(0, _end_with_owner, serving)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _end_with_owner(serving: asyncio.Future[None]) -> None:
    if not os.read(0, 4096):
        asyncio.get_running_loop().remove_reader(0)
        serving.cancel()


def main() -> None:
    """Serve until told to end; the port is printed as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m envs.shadow.server", description="The shadow backend.")
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--corpus", default="", help=f"folder of pages for /web; {CORPUS}: Python's documentation")
    parser.add_argument("--owned", action="store_true", help="end when standard input does")
    try:
        asyncio.run(_run(parser.parse_args()))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
