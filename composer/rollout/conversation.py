"""One conversation as token ids: what was generated stays as it was sampled, and what comes between is encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from composer.contract import Tool
from composer.rollout.chat import Chat
from composer.types import Generation, Message, ToolCall, Turn


class Conversation:
    """One conversation with tools as ids: prompt, generated tokens and tool results in order.

    Attributes:
        ids: the whole context, [T].
        loss_mask: [T], true at generated tokens.
        messages: the same as text, for people.
        turns: what each generation added.
        metadata: what the episode's record is to hold besides.
        num_invalid_calls: malformed turns so far.
    """

    def __init__(self, chat: Chat, tools: Sequence[Tool], system_prompt: str, request: str) -> None:
        """Encode the first prompt: the system message with the tools, and the request."""
        self.chat, self.tools = chat, tools
        self.messages = [Message("system", system_prompt)] if system_prompt else []
        self.messages.append(Message("user", request))
        self.turns: list[Turn] = []
        self.metadata: dict[str, Any] = {}
        self.num_invalid_calls = 0
        self.ids: list[int] = []
        self.loss_mask: list[bool] = []
        self._pending = chat.encode_prompt(self.messages, tools)
        self._append(self._pending, generated=False)

    def add_generation(self, generation: Generation, seconds: float = 0.0) -> Turn:
        """Append a generated turn as it was sampled; its text is decoded for parsing and for people only."""
        turn = Turn(self._pending, generation, seconds=seconds, generation_seconds=seconds)
        self.turns.append(turn)
        self._pending = []
        self._append(generation.token_ids, generated=True)
        self.messages.append(Message("assistant", self.chat.decode(generation.token_ids)))
        return turn

    def add_calls(self, calls: Sequence[ToolCall]) -> None:
        """Note what was parsed from the last turn."""
        self.turns[-1].tool_calls = list(calls)
        last = self.messages[-1]
        self.messages[-1] = Message(last.role, last.content, tuple(calls))

    def add_observations(self, observations: Sequence[str], continues: bool) -> None:
        """Append the results of the last turn's calls.

        Args:
            observations: one a call; of a malformed turn, the one error message.
            continues: another turn may follow; without it, the results are kept as text and no ids are added.
        """
        turn = self.turns[-1]
        turn.observation = "\n".join(observations)
        self.messages += [Message("tool", o) for o in observations]
        if continues:
            ended = turn.generation.token_ids[-1:] == [self.chat.end_token_id]
            self._pending = self.chat.encode_observations(observations, self.tools, ended)
            self._append(self._pending, generated=False)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy between two turns (expert ids left out), which `resume` takes."""
        return {
            "messages": [asdict(message) for message in self.messages],
            "turns": [turn.to_dict() for turn in self.turns],
            "ids": self.ids,
            "loss_mask": self.loss_mask,
            "pending": self._pending,
            "metadata": self.metadata,
            "num_invalid_calls": self.num_invalid_calls,
        }

    def resume(self, d: dict[str, Any]) -> None:
        """Go on where a conversation that began alike was when `to_dict` copied it.

        Raises:
            KeyError, TypeError, ValueError: `d` is not what `to_dict` gives; nothing has changed then.
        """
        messages, turns = [Message.from_dict(m) for m in d["messages"]], [Turn.from_dict(t) for t in d["turns"]]
        ids, loss_mask, pending = list(d["ids"]), list(d["loss_mask"]), list(d["pending"])
        metadata, num_invalid_calls = dict(d["metadata"]), int(d["num_invalid_calls"])
        if ids[: len(self.ids)] != self.ids:
            raise ValueError("it began with another prompt: the env or the tokenizer has changed since")
        if ids != [i for t in turns for i in (*t.prompt_ids, *t.generation.token_ids)] + pending:
            raise ValueError("its turns do not add up to its ids")
        if len(loss_mask) != len(ids):
            raise ValueError(f"it has {len(ids)} ids and a loss mask of {len(loss_mask)}")
        # In place: an episode's record holds these very lists.
        self.messages[:], self.turns[:] = messages, turns
        self.ids, self.loss_mask, self._pending = ids, loss_mask, pending
        self.metadata.update(metadata)
        self.num_invalid_calls = num_invalid_calls

    def _append(self, ids: Sequence[int], generated: bool) -> None:
        self.ids += ids
        self.loss_mask += [generated] * len(ids)
