"""Asks a model behind an endpoint that speaks OpenAI's chat completions, and knows trouble from an answer.

A time-out, a refused connection, 429, 5xx, an answer that is none and a refusal are tried again, later each time, until
a deadline: then it is an outage (`GeneratorError`), which says nothing about the repository.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer.errors import ConfigError, GeneratorError
from composer.schema import InstallAgentConfig

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

STAND_IN = "scripted-stand-in"
"""What an endpoint answers as its `system_fingerprint` if its answers are scripted: records then say so."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_TRY_AGAIN = (408, 409, 425, 429)
_NO_KEY = "none"


class ContextFullError(Exception):
    """The conversation does not fit the model any more: an end of the agent's own."""


@dataclass(frozen=True)
class AskedCall:
    """A tool call as the endpoint gave it; its arguments are still text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """One turn of the model."""

    content: str
    calls: tuple[AskedCall, ...]
    tokens: int
    """Prompt and answer; estimated where the endpoint does not say."""


@dataclass
class Endpoint:
    """One agent's endpoint."""

    config: InstallAgentConfig
    key: str
    """Where `config` stands, for messages."""
    request_timeout_s: float
    outage_timeout_s: float
    seed: int = 0
    """Of the pauses. Endpoints are sent none: few heed one, and one takes vLLM's CPU engine down."""
    notice: Callable[[str], None] = lambda text: None
    """Told of every attempt that failed."""
    names: set[str] = field(default_factory=set)
    """What the endpoint called its models."""
    is_stand_in: bool = False
    """Whether the endpoint has said that its answers are scripted."""
    num_retries: int = 0
    lost_s: float = 0.0
    """Seconds that went to attempts which failed, and to the pauses after them."""

    def __post_init__(self) -> None:
        """Read the key, which is kept nowhere but in the client.

        Raises:
            ConfigError: the variable that should hold it is not set.
        """
        from openai import AsyncOpenAI

        name = self.config.api_key_env
        secret = os.environ.get(name, "") if name else _NO_KEY
        if not secret:
            raise ConfigError(
                f"{self.key}.api_key_env", name, "no such environment variable is set: export the key in it"
            )
        self._pauses = random.Random(self.seed)
        self._client = AsyncOpenAI(
            base_url=self.config.url, api_key=secret, max_retries=0, timeout=self.request_timeout_s
        )

    async def ask(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Reply:
        """The model's next turn.

        Raises:
            ContextFullError: the messages do not fit the model.
            GeneratorError: the endpoint refused the request, or gave no usable answer before the deadline.
        """
        start, attempt = time.monotonic(), 0
        while True:
            began = time.monotonic()
            left_s = self.outage_timeout_s - (time.monotonic() - start)
            try:
                async with asyncio.timeout(min(self.request_timeout_s, max(0.05, left_s))):
                    return self._read(await self._request(messages, tools), messages)
            except _Again as trouble:
                reason, pause_s = str(trouble), trouble.pause_s
            except TimeoutError:
                reason, pause_s = f"no answer within {self.request_timeout_s:g} s", 0.0
            pause_s = max(pause_s, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * self._pauses.uniform(0.5, 1.0))
            attempt += 1
            self.num_retries += 1
            if time.monotonic() - start + pause_s >= self.outage_timeout_s:
                raise GeneratorError(
                    f"{self.key}.url={self.config.url!r}: {reason} ({attempt} attempts in "
                    f"{time.monotonic() - start:.0f} s): look at the endpoint, then start the command again."
                )
            self.notice(f"{self.config.url}: {reason}; asking again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)
            self.lost_s += time.monotonic() - began

    def kind(self) -> str:
        """What can be said of the model, never more than is known."""
        if self.is_stand_in:
            return "scripted stand-in"
        return "as the endpoint names them, unverified" if self.names else "none has answered"

    async def close(self) -> None:
        """Let the connections go. Idempotent."""
        await self._client.close()

    def to_dict(self) -> dict[str, Any]:
        """Which model it was, as far as that is known."""
        return {
            "url": self.config.url,
            "asked_for": self.config.model,
            "answered_as": sorted(self.names),
            "models": self.kind(),
            "temperature": self.config.temperature,
            "num_retries": self.num_retries,
        }

    async def _request(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> ChatCompletion:
        import openai

        request: dict[str, Any] = {
            "model": self.config.model,
            "messages": list(messages),
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_turn_tokens,
        }
        if tools and self.config.native_tools:
            request["tools"] = list(tools)
        try:
            return await self._client.chat.completions.create(**request)
        except openai.APIStatusError as error:
            said = " ".join(str(error.message).split())[:200]
            if error.status_code in _TRY_AGAIN or error.status_code >= 500:
                raise _Again(f"it answered {error.status_code} ({said})", _retry_after(error)) from error
            if error.status_code in (400, 413, 422) and "context" in said.lower():
                raise ContextFullError(said) from error
            raise GeneratorError(
                f"{self.key}.url={self.config.url!r}: it refused the request with {error.status_code} ({said}): "
                f"look at {self.key} (native_tools: false, if it reads no tool calls itself)."
            ) from error
        except openai.APITimeoutError as error:
            raise _Again(f"no answer within {self.request_timeout_s:g} s") from error
        except openai.APIConnectionError as error:
            raise _Again(f"it cannot be reached ({error.__cause__ or error})") from error
        except (openai.OpenAIError, ValueError) as error:  # what it sent is no JSON, or no completion
            raise _Again(f"its answer cannot be read ({str(error)[:200]})") from error

    def _read(self, completion: ChatCompletion, messages: Sequence[Mapping[str, Any]]) -> Reply:
        try:
            choice = completion.choices[0]
            message = choice.message
            calls = tuple(
                AskedCall(_whole(call.id), _whole(call.function.name), _whole(call.function.arguments))  # pyright: ignore[reportAttributeAccessIssue]
                for call in message.tool_calls or ()
            )
            content = _whole(message.content or "")
        except (AttributeError, IndexError, TypeError) as error:
            raise _Again(f"its answer is no completion ({error!r:.200})") from error
        if refusal := getattr(message, "refusal", None) or (choice.finish_reason == "content_filter" and "filtered"):
            raise _Again(f"the model refuses ({str(refusal)[:200]})")
        if not content and not calls:
            raise _Again("its answer is empty")
        self.names.add(str(completion.model))
        self.is_stand_in |= getattr(completion, "system_fingerprint", None) == STAND_IN
        usage = getattr(completion.usage, "total_tokens", None)
        if not isinstance(usage, int):
            usage = (len(json.dumps(list(messages))) + len(content)) // 4
        return Reply(content, calls, usage)


class _Again(Exception):
    """Trouble that may pass."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


def _whole(text: object) -> str:
    """A text without half characters, which could not be sent back."""
    return str(text).encode(errors="replace").decode()


def _retry_after(error: Any) -> float:
    """Seconds that the endpoint asks for; 0 if it does not, or in another form."""
    try:
        return max(0.0, float(error.response.headers.get("retry-after", 0)))
    except (TypeError, ValueError):
        return 0.0
