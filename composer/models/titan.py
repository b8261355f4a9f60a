"""From our `ModelConfig` to a torchtitan `ModelSpec`, and what torchtitan 0.3.0 lacks where it was not written for.

That is: on CPU, without compiled kernels, on torch 2.13. On a CUDA machine none of the `Cpu...` classes is used and
`install_cpu_support` does nothing.

This file, `titan_layers.py` and `titan_experts.py` are the only place that touches torchtitan's internals; everything
about them that depends on its version lives here.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as torch_context_parallel
import torchtitan.models.common.attention as titan_attention
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, FlexAttention, Linear, RMSNorm
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model_spec import ModelSpec

from composer.models.cpu import CpuDevice, context_parallel_mask, document_mask
from composer.models.initial import SeededNormal
from composer.models.titan_experts import register_hooks
from composer.models.titan_layers import CpuAttention, CpuExperts, CpuGate, LatentAttention
from composer.schema import Dtype, Family, ModelConfig

_NOISE = (
    "lspci",
    "Peak flops",
    "initial_load_model_only",
    "model.safetensors.index.json not found",
    "based on job config",
    "Pipeline Parallel loss is not visible",
)
"""Warnings of torchtitan about nothing that a user can or should change."""


@functools.cache
def install_cpu_support() -> bool:
    """Make torchtitan usable without an accelerator. Idempotent; nothing happens where CUDA is available.

    Returns:
        Whether this process trains on CPU.
    """
    logging.getLogger().addFilter(lambda record: not any(text in str(record.msg) for text in _NOISE))
    # torchtitan asks schedulers for the rate of a restored step in the one way that works, and torch warns about it.
    warnings.filterwarnings("ignore", message="To get the last learning rate computed by the scheduler")
    if torch.cuda.is_available():
        return False
    # torchtitan asks torch for "the accelerator" and takes "cuda" when there is none. The answer was copied by name
    # into many modules when they were imported, so every copy is replaced.
    device = CpuDevice()
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module)["device_type"] = "cpu"
            if hasattr(module, "device_module"):
                vars(module)["device_module"] = device
    # Block masks are built by torch.compile, which needs a C++ compiler at run time; context parallelism still asks for
    # them on CPU. The eager function gives the same mask.
    titan_attention._compiled_create_block_mask = create_block_mask
    torch_context_parallel._compiled_create_block_mask = create_block_mask
    torch_context_parallel._create_cp_block_mask = context_parallel_mask
    # The router asks for a float32 autocast, which CPU autocast refuses with a warning each time; `CpuGate` computes in
    # float32 by itself.
    warnings.filterwarnings("ignore", message="CPU Autocast only supports")
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    return True


def on_cpu() -> bool:
    """Whether this process trains on CPU."""
    return install_cpu_support()


def build_model_spec(model: ModelConfig, seed: int = 0) -> ModelSpec:
    """Build torchtitan's description of `model`; random weights come from `seed` and `model.init_std`."""
    build = {Family.qwen3_moe: _qwen3_moe, Family.deepseek_v3: _deepseek_v3}[model.family]
    config, parallelize, adapter = build(model)
    for fqn, part, _, _ in config.traverse((Linear.Config, Embedding.Config, GroupedExperts.Config)):
        if model.tie_embeddings and fqn == "tok_embeddings":
            part.param_init = {"weight": skip_param_init}
            continue
        names = ("w1_EFD", "w2_EDF", "w3_EFD") if isinstance(part, GroupedExperts.Config) else ("weight",)
        part.param_init = {n: SeededNormal(seed, f"{fqn}.{n}", model.init_std) for n in names}
    for _, norm, _, _ in config.traverse(RMSNorm.Config):
        norm.eps, norm.param_init = model.norm_eps, {"weight": nn.init.ones_}
    for layer in config.layers:
        if layer.moe is not None:
            layer.moe.load_balance_coeff = model.router_bias_rate or None
    _swap(config, deepseek_v3.model.Attention.Config, LatentAttention.Config)
    if on_cpu():
        _swap(config, FlexAttention.Config, CpuAttention.Config)
        _swap(config, GroupedExperts.Config, CpuExperts.Config)
        for _, router, _, _ in config.traverse(TokenChoiceTopKRouter.Config):
            router.gate = CpuGate.Config(**_fields(router.gate))
    return ModelSpec(
        name=model.family.value,
        flavor=model.name,
        model=config,
        parallelize_fn=functools.partial(_parallelize, parallelize),
        pipelining_fn=_pipeline,
        post_optimizer_build_fn=register_hooks,
        state_dict_adapter=adapter,
    )


def _swap(config: Any, old: type, new: type) -> None:
    """Replace every nested config of type `old` by `new` with the same fields."""
    for _, part, parent, field in list(config.traverse(old)):
        if isinstance(field, int):
            parent[field] = new(**_fields(part))
        else:
            setattr(parent, field, new(**_fields(part)))


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__ if not name.startswith("_")}


def _parallelize(parallelize: Callable, model: nn.Module, **kwargs: Any) -> nn.Module:
    """The family's own parallelisation, with what CPU and latent gathering need around it."""
    dims = kwargs["parallel_dims"]
    if on_cpu() and dims.world_size == 1 and kwargs["training"].mixed_precision_param == Dtype.float32.value:
        # torchtitan wraps even one process in FSDP, whose copies in and out cost 40 % of a step of a small model. It is
        # FSDP that casts parameters to the format they are computed in, so bfloat16 needs it.
        if kwargs["ac_config"] is not None:
            kwargs["ac_config"].build(dump_folder=kwargs["dump_folder"]).apply(model)
    else:
        model = parallelize(model, **kwargs)
    for module in model.modules():
        if isinstance(module, LatentAttention) and dims.cp_enabled and not dims.tp_enabled:
            module.gather_latents(dims.get_mesh("cp").get_group().group_name)
        if isinstance(module, FSDPModule) and on_cpu():
            # A gradient divide factor makes FSDP reduce with PREMUL_SUM, which gloo lacks; with torchtitan's factor of
            # 1 a plain sum is the same.
            module.set_force_sum_reduction_for_comms(True)
    if on_cpu() and not dims.cp_enabled:
        vars(model)["get_attention_masks"] = document_mask
    return model


def _pipeline(*args: Any, **kwargs: Any) -> Any:
    """Build torchtitan's pipeline, with the call of `step` that torch 2.13 understands.

    torchtitan 0.3.0 hands over micro-batches that are already split; torch 2.13 insists on splitting them itself.
    """
    schedule: Any
    schedule, *rest = pipeline_llm(*args, **kwargs)
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        stage._prepare_forward_infra = _in_evaluation(stage.submod, stage._prepare_forward_infra)
        stage._prepare_backward_infra = _in_evaluation(stage.submod, stage._prepare_backward_infra)
    if "arg_mbs" in inspect.signature(type(schedule).step).parameters:
        return schedule, *rest
    step = schedule.step

    def presplit_step(
        *, arg_mbs: list | None = None, kwarg_mbs: list | None = None, target_mbs: list | None = None, **options: Any
    ) -> Any:
        count = schedule._n_microbatches
        schedule._split_inputs = lambda *_: (arg_mbs or [()] * count, kwarg_mbs or [{}] * count)
        options["target"] = None if target_mbs is None else torch.cat(target_mbs)
        return step(**options)

    schedule.step = presplit_step
    return schedule, *rest


def _in_evaluation(model: nn.Module, prepare: Callable) -> Callable:
    """A stage learns its shapes from made-up tokens, forward and backward; they must not count as expert load."""

    def prepare_uncounted(*args: Any, **kwargs: Any) -> Any:
        model.eval()
        try:
            return prepare(*args, **kwargs)
        finally:
            model.train()

    return prepare_uncounted


def shard_sequence(tensors: tuple[torch.Tensor, ...], mesh: Any, balancer: str | None) -> tuple[torch.Tensor, ...]:
    """This rank's part of [B, L] tensors under context parallelism, cut as torchtitan cuts inputs and labels."""
    return cp_shard(mesh, tensors, None, balancer)[0]


def gather_sequence(tensor: torch.Tensor, mesh: Any, balancer: str | None) -> torch.Tensor:
    """The inverse of `shard_sequence` for one [B, L / ranks] tensor: [B, L], in the original order on every rank."""
    length = tensor.shape[1] * mesh.size()
    parts = [torch.empty_like(tensor) for _ in range(mesh.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=mesh.get_group())
    whole = torch.cat(parts, dim=1)
    if balancer is None:
        return whole
    order = _HeadTailLoadBalancer(length, mesh.size(), tensor.device)
    return whole[:, order._generate_indices(restore=True)[0]]


def _common(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "dim": model.hidden_size,
        "enable_weight_tying": model.tie_embeddings,
        "norm": RMSNorm.Config(normalized_shape=model.hidden_size),
        "tok_embeddings": Embedding.Config(num_embeddings=model.vocab_size, embedding_dim=model.hidden_size),
        "lm_head": Linear.Config(in_features=model.hidden_size, out_features=model.vocab_size),
    }


def _qwen3_moe(model: ModelConfig) -> tuple[Any, Callable, type]:
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=model.num_layers,
        dim=model.hidden_size,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        moe_hidden_dim=model.expert_ffn_size,
        num_experts=model.num_experts,
        top_k=model.experts_per_token,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=model.head_dim, max_seq_len=model.max_context, theta=model.rope_theta),
    )
    return (
        qwen3.Qwen3Model.Config(layers=layers, **_common(model)),
        qwen3.parallelize_qwen3,
        qwen3.Qwen3StateDictAdapter,
    )


def _deepseek_v3(model: ModelConfig) -> tuple[Any, Callable, type]:
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=model.num_layers,
        n_dense_layers=model.num_dense_layers,
        dim=model.hidden_size,
        n_heads=model.num_heads,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        mscale=1.0,
        dense_hidden_dim=model.dense_ffn_size,
        moe_hidden_dim=model.expert_ffn_size,
        num_experts=model.num_experts,
        num_shared_experts=model.num_shared_experts,
        router_top_k=model.experts_per_token,
        router_score_func=model.router_score.value,
        router_route_scale=model.router_scale,
        router_route_norm=True,
        router_num_expert_groups=model.router_groups if model.router_groups > 1 else None,
        router_num_limited_groups=model.router_groups_used if model.router_groups > 1 else None,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(
            dim=model.qk_rope_head_dim,
            max_seq_len=model.max_context,
            theta=model.rope_theta,
            scaling="yarn" if model.rope_factor > 1 else "none",
            rope_factor=model.rope_factor,
            original_seq_len=model.rope_original_context,
            beta_fast=model.rope_beta_fast,
            beta_slow=1.0,
        ),
    )
    return (
        deepseek_v3.DeepSeekV3Model.Config(layers=layers, **_common(model)),
        deepseek_v3.parallelize_deepseekv3,
        deepseek_v3.DeepSeekV3StateDictAdapter,
    )
