"""What vLLM is told, on CPU and on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer.errors import GeneratorError
from composer.rollout.engine_args import engine_arguments, engine_environment
from composer.schema import Accelerator, Dtype, GeneratorConfig


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return tmp_path


def test_cpu(model: Path) -> None:
    arguments = engine_arguments(model, GeneratorConfig(kv_cache_bytes=2**26), Accelerator.cpu, seed=3)
    assert arguments["dtype"] == "float32"
    assert arguments["kv_cache_memory_bytes"] == 2**26
    assert arguments["compilation_config"] == {"custom_ops": ["none"]}
    assert arguments["block_size"] == 32
    assert "gpu_memory_utilization" not in arguments


def test_latent_attention_on_cpu_has_its_own_block_and_backend(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "kv_lora_rank": 512}))
    exact = engine_arguments(model, GeneratorConfig(), Accelerator.cpu, 0)
    half = engine_arguments(model, GeneratorConfig(dtype=Dtype.bfloat16), Accelerator.cpu, 0)
    assert exact["attention_config"] == {"backend": "CPU_MLA"} and "attention_config" not in half
    assert "block_size" not in exact


def test_gpus_differ_by_config_values_only(model: Path) -> None:
    config = GeneratorConfig(
        dtype=Dtype.bfloat16, tensor_parallel=8, expert_parallel=True, enforce_eager=False, kv_cache_bytes=3 * 2**30
    )
    arguments = engine_arguments(model, config, Accelerator.cuda, 0)
    assert arguments["kv_cache_memory_bytes"] == 3 * 2**30, "what the plan shows and checks"
    assert arguments["tensor_parallel_size"] == 8 and arguments["enable_expert_parallel"]
    assert not arguments["enforce_eager"] and arguments["gpu_memory_utilization"] == 0.85
    assert not {"compilation_config", "block_size"} & arguments.keys()
    assert "OMP_NUM_THREADS" not in engine_environment(config, Accelerator.cuda, 1, "/tmp/x")
    assert "distributed_executor_backend" not in arguments
    wide = engine_arguments(model, config, Accelerator.cuda, 0, machines=2)
    assert wide == arguments | {"distributed_executor_backend": "ray"}


def test_one_rank_on_cpu_computes_inside_engine_core() -> None:
    one = engine_environment(GeneratorConfig(), Accelerator.cpu, 1, "/tmp/x")
    two = engine_environment(GeneratorConfig(tensor_parallel=2), Accelerator.cpu, 1, "/tmp/x")
    assert one["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in two


def test_an_eager_engine_on_cpu_compiles_nothing() -> None:
    """Not even vLLM's sampler: a C++ compiler is no part of a bare machine."""
    eager = engine_environment(GeneratorConfig(), Accelerator.cpu, 1, "/tmp/x")
    compiling = engine_environment(GeneratorConfig(enforce_eager=False), Accelerator.cpu, 1, "/tmp/x")
    assert eager["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in compiling


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(GeneratorError, match=f"model_dir='{tmp_path}'.*config.json"):
        engine_arguments(tmp_path, GeneratorConfig(), Accelerator.cpu, 0)
