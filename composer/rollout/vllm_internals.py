"""The only file that imports vLLM: how it is built and asked, and what it lacks on CPU.

The first half runs in the process of `composer.rollout.engine.Engine`, which owns vLLM's EngineCore, a child process
that computes. The second half runs in that child, called by `composer.weight_sync.load.WeightLoader`. vLLM is imported
inside functions, since its environment variables must be set before its first import (`composer.rollout.engine_args`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import shutil
import signal
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.rollout.engine_args import OWNER_VARIABLE, SOCKETS_VARIABLE

if TYPE_CHECKING:
    import torch


def build(arguments: dict[str, Any], given_up: threading.Event) -> Any:
    """Start an `AsyncLLM`. Blocks until EngineCore is ready; raises whatever vLLM raises.

    Args:
        arguments: of `vllm.AsyncEngineArgs`.
        given_up: set by a caller that waits no longer; then nothing stays alive.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = AsyncEngineArgs(**arguments).create_engine_config()
    if given_up.is_set():
        raise TimeoutError
    llm: Any = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    if given_up.is_set():
        close(llm, 0)
        raise TimeoutError
    return llm


def close(llm: Any, timeout_s: float) -> None:
    """End an `AsyncLLM` and its EngineCore; every waiting request fails. Raises nothing."""
    from vllm.v1.engine.exceptions import EngineDeadError

    with contextlib.suppress(Exception):
        # A shutdown alone leaves whoever waits for tokens waiting.
        llm.output_processor.propagate_error(EngineDeadError())
    with contextlib.suppress(Exception):
        llm.shutdown(timeout=timeout_s)
    # vLLM calls it once more when the object dies, at the end of the interpreter with a traceback.
    llm.shutdown = lambda timeout=None: None


def engine_cores() -> list[Any]:
    """The EngineCore processes of this process."""
    return [p for p in multiprocessing.active_children() if p.name.startswith("EngineCore")]


def prompt(token_ids: Sequence[int]) -> Any:
    """A prompt of token ids."""
    from vllm import TokensPrompt

    return TokensPrompt(prompt_token_ids=list(token_ids))


def sampling(max_tokens: int, temperature: float, stop_token_ids: Sequence[int], seed: int | None) -> Any:
    """Parameters of a request that generates: no text, one final answer, the sampled tokens' log-probabilities."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        stop_token_ids=list(stop_token_ids),
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def scoring() -> Any:
    """Parameters of a request for the log-probabilities of its prompt.

    Such requests do not read the prefix cache, so that every position is computed anew.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


# ---- Inside EngineCore and its workers ------------------------------------------------------------------------------


def watch_owner() -> None:
    """End this process (and EngineCore above it) as soon as the engine's owner is gone, also after `kill -9`.

    Does nothing outside EngineCore and its workers.
    """
    owner, parent = int(os.environ.get(OWNER_VARIABLE, "0")), multiprocessing.parent_process()
    if owner in (0, os.getpid()) or parent is None:
        return

    def wait() -> None:
        with contextlib.suppress(ProcessLookupError):
            poll = select.poll()
            poll.register(os.pidfd_open(owner), select.POLLIN)
            poll.poll()
        if parent.pid != owner and parent.pid is not None and os.getppid() == parent.pid:
            os.kill(parent.pid, signal.SIGKILL)  # with tensor parallelism EngineCore stands between owner and worker
        shutil.rmtree(os.environ.get(SOCKETS_VARIABLE, ""), ignore_errors=True)  # the owner would have done it
        os._exit(1)

    threading.Thread(target=wait, name="composer-watch-owner", daemon=True).start()


def use_thread_locks() -> None:
    """Have progress bars, which vLLM uses in each worker, lock threads only.

    By default they lock processes, with a named semaphore that would stay in /dev/shm: vLLM ends its processes by
    signals, and Ray kills Python's resource tracker, which would have removed it, together with the replica.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def prepare_worker() -> None:
    """Repair what vLLM 0.32 lacks on CPU. Called once, before the first request. Does nothing on GPUs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch

    # Linux hands out AMX tile registers on request only. vLLM's warm-up would ask; an eager engine with a fixed KV
    # cache has none, and its first attention kernel would end in SIGILL.
    torch.cpu._init_amx()
    # Ranks on one machine add up through these segments. All have mapped them by now; without a name, they end with the
    # last of them instead of staying after a kill.
    for segment in Path("/dev/shm").glob(f"{os.environ.get('VLLM_DIST_IDENT', 'vllm_dist_none')}-*cpushm*"):
        segment.unlink(missing_ok=True)
    _repair_seeds()
    _repair_reload()


def _repair_seeds() -> None:
    """Let a seeded request's prompt be computed in chunks.

    For a chunk that is not the last, vLLM samples a token, drops it, and rewinds the request's random generator; CPU
    generators cannot be rewound, and EngineCore dies. Without its generator, the row is sampled from the common one.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    stock = runner.sample_tokens

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        generators = self.input_batch.generators
        if not generators or self.execute_model_state is None:
            return stock(self, grammar_output)
        partial = self.discard_request_mask.np
        hidden = {i: generators.pop(i) for i in list(generators) if i < self.input_batch.num_reqs and partial[i]}
        try:
            return stock(self, grammar_output)
        finally:
            generators.update(hidden)

    runner.sample_tokens = sample_tokens


def _repair_reload() -> None:
    """Let attention with latent keys and values (MLA) be reloaded.

    vLLM empties `kv_b_proj` once it has absorbed it, and copies reloaded weights into the tensors it had: shapes
    differ. It needs the old addresses only for CUDA graphs.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    stock = layerwise._copy_and_restore_kernel_tensors

    def copy_and_restore(layer: Any, info: Any) -> None:
        for name, parameter in info.kernel_tensors[0].items():
            new = getattr(layer, name)
            if parameter.shape != new.shape:
                parameter.data = new.data.clone()
        stock(layer, info)

    layerwise._copy_and_restore_kernel_tensors = copy_and_restore


def replace_weights(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights (Hugging Face names) into a vLLM worker's model, in place."""
    from vllm.platforms import current_platform

    model = worker.model_runner.get_model()
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        forget_packed_experts(model)
    worker.model_runner.reload_weights(weights_iterator=iter(tensors))
    if on_cpu:
        pack_tied_head(model)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack the experts anew at the next reload.

    On CPU the experts are packed for the matrix kernel when that kernel is first made. A reload that finds a kernel
    does not pack them, so that **the experts compute with wrong weights, silently**. On GPUs the kernel reads the
    parameters themselves, and CUDA graphs hold their addresses: it must stay.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied_head(model: Any) -> None:
    """Pack the output layer anew after a reload.

    On CPU a linear layer computes with a packed copy. A reload packs the layers that it has loaded; an output layer
    tied to the embedding has no tensor of its own, and **goes on answering with the old embedding, silently**.
    """
    for module in model.modules():
        if (
            hasattr(module, "cpu_linear") and module.weight.numel() > 0
        ):  # others keep no unpacked weight, and were loaded
            module.quant_method.process_weights_after_loading(module)


def checkpoint_directory(worker: Any) -> Path:
    """The checkpoint that a vLLM worker started from."""
    return Path(worker.model_config.model)
