"""Small random models with experts, as Hugging Face folders, and transformers as the independent implementation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 512


def qwen3_moe(folder: Path, seed: int) -> Path:
    """Two layers, eight experts, embeddings tied to the output layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=128, moe_intermediate_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.15,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def deepseek_v3(folder: Path, seed: int) -> Path:
    """One dense layer and one with experts, latent attention with rope type "default"."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=512, q_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.5,
        max_position_embeddings=1024, initializer_range=0.06,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).float().save_pretrained(folder)
    path = folder / "config.json"  # transformers knows these two and does not write them
    path.write_text(json.dumps(json.loads(path.read_text()) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model."""
    return load_file(folder / "model.safetensors")


def mixed(folder: Path, base: Path, changes: Mapping[str, torch.Tensor]) -> Path:
    """A copy of `base` with some tensors changed."""
    folder.mkdir()
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(weights(base) | changes, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@cache
def _reference(folder: Path):  # noqa: ANN202 - a transformers model
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def log_probs(folder: Path, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Transformers' log-probabilities, [T - 1]: entry i is that of `token_ids[i + 1]`."""
    logits = _reference(folder)(torch.tensor([token_ids])).logits[0, :-1] / temperature
    picked = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])
    return picked[:, 0].tolist()


def difference(a: list[float], b: list[float]) -> float:
    """The largest |difference|."""
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
