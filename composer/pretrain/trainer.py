"""One phase before RL: continual pretraining or supervised fine-tuning, from weights to a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from composer.errors import CorpusError, TokenizerError
from composer.models.huggingface import check_checkpoint, export
from composer.models.sizes import sequence_multiple
from composer.models.trainer import Microbatch, TitanTrainer, TrainSettings, trainer_config
from composer.pretrain.batches import Batches, PretrainBatches, SessionBatches, codebase_rows, rows_of_rank
from composer.pretrain.mix import Codebase, Mix
from composer.pretrain.packing import Row, Session
from composer.pretrain.tokenizer import Encoder
from composer.schema import MixConfig, ModelConfig, ParallelConfig, PhaseKind

OnMetrics = Callable[[int, dict[str, float]], None]
"""Called on rank 0 with the optimizer step and its numbers."""

_CODEBASE_ROW = 512
"""Tokens of context in which held-out code is scored (less if the model knows fewer positions); the same in all phases,
so that their losses can be compared."""
_TOKENS_AT_ONCE = 8192
"""Tokens of a micro-batch, for training and for scoring (one row at least)."""


@dataclass(frozen=True)
class PhaseResult:
    """What a phase came to."""

    steps: int
    tokens: int
    """Tokens trained on in this process, padding included, this rank."""
    loss: float
    """Of the last step; nan if none was left to do."""
    codebase_loss: float
    """Mean negative log-likelihood of a held-out token, in nats, at the end."""
    seconds: float
    exported: Path
    """The Hugging Face folder."""


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


def run_phase(phase: Phase, on_metrics: OnMetrics = lambda step, metrics: None) -> PhaseResult:
    """Train one phase to its end, from its newest checkpoint if there is one. Collective.

    Every step reports the numbers of `TitanTrainer.update`; every `evaluate_every` steps, before the first step and
    after the last one, `codebase_loss` comes along.

    Raises:
        CorpusError: a source is missing, or nothing of it is left to train on.
        TokenizerError: the tokenizer does not fit the model.
        TrainingError: the loss is not finite. The checkpoints are intact.
        ResumeError: a checkpoint cannot be loaded.
    """
    started, config = time.perf_counter(), phase.mix.phases[phase.name]
    encoder = Encoder(phase.tokenizer)
    if encoder.size > phase.model.vocab_size:
        raise TokenizerError(f"model.vocab_size={phase.model.vocab_size}: the tokenizer in {phase.tokenizer} has "
                             f"{encoder.size} tokens; raise it to at least {encoder.size}")
    if config.seq_len > phase.model.max_context:
        raise CorpusError(f"mix.phases.{phase.name}.seq_len={config.seq_len}: the model has only "
                          f"{phase.model.max_context} positions; lower it or raise model.max_context")
    if phase.model.checkpoint is not None:
        check_checkpoint(Path(phase.model.checkpoint), phase.model)
    codebase = Codebase(phase.mix, config.seq_len)
    batches = _batches(phase, encoder, codebase)
    trainer = _build(phase, batches.num_steps)
    try:
        rows = codebase_rows(codebase, encoder, _codebase_row(phase), phase.mix.codebase_tokens)
        held_out = _microbatches(trainer, rows)
        trainer.track("batches", batches)
        step = trainer.load()
        return _train(phase, trainer, batches, held_out, step, on_metrics, started)
    finally:
        trainer.close()


def _train(phase: Phase, trainer: TitanTrainer, batches: Batches, held_out: list[Microbatch], step: int,
           on_metrics: OnMetrics, started: float) -> PhaseResult:
    config = phase.mix.phases[phase.name]
    first = torch.distributed.get_rank() == 0
    codebase_loss = math.nan
    if step == 0:
        codebase_loss = trainer.mean_loss(held_out)
        if first:
            on_metrics(0, {"codebase_loss": codebase_loss})
    tokens, metrics = 0, {"loss": math.nan}
    while step < batches.num_steps:
        metrics = trainer.update(_microbatches(trainer, batches.next()))
        step, tokens = trainer.step, tokens + int(metrics["tokens"])
        last = step == batches.num_steps
        if last or step % config.evaluate_every == 0:
            codebase_loss = metrics["codebase_loss"] = trainer.mean_loss(held_out)
        if first:
            on_metrics(step, {**metrics, **batches.metrics()})
        if last or step % config.checkpoint_every == 0:
            trainer.save()
    if math.isnan(codebase_loss):  # resumed after the last step, before the export
        codebase_loss = trainer.mean_loss(held_out)
    export(trainer, phase.model, phase.exported, phase.tokenizer)
    return PhaseResult(step, tokens, metrics["loss"], codebase_loss, time.perf_counter() - started, phase.exported)


def _batches(phase: Phase, encoder: Encoder, codebase: Codebase) -> Batches:
    config = phase.mix.phases[phase.name]
    multiple = sequence_multiple(phase.model, phase.parallel)
    if config.kind is PhaseKind.sft:
        if phase.parallel.pipeline_parallel > 1:
            multiple = config.seq_len  # a pipeline learns its shapes once
        return SessionBatches(phase.sessions, config.seq_len, config.batch_size, config.tokens, phase.seed,
                              multiple=multiple, pad_id=encoder.pad_id)
    if config.seq_len % multiple:
        raise CorpusError(f"mix.phases.{phase.name}.seq_len={config.seq_len}: must be a multiple of {multiple} on this "
                          "mesh")
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
        folder=phase.folder, num_steps=num_steps, learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps, schedule=config.schedule,
        min_learning_rate_ratio=config.min_learning_rate_ratio, weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm, seed=phase.seed,
        # sessions share rows, so their number of rows changes from step to step
        pipeline_microbatches=max(parallel.pipeline_parallel, rows if config.kind is PhaseKind.pretrain else 1))
    return trainer_config(phase.model, parallel, settings).build()


def _microbatches(trainer: TitanTrainer, rows: list[Row]) -> list[Microbatch]:
    """This rank's rows in micro-batches; in a pipeline one row each, and full groups of them."""
    group = trainer.num_pipeline_parallel_microbatches
    mine = rows_of_rank(rows, *trainer.data_parallel, multiple=group)
    at_once = 1 if trainer.parallel_dims.pp_enabled else max(1, _TOKENS_AT_ONCE // len(rows[0].tokens))
    return [_microbatch(mine[i:i + at_once]) for i in range(0, len(mine), at_once)]


def _microbatch(rows: Sequence[Row]) -> Microbatch:
    return Microbatch(tokens=torch.tensor([row.tokens for row in rows]),
                      labels=torch.tensor([row.labels for row in rows]),
                      positions=torch.tensor([row.positions for row in rows]))


def next_phase_model(model: ModelConfig, result: PhaseResult) -> ModelConfig:
    """The model that the next phase starts from."""
    return dataclasses.replace(model, checkpoint=str(result.exported))
