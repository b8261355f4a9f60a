"""Demands of the families, and the Hugging Face description against transformers itself."""

import dataclasses
from typing import Any

import pytest

from composer.compose import compose
from composer.errors import ConfigError
from composer.models.base import check_model, hf_config, hf_parameter_shapes
from composer.schema import ModelConfig, ScoreFunction
from tests.unit.models.test_sizes import DEEPSEEK_V3, TINY


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (TINY, {"experts_per_token": 17}, r"experts_per_token=17: must be at most num_experts \(16\)"),
        (TINY, {"num_kv_heads": 3}, r"model\.num_kv_heads=3: must divide num_heads \(4\) \(family qwen3_moe\)"),
        (TINY, {"num_shared_experts": 1}, r"num_shared_experts=1: must be 0"),
        (TINY, {"router_bias_rate": 0.1}, r"router_bias_rate=0\.1: must be 0"),
        (TINY, {"router_score": ScoreFunction.sigmoid}, r"router_score=.*must be softmax"),
        (DEEPSEEK_V3, {"kv_lora_rank": 0}, r"kv_lora_rank=0: must be at least 1 \(family deepseek_v3\)"),
        (DEEPSEEK_V3, {"tie_embeddings": True}, r"tie_embeddings=True: must be false"),
        (DEEPSEEK_V3, {"num_dense_layers": 61}, r"num_dense_layers=61: must be less than num_layers \(61\)"),
        (DEEPSEEK_V3, {"router_groups": 3}, r"router_groups=3: must divide num_experts \(256\)"),
        (DEEPSEEK_V3, {"router_groups": 8, "router_groups_used": 9}, r"router_groups_used=9: must be at most"),
        (DEEPSEEK_V3, {"router_groups": 256}, r"router_groups=256: a group holds two experts or more: at most 128"),
        (  # 256 experts in 64 groups of 4, of which a token uses one
            DEEPSEEK_V3,
            {"router_groups": 64},
            r"experts_per_token=8: must be at most the experts of router_groups_used \(1 x 4\)",
        ),
        (DEEPSEEK_V3, {"num_kv_heads": 8}, r"num_kv_heads=8: must be num_heads \(128\)"),
        (DEEPSEEK_V3, {"head_dim": 128}, r"head_dim=128: must be qk_nope_head_dim \+ qk_rope_head_dim \(192\)"),
    ],
)
def test_impossible_models(model: ModelConfig, changes: dict[str, Any], message: str) -> None:
    check_model(model)
    with pytest.raises(ConfigError, match=message):
        check_model(dataclasses.replace(model, **changes))


def test_kimi_k2_as_published() -> None:
    published = {  # moonshotai/Kimi-K2-Instruct, config.json
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 50000.0,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    }
    model = dataclasses.replace(
        compose(["model=kimi_k2_5"]).model, rope_factor=32.0, rope_beta_fast=1.0, max_context=131072, norm_eps=1e-6
    )  # K2.5 has a longer context
    described = hf_config(model)
    described["rope_scaling"] = {key: described["rope_scaling"][key] for key in published["rope_scaling"]}
    assert {key: described[key] for key in published} == published


SMALL_DEEPSEEK = dataclasses.replace(
    DEEPSEEK_V3,
    vocab_size=64,
    hidden_size=32,
    num_layers=3,
    num_dense_layers=1,
    num_heads=2,
    num_kv_heads=2,
    dense_ffn_size=48,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_size=16,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    router_bias_rate=0.001,
)


@pytest.mark.parametrize(
    "model",
    [
        dataclasses.replace(TINY, num_experts=3),
        dataclasses.replace(TINY, num_experts=3, tie_embeddings=False),
        SMALL_DEEPSEEK,
        dataclasses.replace(SMALL_DEEPSEEK, q_lora_rank=0),
    ],
    ids=["tied", "untied", "mla", "mla-full-q"],
)
def test_names_and_shapes_are_those_that_transformers_writes(model: ModelConfig, tmp_path: Any) -> None:
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    described = hf_config(model)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(described.pop("model_type"), **described))
    built.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        written = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
    assert hf_parameter_shapes(model) == written
