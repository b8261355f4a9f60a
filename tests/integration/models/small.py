"""Small models of both families, and trainers and batches for them."""

from pathlib import Path
from typing import Any

import torch

from composer.models.settings import TrainSettings, trainer_config
from composer.models.trainer import Microbatch, TitanTrainer
from composer.schema import Family, ModelConfig, ParallelConfig, Schedule, ScoreFunction

QWEN = ModelConfig(
    name="tiny-qwen3",
    family=Family.qwen3_moe,
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_size=32,
    max_context=128,
    tie_embeddings=True,
    init_std=0.08,
)
DEEPSEEK = ModelConfig(
    name="tiny-deepseek",
    family=Family.deepseek_v3,
    vocab_size=512,
    hidden_size=64,
    num_layers=3,
    num_dense_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=48,
    dense_ffn_size=96,
    num_experts=8,
    experts_per_token=2,
    num_shared_experts=1,
    expert_ffn_size=32,
    router_score=ScoreFunction.sigmoid,
    router_scale=2.5,
    router_bias_rate=0.001,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    max_context=128,
    init_std=0.08,
)


def batch(seed: int, rows: int = 4, length: int = 32, vocab: int = 512) -> Microbatch:
    """Random tokens, one document a row."""
    ids = torch.randint(0, vocab, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).expand(rows, length).contiguous()
    return Microbatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions)


def build(model: ModelConfig, folder: Path, parallel: ParallelConfig | None = None, **settings: Any) -> TitanTrainer:
    """A trainer for 20 steps with a warm-up of 2 and a cosine."""
    options = {"num_steps": 20, "learning_rate": 3e-3, "warmup_steps": 2, "schedule": Schedule.cosine} | settings
    return trainer_config(model, parallel or ParallelConfig(), TrainSettings(folder, **options)).build()
