"""A sandbox stand-in for tests of the agent loop alone: files in memory, no programs, failures on request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from composer.contract import ExecResult, Finding, Grade, SandboxLimits, SandboxStats
from composer.rollout.chat import SPECIAL_TOKENS, TEMPLATES, Chat
from composer.types import Generation


class StandInSandbox:
    """Files in a dict."""

    def __init__(self, number: int, files: Mapping[str, bytes]) -> None:
        self.id, self.workdir, self.content, self.stopped = f"stand-in-{number}", "/", dict(files), False
        self.files_error: Exception | None = None
        self.exec_seconds = 0.0

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        if path not in self.content:
            raise FileNotFoundError(path)
        return self.content[path][:max_bytes]

    async def write(self, path: str, content: bytes) -> None:
        self.content[path] = content

    async def files(self, max_bytes: int = 2**20) -> dict[str, bytes]:
        if self.files_error is not None:
            raise self.files_error
        return dict(self.content)

    async def shell(self, command: str, timeout_s: float | None = None) -> ExecResult:
        await asyncio.sleep(self.exec_seconds)
        return ExecResult(0, b"")

    async def exec(self, argv, *, stdin=b"", env=None, timeout_s=None) -> ExecResult:
        return ExecResult(127, b"no programs here")

    async def stats(self) -> SandboxStats:
        return SandboxStats(0, 0.0, 0)

    async def stop(self) -> None:
        self.stopped = True


@dataclass(eq=False)
class StandInBackend:
    """Starts stand-ins and keeps them for a look afterwards."""

    start_error: Exception | None = None
    files_error: Exception | None = None
    exec_seconds: float = 0.0
    started: list[StandInSandbox] = field(default_factory=list)

    async def start(self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "") -> StandInSandbox:
        if self.start_error is not None:
            raise self.start_error
        sandbox = StandInSandbox(len(self.started), files)
        sandbox.files_error, sandbox.exec_seconds = self.files_error, self.exec_seconds
        self.started.append(sandbox)
        return sandbox

    async def close(self) -> None:
        for sandbox in self.started:
            await sandbox.stop()

    def check(self) -> list[Finding]:
        return []

    def sweep(self) -> int:
        return 0


class LineGrader:
    """1.0 if line 2 of main.py is the expected one."""

    name = "line"

    def __init__(self, expected: str, error: Exception | None = None) -> None:
        self.expected, self.error, self.seen = expected, error, []

    async def grade(self, task, files, backend, trajectory) -> Grade:
        if self.error is not None:
            raise self.error
        self.seen.append(dict(files))
        return Grade(float(files["main.py"].split(b"\n")[1].decode() == self.expected), {"looked": True})


def small_tokenizer(template: str, texts: list[str], vocab_size: int = 600):
    """A byte-level BPE with the special tokens, as small as a test needs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATES[template]
    return fast


class Script:
    """Plays back turns: each is a text (ended with the end token), or an error, or a `Generation`."""

    def __init__(self, chat: Chat, turns: list[str | Exception | Generation]) -> None:
        self.chat, self.turns, self.prompts, self.budgets = chat, list(turns), [], []

    async def __call__(self, token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
        self.prompts.append(token_ids)
        self.budgets.append(max_tokens)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        if isinstance(turn, Generation):
            return turn
        ids = [*self.chat.encode_generated(turn), self.chat.end_token_id]
        if len(ids) > max_tokens:
            return Generation(ids[:max_tokens], [-0.5] * max_tokens, [3] * max_tokens, "length")
        return Generation(ids, [-0.5] * len(ids), [3] * len(ids), "stop")
