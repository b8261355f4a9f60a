"""What vLLM is told when it starts: environment variables and arguments. Pure; imports no vLLM."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from composer.errors import GeneratorError
from composer.schema import Accelerator, Dtype, GeneratorConfig

WORKER_EXTENSION = "composer.weight_sync.load.WeightLoader"
"""Mixed into vLLM's worker. A name, since `weight_sync` stands above this package."""
OWNER_VARIABLE = "COMPOSER_ENGINE_OWNER"
"""Environment variable of EngineCore: the process id that must outlive it."""

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Where vLLM puts its own sockets, one file an engine, which it never removes."""
QUIET = "ignore::FutureWarning:vllm.triton_utils.dispatcher"
"""A warning at each import of vLLM about a deprecation inside vLLM."""


def engine_environment(config: GeneratorConfig, accelerator: Accelerator, threads: int, sockets: str) -> dict[str, str]:
    """The environment variables that vLLM reads, to be set before its first import.

    Args:
        config: sizes and limits.
        accelerator: what computes.
        threads: OpenMP threads on CPU.
        sockets: a folder for vLLM's own sockets.
    """
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        # transformers imports joblib where it is installed, which tries a named semaphore; a kill leaves it behind.
        "JOBLIB_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        # vLLM's own deadline for EngineCore; ours ends a start earlier, with a plain sentence.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.start_timeout_s) + 60),
        SOCKETS_VARIABLE: sockets,
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), QUIET])),
        OWNER_VARIABLE: str(os.getpid()),
    }
    if accelerator is Accelerator.cpu:
        env["OMP_NUM_THREADS"] = str(threads)
        # vLLM would pin its threads to cores of its own choice, on which trainer and sandboxes run too.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if config.enforce_eager:
            # vLLM compiles a piece of its sampler all the same, for which many machines have no C++ compiler.
            env["TORCH_COMPILE_DISABLE"] = "1"
        if config.tensor_parallel == 1:
            # On CPU vLLM starts a further worker process, only in order to set its OpenMP environment. Ours is set
            # already, so EngineCore can compute by itself, without importing everything once more.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return env


def engine_arguments(
    model_dir: Path, config: GeneratorConfig, accelerator: Accelerator, seed: int, machines: int = 1
) -> dict[str, Any]:
    """The arguments of `vllm.AsyncEngineArgs`. Pure but for reading `config.json`.

    Raises:
        GeneratorError: the folder has no readable `config.json`.
    """
    try:
        model = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise GeneratorError(
            f"model_dir={str(model_dir)!r}: its config.json cannot be read ({e}); export a "
            "Hugging Face checkpoint there first"
        ) from e
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        # Always said: "auto" turns float32 checkpoints into bfloat16.
        "dtype": config.dtype.value,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_expert_parallel": config.expert_parallel,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": True,
        "seed": seed,
        "load_format": "safetensors",
        "use_tqdm_on_load": False,
        # Token ids in and out: no tokenizer, and no stop tokens but those of the request.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # Log-probabilities after temperature: those of the distribution that the token was drawn from.
        "logprobs_mode": "processed_logprobs",
        # As planned, whatever else is free: vLLM would fill `gpu_memory_utilization` with it.
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_log_requests": False,
    }
    if accelerator is Accelerator.cuda:
        if machines > 1:
            arguments["distributed_executor_backend"] = "ray"  # vLLM's own processes stay on one machine
        return arguments | {"gpu_memory_utilization": config.gpu_memory_utilization}
    # Native PyTorch instead of vLLM's CPU kernels: "rotary_embedding" gives wrong positions for DeepSeek's attention
    # with rope type "default", silently.
    arguments["compilation_config"] = {"custom_ops": ["none"]}
    if model.get("kv_lora_rank"):
        if config.dtype is Dtype.float32:
            arguments["attention_config"] = {"backend": "CPU_MLA"}  # the default, AMX_MLA, fails in float32
    else:
        # The smallest block that CPU attention computes fast. The default, 128, can be most of an episode, so that the
        # prefix cache would seldom hit.
        arguments["block_size"] = 32
    return arguments
