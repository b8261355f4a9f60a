"""Sizes against published numbers, against transformers' own counts, and against hand arithmetic."""

import dataclasses

import pytest

from composer.models.sizes import (
    count_parameters,
    generator_memory,
    kv_cache_bytes_per_token,
    pipeline_layers,
    rows_at_once,
    sequence_multiple,
    trainer_memory,
    training_flops_per_token,
)
from composer.schema import Accelerator, Dtype, Family, GeneratorConfig, ModelConfig, ParallelConfig, ScoreFunction

KIMI_K2 = ModelConfig(
    name="kimi-k2",
    family=Family.deepseek_v3,
    vocab_size=163840,
    hidden_size=7168,
    num_layers=61,
    num_dense_layers=1,
    num_heads=64,
    num_kv_heads=64,
    head_dim=192,
    dense_ffn_size=18432,
    num_experts=384,
    experts_per_token=8,
    num_shared_experts=1,
    expert_ffn_size=2048,
    router_score=ScoreFunction.sigmoid,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
DEEPSEEK_V3 = dataclasses.replace(
    KIMI_K2, name="deepseek-v3", vocab_size=129280, num_dense_layers=3, num_heads=128, num_kv_heads=128, num_experts=256
)
QWEN3_30B = ModelConfig(
    name="qwen3-30b-a3b",
    family=Family.qwen3_moe,
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_ffn_size=768,
)
TINY = ModelConfig(
    name="tiny",
    family=Family.qwen3_moe,
    vocab_size=1024,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    num_experts=16,
    experts_per_token=2,
    expert_ffn_size=128,
    tie_embeddings=True,
)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        (KIMI_K2, 1.04e12, 32e9),  # Kimi K2 report
        (DEEPSEEK_V3, 671e9, 37e9),  # DeepSeek-V3 report
        (QWEN3_30B, 30.5e9, 3.3e9),  # Qwen3 report
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_published_sizes(model: ModelConfig, total: float, active: float) -> None:
    count = count_parameters(model)
    assert count.total == pytest.approx(total, rel=0.02)
    assert count.active == pytest.approx(active, rel=0.04)


@pytest.mark.parametrize("model", [KIMI_K2, QWEN3_30B, TINY], ids=lambda m: m.name)
def test_transformers_counts_the_same(model: ModelConfig) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from composer.models.base import hf_config

    described = hf_config(model)
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert count_parameters(model).total == sum(p.numel() for p in built.parameters())


def test_flops_by_hand() -> None:
    # 2 layers: attention 4 * 128 * 128, router 128 * 16, 2 experts of 3 * 128 * 128; head 1024 * 128
    multiplied = 2 * (65536 + 2048 + 98304) + 131072
    # per layer 4 heads, 32 + 32 features, 50.5 keys on average, 2 operations, 3 passes
    attention = 2 * 4 * 64 * 50.5 * 2 * 3
    assert training_flops_per_token(TINY, 100) == 6 * multiplied + attention


def test_kv_cache_per_token() -> None:
    assert kv_cache_bytes_per_token(TINY, Dtype.float32) == 2 * 2 * 4 * 32 * 4
    assert kv_cache_bytes_per_token(KIMI_K2, Dtype.bfloat16) == 61 * (512 + 64) * 2


def test_states_take_16_bytes_a_parameter_over_all_shards() -> None:
    parallel = ParallelConfig(
        data_parallel_shard=4, context_parallel=2, pipeline_parallel=2, expert_parallel=8, param_dtype=Dtype.bfloat16
    )
    memory = trainer_memory(QWEN3_30B, parallel, microbatch_tokens=8192)
    states = memory.parameters + memory.gradients + memory.optimizer
    assert states == pytest.approx(16 * count_parameters(QWEN3_30B).total / 16, rel=1e-6)


def test_the_reference_of_a_kl_penalty_is_one_more_copy_of_the_weights() -> None:
    parallel = ParallelConfig(data_parallel_shard=8, tensor_parallel=2, data_parallel_replicate=3)
    without = trainer_memory(QWEN3_30B, parallel, 8192)
    with_it = trainer_memory(QWEN3_30B, parallel, 8192, reference=True)
    assert without.reference == 0
    assert with_it.reference == with_it.total - without.total == 4 * count_parameters(QWEN3_30B).total // 16


def test_checkpointing_and_expert_parallelism_save_memory() -> None:
    plain = ParallelConfig(data_parallel_shard=8, param_dtype=Dtype.bfloat16)
    expert = dataclasses.replace(plain, expert_parallel=8)
    recompute = dataclasses.replace(plain, activation_checkpoint=True)
    base = trainer_memory(QWEN3_30B, plain, 8192)
    assert trainer_memory(QWEN3_30B, expert, 8192).gathered < base.gathered / 4
    assert trainer_memory(QWEN3_30B, recompute, 8192).activations < base.activations / 5


def test_a_large_vocabulary_is_scored_in_pieces() -> None:
    memory = trainer_memory(KIMI_K2, ParallelConfig(), 8192)
    assert memory.logits == 3 * 4 * 8192 * 163840 // 8


def test_rl_gathers_the_vocabulary_that_tensor_parallelism_cuts() -> None:
    mesh = ParallelConfig(tensor_parallel=4, context_parallel=2)
    pretraining = trainer_memory(TINY, mesh, 8192)
    # 8192 tokens on 8 ranks; logits, log-softmax and gradient of 4 bytes each for 1024 words
    assert pretraining.logits == 8192 // 8 * 1024 * 3 * 4 == 12_582_912
    # each of 4 tensor-parallel ranks holds all of its half of the sequence
    rl = trainer_memory(TINY, mesh, 8192, rl_tokens=4096)
    assert rl.logits == 4096 // 2 * 1024 * 3 * 4 == 25_165_824
    assert rl.activations == pretraining.activations
    assert trainer_memory(TINY, mesh, 8192, rl_tokens=1024).logits == pretraining.logits, "the larger of the two"


def test_rows_of_a_mesh() -> None:
    mesh = ParallelConfig(context_parallel=4, tensor_parallel=5)
    assert sequence_multiple(TINY, mesh) == 40  # 2 x 4 pieces, each cut by 5
    assert sequence_multiple(TINY, ParallelConfig(tensor_parallel=2)) == 2
    assert sequence_multiple(KIMI_K2, ParallelConfig(context_parallel=8)) == 128  # 2 x 8 pieces, 8 of the loss
    assert (rows_at_once(2048, False), rows_at_once(10000, False), rows_at_once(16, True)) == (4, 1, 1)


def test_masks_on_cuda_have_whole_blocks() -> None:
    from torch.nn.attention.flex_attention import _DEFAULT_SPARSE_BLOCK_SIZE

    # torch: "Q_LEN is not divisible by CP mesh world size * BLOCK_SIZE"
    assert sequence_multiple(TINY, ParallelConfig(Accelerator.cuda, context_parallel=2)) == (
        2 * _DEFAULT_SPARSE_BLOCK_SIZE
    )
    mesh = ParallelConfig(Accelerator.cuda, context_parallel=2, tensor_parallel=3)
    assert sequence_multiple(TINY, mesh) == 768  # of 12 and 256
    assert sequence_multiple(TINY, ParallelConfig(Accelerator.cuda, tensor_parallel=3)) == 3


def test_layers_of_pipeline_stages_are_those_of_torchtitan() -> None:
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    for layers in (1, 2, 3, 6, 48, 61):
        for stages in (s for s in (1, 2, 3, 4, 8, 48) if s <= layers):
            parts = _generate_llm_fqn_per_model_part(stages, layers)
            assert pipeline_layers(layers, stages) == [sum("layers." in n for n in part) for part in parts]


def test_the_fullest_stage_decides() -> None:
    """Of 6 layers in 3 stages the second holds 3; each keeps the micro-batches of 3 stages in flight."""
    six = dataclasses.replace(TINY, num_layers=6)
    pipeline = trainer_memory(six, ParallelConfig(pipeline_parallel=3), 1024)
    assert pipeline.activations == 3 * 3 * trainer_memory(TINY, ParallelConfig(), 1024).activations // 2


def test_generator_cuts_heads_but_copies_latents() -> None:
    cache = GeneratorConfig(tensor_parallel=4, kv_cache_bytes=2**30, dtype=Dtype.bfloat16)
    assert generator_memory(QWEN3_30B, cache).max_tokens == 2**30 // (48 * 2 * 4 * 128 * 2 // 4)
    assert generator_memory(KIMI_K2, cache).max_tokens == 2**30 // (61 * 576 * 2)
    assert generator_memory(KIMI_K2, cache).weights == count_parameters(KIMI_K2).total * 2 // 4
