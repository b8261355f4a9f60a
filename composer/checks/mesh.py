"""Checks of the trainer's mesh, the generators' cut and the GPUs that both need."""

from __future__ import annotations

import math

from composer.checks.common import (
    divisors,
    generates,
    gpus_needed,
    largest_microbatch,
    next_multiple,
    require,
    world_size,
)
from composer.models.sizes import generator_memory, kv_cache_bytes_per_token, trainer_memory
from composer.schema import Accelerator, Config, Family, SyncMethod

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes that vLLM's attention on CPU is built for."""


def check_mesh(config: Config) -> None:
    """The axes divide the model, and the expert axis fits into them.

    Raises:
        PlanError: the first relation that does not hold.
    """
    model, p = config.model, config.parallel
    tp, cp, pp, ep = p.tensor_parallel, p.context_parallel, p.pipeline_parallel, p.expert_parallel
    key = "parallel.tensor_parallel"
    require(
        model.num_heads % tp == 0,
        key,
        tp,
        f"must divide model.num_heads ({model.num_heads}): {divisors(model.num_heads)}",
    )
    if model.family is Family.qwen3_moe:
        heads = model.num_kv_heads
        require(heads % tp == 0, key, tp, f"must divide model.num_kv_heads ({heads}): {divisors(heads)}")
    require(model.vocab_size % tp == 0, key, tp, f"must divide model.vocab_size ({model.vocab_size})")
    require(
        pp <= model.num_layers,
        "parallel.pipeline_parallel",
        pp,
        f"must be at most model.num_layers ({model.num_layers}), one layer a stage",
    )
    key, axes = "parallel.expert_parallel", p.data_parallel_shard * cp * tp
    experts = model.num_experts
    require(experts % ep == 0, key, ep, f"must divide model.num_experts ({experts}): {divisors(experts)}")
    require(
        axes % ep == 0,
        key,
        ep,
        f"must divide data_parallel_shard x context_parallel x tensor_parallel ({axes}), from which it is formed: "
        f"{divisors(axes)}, or a larger data_parallel_shard",
    )


def check_generator(config: Config) -> None:
    """An episode fits the generator's context and KV cache, and the model its cut.

    Raises:
        PlanError: the first relation that does not hold.
    """
    if not generates(config):
        return
    g, model = config.generator, config.model
    limit = model.max_context
    key = "generator.max_model_len"
    require(g.max_model_len <= limit, key, g.max_model_len, f"must be at most model.max_context ({limit})")
    room = g.max_model_len - config.env.max_turn_tokens
    require(
        room > 0,
        "env.max_turn_tokens",
        config.env.max_turn_tokens,
        f"must be less than generator.max_model_len ({g.max_model_len}), which also holds prompt and tool results",
    )
    tp = g.tensor_parallel
    key = "generator.tensor_parallel"
    require(
        model.num_heads % tp == 0,
        key,
        tp,
        f"must divide model.num_heads ({model.num_heads}): {divisors(model.num_heads)}",
    )
    require(
        not g.expert_parallel or model.num_experts % tp == 0,
        key,
        tp,
        f"with expert_parallel it must divide model.num_experts ({model.num_experts})",
    )
    needed = kv_cache_bytes_per_token(model, g.dtype) * g.max_model_len
    require(
        generator_memory(model, g).max_tokens >= g.max_model_len,
        "generator.kv_cache_bytes",
        g.kv_cache_bytes,
        f"holds less than one episode of max_model_len ({g.max_model_len} tokens): at least {needed} bytes",
    )
    if config.parallel.accelerator is Accelerator.cpu:
        _check_cpu_generator(config)


def _check_cpu_generator(config: Config) -> None:
    """What vLLM's CPU kernels are built for."""
    model, tp = config.model, config.generator.tensor_parallel
    remedy = "a replica on the CPU is one process: use 1, and generator.num_replicas for more of them"
    require(tp == 1, "generator.tensor_parallel", tp, remedy)
    for name in ("hidden_size", "expert_ffn_size"):
        value = getattr(model, name)
        remedy = f"vLLM on CPU needs a multiple of 32: {next_multiple(value, 32)}"
        require(value % 32 == 0, f"model.{name}", value, remedy)
    if model.family is Family.qwen3_moe:
        sizes = ", ".join(map(str, _CPU_HEAD_SIZES))
        require(model.head_dim in _CPU_HEAD_SIZES, "model.head_dim", model.head_dim, f"vLLM on CPU knows {sizes}")
    else:
        latent = model.kv_lora_rank + model.qk_rope_head_dim
        remedy = f"vLLM's MLA on CPU needs kv_lora_rank + qk_rope_head_dim = 576, not {latent}"
        require(latent == 576, "model.kv_lora_rank", model.kv_lora_rank, remedy)


def check_cluster(config: Config) -> None:
    """Trainer and generators fit the machines and each GPU's memory.

    Raises:
        PlanError: the first relation that does not hold.
    """
    p, g, ranks = config.parallel, config.generator, world_size(config.parallel)
    if p.accelerator is Accelerator.cpu:
        return
    for key, size in (("parallel", ranks), ("generator.tensor_parallel", g.tensor_parallel)):
        if size > p.gpus_per_node:
            require(
                size % p.gpus_per_node == 0,
                key,
                size,
                f"{size} ranks do not fill whole machines of {p.gpus_per_node} GPUs: use a multiple",
            )
    needed, there = gpus_needed(config), p.num_nodes * p.gpus_per_node
    require(
        p.num_nodes == 0 or needed <= there,
        "parallel.num_nodes",
        p.num_nodes,
        f"{ranks} trainer ranks and {needed - ranks} generator GPUs need {math.ceil(needed / p.gpus_per_node)} "
        f"machines of {p.gpus_per_node} GPUs",
    )
    if config.weight_sync.method is SyncMethod.shared_memory:
        require(
            needed <= p.gpus_per_node,
            "weight_sync.method",
            "shared_memory",
            "trainer and generators are on several machines: use weight_sync=filesystem",
        )
    if not p.gpu_memory_bytes:
        return
    trainer = trainer_memory(config.model, p, largest_microbatch(config))
    fixed = trainer.parameters + trainer.gradients + trainer.optimizer
    require(
        fixed < p.gpu_memory_bytes,
        "parallel.data_parallel_shard",
        p.data_parallel_shard,
        f"weights, gradients and optimizer take {fixed / 1e9:.0f} GB of a GPU's {p.gpu_memory_bytes / 1e9:.0f} GB: "
        f"shard over more GPUs, at least {math.ceil(p.data_parallel_shard * fixed / p.gpu_memory_bytes)}",
    )
    if generates(config):
        memory = generator_memory(config.model, g)
        budget = p.gpu_memory_bytes * g.gpu_memory_utilization
        require(
            memory.total <= budget,
            "generator.kv_cache_bytes",
            g.kv_cache_bytes,
            f"with {memory.weights / 1e9:.0f} GB of weights this exceeds {budget / 1e9:.0f} GB (gpu_memory_utilization "
            f"of a GPU): raise generator.tensor_parallel, or set at most {max(0, int(budget - memory.weights))}",
        )
