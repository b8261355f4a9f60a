"""The policy on one trainer rank: a policy-gradient loss, a reference policy, and the way to its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.loss import BaseLoss

from composer.models.huggingface import export
from composer.models.logits import log_probs_and_entropy
from composer.models.settings import TrainSettings, trainer_config
from composer.models.trainer import Microbatch
from composer.rl.loss import policy_loss
from composer.rl.packing import PackedRows, pack_to_score
from composer.schema import AlgorithmConfig, ModelConfig, ParallelConfig
from composer.types import NO_LABEL


class PolicyLoss(BaseLoss):
    """`policy_loss` as torchtitan calls a loss: from logits, with metrics named by how they reduce."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """Carries the algorithm."""

        algorithm: AlgorithmConfig

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        """Keep the algorithm; nothing is compiled."""
        self.algorithm = config.algorithm

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor,
        *,
        positions: Tensor,
        sampler_log_probs: Tensor,
        advantages: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and diagnostics of one microbatch.

        Args:
            pred: [B, L, V] logits; torchtitan brings those of a large vocabulary a piece of the sequence at a time.
            labels: [B, L], `NO_LABEL` at tokens that the policy did not generate.
            global_valid_tokens: generated tokens of the step, over all ranks and microbatches.
            positions: unused; every torchtitan loss is given them.
            sampler_log_probs: [B, L].
            advantages: [B, L].
        """
        log_probs, entropy = log_probs_and_entropy(
            pred, labels, self.algorithm.temperature, entropy_has_gradient=self.algorithm.entropy_coefficient > 0
        )
        loss, diagnostics = policy_loss(
            log_probs, entropy, sampler_log_probs, advantages, labels != NO_LABEL, global_valid_tokens, self.algorithm
        )
        return loss, {f"{name}/mean": value for name, value in diagnostics.items()}


class PolicyTrainer:
    """Trains the policy on packed rows. Every method is collective: all ranks call it with the same arguments."""

    def __init__(
        self, model: ModelConfig, parallel: ParallelConfig, algorithm: AlgorithmConfig, folder: Path, seed: int
    ) -> None:
        """Build the trainer; `model.checkpoint` is the Hugging Face folder that RL starts from.

        Raises:
            ResumeError: `folder` holds a checkpoint that cannot be read.
        """
        self._model, self._algorithm = model, algorithm
        settings = TrainSettings(
            folder=folder,
            num_steps=algorithm.num_steps,
            learning_rate=algorithm.learning_rate,
            warmup_steps=algorithm.warmup_steps,
            schedule=algorithm.schedule,
            min_learning_rate_ratio=algorithm.min_learning_rate_ratio,
            weight_decay=algorithm.weight_decay,
            beta1=algorithm.beta1,
            beta2=algorithm.beta2,
            max_grad_norm=algorithm.max_grad_norm,
            seed=seed,
            timeout_s=parallel.timeout_s,
        )
        self._trainer = trainer_config(model, parallel, settings, PolicyLoss.Config(algorithm=algorithm)).build()
        self._reference: list[Tensor] | None = None
        if algorithm.kl_coefficient:
            self._keep_reference(model, parallel, settings)
        self.version = self._trainer.load()

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) over which different rows go to different ranks."""
        return self._trainer.data_parallel

    @property
    def sequence_multiple(self) -> int:
        """Row lengths must be a multiple of this."""
        return self._trainer.sequence_multiple

    def update(self, rows: Sequence[PackedRows]) -> dict[str, float]:
        """One optimizer step over this rank's rows; the version goes up by one.

        Raises:
            TrainingError: the loss or the gradient is not finite.
        """
        metrics = self._trainer.update([_to_microbatch(r) for r in rows])
        self.version = self._trainer.step
        return metrics

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of token_ids[1:], each given what stands before it, under the current weights.

        At temperature 1, as generators score a probe.
        """
        length = len(token_ids) - 1
        padded = -(-length // self.sequence_multiple) * self.sequence_multiple
        tokens = torch.zeros(1, padded, dtype=torch.int64)
        labels = torch.full_like(tokens, NO_LABEL)
        tokens[0, :length], labels[0, :length] = torch.tensor(token_ids[:-1]), torch.tensor(token_ids[1:])
        positions = torch.arange(padded)[None]
        return self._trainer.score(Microbatch(tokens, labels, positions))[0, :length].tolist()

    def reference_score(self, sequences: Sequence[Sequence[int] | np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities of every token but the first, under the weights that RL started from.

        At the temperature of sampling, as the log-probabilities that they are compared with. The sequences are packed
        into micro-batches and shared out over the data-parallel ranks like those of a step.

        Returns:
            For each sequence of T tokens float32 [T - 1], the same on every rank.

        Raises:
            ValueError: no reference is kept (`algorithm.kl_coefficient` is 0).
        """
        if self._reference is None:
            raise ValueError("algorithm.kl_coefficient=0: no reference policy is kept; set it above 0")
        rank, num_ranks = self.data_parallel
        budget, multiple = self._algorithm.microbatch_tokens, self.sequence_multiple
        mine = pack_to_score(sequences, rank, num_ranks, budget, pad_id=0, multiple_of=multiple)
        lengths = [len(s) - 1 for s in sequences]
        scores = torch.zeros(sum(lengths), dtype=torch.float32)
        self._swap_reference()
        try:
            for rows in mine:
                tokens, labels, positions, targets = map(
                    torch.from_numpy, (rows.tokens, rows.labels, rows.positions, rows.targets)
                )
                found = self._trainer.score(Microbatch(tokens, labels, positions), self._algorithm.temperature)
                scores[targets[targets >= 0]] = found.cpu()[targets >= 0]
        finally:
            self._swap_reference()
        return [part.numpy() for part in self._trainer.add_over_data_ranks(scores).cpu().split(lengths)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), one at a time."""
        return self._trainer.hf_state_dict()

    def export(self, folder: Path, tokenizer: Path) -> None:
        """Write the policy as a Hugging Face folder, whole or not at all."""
        export(self._trainer, self._model, folder, tokenizer)

    def save(self) -> None:
        """Write a checkpoint of this step."""
        self._trainer.save()

    def close(self) -> None:
        """Release threads and process groups."""
        self._trainer.close()

    def _keep_reference(self, model: ModelConfig, parallel: ParallelConfig, settings: TrainSettings) -> None:
        """Keep this rank's shards of the weights that RL starts from.

        They are loaded by the trainer itself from `model.checkpoint`, before it loads its own newest checkpoint; so a
        resumed run has the same reference as the first one.
        """
        trainer = self._trainer
        newest = trainer.checkpointer.folder
        trainer.checkpointer.folder = str(settings.folder / "no-checkpoint-here")
        try:
            trainer.load()
        finally:
            trainer.checkpointer.folder = newest
        self._reference = [shard.detach().clone() for shard in trainer.shards()]

    @torch.no_grad()
    def _swap_reference(self) -> None:
        for shard, kept in zip(self._trainer.shards(), self._reference or [], strict=True):
            now = shard.detach().clone()
            shard.copy_(kept)
            kept.copy_(now)


def _to_microbatch(rows: PackedRows) -> Microbatch:
    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array))  # arrays from Ray's object store are read-only

    extras = {"sampler_log_probs": tensor(rows.sampler_log_probs), "advantages": tensor(rows.advantages)}
    return Microbatch(tensor(rows.tokens), tensor(rows.labels), tensor(rows.positions), extras)
