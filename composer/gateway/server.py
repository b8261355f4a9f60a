"""The gateway itself: one HTTP server on loopback a process, which tells episodes apart by their keys.

    POST /v1/chat/completions          OpenAI
    POST /v1/responses                 OpenAI
    POST /v1/messages                  Anthropic, and /v1/messages/count_tokens
    GET  /v1/models, /v1/models/{id}   what clients ask before they begin

Answers come from the generator in one piece, so a stream has all of its text in one event; it begins when the answer is
there, so that an error is still an HTTP status.

Retries. A request of which the client has hung up is given up and leaves nothing behind, so whoever asks again does so
for the first time. A request that was answered and comes again, the same to the byte, is a new sample, as for an agent
that asks the same question several times; unless it says that it is a retry (`x-stainless-retry-count`, which OpenAI's
and Anthropic's clients send, or an `idempotency-key` that was there before): it gets the answer that there is.

Trouble. A request that cannot be read is its client's mistake (4xx), and an agent's to live with. Whatever else goes
wrong between a request and its answer is ours: the episode fails, which has no reward, and its client is told so (503).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from composer.gateway import anthropic_messages, openai_chat, openai_responses
from composer.gateway.exchange import Answer, ApiError, Ask, Trouble, bad_request, is_deep
from composer.gateway.record import EpisodeRecord

logger = logging.getLogger(__name__)
MODEL = "composer"
"""The name of the policy; whatever else an agent asks for is answered by it too."""
_MAX_BODY_BYTES = 2**24
_MAX_INLINE_BYTES = 2**16
_MAX_BRACKETS = 300_000
"""In a body, those in its texts included: millions of lists hold up every thread of a process while they are parsed."""
_READERS = ThreadPoolExecutor(2, thread_name_prefix="gateway-reader")
_MAX_REQUESTS = 16
"""Of an episode, that are read and answered at a time; more wait. No agent is trusted with this process's memory."""
_MAX_ANSWERS = 64
"""Of an episode, that are kept for retries."""
_KEPT_ALIVE_S = 30.0
"""A connection without a request; another of the agent's may be waiting for its place."""
_STOP_S = 2.0
_EPISODE = web.RequestKey("episode", object)
_TURNS_TO_LEARN = 3
"""Of the event loop, after which it knows of connections that have ended by now."""


@dataclass
class _Episode:
    record: EpisodeRecord
    answers: OrderedDict[str, Answer] = field(default_factory=OrderedDict)
    """By the digest of the request that each answered."""
    idempotency_keys: set[str] = field(default_factory=set)
    num_requests: int = 0
    """That are here."""
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_REQUESTS))

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """When one is free."""
        self.num_requests += 1
        try:
            async with self._places:
                yield
        finally:
            self.num_requests -= 1


class Gateway:
    """Serves the episodes that are open; a key is the only way to one, and is gone when it is closed.

    Attributes:
        url: where it listens, "" before `start`.
    """

    def __init__(self) -> None:
        """Nothing listens yet."""
        self.url = ""
        self.port = 0
        self._episodes: dict[str, _Episode] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen on a free port of loopback. Idempotent.

        Raises:
            OSError: there is none.
        """
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=_MAX_BODY_BYTES)
            app.router.add_post("/v1/chat/completions", self._handler(openai_chat))
            app.router.add_post("/v1/responses", self._handler(openai_responses))
            app.router.add_post("/v1/messages", self._handler(anthropic_messages))
            app.router.add_post("/v1/messages/count_tokens", self._handled(anthropic_messages, self._count_tokens))
            app.router.add_get("/v1/models", self._models)
            app.router.add_get("/v1/models/{model}", self._models)
            app.router.add_route("*", "/{path:.*}", self._unknown)
            app.on_response_prepare.append(_make_room)
            # So that a request whose client hangs up is given up.
            runner = web.AppRunner(
                app,
                handler_cancellation=True,
                shutdown_timeout=_STOP_S,
                keepalive_timeout=_KEPT_ALIVE_S,
                access_log=None,
            )
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{self.port}"
            self._runner = runner

    @contextlib.contextmanager
    def serving(self, record: EpisodeRecord) -> Iterator[str]:
        """Serve an episode; gives its key."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._episodes[key] = _Episode(record)
        try:
            yield key
        finally:
            del self._episodes[key]

    async def stop(self) -> None:
        """Give up every request and listen no more. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _handler(self, api: ModuleType) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request, episode: _Episode) -> web.StreamResponse:
            raw = await _body(request)
            ask = await _off_the_loop(len(raw), lambda: _read(api, _json(raw), episode.record))
            digest = hashlib.sha256(request.path.encode() + b"\0" + raw).hexdigest()
            return await _answer(api, request, episode, ask, digest)

        return self._handled(api, answer)

    def _handled(
        self, api: ModuleType, answer: Callable[[web.Request, _Episode], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Any]:
        """What aiohttp calls: `answer` for the episode of a request, one of few at a time, or an error of the API's."""

        async def handle(request: web.Request) -> web.StreamResponse:
            episode = None
            try:
                request[_EPISODE] = episode = self._episode(request)
                # A connection that breaks is the client's; whatever else breaks under an answer is told by the record.
                with episode.record.answering("answering a request", lets_out=(ConnectionError,)):
                    async with episode.place():
                        return await answer(request, episode)
            except ApiError as error:
                if episode is not None and error.trouble is Trouble.BAD_REQUEST:
                    episode.record.count(f"refused_{error.trouble}")
                return _error(api, error)

        return handle

    def _episode(self, request: web.Request) -> _Episode:
        """The episode of a request.

        Raises:
            ApiError: its key is none.
        """
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        for key in (request.headers.get("x-api-key", ""), bearer):
            if key in self._episodes:
                return self._episodes[key]
        raise ApiError(Trouble.UNAUTHORIZED, "the API key belongs to no episode that is running")

    async def _count_tokens(self, request: web.Request, episode: _Episode) -> web.StreamResponse:
        raw = await _body(request)

        def read() -> Ask:
            body = {k: v for k, v in _json(raw).items() if k != "max_tokens"}
            return _read(anthropic_messages, body, episode.record)

        ask = await _off_the_loop(len(raw), read)
        return web.json_response({"input_tokens": await episode.record.count_tokens(ask)})

    async def _models(self, request: web.Request) -> web.Response:
        api = _api_of(request)
        try:
            self._episode(request)
        except ApiError as error:
            return _error(api, error)
        name = request.match_info.get("model", MODEL)
        if api is anthropic_messages:
            shown: dict[str, Any] = {"type": "model", "id": name, "display_name": name}
            listing = {"data": [shown], "has_more": False, "first_id": name, "last_id": name}
        else:
            shown = {"id": name, "object": "model", "created": 0, "owned_by": MODEL}
            listing = {"object": "list", "data": [shown]}
        return web.json_response(shown if "model" in request.match_info else listing)

    async def _unknown(self, request: web.Request) -> web.Response:
        trouble = ApiError(Trouble.NOT_FOUND, f"there is no {request.method} {request.path} here")
        return _error(_api_of(request), trouble)


def _api_of(request: web.Request) -> ModuleType:
    """Which API a request most likely speaks, where its path does not say so."""
    return anthropic_messages if "anthropic-version" in request.headers else openai_chat


async def _make_room(request: web.Request, response: web.StreamResponse) -> None:
    """An episode with more requests than places has more connections waiting: theirs comes when this one ends."""
    episode = request.get(_EPISODE)
    if isinstance(episode, _Episode) and episode.num_requests > _MAX_REQUESTS:
        response.force_close()
        response.headers["Connection"] = "close"


async def _body(request: web.Request) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is too large, or not what its headers say.
        ConnectionError: the client has hung up.
    """
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise bad_request(f"the request has more than {_MAX_BODY_BYTES} bytes") from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise bad_request(f"the request's body is not what its headers say ({error})") from error


async def _off_the_loop(num_bytes: int, read: Callable[[], Ask]) -> Ask:
    """Read a body: a large one in a thread, while the requests of other episodes are served."""
    if num_bytes <= _MAX_INLINE_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(_READERS, read)


def _json(raw: bytes) -> dict[str, Any]:
    """The body of a request.

    Raises:
        ApiError: it is no JSON object.
    """
    if raw.count(b"[") + raw.count(b"{") > _MAX_BRACKETS:
        raise bad_request(f"the request's body has more than {_MAX_BRACKETS} brackets")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise bad_request("the request's body must be a JSON object")
    if is_deep(body):
        raise bad_request("the request's body is nested too deep")
    return body


def _read(api: ModuleType, body: Mapping[str, Any], record: EpisodeRecord) -> Ask:
    """The request, with the conversation that it names by the id of an answer.

    Raises:
        ApiError: it asks for what there is not.
    """
    previous = body.get("previous_response_id") if api is openai_responses else None
    earlier = record.conversation_of(str(previous).removeprefix("resp_")) if previous is not None else ()
    if earlier is None:
        raise bad_request(f"there is no response {previous!r:.80} in this episode", "previous_response_id")
    try:
        return openai_responses.read(body, earlier) if earlier else api.read(body)
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        # The shapes that a body can have are without number, and none of them is the machine's fault.
        raise bad_request(f"the request cannot be read ({type(error).__name__}: {error})") from error


async def _answer(
    api: ModuleType, request: web.Request, episode: _Episode, ask: Ask, digest: str
) -> web.StreamResponse:
    """Ask the policy, and send what it says; what cannot be sent is not in the record either.

    Raises:
        ApiError: the request is not answered.
    """
    if (known := _known_answer(request, episode, digest)) is not None:
        episode.record.count("replayed")
        answer, take_back = known, None
    else:
        answer, take_back = await episode.record.answer(ask)
    try:
        for _ in range(_TURNS_TO_LEARN):
            await asyncio.sleep(0)
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError("the client has hung up")
        if take_back is not None:
            episode.answers[digest] = answer
            if len(episode.answers) > _MAX_ANSWERS:
                episode.answers.popitem(last=False)
        return await _send(api, request, answer, ask)
    except (ConnectionError, asyncio.CancelledError):
        if take_back is not None:
            take_back()
            episode.answers.pop(digest, None)
        raise


def _known_answer(request: web.Request, episode: _Episode, digest: str) -> Answer | None:
    """The answer that a retry is about."""
    key = request.headers.get("idempotency-key", "")
    is_retry = request.headers.get("x-stainless-retry-count", "0") != "0" or key in episode.idempotency_keys
    if key:
        episode.idempotency_keys.add(key)
    return episode.answers.get(digest) if is_retry else None


async def _send(api: ModuleType, request: web.Request, answer: Answer, ask: Ask) -> web.StreamResponse:
    if not ask.stream:
        response: web.StreamResponse = web.json_response(api.write(answer, ask))
        await response.prepare(request)
    else:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(b"".join(api.stream(answer, ask)))
    await response.write_eof()
    return response


def _error(api: ModuleType, error: ApiError) -> web.Response:
    # Clients would ask again what will be refused again, and an outage is the episode's end.
    headers = {"x-should-retry": "false"}
    return web.json_response(api.write_error(error), status=error.status, headers=headers)
