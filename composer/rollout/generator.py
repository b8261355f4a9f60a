"""Replicas of the rollout engine, and the pool through which env workers reach them.

A replica is one actor process with one engine. The controller makes the actors, with Ray's own words:

    actor = ray.remote(Replica).options(max_concurrency=1024, num_cpus=1).remote("generator-0", model_dir, config, ...)
    await actor.start.remote()

and gives their handles to everyone who generates. Weights are updated in flight: `GeneratorPool.load_weights` reaches
all replicas at once, while requests run.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from typing import Any

from composer.errors import ComposerError, EngineDeadError, GeneratorError, WeightSyncError
from composer.rollout.engine import Engine
from composer.schema import Accelerator, GeneratorConfig, WeightSyncConfig
from composer.types import Generation, LoadReport, Probe

GRACE_S = 10.0
"""A replica ends what misses its deadline itself and says why; one that has not answered by then plus this hangs."""


class Replica:
    """One engine and its process. A plain asyncio class; methods run concurrently."""

    def __init__(
        self,
        name: str,
        model_dir: str,
        config: GeneratorConfig,
        accelerator: Accelerator = Accelerator.cpu,
        threads: int = 1,
        seed: int = 0,
        policy_version: int = 0,
        machines: int = 1,
    ) -> None:
        """Keep the arguments of `Engine.start`; `name` stands in every error."""
        self.name = name
        self._arguments = (model_dir, config)
        self._options = {
            "accelerator": accelerator,
            "threads": threads,
            "seed": seed,
            "policy_version": policy_version,
            "machines": machines,
        }
        self._engine: Engine | None = None

    async def start(self) -> None:
        """Start the engine, before anything else is called.

        Raises:
            GeneratorError: it did not start.
        """
        if self._engine is None:
            self._engine = await Engine.start(*self._arguments, **self._options)
            # What vLLM's imports leave lives as long as the process; no full collection has to walk it again.
            gc.collect()
            gc.freeze()

    async def generate(self, token_ids: Sequence[int], **options: Any) -> Generation:
        """See `Engine.generate`."""
        return await self._started().generate(token_ids, **options)

    async def load_weights(
        self, directory: str, policy_version: int, probe: Probe, sync: WeightSyncConfig
    ) -> LoadReport:
        """See `Engine.load_weights`."""
        return await self._started().load_weights(directory, policy_version, probe, sync)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._engine is not None:
            await self._engine.stop()
            gc.unfreeze()

    def _started(self) -> Engine:
        if self._engine is None:
            raise GeneratorError(f"replica={self.name!r}: it was asked before it had started; await `start` first")
        return self._engine


class GeneratorPool:
    """Sends each request to a replica: the one that holds the episode's prefix, or else the least loaded one.

    Cheap and picklable while idle: every env worker has its own, and counts only its own requests as load.

    Example:
        >>> pool = GeneratorPool({"generator-0": actor_handle}, request_timeout_s=120.0)   # doctest: +SKIP
        >>> await pool.generate([1, 2, 3], episode_id="e7", max_tokens=16)                 # doctest: +SKIP
    """

    def __init__(self, replicas: Mapping[str, Any], request_timeout_s: float) -> None:
        """Take replicas by name (Ray actor handles of `Replica`) and the deadline of one request."""
        if not replicas:
            raise GeneratorError("generator.num_replicas=0: there is no replica to ask; start at least one")
        self.request_timeout_s = request_timeout_s
        self._replicas = dict(replicas)
        self._load = dict.fromkeys(self._replicas, 0)
        self._dead: dict[str, str] = {}
        self._episodes: dict[str, str] = {}

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        episode_id: str,
        max_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Generation:
        """Continue an episode's context; see `Engine.generate`.

        Raises:
            GeneratorError: the deadline passed, or the replica is dead or refused the request; it names the replica.
        """
        name = self._route(episode_id)
        self._load[name] += 1
        try:
            return await self._call(
                name,
                "generate",
                self.request_timeout_s + GRACE_S,
                list(token_ids),
                max_tokens=max_tokens,
                temperature=temperature,
                stop_token_ids=list(stop_token_ids),
                seed=seed,
                timeout_s=self.request_timeout_s,
            )
        finally:
            self._load[name] -= 1

    def release(self, episode_id: str) -> None:
        """Forget where an episode ran. Call it when the episode ends."""
        self._episodes.pop(episode_id, None)

    async def load_weights(
        self, directory: str, policy_version: int, probe: Probe, sync: WeightSyncConfig
    ) -> list[LoadReport]:
        """Load and verify a version in all replicas at once; see `Engine.load_weights`.

        Raises:
            WeightSyncError: a replica could not, is dead, or did not answer. All have ended their attempt by then.
        """
        calls = [self._call(name, "load_weights", sync.timeout_s + GRACE_S, directory, policy_version, probe, sync)
                 for name in self._replicas]  # fmt: skip
        reports = await asyncio.gather(*calls, return_exceptions=True)
        for report in reports:
            if isinstance(report, GeneratorError):
                raise WeightSyncError(f"version={policy_version!r}: {report}") from report
            if isinstance(report, BaseException):
                raise report
        return [r for r in reports if isinstance(r, LoadReport)]

    async def stop(self) -> None:
        """Stop all replicas' engines. Raises nothing."""
        await asyncio.gather(*(self._call(n, "stop", GRACE_S) for n in self._replicas), return_exceptions=True)

    def _route(self, episode_id: str) -> str:
        name = self._episodes.get(episode_id)
        if name is None or name in self._dead:
            name = self._episodes[episode_id] = self._least_loaded()
        return name

    def _least_loaded(self) -> str:
        alive = [n for n in self._replicas if n not in self._dead]
        if not alive:
            raise GeneratorError(
                "all generator replicas are dead: " + "; ".join(f"{n}: {why}" for n, why in self._dead.items())
            )
        # Episodes between two turns count as well: they come back to their replica.
        homes = list(self._episodes.values())
        return min(alive, key=lambda n: (self._load[n], homes.count(n)))

    async def _call(self, name: str, method: str, deadline_s: float, /, *args: Any, **options: Any) -> Any:
        """Call a replica, with a deadline, and translate Ray's errors into ours."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        reference = getattr(self._replicas[name], method).remote(*args, **options)
        try:
            async with asyncio.timeout(deadline_s):
                return await reference
        except TimeoutError as e:
            ray.cancel(reference)
            raise GeneratorError(
                f"replica={name!r}: no answer to {method} within {deadline_s:.0f} s; it hangs, restart it"
            ) from e
        except asyncio.CancelledError:
            ray.cancel(reference)  # frees the slot of an episode that nobody waits for
            raise
        except RayActorError as e:
            self._dead[name] = "its process ended"
            raise GeneratorError(
                f"replica={name!r}: its process is dead ({str(e).strip().splitlines()[0]}); the run must start it again"
            ) from e
        except RayTaskError as e:
            if isinstance(e.cause, EngineDeadError):  # it would answer at once, so be the least loaded one for ever
                self._dead[name] = str(e.cause)
            if isinstance(e.cause, ComposerError):
                raise type(e.cause)(f"replica={name!r}: {e.cause}") from e
            raise
