"""A policy stand-in: says what a test wants, and remembers the token ids that it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from composer.errors import GeneratorError
from composer.gateway.record import EpisodeRecord
from composer.rollout.chat import Chat
from composer.types import Generation, Trajectory

Line = str | Exception | Generation


class Policy:
    """Each call says the next line, or what `say` makes of the context's text."""

    def __init__(self, chat: Chat, lines: list[Line] | None = None, say: Callable[[str], str] | None = None) -> None:
        self.chat, self.lines, self.say = chat, list(lines or []), say
        self.sent: list[list[int]] = []
        self.said: list[list[int]] = []
        self.gate: asyncio.Event | None = None
        self.num_cancelled = 0

    async def __call__(self, token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        line = self.say(self.chat.decode(token_ids)) if self.say else self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        if isinstance(line, Generation):
            generation = line
        else:
            ids = [*self.chat.encode_generated(line), self.chat.end_token_id]
            cut = ids[:max_tokens]
            reason = "stop" if len(ids) <= max_tokens else "length"
            generation = Generation(cut, [-0.5] * len(cut), [3] * len(cut), reason)
        self.sent.append(token_ids)
        self.said.append(generation.token_ids)
        return generation

    def recorded_exactly(self, record: EpisodeRecord) -> bool:
        """Whether the record's turns are what was sent and said, token for token."""
        contexts = {(tuple(sent), tuple(said)) for sent, said in zip(self.sent, self.said, strict=True)}
        found = set()
        for number, turn in enumerate(record.turns):
            whole = tuple(record.context_ids(number))
            said = tuple(turn.generation.token_ids)
            found.add((whole[: len(whole) - len(said)], said))
        return found <= contexts

    @staticmethod
    def down() -> GeneratorError:
        return GeneratorError("replica='generator-0': its process is dead")


def trajectory(record: EpisodeRecord) -> Trajectory:
    """The record as an episode's end would have it."""
    from composer.types import Outcome

    return Trajectory("t", "g", "g/0", record.turns, record.messages, Outcome.FINISHED, 1.0, metadata=record.metadata)
