"""The records that flow through a run: Task -> Turn -> Trajectory -> Group -> Sample.

All are plain data: picklable between our own processes, JSON-ready through `to_dict`, free of torch. Token
sequences are lists of ids; a text is never encoded again once ids exist.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NO_LABEL = -100
"""The label of a position from which nothing is learned; what torch's and torchtitan's cross-entropy ignore."""
PREVIOUS = -1
"""As a turn's parent: the turn before it."""
FRESH = -2
"""As a turn's parent: none, its prompt is the whole context."""
CREATED_AT = "created_at"
"""In a task's metadata: when its issue was opened. Package indexes that its agent sees end there."""


class Split(StrEnum):
    """Which pool a task comes from. Pools never share a task."""

    TRAIN = "train"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class Task:
    r"""One problem: a small repository, a request, and tests that decide.

    Example:
        >>> Task(id="micro/train/7", request="scale_price fails its tests in main.py",
        ...      files={"main.py": b"def scale_price(a, b):\\n    return a - b\\n"},
        ...      hidden_tests={"test_hidden.py": b"from main import *\\n..."}).id
        'micro/train/7'
    """

    id: str
    """Unique and stable: `<taskset>/<split>/<index>`."""
    request: str
    """What the user asks, as terse as users are."""
    files: dict[str, bytes]
    """The base state: path relative to the working directory -> content."""
    hidden_tests: dict[str, bytes]
    """Put in place only by the grader, in a clean sandbox."""
    image: str = ""
    """What its sandboxes start from, as the backend names such things (an image, a tarball); "": the env's own."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever a report may want to group by (a family, a label, a difficulty). Never shown to the model."""
    setup: str = ""
    """A shell's command line that makes its sandboxes ready, as their user, before an agent or a grader comes."""

    @property
    def date(self) -> str:
        """When its fix did not exist yet (ISO 8601): `created_at` of the metadata; empty: nobody knows."""
        return str(self.metadata.get(CREATED_AT) or "")


@dataclass(frozen=True)
class ToolCall:
    """A tool call as parsed from generated text."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """A chat message. `content` of an assistant message is the generated text, tool calls included."""

    role: str
    """system, user, assistant or tool; history: an assistant's words that an external agent brings, and that no turn
    of the episode generated."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Message:
        """From what `dataclasses.asdict` and JSON made of it.

        Raises:
            KeyError, TypeError: it is something else.
        """
        return cls(d["role"], d["content"], tuple(ToolCall(**c) for c in d["tool_calls"]))


@dataclass(frozen=True)
class Generation:
    """What the generator returns for one request. All lists have length T (generated tokens)."""

    token_ids: list[int]
    log_probs: list[float]
    """Natural log-probability of each sampled token under the policy at the temperature it was sampled at."""
    policy_versions: list[int]
    """The version of the weights that sampled each token; it may change within a turn (in-flight updates)."""
    finish_reason: str
    """stop (the turn's end token), length, or abort."""
    expert_ids: Any | None = None
    """Routed experts, uint8/uint16 [prompt + T - 1, layers, k], where the engine returns them; else None."""


@dataclass
class Turn:
    """One request to the generator and what followed."""

    prompt_ids: list[int]
    """Ids added to the parent's context before generating: the first prompt, later the tool results."""
    generation: Generation
    tool_calls: list[ToolCall] = field(default_factory=list)
    observation: str = ""
    """What the tools answered, as shown to the model."""
    seconds: float = 0.0
    """Wall time of the whole turn."""
    generation_seconds: float = 0.0
    """The part of it in which the policy was asked; the rest went to the tools."""
    parent: int = PREVIOUS
    """The number of the turn whose context it goes on from, prompt and generated tokens; or `PREVIOUS`, or `FRESH`."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy (expert ids left out)."""
        d = dataclasses.asdict(self)
        d["generation"].pop("expert_ids")
        return d

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Turn:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError: `d` is not what `to_dict` gives.
        """
        calls = [ToolCall(**c) for c in d["tool_calls"]]
        return cls(**{**d, "generation": Generation(**d["generation"]), "tool_calls": calls})


class Outcome(StrEnum):
    """How an episode ended. `INFRASTRUCTURE_ERROR` carries no reward; any other may lose it to a quarantine."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    INVALID_CALL = "invalid_call"
    TIMED_OUT = "timed_out"
    """The agent's own commands used up the episode's time."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"


@dataclass(frozen=True)
class TokenPath:
    """One context from its first token to where it ended. All lists have length T."""

    token_ids: list[int]
    loss_mask: list[bool]
    """True at the generated tokens that no earlier path of the episode has."""
    log_probs: list[float]
    """The sampler's log-probabilities; 0.0 where `loss_mask` is false."""
    policy_version: int
    """The oldest version that generated one of the tokens under `loss_mask`."""


@dataclass
class Trajectory:
    """The record of one episode.

    Its turns are a forest: most episodes have one path through all turns; agents with sub-agents, or that start anew
    from a summary, have several. `token_ids`, `loss_mask` and `log_probs` are those of all paths, one after the other.
    """

    task_id: str
    group_id: str
    episode_id: str
    turns: list[Turn]
    messages: list[Message]
    outcome: Outcome
    reward: float | None
    """None exactly when the outcome is an infrastructure error or the episode is in quarantine: data, never a zero."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The rubric's parts before weighting, by grader name."""
    error: str = ""
    """Root cause of an infrastructure error, in one sentence."""
    seconds: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)
    quarantine: str = ""
    """Why an episode that ended by itself has no reward and is never trained on: what the cheat monitor found."""

    @property
    def parents(self) -> list[int | None]:
        """By turn: the number of the turn whose context it goes on from, None if it starts a context."""
        parents = [number - 1 if t.parent == PREVIOUS else t.parent for number, t in enumerate(self.turns)]
        return [None if parent < 0 else parent for parent in parents]

    @property
    def paths(self) -> list[TokenPath]:
        """The contexts that no other one continues, in the order of their last turns.

        Every generated token is under the loss mask of exactly one of them: the first that has it.

        Raises:
            ValueError: a turn goes on from itself or from a later one.
        """
        parents = self.parents
        if any(parent is not None and parent >= number for number, parent in enumerate(parents)):
            raise ValueError(f"episode {self.episode_id}: a turn goes on from one that was not before it: {parents}")
        seen: set[int] = set()
        paths = []
        for leaf in (number for number in range(len(self.turns)) if number not in parents):
            line, number = [leaf], parents[leaf]
            while number is not None:
                line.append(number)
                number = parents[number]
            paths.append(self._path(line[::-1], seen))
            seen.update(line)
        return paths

    def _path(self, line: list[int], seen: set[int]) -> TokenPath:
        """The turns `line` in a row; of those in `seen`, nothing is learned."""
        ids: list[int] = []
        mask: list[bool] = []
        log_probs: list[float] = []
        versions: list[int] = []
        for number in line:
            prompt, generation = self.turns[number].prompt_ids, self.turns[number].generation
            fresh = number not in seen
            ids += [*prompt, *generation.token_ids]
            mask += [False] * len(prompt) + [fresh] * len(generation.token_ids)
            log_probs += [0.0] * len(prompt) + [p if fresh else 0.0 for p in generation.log_probs]
            versions += generation.policy_versions if fresh else []
        return TokenPath(ids, mask, log_probs, min(versions, default=0))

    @property
    def token_ids(self) -> list[int]:
        """The whole context, [T]: prompts, generated tokens and tool results in order."""
        return [i for path in self.paths for i in path.token_ids]

    @property
    def loss_mask(self) -> list[bool]:
        """[T], true exactly at the tokens that the policy generated; where paths share some, in the first of them."""
        return [m for path in self.paths for m in path.loss_mask]

    @property
    def log_probs(self) -> list[float]:
        """[T], the sampler's log-probabilities; 0.0 where `loss_mask` is false."""
        return [p for path in self.paths for p in path.log_probs]

    @property
    def why_no_reward(self) -> str:
        """The cause, in one sentence; empty for an episode with a reward."""
        return self.error or self.quarantine

    @property
    def num_generated_tokens(self) -> int:
        """How many tokens the policy generated."""
        return sum(len(t.generation.token_ids) for t in self.turns)

    @property
    def oldest_policy_version(self) -> int:
        """The oldest version that generated a token; staleness is the trainer's version minus this."""
        versions = [v for t in self.turns for v in t.generation.policy_versions]
        return min(versions) if versions else 0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy (expert ids left out)."""
        d = dataclasses.asdict(self)
        for turn in d["turns"]:
            turn["generation"].pop("expert_ids")
        return d

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Trajectory:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: `d` is not what `to_dict` gives.
        """
        turns, messages = list(map(Turn.from_dict, d["turns"])), list(map(Message.from_dict, d["messages"]))
        return cls(**{**d, "turns": turns, "messages": messages, "outcome": Outcome(d["outcome"])})


@dataclass
class Group:
    """Sibling trajectories of one task, whose mean reward is the baseline."""

    id: str
    task_id: str
    trajectories: list[Trajectory]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return {"id": self.id, "task_id": self.task_id, "trajectories": [t.to_dict() for t in self.trajectories]}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Group:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: `d` is not what `to_dict` gives.
        """
        return cls(d["id"], d["task_id"], [Trajectory.from_dict(t) for t in d["trajectories"]])


@dataclass(frozen=True)
class Sample:
    """One trainable sequence. All lists have length T and refer to the token at their position.

    `advantages[t]` and `log_probs[t]` belong to `token_ids[t]` as a *target*; the trainer shifts by one.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    log_probs: list[float]
    advantages: list[float]
    group_id: str
    policy_version: int
    """The oldest version in it."""


@dataclass(frozen=True)
class Probe:
    """A short sequence and the trainer's own log-probabilities of it, by which a loaded version is verified.

    Example:
        >>> Probe(token_ids=[5, 9, 2], log_probs=[-1.5, -0.25]).log_probs[0]  # of token 9 after token 5
        -1.5
    """

    token_ids: list[int]
    """[T], T >= 2."""
    log_probs: list[float]
    """[T - 1], natural: `log_probs[i]` is that of `token_ids[i + 1]` given `token_ids[: i + 1]`, at temperature 1."""


@dataclass(frozen=True)
class Mismatch:
    """How far two engines' log-probabilities of the same tokens under the same weights are apart."""

    k3: float
    """Mean of exp(d) - 1 - d with d = trainer - generator: Schulman's estimate of KL(generator || trainer), in nats."""
    p90: float
    """The difference |d| that 90 % of the tokens do not exceed (nearest rank)."""
    p99: float
    max: float
    """The largest |d|."""

    @classmethod
    def of(cls, generator: Sequence[float], trainer: Sequence[float]) -> Mismatch:
        """Compare log-probabilities token by token; all numbers are NaN if one is not finite or the lengths differ.

        Example:
            >>> Mismatch.of([-1.0, -2.0], [-1.5, -2.25]).max
            0.5
        """
        differences = [t - g for g, t in zip(generator, trainer, strict=False)]
        if len(generator) != len(trainer) or not all(map(math.isfinite, differences)) or not differences:
            return cls(math.nan, math.nan, math.nan, math.nan)
        sizes = sorted(map(abs, differences))
        k3 = sum(math.expm1(d) - d for d in differences) / len(differences)
        p90, p99 = (sizes[math.ceil(share * len(sizes) / 100) - 1] for share in (90, 99))
        return cls(k3, p90, p99, sizes[-1])


@dataclass(frozen=True)
class LoadReport:
    """What one load of new weights did."""

    policy_version: int
    seconds: float
    """From the request to the verified version."""
    paused_seconds: float
    """How long no token was generated."""
    mismatch: Mismatch
    """Generator against trainer on the probe, after the load."""


@dataclass(frozen=True)
class Pressure:
    """How hard a machine with sandboxes is pressed at one moment; None: that is not known."""

    runnable_per_cpu: float | None
    """Threads that run or could run, a CPU."""
    memory_bytes: int | None
    """That could be had without swapping; in a container no more than its limit leaves."""
    disk_bytes: int | None
    """Free where sandboxes, or temporary files, lie."""
