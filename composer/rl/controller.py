"""The RL loop: keeps episodes running, takes finished groups, trains, and sends the new weights out.

Trainer and generators never wait for each other by more than the staleness bound allows. With G groups a step and a
bound of S versions, a group may start only while fewer than (S + 1) G groups are started but not trained: then it is
taken at most S versions later (AReaL, arXiv 2505.24298, section 5.1). S = 0 is synchronous RL.

The loop knows nothing of processes: `Rollouts` and `Policy` are what it needs of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from composer.errors import ComposerError, LauncherError, TrainingError
from composer.rl.ledger import Ledger, LedgerState
from composer.rl.packing import PackedRows, pack
from composer.rl.samples import group_metrics, make_samples
from composer.schema import AlgorithmConfig
from composer.types import Group, Sample, Split, TokenPath

PROBE_TOKENS = 512
"""Of the sequence on which both engines compare log-probabilities after each load."""
_NO_ROOM = "its request fills the context; shorten it, or start a new run with a higher generator.max_model_len"
_STANDSTILL_STEPS = 5
"""A step without a difference between siblings happens; so many in a row say that there is nothing left to learn."""
_MOST_TOLD = 3
"""Warnings about groups that lost a few episodes; the ledger and the outcome metrics have them all."""


class Rollouts(Protocol):
    """Where episodes run."""

    async def run_group(self, split: Split, index: int, group_id: str, size: int, temperature: float) -> Group:
        """Run `size` sibling episodes of a task. Failed episodes are data inside the group.

        Raises:
            LauncherError: there is no worker left.
            ComposerError: the worker itself failed.
        """
        ...


class Policy(Protocol):
    """The trainer's ranks, addressed together, and the way of their weights to the generators."""

    num_data_ranks: int
    sequence_multiple: int

    async def update(self, rows: list[list[PackedRows]]) -> dict[str, float]:
        """One optimizer step; rows by data-parallel rank.

        Raises:
            TrainingError: the step failed.
        """
        ...

    async def reference_score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probabilities under the weights that RL started from."""
        ...

    async def synchronise(self, version: int, probe: list[int]) -> dict[str, float]:
        """Publish the weights, load them on every generator, and compare log-probabilities on `probe`.

        Raises:
            WeightSyncError: they could not be published, loaded or verified.
        """
        ...

    async def save(self) -> None:
        """Write a checkpoint."""
        ...


@dataclass
class Step:
    """What the loop reports after each optimizer step."""

    step: int
    metrics: dict[str, float]
    groups: list[Group]


class Controller:
    """Runs RL from a ledger's state to `algorithm.num_steps`."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        rollouts: Rollouts,
        policy: Policy,
        ledger: Ledger,
        state: LedgerState,
        version: int,
        pad_id: int,
        report: Callable[[Step], None],
        warn: Callable[[str], None],
    ) -> None:
        """Nothing runs yet.

        Args:
            algorithm: the algorithm.
            rollouts: where episodes run.
            policy: the trainer.
            ledger: open for appending.
            state: what `read_ledger` found for `version`.
            version: optimizer steps done.
            pad_id: token of empty positions.
            report: called after each step; must not raise.
            warn: tells the user one sentence.
        """
        self.algorithm, self.rollouts, self.policy, self.ledger = algorithm, rollouts, policy, ledger
        self.version, self.pad_id, self.report, self.warn = version, pad_id, report, warn
        self._ready: deque[Group] = deque(state.groups.values())
        self._running: dict[str, asyncio.Task[None]] = {}
        self._next_index = state.next_index
        self._training = 0
        self._num_dropped = state.num_dropped
        self._num_quarantined = 0
        self._failures_in_a_row = 0
        self._last_failure = ""
        self._num_told = 0
        self._bug: Exception | None = None
        self._steps_alike = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Train until `num_steps`.

        Raises:
            WeightSyncError: weights did not arrive.
            TrainingError: an optimizer step failed, or group after group did in the infrastructure.
            LauncherError: there is no worker left.
        """
        try:
            while self.version < self.algorithm.num_steps:
                started = time.monotonic()
                groups = await self._take()
                waited = time.monotonic() - started
                metrics = group_metrics(groups, self.version)
                self._look_for_standstill(metrics)
                metrics |= await self._train(groups)
                seconds = time.monotonic() - started
                tokens = sum(t.num_generated_tokens for g in groups for t in g.trajectories)
                metrics |= {
                    "time/wait_s": waited,
                    "time/step_s": seconds,
                    "throughput/generated_tokens_per_s": tokens / seconds,
                    "groups/dropped": float(self._num_dropped),
                    "groups/dropped_by_monitor": float(self._num_quarantined),
                    "groups/ready": float(len(self._ready)),
                    "groups/running": float(len(self._running)),
                }
                self.report(Step(self.version, metrics, groups))
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _look_for_standstill(self, metrics: Mapping[str, float]) -> None:
        """Say it once when step after step has nothing to learn from: no later step mends that by itself."""
        alike = metrics["reward/zero_variance_share"] == 1
        self._steps_alike = self._steps_alike + 1 if alike else 0
        if self._steps_alike == _STANDSTILL_STEPS:
            self.warn(
                f"nothing is learnt any more: in the last {_STANDSTILL_STEPS} steps all episodes of each group had one "
                f"reward (the mean is {metrics['reward/mean']:.3g}). Near 1 the tasks are learnt or easy; else they "
                "are too hard or the policy has collapsed: look at the traces, and start again with a lower "
                "algorithm.learning_rate, a higher algorithm.kl_coefficient or easier tasks"
            )

    def _fill(self) -> None:
        """Start as many groups as the staleness bound allows and the rest of the run needs."""
        per_step = self.algorithm.groups_per_step
        left = (self.algorithm.num_steps - self.version) * per_step
        bound = min((self.algorithm.max_staleness + 1) * per_step, left)
        while len(self._running) + len(self._ready) + self._training < bound:
            index, self._next_index = self._next_index, self._next_index + 1
            group_id = f"g{index}"
            self.ledger.start(group_id, index, self.version)
            self._running[group_id] = asyncio.create_task(self._run_group(group_id, index))

    async def _run_group(self, group_id: str, index: int) -> None:
        """Run one group to its end; whatever happens, it is either ready or dropped afterwards."""
        algorithm = self.algorithm
        try:
            async with asyncio.timeout(algorithm.group_timeout_s):
                group = await self.rollouts.run_group(
                    Split.TRAIN, index, group_id, algorithm.group_size, algorithm.temperature
                )
            scored = [t for t in group.trajectories if t.reward is not None]
            lost = [t.why_no_reward for t in group.trajectories if t.reward is None]
            if len(scored) < 2:
                # Also where all are in quarantine: a policy that only cheats would go on for ever.
                self._num_quarantined += any(t.quarantine for t in group.trajectories)
                self._drop(group_id, lost[0] if lost else "no episode", failed=True)
            elif not any(t.num_generated_tokens for t in scored):
                self._drop(group_id, f"task {group.task_id} leaves no room to answer: {_NO_ROOM}", failed=True)
            else:
                self.ledger.group(group)
                self._ready.append(group)
                self._failures_in_a_row = 0
                if lost and self._num_told < _MOST_TOLD:
                    self._num_told += 1
                    self.warn(f"{len(lost)} episodes of group {group_id} have no reward: {lost[0]}")
        except TimeoutError:
            self._drop(group_id, f"not finished after {algorithm.group_timeout_s:g} s", failed=True)
        except LauncherError as e:  # no other group would fare better
            self._bug = e
        except ComposerError as e:
            self._drop(group_id, str(e), failed=True)
        except Exception as e:  # not a failure of an episode: the loop would meet it again and again
            self._bug = e
        finally:
            self._running.pop(group_id, None)
            self._changed.set()

    def _drop(self, group_id: str, reason: str, failed: bool) -> None:
        self._num_dropped += 1
        self.ledger.drop(group_id, reason)
        self.warn(f"group {group_id} was dropped: {reason}")
        if failed:
            self._failures_in_a_row += 1
            self._last_failure = reason

    async def _take(self) -> list[Group]:
        """The next step's groups, none of them staler than the bound."""
        per_step = self.algorithm.groups_per_step
        batch: list[Group] = []
        while len(batch) < per_step:
            while self._ready and len(batch) < per_step:
                group = self._ready.popleft()
                if self._staleness(group) > self.algorithm.max_staleness and not self._is_replay(group):
                    self._drop(group.id, f"staleness {self._staleness(group)} is over the bound", failed=False)
                else:
                    batch.append(group)
            self._training = len(batch)
            if self._bug is not None:
                raise self._bug
            if self._failures_in_a_row >= 3 * per_step:
                raise TrainingError(
                    f"{self._failures_in_a_row} groups in a row failed, the last one because: {self._last_failure}. "
                    "Mend that and resume; `composer doctor` checks the machine"
                )
            self._fill()
            if len(batch) < per_step:
                self._changed.clear()
                await self._changed.wait()
        return batch

    def _staleness(self, group: Group) -> int:
        return self.version - min(t.oldest_policy_version for t in group.trajectories if t.reward is not None)

    def _is_replay(self, group: Group) -> bool:
        """Sampled by weights that were lost and are being trained again: newer than the trainer, never too old."""
        return self._staleness(group) < 0

    async def _train(self, groups: Sequence[Group]) -> dict[str, float]:
        """One optimizer step on these groups, then the new weights to the generators."""
        clock = _Stopwatch()
        kl = await self._kl(groups)
        samples = make_samples(groups, self.algorithm, kl)
        rows = pack(
            samples,
            self.policy.num_data_ranks,
            self.algorithm.microbatch_tokens,
            self.pad_id,
            multiple_of=self.policy.sequence_multiple,
        )
        updated = await self.policy.update(rows)
        metrics = {f"train/{name}": value for name, value in updated.items()}
        metrics |= {"loss/policy": updated["loss"], "time/update_s": clock.lap()}
        if kl:
            metrics["reward/kl_k1"] = sum(kl.values()) / len(kl)
        self.version += 1
        self.ledger.step(self.version, [g.id for g in groups])
        metrics |= await self.policy.synchronise(self.version, _probe(samples))
        metrics["time/synchronise_s"] = clock.lap()
        self._training = 0
        self._fill()
        if self.version % self.algorithm.checkpoint_every == 0 or self.version == self.algorithm.num_steps:
            await self.policy.save()
            metrics["time/checkpoint_s"] = clock.lap()
        return metrics

    async def _kl(self, groups: Sequence[Group]) -> dict[str, float] | None:
        """k1 = sum over generated tokens of log pi - log pi_ref, by episode; None without a reference."""
        if not self.algorithm.kl_coefficient:
            return None
        episodes = [t for g in groups for t in g.trajectories if t.reward is not None]
        paths = [(t.episode_id, path) for t in episodes for path in t.paths]
        scores = await self.policy.reference_score([path.token_ids for _, path in paths])
        kl = dict.fromkeys((t.episode_id for t in episodes), 0.0)
        for (episode_id, path), reference in zip(paths, scores, strict=True):
            kl[episode_id] += _k1(path, reference)
        return kl


def _k1(path: TokenPath, reference: Sequence[float]) -> float:
    """`reference[i]` belongs to token i + 1."""
    triples = zip(path.loss_mask[1:], path.log_probs[1:], reference, strict=True)
    return sum(sampled - ref for generated, sampled, ref in triples if generated)


def _probe(samples: Sequence[Sample]) -> list[int]:
    """The sequence on which both engines compare log-probabilities: the beginning of the step's first sample.

    Without its last token: the generator needs room for one more.
    """
    return samples[0].token_ids[:-1][:PROBE_TOKENS]


class _Stopwatch:
    """Seconds between laps."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return seconds
