"""A torchtitan `Trainer` that is stepped from outside: one `update` an optimizer step, on batches the caller made.

Continual pretraining, supervised fine-tuning and RL all train through `TitanTrainer`; they differ in their batches and
their loss. torchtitan keeps everything else: meshes, model, optimizer, schedule, gradient clipping, checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from composer.errors import ResumeError, TrainingError
from composer.models import titan
from composer.models.components import CollectLogProbs, JsonState
from composer.models.logits import label_log_probs
from composer.models.titan_experts import mark_padding, without_loss
from composer.types import NO_LABEL

_PADDING = "padding"
"""Under this name the tokens that count as no expert load travel to `post_dataloading_process`."""


@dataclass
class Microbatch:
    """What one data-parallel rank sends through the model at once. All tensors are [B, L].

    B and L may differ from step to step; L must be a multiple of `TitanTrainer.sequence_multiple`.
    """

    tokens: torch.Tensor
    """int64 token ids."""
    labels: torch.Tensor
    """int64, the id that should follow each token; `NO_LABEL` where none is trained on."""
    positions: torch.Tensor
    """int64, counted from 0 in each document; tokens see only their own document."""
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further [B, L] tensors, handed to the loss by name and never to the model."""


class TitanTrainer(Trainer):
    """torchtitan's `Trainer`, driven one optimizer step at a time.

    A loss is any torchtitan `BaseLoss`: `loss(logits, labels, global_valid_tokens, positions=..., **extras)` returns
    the sum over this rank's tokens divided by `global_valid_tokens`, and metrics whose names end in `/mean` or `/frac`
    (already divided likewise; added over ranks and micro-batches), `/max` or `/min`.

    Example:
        >>> trainer = trainer_config(model, parallel, settings).build()   # doctest: +SKIP
        >>> trainer.load()                                                # 0: a fresh start
        >>> trainer.update([Microbatch(tokens, labels, positions)])["loss"]
        >>> trainer.save()
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's, and what this mesh and loss demand of rows."""

        sequence_multiple: int = 1
        """`composer.models.sizes.sequence_multiple`."""

    checkpointer: Any  # a CheckpointManager
    metrics_processor: Any  # a LastMetrics
    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]
    optimizers: Any  # torchtitan's container, with `worst_expert_load` (see `titan_experts.register_hooks`)
    _extras: dict[str, torch.Tensor]
    _loss_metrics: dict[str, torch.Tensor]

    def __init__(self, config: Config) -> None:
        """Build meshes, model, optimizer and checkpointer. Collective: every rank calls it."""
        super().__init__(config)
        self.fwd_bwd_fn = self._forward_and_backward
        self._extras, self._loss_metrics = {}, {}

    @property
    def sequence_multiple(self) -> int:
        """Row lengths must be a multiple of this."""
        return self.config.sequence_multiple

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) over which different rows go to different ranks."""
        if not self.parallel_dims.dp_enabled:
            return 0, 1
        mesh = self.parallel_dims.get_mesh("batch")
        return mesh.get_local_rank(), mesh.size()

    def shards(self) -> list[torch.nn.Parameter]:
        """This rank's shards of all weights.

        A forward pass leaves the outermost layer of FSDP gathered, with plain tensors in place of its shards; this
        undoes it.
        """
        for part in self.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return [parameter for part in self.model_parts for parameter in part.parameters()]

    def track(self, name: str, stateful: Any) -> None:
        """Save and restore `stateful` (JSON-ready `state_dict`, the same on every rank) with checkpoints.

        Call it before `load`.
        """
        self.checkpointer.states[name] = JsonState(stateful)

    def load(self) -> int:
        """Restore the newest checkpoint, else the initial one, else nothing.

        Returns:
            The number of optimizer steps done.

        Raises:
            ResumeError: a checkpoint is there but cannot be read.
        """
        try:
            self.checkpointer.load()
        except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
            causes = [failure[0] for failure in getattr(error, "failures", {}).values()] or [error]
            raise ResumeError(
                f"The newest checkpoint in {self.checkpointer.folder} cannot be loaded ({causes[0]!r}). "
                "Give back the settings it was made with, or delete its step-* folder to continue from "
                "the one before."
            ) from error
        return self.step

    def save(self) -> None:
        """Write model, optimizer, schedule and tracked states of this step. Collective."""
        self.checkpointer.save(self.step)

    def update(self, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """One optimizer step over this rank's micro-batches. Collective; every rank brings as many.

        Returns:
            loss (mean over all trained tokens of all ranks), grad_norm (before clipping), learning_rate, tokens (this
            rank's, padding included), worst_expert_load, seconds, and the loss's own metrics.

        Raises:
            TrainingError: loss or gradient is not finite. Checkpoints on disk are as they were.
        """
        started = time.perf_counter()
        self.step += 1
        self.gc_handler.run(self.step)
        self._loss_metrics = {}
        group = self.num_pipeline_parallel_microbatches
        self.gradient_accumulation_steps, rest = divmod(len(microbatches), group)
        if rest or not microbatches:
            raise ValueError(f"len(microbatches) must be a positive multiple of {group}, but is {len(microbatches)}")
        padded = (_pad_rows(m, self.parallel_dims.tp) for m in microbatches)
        batches = ((_inputs(m) | {_PADDING: without_loss(m.labels, m.positions), **m.extras}, m.labels) for m in padded)
        try:
            self.train_step(self.batch_generator(batches))
        except RuntimeError as error:
            if "not finite" not in str(error):
                raise
            raise self._not_finite("loss") from error
        metrics = dict(self.metrics_processor.last)
        if not math.isfinite(metrics["grad_norm"]):
            raise self._not_finite("gradient")
        metrics |= {
            "tokens": float(sum(m.tokens.numel() for m in microbatches)),
            "worst_expert_load": self.optimizers.worst_expert_load,
            **self._reduced_loss_metrics(),
        }
        if self.parallel_dims.pp_enabled:  # the last stage alone knows the loss, each stage its own experts
            mesh = self.parallel_dims.get_mesh("pp")
            known = metrics["loss"] if self.pp_has_last_stage else 0.0
            metrics["loss"] = dist_utils.dist_sum(torch.tensor(known, device=self.device), mesh)
            load = torch.tensor(metrics["worst_expert_load"], device=self.device)
            metrics["worst_expert_load"] = dist_utils.dist_max(load, mesh)
        return {**metrics, "seconds": time.perf_counter() - started}

    @torch.no_grad()
    def mean_loss(self, microbatches: Sequence[Microbatch]) -> float:
        """Mean negative log-likelihood of the labels in nats a token, over all ranks' micro-batches. Collective.

        Under pipeline parallelism micro-batches must have the shape of those of `update`, and the trainer's loss must
        be cross-entropy.
        """
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.parallel_dims.pp_enabled:
            group = self.num_pipeline_parallel_microbatches
            for start in range(0, len(microbatches), group):
                total += self._pipeline_loss(microbatches[start : start + group])
            torch.distributed.all_reduce(total, group=self.parallel_dims.get_mesh("pp").get_group())
            if self.parallel_dims.cp_enabled:  # each context rank has seen its part of the rows
                torch.distributed.all_reduce(total, group=self.parallel_dims.get_mesh("cp").get_group())
        else:
            for batch in microbatches:
                total += torch.stack([-self.score(batch).sum(), (batch.labels != NO_LABEL).sum().to(self.device)])
        total = self.add_over_data_ranks(total)
        return float(total[0] / total[1])

    def _pipeline_loss(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """(sum of losses, number of labels) on the last stage, zeros elsewhere."""
        inputs, kwargs, targets = [], [], []
        for batch in microbatches:
            tokens, labels, rest = self._on_device(batch)
            inputs.append((tokens,))
            kwargs.append(rest)
            targets.append(labels)
        losses: list[torch.Tensor] = []
        for part in self.model_parts:
            part.eval()
        try:
            with self.train_context():
                self.pp_schedule.eval(
                    arg_mbs=inputs if self.pp_has_first_stage else None,
                    kwarg_mbs=kwargs,
                    target_mbs=targets if self.pp_has_last_stage else None,
                    losses=losses if self.pp_has_last_stage else None,
                )
        finally:
            for part in self.model_parts:
                part.train()
        if not self.pp_has_last_stage:
            return torch.zeros(2, dtype=torch.float64, device=self.device)
        counts = [(t != NO_LABEL).sum().to(self.device) for t in targets]
        return torch.stack([torch.stack(losses).sum().double(), torch.stack(counts).sum().double()])

    @torch.no_grad()
    def score(self, batch: Microbatch, temperature: float = 1.0) -> torch.Tensor:
        """Natural log-probabilities of `batch.labels` under the current weights. Collective; not with a pipeline.

        Logits exist for this batch only, and of a large vocabulary for a piece of it (`composer.models.sizes`).

        Args:
            batch: every rank brings one of the same shape.
            temperature: the logits are divided by it first.

        Returns:
            float32 [B, L]; 0 where the label is `NO_LABEL`.
        """
        padded = _pad_rows(batch, self.parallel_dims.tp)
        tokens, labels, kwargs = self._on_device(padded)
        model: Any = self.model_parts[0]
        model.eval()  # else these tokens would count as expert load
        try:
            with self.train_context():
                out = model(tokens, **kwargs)
                if isinstance(self.loss_fn, ChunkedLossWrapper):  # the model then stops before its last layer
                    log_probs = CollectLogProbs.in_chunks(
                        out, labels, model.lm_head, self.loss_fn.num_chunks, temperature
                    )
                else:
                    log_probs = label_log_probs(out, labels, temperature)
        finally:
            model.train()
        if self.parallel_dims.cp_enabled:
            mesh = self.parallel_dims.get_mesh("cp")
            log_probs = titan.gather_sequence(log_probs, mesh, self.config.parallelism.context_parallel_load_balancer)
        return log_probs[: len(batch.tokens)]

    def add_over_data_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks with different rows have. Collective."""
        total = values.to(self.device)
        if self.parallel_dims.dp_enabled:
            torch.distributed.all_reduce(total, group=self.parallel_dims.get_mesh("batch").get_group())
        return total

    @torch.no_grad()
    def hf_state_dict(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, whole tensor) one parameter at a time. Collective: every rank iterates to the end.

        Under pipeline parallelism a rank yields the layers of its own stage.
        """
        spec = self.config.model_spec
        assert spec is not None and spec.state_dict_adapter is not None
        adapter = spec.state_dict_adapter(self.model_config, None)
        for part in self.model_parts:
            for name, value in part.state_dict().items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                yield from adapter.to_hf({name: whole.detach()}).items()

    def close(self) -> None:
        """Release checkpoint threads and process groups; another trainer may be built afterwards."""
        super().close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def post_dataloading_process(self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor) -> Any:
        """Keep the loss's own tensors away from the model, cut like the labels under context parallelism."""
        inputs = {k: input_dict[k] for k in ("input", "positions")}
        extras = {k: v for k, v in input_dict.items() if k not in inputs}
        if extras and self.parallel_dims.cp_enabled:
            cut = titan.shard_sequence(
                tuple(extras.values()),
                self.parallel_dims.get_mesh("cp"),
                self.config.parallelism.context_parallel_load_balancer,
            )
            extras = dict(zip(extras, cut, strict=True))
        padding = extras.pop(_PADDING, None)
        self._extras = extras
        tokens, labels, kwargs = super().post_dataloading_process(inputs, labels)
        if padding is not None:
            mark_padding(kwargs["positions"], padding)
        return tokens, labels, kwargs

    def _on_device(self, batch: Microbatch) -> Any:
        """Tokens, labels and further arguments of the model, for a forward pass outside of `update`."""
        inputs = {name: tensor.to(self.device) for name, tensor in _inputs(batch).items()}
        return self.post_dataloading_process(inputs, batch.labels.to(self.device))

    def _forward_and_backward(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
        extra_kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """torchtitan's, with extra loss inputs and with the metrics that the loss returns (torchtitan drops both)."""
        with self.train_context():
            out = self.model_parts[0](inputs, **extra_kwargs)
            loss, metrics = self.loss_fn(
                out, labels, global_valid_tokens, positions=extra_kwargs["positions"], **self._extras
            )
            del out
            loss.backward()
        for name, value in metrics.items():
            seen, value = self._loss_metrics.get(name), value.detach()
            if seen is not None:
                value = {"max": torch.maximum, "min": torch.minimum}.get(_reduction(name), torch.add)(seen, value)
            self._loss_metrics[name] = value
        return loss

    def _reduced_loss_metrics(self) -> dict[str, float]:
        mesh = self.parallel_dims.get_optional_mesh("loss")
        if mesh is None:
            return {k: float(v) for k, v in self._loss_metrics.items()}
        operations = {"max": dist_utils.dist_max, "min": lambda x, m: -dist_utils.dist_max(-x, m)}
        return {k: operations.get(_reduction(k), dist_utils.dist_sum)(v, mesh) for k, v in self._loss_metrics.items()}

    def _not_finite(self, what: str) -> TrainingError:
        lr = self.lr_schedulers.get_metrics()
        return TrainingError(
            f"Step {self.step}: the {what} is not finite. Start a new run with a lower learning_rate (now "
            f"{max(lr.values()):.3g}) or max_grad_norm (now {self.config.training.max_norm:g}); "
            f"the checkpoints in {self.config.dump_folder}/checkpoints are intact."
        )


def _inputs(batch: Microbatch) -> dict[str, torch.Tensor]:
    """What the model is given, by torchtitan's names."""
    return {"input": batch.tokens, "positions": batch.positions}


def _pad_rows(batch: Microbatch, multiple: int) -> Microbatch:
    """Repeat the last row without labels until there is a multiple of rows.

    DTensor cuts the backward pass of the router by rows under tensor parallelism, and only evenly.
    """
    missing = -len(batch.tokens) % multiple
    if not missing:
        return batch

    def repeat(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, rows[-1:].expand(missing, -1)])

    labels = torch.cat([batch.labels, torch.full_like(batch.labels[-1:], NO_LABEL).expand(missing, -1)])
    return Microbatch(
        repeat(batch.tokens),
        labels,
        repeat(batch.positions),
        {name: repeat(rows) for name, rows in batch.extras.items()},
    )


def _reduction(name: str) -> str:
    return name.rsplit("/", 1)[-1]
