"""One external episode as token ids: which earlier context a request continues, and what was sampled for it.

An agent sends its whole conversation with every request. What of it the policy has seen or said is found by comparing
messages, and stands for the token ids that were sent and sampled then: they are never made again from text. The rest is
encoded once. So each request is one of these:

- it continues the longest context of which it has every message, answers included: one more turn there. If that context
  was continued before, the episode now has a branch (a sub-agent, another try);
- it continues none: a context of its own, such as that of a sub-agent, or a reset after which an agent goes on from a
  summary. Assistant's words in it that nobody sampled here are encoded as text, and not trained on.

A request that fails, or whose client has hung up, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from composer.errors import ComposerError, GeneratorError, TokenizerError
from composer.gateway.exchange import (
    Answer,
    ApiError,
    Ask,
    Call,
    OfferedTool,
    Said,
    Trouble,
    as_object,
    bad_request,
    canonical,
    split_calls,
)
from composer.rollout.chat import Chat, format_calls
from composer.rollout.harness import Generate, HarnessLimits, check_generation
from composer.types import FRESH, PREVIOUS, Generation, Message, Outcome, ToolCall, Turn

logger = logging.getLogger(__name__)
_PIECE = 2**14
"""Characters that are encoded at a time to see whether a text is worth encoding."""
_INLINE_MESSAGES = 64
"""A request with more messages, or more characters than a piece, is encoded in a thread: the event loop goes on."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="gateway")
"""Few, so that whoever sends much waits for itself."""
_MARGIN = 1.25
"""Pieces of a text have a few tokens more than the whole."""


class _TooLongError(Exception):
    """A request has more tokens than any context, at least so many; it is not encoded, which would take its time."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"at least {num_tokens} tokens")
        self.num_tokens = num_tokens


@dataclass(eq=False)
class _Context:
    """What a turn ended in: everything its next one continues."""

    turn: Turn
    answer_id: str
    ask: Ask
    messages: tuple[Said, ...]
    """The request's, and the answer."""
    tools_key: str
    parent: _Context | None
    shown: list[Message]
    """What the turn added, for people."""
    started: float
    num_continued: int = 0
    """Requests that go on from it, answered or not yet."""

    def ids(self) -> list[int]:
        """The token ids of the whole context."""
        line, context = [], self
        while context is not None:
            line.append(context.turn)
            context = context.parent
        return [i for turn in reversed(line) for i in (*turn.prompt_ids, *turn.generation.token_ids)]


class EpisodeRecord:
    """The turns of one external episode, while it runs and afterwards.

    Attributes:
        turns: as of `composer.types.Trajectory`; a request's turn is there as soon as its answer is on its way.
        messages: the same as text, for people: of each turn what it added, and what the policy said.
        metadata: under `gateway`, how often something else than the next turn happened.
        failure: what of ours broke: the generator, or the way to it; the episode then has no reward.
        ended: set when nothing will be answered any more.
    """

    def __init__(self, chat: Chat, limits: HarnessLimits, request: str = "") -> None:
        """Nothing was asked yet; `request` is the task's."""
        self.chat, self.limits, self.request = chat, limits, request
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._counts: dict[str, int] = {}
        self.metadata: dict[str, Any] = {"gateway": self._counts}
        self.failure: ComposerError | None = None
        self.ended = asyncio.Event()
        self._generate: Generate | None = None
        self._episode_id = ""
        self._contexts: list[_Context] = []
        self._tools: dict[str, tuple[OfferedTool, ...]] = {}
        self._refused: Trouble | None = None
        self._num_pending, self._pending_since, self._asked_s = 0, 0.0, 0.0

    def open(self, generate: Generate, episode_id: str) -> None:
        """Begin to answer."""
        self._generate, self._episode_id = generate, episode_id

    def close(self) -> None:
        """Answer no more."""
        self._generate = None

    @property
    def asked_s(self) -> float:
        """Wall time in which at least one request waited for its answer."""
        return self._asked_s + (time.monotonic() - self._pending_since if self._num_pending else 0.0)

    @property
    def limit(self) -> Outcome | None:
        """The limit at which the last request was refused, if it was."""
        outcomes = {Trouble.CONTEXT_FULL: Outcome.CONTEXT_FULL, Trouble.MAX_TURNS: Outcome.MAX_TURNS}
        return outcomes.get(self._refused) if self._refused else None

    def count(self, what: str) -> None:
        """One more of it in the metadata."""
        self._counts[what] = self._counts.get(what, 0) + 1

    def fail(self, error: ComposerError) -> None:
        """The episode has no reward, whatever its agent makes of it; the first error is kept. Nothing is answered."""
        if self.failure is None:
            self.failure = error
        self.ended.set()

    @contextlib.contextmanager
    def answering(self, what: str, lets_out: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Around what is ours in an answer: whatever breaks in it fails the episode, and is no error of the agent's.

        Raises:
            ApiError: the request is not answered.
            Exception: one of `lets_out`.
        """
        try:
            yield
        except (ApiError, *lets_out):
            raise
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
            if task is not None and task.cancelling():  # the client has hung up; else something below gave up by itself
                raise
            if not isinstance(error, ComposerError):
                logger.exception("Episode %s: %s broke", self._episode_id, what)
                self.fail(GeneratorError(f"{what} raised {type(error).__name__}: {error}"))
            else:
                self.fail(error)
            raise ApiError(Trouble.UNAVAILABLE, "the model is not available") from error

    async def answer(self, ask: Ask) -> tuple[Answer, Callable[[], None]]:
        """Have the policy answer, and note it as a turn.

        Returns:
            The answer, and what takes the turn back if the client turns out not to get it.

        Raises:
            ApiError: the request is not answered, and nothing was noted.
        """
        started = time.monotonic()
        self.count("requests")
        generate = self._generate
        if self.failure is not None or generate is None:
            raise ApiError(Trouble.UNAVAILABLE, "the model is not available: this episode has ended")
        if not ask.messages:
            raise bad_request("messages must not be empty", "messages")
        if ask.messages[-1].role == "assistant":
            raise bad_request("the last message must not be the assistant's: there is no prefill", "messages")
        if len(self.turns) + self._num_pending >= self.limits.max_turns:
            raise self._refuse(Trouble.MAX_TURNS, f"this episode has had its {self.limits.max_turns} requests")
        try:
            with self.answering("reading a request"):
                parent = self._find(ask)
            with self.answering("asking the policy"), self._pending(parent):
                try:
                    with self.answering("reading a request", lets_out=(_TooLongError,)):
                        prompt = await self._encode(ask, parent)
                except _TooLongError as error:
                    raise self._refuse_full(f"at least {error.num_tokens}") from None
                ids = [*(parent.ids() if parent is not None else ()), *prompt]
                room = self.limits.max_model_len - len(ids)
                if room < 1:
                    raise self._refuse_full(str(len(ids)))
                max_tokens = min(room, self.limits.max_turn_tokens, ask.max_tokens or room)
                if self._generate is None:
                    raise ApiError(Trouble.UNAVAILABLE, "the model is not available: this episode has ended")
                generation = await generate(list(ids), max_tokens=max_tokens, episode_id=self._episode_id)
                check_generation(generation, self._episode_id)
        except asyncio.CancelledError:
            self.count("cancelled")
            raise
        with self.answering("noting an answer"):
            if self._generate is None:  # the episode has ended meanwhile, and its record is somebody else's by now
                raise ApiError(Trouble.UNAVAILABLE, "the model is not available: this episode has ended")
            self._refused = None
            return self._note(ask, parent, prompt, generation, started, len(ids))

    async def count_tokens(self, ask: Ask) -> int:
        """How many tokens the context of a request has; at least so many if they are far too many.

        Raises:
            ApiError: the chat template refuses it.
        """
        with self.answering("reading a request"):
            try:
                parent = self._find(ask)
                prompt = await self._encode(ask, parent)
            except _TooLongError as error:
                return error.num_tokens
            return len(parent.ids() if parent is not None else ()) + len(prompt)

    def conversation_of(self, answer_id: str) -> tuple[Said, ...] | None:
        """The messages up to an answer, without its request's instructions; None if there is no such answer."""
        found = (c.messages[c.ask.num_instructions :] for c in self._contexts if c.answer_id == answer_id)
        return next(found, None)

    def context_ids(self, number: int) -> list[int]:
        """The token ids of a turn's whole context, with what it generated."""
        return self._contexts[number].ids()

    def _refuse(self, trouble: Trouble, message: str) -> ApiError:
        self._refused = trouble
        self.count(f"refused_{trouble}")
        if trouble is Trouble.MAX_TURNS:  # while a full context may be what an agent starts anew from
            self.ended.set()
        return ApiError(trouble, message)

    def _refuse_full(self, num_tokens: str) -> ApiError:
        return self._refuse(
            Trouble.CONTEXT_FULL,
            f"This model's maximum context length is {self.limits.max_model_len} tokens. However, your messages "
            f"resulted in {num_tokens} tokens: prompt is too long. Please reduce the length of the messages.",
        )

    @contextlib.contextmanager
    def _pending(self, parent: _Context | None) -> Iterator[None]:
        """While a request that goes on from `parent` waits for its answer; without one, it has not gone on from it."""
        if not self._num_pending:
            self._pending_since = time.monotonic()
        self._num_pending += 1
        if parent is not None:
            parent.num_continued += 1
        try:
            yield
        except BaseException:
            if parent is not None:
                parent.num_continued -= 1
            raise
        finally:
            self._num_pending -= 1
            if not self._num_pending:
                self._asked_s += time.monotonic() - self._pending_since

    def _find(self, ask: Ask) -> _Context | None:
        """The longest context that the request continues; the newest of several."""
        best, length, key = None, 0, ask.tools_key
        for context in self._contexts:
            size = len(context.messages)
            if length <= size < len(ask.messages) and context.tools_key == key:
                pairs = zip(reversed(context.messages), reversed(ask.messages[:size]), strict=True)
                if all(known.is_like(given) for known, given in pairs):
                    best, length = context, size
        return best

    async def _encode(self, ask: Ask, parent: _Context | None) -> list[int]:
        """The ids of what a request adds to the context that it continues.

        Raises:
            ApiError: the chat template refuses it.
            _TooLongError: it is far too long.
        """
        added = ask.messages[len(parent.messages) if parent is not None else 0 :]
        if len(added) > self.limits.max_model_len:  # a message has a token at least, those of its role
            raise _TooLongError(len(added))
        # The same objects for the same tools, by which the template's renderings are kept.
        tools = self._tools.setdefault(ask.tools_key, ask.tools)
        encode = functools.partial(self._encode_now, added, parent, tools, ask.tools_key)
        size = sum(len(m.text) + sum(len(c.arguments) for c in m.calls) for m in added) + len(ask.tools_key)
        if len(added) <= _INLINE_MESSAGES and size <= _PIECE:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(_THREADS, encode)

    def _encode_now(self, added: Sequence[Said], parent: _Context | None, tools: Any, tools_key: str) -> list[int]:
        try:
            new = [self._message(m) for m in added]
            self._check_size([m.content for m in new] + ([tools_key] if parent is None else []))
            if parent is None:
                return self.chat.encode_prompt(new, tools)
            ended = parent.turn.generation.token_ids[-1:] == [self.chat.end_token_id]
            return self.chat.encode_continuation(new, tools, ended)
        except TokenizerError as error:
            raise bad_request(f"the chat template refuses the messages: {error}", "messages") from error

    def _check_size(self, texts: Sequence[str]) -> None:
        """Encoding holds a thread up: megabytes, for many seconds.

        Raises:
            _TooLongError: the texts have more tokens than a context.
        """
        if sum(map(len, texts)) <= 4 * _PIECE:
            return
        found = 0
        for text in texts:
            for start in range(0, len(text), _PIECE):
                found += len(self.chat.encode_plain(text[start : start + _PIECE]))
                if found > _MARGIN * self.limits.max_model_len:
                    raise _TooLongError(int(found / _MARGIN))

    def _message(self, said: Said) -> Message:
        """A message as it is encoded: an assistant's content holds its calls."""
        if not said.calls:
            return Message(said.role, said.text)
        calls = tuple(ToolCall(c.name, as_object(c.arguments)) for c in said.calls)
        return Message(said.role, said.text + format_calls(self.chat.template, calls), calls)

    def _note(
        self,
        ask: Ask,
        parent: _Context | None,
        prompt: list[int],
        generation: Generation,
        started: float,
        num_prompt: int,
    ) -> tuple[Answer, Callable[[], None]]:
        """Make a turn of what was sampled, and an answer."""
        text = self.chat.decode(generation.token_ids)
        shown_text, calls = split_calls(text) if ask.tools and ask.parse_calls else (text, [])
        answer_id = uuid.uuid4().hex
        said = Said(
            "assistant",
            shown_text,
            tuple(Call(f"call_{answer_id}_{i}", c.name, canonical(c.arguments)) for i, c in enumerate(calls)),
        )
        finish_reason = "tool_calls" if calls else "length" if generation.finish_reason == "length" else "stop"
        now = time.monotonic()
        new = ask.messages[len(parent.messages) if parent is not None else 0 :]
        shown = [Message("history" if m.role == "assistant" else m.role, self._message(m).content) for m in new]
        shown.append(Message("assistant", text, tuple(calls)))
        if parent is not None and all(context.parent is not parent for context in self._contexts):
            parent.turn.observation = "\n".join(m.text for m in new if m.role == "tool")
            parent.turn.seconds = max(parent.turn.seconds, started - parent.started)
        turn = Turn(prompt, generation, list(calls), seconds=now - started, generation_seconds=now - started)
        context = _Context(turn, answer_id, ask, (*ask.messages, said), ask.tools_key, parent, shown, started)
        self.turns.append(turn)
        self._contexts.append(context)
        self.messages += shown
        self._link()
        answer = Answer(answer_id, said, finish_reason, num_prompt, len(generation.token_ids), int(time.time()))
        return answer, lambda: self._take_back(context)

    def _take_back(self, context: _Context) -> None:
        """Forget a turn that its client did not get, unless it was continued all the same."""
        if context not in self._contexts or context.num_continued:
            return
        self.count("cancelled")
        number = self._contexts.index(context)
        del self._contexts[number], self.turns[number]
        if context.parent is not None:
            context.parent.num_continued -= 1
        self.messages[:] = [message for c in self._contexts for message in c.shown]
        self._link()

    def _link(self) -> None:
        """Write the parents into the turns, and count what is no simple next turn.

        An agent that goes straight on has the same record as the product's own harness.
        """
        numbers = {id(context): number for number, context in enumerate(self._contexts)}
        parents = [numbers[id(c.parent)] if c.parent is not None else None for c in self._contexts]
        for number, (turn, parent) in enumerate(zip(self.turns, parents, strict=True)):
            follows = parent == number - 1 or (number == 0 and parent is None)
            turn.parent = PREVIOUS if follows else FRESH if parent is None else parent
        continued = [parent for parent in parents if parent is not None]
        self._counts |= {
            "fresh_contexts": max(0, parents.count(None) - 1),
            "branches": len(continued) - len(set(continued)),
            "unmatched_answers": sum(any(m.role == "history" for m in c.shown) for c in self._contexts),
        }
