"""One phase before RL: continual pretraining or supervised fine-tuning, from weights to a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from composer.errors import CorpusError, TokenizerError
from composer.models.huggingface import check_checkpoint, export
from composer.models.settings import TrainSettings, trainer_config
from composer.models.sizes import rows_at_once, sequence_multiple
from composer.models.trainer import Microbatch, TitanTrainer
from composer.pretrain.batches import Batches, PretrainBatches, SessionBatches, codebase_rows, rows_of_rank
from composer.pretrain.mix import Codebase, Mix
from composer.pretrain.packing import Row, Session
from composer.pretrain.tokenizer import Encoder
from composer.schema import MixConfig, ModelConfig, ParallelConfig, PhaseKind

_CODEBASE_ROW = 512
"""Tokens of context in which held-out code is scored (less if the model knows fewer positions). The same in all phases,
so that their losses can be compared; except in a pipeline, which learns one length, that of the phase."""


@dataclass(frozen=True)
class Phase:
    """A phase and everything it needs. All of it comes from the config except where the phase starts and writes.

    `model.checkpoint` is where weights come from: the folder that the phase before exported, a published model, or
    None for random weights.
    """

    name: str
    mix: MixConfig
    model: ModelConfig
    parallel: ParallelConfig
    tokenizer: Path
    folder: Path
    """Checkpoints go to `checkpoints` in it, the result to `exported`."""
    seed: int = 0
    sessions: Sequence[Session] = ()
    """For kind sft."""

    @property
    def exported(self) -> Path:
        """Exists exactly when the phase is done."""
        return self.folder / "exported"


def train_phase(phase: Phase) -> Iterator[tuple[int, dict[str, float]]]:
    """Train one phase to its end, from its newest checkpoint if there is one. Collective.

    Yields:
        On rank 0, after each optimizer step, the step and its numbers: `loss/train`, what `TitanTrainer.update` says
        under `train/`, `throughput/trained_tokens_per_s` (tokens from which something is learned, of all ranks: no
        padding, and in fine-tuning only the assistant's), where the data stands under `mix/`, and `loss/codebase`
        (mean negative log-likelihood of a held-out token, in nats) every `evaluate_every` steps, before the first
        step (as step 0) and after the last one. Other ranks yield nothing. When it ends, `phase.exported` is there.

    Raises:
        CorpusError: a source is missing, or nothing of it is left to train on.
        TokenizerError: the tokenizer does not fit the model.
        TrainingError: the loss is not finite. The checkpoints are intact.
        ResumeError: a checkpoint cannot be loaded.
    """
    config = phase.mix.phases[phase.name]
    encoder = Encoder(phase.tokenizer)
    if encoder.size > phase.model.vocab_size:
        raise TokenizerError(
            f"model.vocab_size={phase.model.vocab_size}: the tokenizer in {phase.tokenizer} has "
            f"{encoder.size} tokens; raise it to at least {encoder.size}"
        )
    if config.seq_len > phase.model.max_context:
        raise CorpusError(
            f"mix.phases.{phase.name}.seq_len={config.seq_len}: the model has only "
            f"{phase.model.max_context} positions; lower it or raise model.max_context"
        )
    if phase.model.checkpoint is not None:
        check_checkpoint(Path(phase.model.checkpoint), phase.model)
    codebase = Codebase(phase.mix)
    batches = _batches(phase, encoder, codebase)
    trainer = _build(phase, batches.num_steps)
    try:
        rows = codebase_rows(codebase, encoder, _codebase_row(phase), phase.mix.codebase_tokens)
        held_out = _microbatches(trainer, rows)
        trainer.track("batches", batches)
        step = trainer.load()
        yield from _train(phase, trainer, batches, held_out, step)
        export(trainer, phase.model, phase.exported, phase.tokenizer)
    finally:
        trainer.close()


def _train(
    phase: Phase, trainer: TitanTrainer, batches: Batches, held_out: list[Microbatch], step: int
) -> Iterator[tuple[int, dict[str, float]]]:
    config = phase.mix.phases[phase.name]
    first = torch.distributed.get_rank() == 0
    if step in (0, batches.num_steps):  # a fresh start, or resumed after the last step and before the export
        codebase_loss = trainer.mean_loss(held_out)
        if first:
            yield step, {"loss/codebase": codebase_loss}
    while step < batches.num_steps:
        rows = batches.next()
        updated = trainer.update(_microbatches(trainer, rows))
        step = trainer.step
        metrics = {"loss/train": updated.pop("loss"), **{f"train/{n}": v for n, v in updated.items()}}
        metrics["throughput/trained_tokens_per_s"] = sum(row.num_labels for row in rows) / updated["seconds"]
        metrics |= batches.metrics()
        last = step == batches.num_steps
        if last or step % config.evaluate_every == 0:
            metrics["loss/codebase"] = trainer.mean_loss(held_out)
        if last or step % config.checkpoint_every == 0:
            trainer.save()
        if first:
            yield step, metrics


def _batches(phase: Phase, encoder: Encoder, codebase: Codebase) -> Batches:
    config = phase.mix.phases[phase.name]
    multiple = sequence_multiple(phase.model, phase.parallel)
    if config.kind is PhaseKind.sft:
        if phase.parallel.pipeline_parallel > 1:
            multiple = config.seq_len  # a pipeline learns its shapes once
        return SessionBatches(
            f"mix.phases.{phase.name}",
            phase.sessions,
            config.seq_len,
            config.batch_size,
            config.tokens,
            phase.seed,
            multiple=multiple,
            pad_id=encoder.pad_id,
        )
    if config.seq_len % multiple:
        raise CorpusError(
            f"mix.phases.{phase.name}.seq_len={config.seq_len}: must be a multiple of {multiple} on this mesh"
        )
    mix = Mix(f"mix.phases.{phase.name}.sources", config.sources, codebase, config.seq_len, phase.seed)
    return PretrainBatches(mix, encoder, config.seq_len, config.batch_size, config.tokens)


def _codebase_row(phase: Phase) -> int:
    if phase.parallel.pipeline_parallel > 1:
        return phase.mix.phases[phase.name].seq_len
    multiple = sequence_multiple(phase.model, phase.parallel)
    return max(multiple, min(_CODEBASE_ROW, phase.model.max_context) // multiple * multiple)


def _build(phase: Phase, num_steps: int) -> TitanTrainer:
    config, parallel = phase.mix.phases[phase.name], phase.parallel
    rows = config.batch_size // (parallel.data_parallel_replicate * parallel.data_parallel_shard)
    settings = TrainSettings(
        folder=phase.folder,
        num_steps=num_steps,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        schedule=config.schedule,
        min_learning_rate_ratio=config.min_learning_rate_ratio,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        seed=phase.seed,
        timeout_s=parallel.timeout_s,
        # sessions share rows, so their number of rows changes from step to step
        pipeline_microbatches=max(parallel.pipeline_parallel, rows if config.kind is PhaseKind.pretrain else 1),
    )
    return trainer_config(phase.model, parallel, settings).build()


def _microbatches(trainer: TitanTrainer, rows: list[Row]) -> list[Microbatch]:
    """This rank's rows in micro-batches; in a pipeline one row each, and full groups of them."""
    group = trainer.num_pipeline_parallel_microbatches
    mine = rows_of_rank(rows, *trainer.data_parallel, multiple=group)
    at_once = rows_at_once(len(rows[0].tokens), trainer.parallel_dims.pp_enabled)
    return [_microbatch(mine[i : i + at_once]) for i in range(0, len(mine), at_once)]


def _microbatch(rows: Sequence[Row]) -> Microbatch:
    return Microbatch(
        tokens=torch.tensor([row.tokens for row in rows]),
        labels=torch.tensor([row.labels for row in rows]),
        positions=torch.tensor([row.positions for row in rows]),
    )
