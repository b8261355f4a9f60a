"""Asks a shadow backend, with deadlines and a bounded number of attempts.

That it does not answer is never the model's doing: an outage is a `ToolError`, and the episode has no reward.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from composer.errors import ToolError
from envs.shadow.server import TOKEN_ENV
from envs.shadow.service import shared

ATTEMPTS = 3
_PAUSE_S = 0.25
"""Before the second attempt, and twice as much before every further one."""
_MAX_ANSWER_BYTES = 8 * 2**20
_RETRIED = frozenset({429, 500, 502, 503, 504})


class UnknownWorkspaceError(Exception):
    """The backend does not know a workspace, or not any more."""


class TooLargeError(Exception):
    """The backend refuses a workspace of this size."""


class _Unavailable(Exception):
    """An attempt failed in a way that the next one need not."""


class ShadowClient:
    """Asks one backend: a user's own by its address, or the one that ships with the product.

    Holds no connection between requests, so that nothing is left to close.
    """

    def __init__(
        self, backend: str = "", token_env: str = TOKEN_ENV, corpus: str = "", timeout_s: float = 60.0
    ) -> None:
        """Choose the backend; nothing is asked yet.

        Args:
            backend: address, such as `http://10.0.0.5:8123`; "": this process's own, see `envs.shadow.service.shared`.
            token_env: variable with the token of the backend at `backend`.
            corpus: of this process's own, see `envs.shadow.service.ShadowBackend`.
            timeout_s: wall time of one attempt.

        Raises:
            ValueError: the address is none, or there are a backend and a corpus.
        """
        if backend and not backend.startswith(("http://", "https://")):
            raise ValueError(f"`backend` must begin with http:// or https://, but is {backend!r} instead")
        if backend and corpus:
            raise ValueError(f"`corpus` must be empty where there is a `backend`, but is {corpus!r} instead")
        if not timeout_s > 0:
            raise ValueError(f"`timeout_s` must be above 0, but is {timeout_s} instead")
        self._backend, self._token_env, self._corpus = backend.rstrip("/"), token_env, corpus
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def post(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The backend's answer.

        Raises:
            UnknownWorkspaceError: it does not know the workspace.
            TooLargeError: it does not take what is in the payload.
            ToolError: it cannot be reached, or answers nonsense.
        """
        body = json.dumps(payload).encode()
        trouble = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_S * 2 ** (attempt - 1))
            url, token = await self._address()
            try:
                return await self._attempt(f"{url}{path}", token, body)
            except _Unavailable as error:
                trouble = f"{url}{path}: {error}"
        raise ToolError(f"the shadow backend failed {ATTEMPTS} times ({trouble}): see whether it runs")

    async def _address(self) -> tuple[str, str]:
        if self._backend:
            return self._backend, os.environ.get(self._token_env, "")
        own = await asyncio.to_thread(shared, self._corpus)
        return own.url, own.token

    async def _attempt(self, url: str, token: str, body: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.post(url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                status, answer = response.status, await _read(response)
        except TimeoutError as error:
            raise _Unavailable(f"no answer within {self._timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        if status == 200:
            return _parsed(url, answer)
        said = f"status {status}, {answer[:200].decode(errors='replace')!r}"
        if status in _RETRIED:
            raise _Unavailable(said)
        if status == 404 and b"workspace" in answer:
            raise UnknownWorkspaceError(said)
        if status == 413:
            raise TooLargeError(said)
        if status in (401, 403):
            variable = f": give its token in the variable {self._token_env}" if self._backend else ""
            raise ToolError(f"the shadow backend at {url} refuses the token{variable}")
        raise ToolError(f"the shadow backend at {url} refuses the request ({said}): it must speak envs.shadow.server's")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        data += chunk
        if len(data) > _MAX_ANSWER_BYTES:
            raise ToolError(f"the shadow backend at {response.url} answers more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(data)


def _parsed(url: str, answer: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ToolError(f"the shadow backend at {url} answers what is no JSON object: {answer[:80]!r}")
    return parsed
