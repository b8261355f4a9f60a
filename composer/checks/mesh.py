"""Checks of the trainer's mesh, the generators' cut and the GPUs that both need."""

from __future__ import annotations

import math
from collections.abc import Iterator

from composer.checks.common import (
    divisors,
    generates,
    gpus_needed,
    keeps_reference,
    next_multiple,
    rank_memory,
    require,
    world_size,
)
from composer.models.sizes import (
    generator_memory,
    kv_cache_bytes_per_token,
    pipeline_layers,
    position_multiple,
)
from composer.schema import Accelerator, Config, Dtype, Family, GeneratorConfig, ModelConfig, ParallelConfig, SyncMethod

_ALIGNED_BYTES = 16
"""torch's grouped matrix multiplication wants rows that are multiples of it."""
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes that vLLM's attention on CPU is built for."""


def check_mesh(config: Config) -> None:
    """The axes divide the model, and the expert axis fits into them: what torchtitan would refuse on every rank.

    Raises:
        PlanError: the first relation that does not hold.
    """
    for relation in _relations(config.model, config.parallel):
        require(*relation)


def _relations(model: ModelConfig, p: ParallelConfig) -> Iterator[tuple[bool, str, object, str]]:
    """(whether it holds, key, value, remedy) of everything that the trainer's mesh demands of the model."""
    tp, cp, pp, ep = p.tensor_parallel, p.context_parallel, p.pipeline_parallel, p.expert_parallel
    heads, groups, experts = model.num_heads, model.num_kv_heads, model.num_experts
    key = "parallel.tensor_parallel"
    yield heads % tp == 0, key, tp, f"must divide model.num_heads ({heads}): {divisors(heads)}"
    if model.family is Family.qwen3_moe:
        yield groups % tp == 0, key, tp, f"must divide model.num_kv_heads ({groups}): {divisors(groups)}"
    yield model.vocab_size % tp == 0, key, tp, f"must divide model.vocab_size ({model.vocab_size})"

    positions, multiple = model.max_context, position_multiple(p)
    remedy = f"must be a multiple of {multiple} (tensor_parallel x 2 context_parallel, where that is above 1)"
    remedy += f", such as {next_multiple(positions, multiple)}"
    yield positions % multiple == 0, "model.max_context", positions, remedy

    key, layers = "parallel.pipeline_parallel", model.num_layers
    yield pp <= layers, key, pp, f"must be at most model.num_layers ({layers}), one layer a stage"
    remedy = "input and output embeddings are one matrix and lie in two stages: use 1, or model.tie_embeddings=false"
    yield pp == 1 or not model.tie_embeddings, key, pp, remedy
    remedy = f"the last stage holds no layer, which context parallelism needs: at most {(layers + 2) // 2}"
    yield cp == 1 or min(pipeline_layers(layers, pp)) > 0, key, pp, remedy

    key, axes = "parallel.expert_parallel", p.data_parallel_shard * cp * tp
    yield experts % ep == 0, key, ep, f"must divide model.num_experts ({experts}): {divisors(experts)}"
    remedy = (
        f"must divide data_parallel_shard x context_parallel x tensor_parallel ({axes}), from which it is formed: "
        f"{divisors(axes)}, or a larger data_parallel_shard"
    )
    yield axes % ep == 0, key, ep, remedy
    yield from _expert_relations(model, p)


def _expert_relations(model: ModelConfig, p: ParallelConfig) -> Iterator[tuple[bool, str, object, str]]:
    """What the experts' matrices, hidden_size x expert_ffn_size numbers each, demand once they are cut."""
    hidden, ffn, experts = model.hidden_size, model.expert_ffn_size, model.num_experts
    tensor = p.tensor_parallel if p.expert_parallel == 1 else 1
    numbers = _ALIGNED_BYTES // (4 if p.accelerator is Accelerator.cpu and p.param_dtype is Dtype.float32 else 2)
    remedy = f"must be a multiple of {numbers} ({_ALIGNED_BYTES} bytes), for torch's grouped matrices: use "
    yield hidden % numbers == 0, "model.hidden_size", hidden, remedy + str(next_multiple(hidden, numbers))
    if tensor > 1:
        remedy = f"on each of {tensor} tensor_parallel ranks it {remedy}"
    multiple = tensor * numbers
    yield ffn % multiple == 0, "model.expert_ffn_size", ffn, remedy + str(next_multiple(ffn, multiple))

    shards = p.data_parallel_shard * p.context_parallel * (p.tensor_parallel // tensor)
    ranks = shards if p.expert_parallel > 1 else shards * p.data_parallel_replicate
    parts = shards // p.expert_parallel
    if ranks > experts:
        ffn //= tensor
        remedy = (
            f"FSDP has {ranks} ranks for {experts} experts and so cuts hidden_size ({hidden}) and expert_ffn_size "
            f"({ffn} a rank) into {parts} parts, which must be equal: {divisors(math.gcd(hidden, ffn))} parts"
        )
        yield hidden % parts == ffn % parts == 0, "parallel.data_parallel_shard", p.data_parallel_shard, remedy


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
    for divides, remedy in _generator_cuts(model, g):
        require(divides, "generator.tensor_parallel", g.tensor_parallel, remedy)
    needed = kv_cache_bytes_per_token(model, g.dtype) * g.max_model_len
    require(
        generator_memory(model, g).max_tokens >= g.max_model_len,
        "generator.kv_cache_bytes",
        g.kv_cache_bytes,
        f"holds less than one episode of max_model_len ({g.max_model_len} tokens): at least {needed} bytes",
    )
    if config.parallel.accelerator is Accelerator.cpu:
        _check_cpu_generator(config)


def _generator_cuts(model: ModelConfig, g: GeneratorConfig) -> Iterator[tuple[bool, str]]:
    """(whether it holds, remedy) of everything that vLLM cuts over the GPUs of a replica."""
    tp, heads, groups, experts = g.tensor_parallel, model.num_heads, model.num_kv_heads, model.num_experts
    yield heads % tp == 0, f"must divide model.num_heads ({heads}): {divisors(heads)}"
    if model.family is Family.qwen3_moe:
        yield groups % tp == 0 or tp % groups == 0, f"must divide model.num_kv_heads ({groups}), or be a multiple of it"
        yield tp <= experts, f"must be at most model.num_experts ({experts})"
    if g.expert_parallel:
        yield experts % tp == 0, f"with expert_parallel it must divide model.num_experts ({experts})"
    sizes = {
        "expert_ffn_size": 0 if g.expert_parallel else model.expert_ffn_size,
        "num_shared_experts x expert_ffn_size": model.num_shared_experts * model.expert_ffn_size,
        "dense_ffn_size": model.dense_ffn_size if model.num_dense_layers else 0,
    }
    for name, size in sizes.items():
        yield size % tp == 0, f"must divide model.{name} ({size}): {divisors(size)}"


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
    fixed = rank_memory(config).states
    held = "weights, reference, gradients" if keeps_reference(config) else "weights, gradients"
    require(
        fixed < p.gpu_memory_bytes,
        "parallel.data_parallel_shard",
        p.data_parallel_shard,
        f"{held} and optimizer take {fixed / 1e9:.0f} GB of a GPU's {p.gpu_memory_bytes / 1e9:.0f} GB: "
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
