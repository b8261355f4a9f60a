"""The rollout engine: token ids in, token ids out, weights replaced in place while requests run.

`Engine` lives in the process that asks for tokens and owns vLLM's EngineCore, a child process that computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from composer.errors import EngineDeadError, GeneratorError, WeightSyncError
from composer.identity import pid_namespace, start_time
from composer.rollout import vllm_internals
from composer.rollout.engine_args import engine_arguments, engine_environment
from composer.schema import Accelerator, GeneratorConfig, WeightSyncConfig
from composer.types import Generation, LoadReport, Mismatch, Probe

SHUTDOWN_S = 3.0
"""How long EngineCore may take to end by itself before it is killed."""

SOCKETS_PREFIX = "composer-engine-"
"""Of the folders in the temporary directory that hold vLLM's sockets; the owner's process id follows."""


class Engine:
    """One vLLM engine: token ids in, token ids out, weights replaced in place while requests run.

    Make it with `start`. All methods belong to the event loop that started it. `stop` leaves no process, whatever
    happened before.
    """

    def __init__(self, llm: Any, processes: list[Any], config: GeneratorConfig, sockets: Any) -> None:
        """Use `start` instead."""
        self.config = config
        self.policy_version = 0
        self._llm: Any = llm
        self._processes, self._sockets = processes, sockets
        self._failure: str | None = None
        self._loading = asyncio.Lock()
        self._verified = asyncio.Event()
        """Cleared while weights are in place that no probe has confirmed: no generation leaves the engine then."""
        self._verified.set()
        self._names = itertools.count()

    @classmethod
    async def start(
        cls,
        model_dir: str | Path,
        config: GeneratorConfig,
        *,
        accelerator: Accelerator = Accelerator.cpu,
        threads: int = 1,
        seed: int = 0,
        policy_version: int = 0,
        machines: int = 1,
    ) -> Engine:
        """Start vLLM on a Hugging Face checkpoint (`config.json` and safetensors; no tokenizer needed).

        Args:
            model_dir: the checkpoint.
            config: sizes and limits; `start_timeout_s` is the deadline.
            accelerator: cpu, or cuda with `tensor_parallel` GPUs visible to this process.
            machines: on how many machines those GPUs are. On more than one, this process is a Ray actor in a placement
                group with a bundle for each GPU, in which vLLM starts its workers.
            threads: OpenMP threads of EngineCore on CPU.
            seed: of sampling, for requests that bring none.
            policy_version: which version of the policy the checkpoint is.

        Raises:
            GeneratorError: vLLM did not start, or not before the deadline.
        """
        arguments = engine_arguments(Path(model_dir), config, accelerator, seed, machines)
        sweep()
        sockets = tempfile.TemporaryDirectory(
            prefix=f"{SOCKETS_PREFIX}{pid_namespace():x}-{os.getpid()}-", ignore_cleanup_errors=True
        )
        os.environ.update(engine_environment(config, accelerator, threads, sockets.name))
        before, given_up = set(vllm_internals.engine_cores()), threading.Event()
        try:
            async with asyncio.timeout(config.start_timeout_s):
                # In a thread, since vLLM blocks until EngineCore is ready.
                with _temporary_files_in(sockets.name):
                    llm = await asyncio.to_thread(vllm_internals.build, arguments, given_up)
                engine = cls(llm, [p for p in vllm_internals.engine_cores() if p not in before], config, sockets)
                await llm.collective_rpc("composer_prepare")
                await llm.update_weight_version(str(policy_version))
                engine.policy_version = policy_version
                return engine
        except BaseException as e:
            # The thread may be about to start EngineCore, or wait for it: killing it ends the wait.
            given_up.set()
            _kill([p for p in vllm_internals.engine_cores() if p not in before])
            sockets.cleanup()
            if isinstance(e, TimeoutError):
                raise GeneratorError(
                    f"generator.start_timeout_s={config.start_timeout_s!r}: vLLM was not ready on "
                    f"{str(model_dir)!r} by then; raise it, or look for the cause in this process's log"
                ) from e
            if isinstance(e, Exception):
                raise GeneratorError(
                    f"vLLM did not start on model_dir={str(model_dir)!r} ({_sentence(e)}); the root "
                    "cause stands in this process's log"
                ) from e
            raise

    @property
    def alive(self) -> bool:
        """Whether the engine still answers."""
        return self._llm is not None and self._failure is None and not self._llm.errored

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """Continue a context.

        Args:
            token_ids: the whole context, [P].
            max_tokens: tokens to generate at most; fewer if `max_model_len` comes first.
            temperature: 0 takes the likeliest token.
            stop_token_ids: each ends the generation and is its last token.
            seed: makes this request's sampling repeatable.
            request_id: unique among running requests; made up if absent.
            timeout_s: deadline; `request_timeout_s` if absent. A request that misses it is aborted.

        Returns:
            `log_probs` are those of the distribution that was sampled from, softmax(logits / temperature), or at
            temperature 1 where it is 0: the trainer's ratio needs them; `policy_versions` tell for each token
            which weights sampled it.

        Raises:
            GeneratorError: the context is too long, the deadline passed, or the engine is dead.
        """
        if len(token_ids) >= self.config.max_model_len:
            raise GeneratorError(
                f"generator.max_model_len={self.config.max_model_len!r}: the context already has "
                f"{len(token_ids)} tokens; raise it or end the episode earlier"
            )
        params = vllm_internals.sampling(max_tokens, temperature, stop_token_ids, seed)
        output = await self._answer(token_ids, params, request_id, timeout_s)
        completion = output.outputs[0]
        versions = [int(s.version) for s in completion.weight_versions or () for _ in range(s.start, s.end)]
        ids, log_probs = list(completion.token_ids), list(completion.logprobs.logprobs)
        if not len(ids) == len(log_probs) == len(versions):
            raise GeneratorError(
                f"vLLM answered {len(ids)} tokens, {len(log_probs)} log-probabilities and "
                f"{len(versions)} versions; its own version does not fit this engine"
            )
        return Generation(ids, log_probs, versions, completion.finish_reason or "abort")

    async def load_weights(
        self, directory: str | Path, policy_version: int, probe: Probe, sync: WeightSyncConfig
    ) -> LoadReport:
        """Replace the weights in place by a published version, without ending a request, and verify them.

        The workers map and check the files while requests go on. Then generation pauses (nothing is aborted), the
        weights are swapped, and generation resumes: running requests continue under the new weights, with their KV
        cache recomputed if `clear_kv_cache`. Last, the probe's log-probabilities are compared with the trainer's; until
        they agree, no generation leaves the engine and `policy_version` stays.

        Raises:
            WeightSyncError: a file is missing or damaged, or its tensors are not the model's (the old weights stay in
                use); or the swap or its verification failed, or missed the deadline (the engine is then dead).
            GeneratorError: the engine was dead before.
        """
        async with self._loading:
            self._check()
            start = time.monotonic()
            deadline = asyncio.get_running_loop().time() + sync.timeout_s
            swapped = False
            try:
                async with asyncio.timeout_at(deadline):
                    await self._worker("composer_stage", str(directory), policy_version)
                    self._verified.clear()
                    swapped = True
                    pause = time.monotonic()
                    await self._llm.pause_generation(mode="keep", clear_cache=sync.clear_kv_cache)
                    await self._worker("composer_swap")
                    await self._llm.update_weight_version(str(policy_version))
                    await self._llm.resume_generation()
                    paused = time.monotonic() - pause
                    scores = await self._score(probe.token_ids)
                    mismatch = Mismatch.of(scores, probe.log_probs)
                    # Not the largest difference: where two experts are as likely to within rounding, the engines may
                    # choose different ones for a token (seen once in 280 loads of the quickstart: 0.05 on one token,
                    # 4e-6 on the others). Weights that are one step old move a third of all tokens by more than 1e-3.
                    if not mismatch.p90 <= sync.verify_tolerance:  # NaN is not within any tolerance
                        raise WeightSyncError(
                            f"weight_sync.verify_tolerance={sync.verify_tolerance!r}: after loading version "
                            f"{policy_version} the generator's log-probabilities of the probe differ from the "
                            f"trainer's by {mismatch.p90:.3g} or more on a tenth of its tokens; the weights did not "
                            "arrive as trained, or the tolerance is too small for generator.dtype"
                        )
            except BaseException as e:
                reason = (
                    f"weight_sync.timeout_s={sync.timeout_s!r}: version {policy_version} was not loaded by then; "
                    "raise it"
                    if isinstance(e, TimeoutError)
                    else f"version {policy_version} could not be loaded from {str(directory)!r}: {_sentence(e)}"
                )
                if swapped:  # nobody knows which weights are in place
                    await self._fail(reason)
                if isinstance(e, WeightSyncError) or not isinstance(e, Exception):
                    raise
                raise WeightSyncError(reason) from e
            self.policy_version = policy_version
            self._verified.set()
            return LoadReport(policy_version, time.monotonic() - start, paused, mismatch)

    async def stop(self) -> None:
        """End vLLM and every process of it. Idempotent; raises nothing."""
        llm, self._llm = self._llm, None
        self._failure = self._failure or "it was stopped"
        self._verified.set()
        if llm is not None:
            # EngineCore holds nothing worth the seconds that it takes to end, unless workers share memory with it.
            vllm_internals.close(llm, SHUTDOWN_S if self.config.tensor_parallel > 1 else 0)
        _kill(self._processes)
        self._sockets.cleanup()

    def _check(self) -> None:
        if not self.alive:
            codes = [p.exitcode for p in self._processes if p.exitcode is not None]
            raise EngineDeadError(
                f"the vLLM engine (process {os.getpid()}) is dead: "
                f"{self._failure or f'EngineCore ended with exit code {codes}'}; its replica must be started again"
            )

    async def _answer(
        self, token_ids: Sequence[int], params: Any, request_id: str | None, timeout_s: float | None, hold: bool = True
    ) -> Any:
        """Return vLLM's final output of one request; with `hold`, not before the weights in place are verified."""
        self._check()
        timeout_s = self.config.request_timeout_s if timeout_s is None else timeout_s
        name = request_id or f"request-{next(self._names)}"
        output = None
        try:
            async with asyncio.timeout(timeout_s):
                async for output in self._llm.generate(vllm_internals.prompt(token_ids), params, name):  # noqa: B007
                    pass
                if hold:
                    await self._verified.wait()
        except TimeoutError as e:
            raise GeneratorError(
                f"generator.request_timeout_s={timeout_s!r}: {name} ({len(token_ids)} prompt tokens) was not "
                "answered by then and was aborted; raise it, or run more replicas"
            ) from e
        except Exception as e:
            self._check()
            raise GeneratorError(f"vLLM refused {name}: {_sentence(e)}") from e
        self._check()
        if output is None:
            raise GeneratorError(f"vLLM gave no answer to {name}; its log says why")
        return output

    async def _score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of a sequence under the weights in place, verified or not, laid out as in `Probe`."""
        output = await self._answer(token_ids, vllm_internals.scoring(), None, None, hold=False)
        return list(output.prompt_logprobs.logprobs)

    async def _worker(self, method: str, *args: Any) -> None:
        """Call a method of `WeightLoader` on every worker; each answers with an error sentence or ""."""
        for rank, error in enumerate(await self._llm.collective_rpc(method, args=args)):
            if error:
                raise WeightSyncError(f"{error} (worker {rank})")

    async def _fail(self, reason: str) -> None:
        """Declare the engine dead: every waiting and coming request gets `reason`."""
        self._failure = reason
        await self.stop()


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Have child processes put temporary files into `folder`: vLLM leaves the file at which its ranks meet behind."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def sweep() -> int:
    """Remove the socket folders of engines that were killed together with their owner; returns how many."""
    removed = 0
    ours = f"{SOCKETS_PREFIX}{pid_namespace():x}-"  # not those of another container that shares this folder
    for folder in Path(tempfile.gettempdir()).glob(f"{ours}*"):
        owner = folder.name.removeprefix(ours).partition("-")[0]
        if owner.isdigit() and start_time(int(owner)) is None:
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    return removed


def _kill(processes: Iterable[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()  # its workers read the end of a pipe from it and end too
        process.join(SHUTDOWN_S)


def _sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
