"""Our settings in torchtitan's words: from a model, a mesh and an optimisation to a trainer's config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from composer.errors import PlanError
from composer.models import titan
from composer.models.components import LastMetrics, NoLoader, NoTokenizer
from composer.models.sizes import loss_chunks, sequence_multiple
from composer.models.trainer import TitanTrainer
from composer.schema import Accelerator, ModelConfig, ParallelConfig, Schedule


@dataclass(frozen=True)
class TrainSettings:
    """How a policy is optimised. Comes from a phase of the mix or from the RL algorithm."""

    folder: Path
    """Checkpoints are kept in its subfolder `checkpoints`."""
    num_steps: int
    """Optimizer steps of the learning-rate schedule."""
    learning_rate: float
    warmup_steps: int = 0
    schedule: Schedule = Schedule.constant
    min_learning_rate_ratio: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 0
    keep_checkpoints: int = 2
    """Older checkpoints are deleted; at least 2, since the newest may be half written; 0 keeps all."""
    pipeline_microbatches: int = 1
    """Micro-batches of one row that fill the pipeline (pipeline parallelism only)."""
    timeout_s: float = 1800.0
    """A collective that takes longer ends the process: a rank is gone."""


def trainer_config(
    model: ModelConfig, parallel: ParallelConfig, settings: TrainSettings, loss: BaseLoss.Config | None = None
) -> TitanTrainer.Config:
    """Our settings in torchtitan's words. `.build()` gives a `TitanTrainer`; RANK, WORLD_SIZE, ... must be set.

    Args:
        model: the model; with `model.checkpoint`, weights come from that Hugging Face folder at `load()`.
        parallel: the mesh.
        settings: the optimisation.
        loss: default: cross-entropy of the labels.

    Raises:
        PlanError: `parallel.accelerator` is not what this process sees.
    """
    if (parallel.accelerator is Accelerator.cpu) != titan.on_cpu():
        remedy = (
            "this process sees no CUDA device; use cpu, or start the run where there are GPUs"
            if titan.on_cpu()
            else "this process sees CUDA devices; use cuda, or hide them with CUDA_VISIBLE_DEVICES="
        )
        raise PlanError("parallel.accelerator", parallel.accelerator.value, remedy)
    if loss is None:
        loss = CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)
    if (chunks := loss_chunks(model, parallel)) > 1:
        loss = ChunkedLossWrapper.Config(loss_fn=loss, num_chunks=chunks)
    torch.set_num_threads(parallel.threads_per_process)
    initial = (
        {}
        if model.checkpoint is None
        else {"initial_load_path": str(Path(model.checkpoint).resolve()), "initial_load_in_hf": True}
    )
    adamw = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": 1e-8,
        "weight_decay": settings.weight_decay,
    }
    return TitanTrainer.Config(
        model_spec=titan.build_model_spec(model, settings.seed),
        hf_assets_path=model.checkpoint or "",
        dump_folder=str(settings.folder),
        loss=loss,
        sequence_multiple=sequence_multiple(model, parallel),
        metrics=LastMetrics.Config(log_freq=1),
        dataloader=NoLoader.Config(),
        tokenizer=NoTokenizer.Config(),
        optimizer=OptimizersContainer.Config(
            param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw)],
            implementation="fused",
        ),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=settings.warmup_steps,
            total_steps=settings.num_steps,
            decay_ratio=0.0 if settings.schedule is Schedule.constant else None,
            decay_type="cosine" if settings.schedule is Schedule.cosine else "linear",
            min_lr_factor=settings.min_learning_rate_ratio,
        ),
        training=TrainingConfig(
            local_batch_size=settings.pipeline_microbatches,
            seq_len=model.max_context,
            steps=settings.num_steps,
            max_norm=settings.max_grad_norm,
            mixed_precision_param=parallel.param_dtype.value,
            disable_cuda_graphs=True,
        ),  # graphs need one fixed shape; row lengths here change from step to step
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=parallel.data_parallel_replicate,
            data_parallel_shard_degree=parallel.data_parallel_shard,
            tensor_parallel_degree=parallel.tensor_parallel,
            context_parallel_degree=parallel.context_parallel,
            pipeline_parallel_degree=parallel.pipeline_parallel,
            expert_parallel_degree=parallel.expert_parallel,
            # the backend whose multi-rank losses were seen to equal one process's, on gloo as on NCCL
            spmd_backend="partial_dtensor",
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            folder="checkpoints",
            interval=1,  # `save` decides when
            keep_latest_k=settings.keep_checkpoints,
            last_save_model_only=False,
            **initial,
        ),
        activation_checkpoint=FullAC.Config() if parallel.activation_checkpoint else None,
        debug=DebugConfig(seed=settings.seed, enable_structured_logging=False),
        comm=CommConfig(init_timeout_seconds=int(settings.timeout_s), trace_buf_size=0),
    )
