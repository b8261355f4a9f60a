"""Starts the plan's processes as Ray actors and hands the stages what they need of them.

An error inside an actor arrives here as it was raised; an actor that died becomes a `LauncherError` that names its
role.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import ray.exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from composer import cluster
from composer.checks.common import world_size
from composer.errors import ClusterError, ComposerError, LauncherError, MachineError, WeightSyncError, is_disk_full
from composer.layout import Layout
from composer.process_logs import last_words
from composer.rl.packing import PackedRows
from composer.rollout.checkpoint import Keeping
from composer.schema import Config
from composer.types import Group, Split
from composer.workers import EnvWorker, GeneratorReplica, TrainerRank

if TYPE_CHECKING:
    from composer.rollout.generator import GeneratorPool
    from composer.weight_sync.store import VersionStore

START_DEADLINE_S = 300.0
PLACEMENT_DEADLINE_S = 60.0
STOP_DEADLINE_S = 4.0


async def arrive(answer: Awaitable[Any], role: str, timeout_s: float | None = None) -> Any:
    """What an actor's call returns.

    Args:
        answer: a Ray object reference.
        role: names the actor in messages.
        timeout_s: None: as long as it takes (the call has a deadline of its own).

    Raises:
        ComposerError: as the actor raised it.
        ClusterError: the actor died because Ray itself has ended.
        LauncherError: the actor died, or did not answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):  # and not wait_for, which can swallow a cancellation (CPython 86296)
            return await answer
    except ray.exceptions.RayTaskError as e:
        raise _own_error(e.cause, role) from None
    except ray.exceptions.RayError as e:
        if ended := await cluster.cause_of_death():
            raise ended from e
        if getattr(e, "actor_init_failed", False):
            raise LauncherError(f"the {role} process could not start: {_last_line(e)}") from e
        raise LauncherError(
            f"the {role} process died ({_first_line(e)}); memory is the usual cause: `dmesg` shows kills, "
            "`composer plan` shows what each process needs"
        ) from e
    except TimeoutError:
        raise LauncherError(f"the {role} process did not answer within {timeout_s:g} s") from None


class Places:
    """Room for all processes of a role, taken at once: a cluster that is too small says so instead of starting half."""

    def __init__(self, role: str, count: int, options: Mapping[str, Any], gpus_per_node: int) -> None:
        """Ask for `count` places, packed on as few machines as possible.

        Args:
            role: for messages.
            count: processes.
            options: Ray options of one of them, with `num_cpus` and `num_gpus`.
            gpus_per_node: a process with more GPUs than this has them one by one, on as many machines as it takes; it
                starts a worker on each of them itself and holds none.
        """
        self._role, self._count, self._options = role, count, dict(options)
        cpus, gpus = options["num_cpus"], options["num_gpus"]
        self._each = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        if gpus > gpus_per_node:
            self._options["num_gpus"] = 0
            bundles = [{"CPU": cpus, "GPU": 1}, *([{"GPU": 1}] * (gpus - 1))]
            self._groups = [ray.util.placement_group(bundles, strategy="PACK") for _ in range(count)]
            self._places = [(group, 0) for group in self._groups]
        else:
            self._groups = [ray.util.placement_group([self._each] * count, strategy="PACK")]
            self._places = [(self._groups[0], index) for index in range(count)]

    async def ready(self) -> None:
        """Wait for the places.

        Raises:
            LauncherError: the cluster has no room.
        """
        try:
            async with asyncio.timeout(PLACEMENT_DEADLINE_S):
                for group in self._groups:
                    await group.ready()
        except TimeoutError:
            raise LauncherError(
                f"the Ray cluster has no room for {self._count} {self._role} process(es) of {self._each} each after "
                f"{PLACEMENT_DEADLINE_S:g} s: `ray status` shows who has it; free it or add machines"
            ) from None

    def options(self, index: int) -> dict[str, Any]:
        """Ray options of the process at `index`."""
        group, bundle = self._places[index]
        return {**self._options, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}


class Trainers:
    """The ranks of the trainer, addressed together. Keeps `composer.rl.controller.Policy`."""

    def __init__(self, config: Config, layout: Layout, actor_options: Mapping[str, Any]) -> None:
        """Start one actor a rank, all or none and as close together as the cluster allows; `ready` waits for them."""
        self.num_ranks = world_size(config.parallel)
        self._places = Places("trainer", self.num_ranks, actor_options, config.parallel.gpus_per_node)
        self.ranks = [
            ray.remote(TrainerRank)
            .options(**self._places.options(rank))
            .remote(str(layout.run_dir), rank, self.num_ranks)
            for rank in range(self.num_ranks)
        ]
        self.num_data_ranks, self.sequence_multiple = 1, 1
        self._data_ranks: list[int] = []
        self._sync: WeightSync | None = None
        self._timeout_s, self._publish_timeout_s = config.parallel.timeout_s, config.weight_sync.timeout_s

    async def ready(self) -> None:
        """Let the ranks meet.

        Raises:
            LauncherError: a rank did not start.
        """
        await self._places.ready()
        host, port = await arrive(self.ranks[0].address.remote(), "trainer", START_DEADLINE_S)
        await self._all(rank.join.remote(host, port) for rank in self.ranks)

    async def train_phase(
        self, phase: str, start: Path | None, sessions: Path | None
    ) -> AsyncIterator[tuple[int, dict[str, float]]]:
        """Train a phase on all ranks; yields what rank 0 yields, as it comes."""
        arguments = (phase, str(start) if start else None, str(sessions) if sessions else None)
        await self.ready()
        streams = [rank.train_phase.options(num_returns="streaming").remote(*arguments) for rank in self.ranks]
        others = [asyncio.create_task(_drain(s)) for s in streams[1:]]
        try:
            steps = aiter(streams[0])
            while (answer := await arrive(anext(steps, None), "trainer", self._timeout_s)) is not None:
                yield await arrive(answer, "trainer", self._timeout_s)
            await asyncio.gather(*others)
        except ray.exceptions.RayActorError as e:
            raise LauncherError(f"the trainer process died ({_first_line(e)}); `dmesg` shows kills for memory") from e
        finally:
            for task in others:
                task.cancel()

    async def open_policy(self, start: Path, sync: WeightSync) -> int:
        """Build the policy on all ranks; returns the number of optimizer steps it has."""
        await self.ready()
        opened = await self._all(rank.open_policy.remote(str(start), str(sync.store.directory)) for rank in self.ranks)
        self._data_ranks = [o["data_rank"] for o in opened]
        self.num_data_ranks, self.sequence_multiple = opened[0]["num_data_ranks"], opened[0]["sequence_multiple"]
        self._sync = sync
        return opened[0]["version"]

    async def update(self, rows: list[list[PackedRows]]) -> dict[str, float]:
        """One optimizer step; rows by data-parallel rank."""
        answers = [r.update.remote(rows[d]) for r, d in zip(self.ranks, self._data_ranks, strict=True)]
        return (await self._all(answers))[0]

    async def reference_score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probabilities under the weights that RL started from."""
        shared = ray.put([np.asarray(s) for s in sequences])  # the ranks of a machine read them from one memory
        scores = (await self._all(rank.reference_score.remote(shared) for rank in self.ranks))[0]
        return [s.tolist() for s in scores]

    async def synchronise(self, version: int, probe: Sequence[int]) -> dict[str, float]:
        """Publish, load on every generator, verify.

        Raises:
            WeightSyncError: the version was not published within `weight_sync.timeout_s`, or a generator did not load
                or verify it.
        """
        assert self._sync is not None, "open_policy comes first"
        answers = [arrive(rank.publish.remote(version, list(probe)), "trainer") for rank in self.ranks]
        try:
            async with asyncio.timeout(self._publish_timeout_s):
                published = (await asyncio.gather(*answers))[0]
        except TimeoutError:
            raise WeightSyncError(
                f"weight_sync.timeout_s={self._publish_timeout_s:g}: version {version} was not published by then; "
                "raise it, or publish to faster storage (weight_sync.directory)"
            ) from None
        return published | await self._sync.load(version)

    async def save(self) -> None:
        """Write a checkpoint."""
        await self._all(rank.save.remote() for rank in self.ranks)

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._all(rank.export.remote(str(folder)) for rank in self.ranks)

    async def _all(self, answers: Iterable[Awaitable[Any]]) -> list[Any]:
        return await asyncio.gather(*(arrive(a, "trainer", self._timeout_s) for a in answers))


class WeightSync:
    """The way of the weights: a store of versions, and the generators that load from it."""

    def __init__(self, config: Config, store: VersionStore, pool: GeneratorPool) -> None:
        """Take the store that rank 0 publishes to and the generators that load from it."""
        self._config, self.store, self._pool = config.weight_sync, store, pool

    async def load(self, version: int) -> dict[str, float]:
        """Load `version` on every generator.

        Raises:
            WeightSyncError: a generator did not load or verify it.
        """
        from composer.weight_sync.load import load

        reports = await load(self._pool, self.store, self._config, version)
        return {
            "weight_sync/load_s": max(r.seconds for r in reports),
            "weight_sync/paused_s": max(r.paused_seconds for r in reports),
            **{f"mismatch/{n}": max(getattr(r.mismatch, n) for r in reports) for n in ("k3", "p90", "p99", "max")},
        }


class Rollouts:
    """Generators and env workers. Keeps `composer.rl.controller.Rollouts` and the evaluation's."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        run_label: str,
        options: Callable[[str], dict[str, Any]],
        warn: Callable[[str], None],
    ) -> None:
        """Start the env workers at once; generators start when there is a model.

        Args:
            config: the resolved config.
            layout: the run directory.
            run_label: marks sandboxes.
            options: Ray options by role.
            warn: tells the user one sentence.
        """
        self._config, self._layout, self._options, self._warn = config, layout, options, warn
        actor = ray.remote(EnvWorker).options(**options("env"), max_concurrency=1024, scheduling_strategy="SPREAD")
        self._names = [f"env-{i}" for i in range(config.env.num_workers)]
        self.workers = [actor.remote(str(layout.run_dir), name, run_label) for name in self._names]
        self._load = [0] * len(self.workers)
        self._dead: dict[int, LauncherError] = {}
        self.pool: GeneratorPool | None = None

    async def check_tasks(self) -> None:
        """Find out before anything is trained whether the tasks' own tests can run."""
        deadline_s = START_DEADLINE_S + 2 * self._config.env.episode_timeout_s
        await self._arrive(0, self.workers[0].check_tasks.remote(), deadline_s)

    async def prepare(self, progress: Callable[[int], None]) -> None:
        """Make the tokenizer and the expert's sessions that the mix asks for.

        Args:
            progress: told every second how many sessions are recorded.
        """
        worker = self.workers[0]

        async def watch() -> None:
            with contextlib.suppress(LauncherError):  # `prepare` meets it too and says it
                while True:
                    progress(await arrive(worker.num_recorded.remote(), "env worker"))
                    await asyncio.sleep(1.0)

        watching = asyncio.create_task(watch())
        try:
            await self._arrive(0, worker.prepare.remote(), self._config.parallel.timeout_s)
        finally:
            watching.cancel()

    async def start_generators(self, model: Path, policy_version: int) -> None:
        """Start the generator replicas on an export and connect the env workers to them.

        Raises:
            GeneratorError: one did not start.
        """
        from composer.rollout.generator import GeneratorPool

        config = self._config
        options = self._options("generator")
        places = Places("generator", config.generator.num_replicas, options, config.parallel.gpus_per_node)
        await places.ready()
        replicas = {
            f"generator-{i}": ray.remote(GeneratorReplica)
            .options(**places.options(i), max_concurrency=1024)
            .remote(
                str(self._layout.run_dir),
                f"generator-{i}",
                str(model),
                config.generator,
                config.parallel.accelerator,
                config.parallel.threads_per_process,
                config.seed + i,
                policy_version,
                max(1, math.ceil(options["num_gpus"] / config.parallel.gpus_per_node)),
            )
            for i in range(config.generator.num_replicas)
        }
        await asyncio.gather(
            *(arrive(r.start.remote(), name, config.generator.start_timeout_s) for name, r in replicas.items())
        )
        self.pool = GeneratorPool(replicas, config.generator.request_timeout_s)
        await asyncio.gather(*(arrive(w.connect.remote(replicas), "env worker", 60.0) for w in self.workers))

    async def run_group(
        self, split: Split, index: int, group_id: str, size: int, temperature: float, keeping: Keeping
    ) -> Group:
        """Run a group on the env worker that has the fewest; on another one if that dies.

        Raises:
            ClusterError: Ray itself has ended.
            LauncherError: all env workers are dead.
            ComposerError: as the worker raised it.
        """
        while alive := [i for i in range(len(self.workers)) if i not in self._dead]:
            worker = min(alive, key=self._load.__getitem__)
            self._load[worker] += 1
            answer = self.workers[worker].run_group.remote(split, index, group_id, size, temperature, keeping)
            try:
                return await self._arrive(worker, answer)
            except ClusterError:
                raise
            except LauncherError as e:
                if worker not in self._dead and len(alive) > 1:
                    self._warn(f"going on with {len(alive) - 1} env workers of {len(self.workers)}: {e}")
                self._dead[worker] = e
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise
            finally:
                self._load[worker] -= 1
        raise next(reversed(self._dead.values()))

    async def _arrive(self, worker: int, answer: Awaitable[Any], timeout_s: float | None = None) -> Any:
        """As `arrive`; a worker that ended itself has left the reason."""
        try:
            return await arrive(answer, "env worker", timeout_s)
        except ClusterError:
            raise
        except LauncherError:
            with contextlib.suppress(OSError):
                reason = last_words(self._layout.run_dir, self._names[worker]).read_text(encoding="utf-8")
                raise LauncherError(reason) from None
            raise

    async def stop(self) -> None:
        """End sandboxes and engines in an orderly way, then the actors. Raises nothing."""
        with contextlib.suppress(Exception):  # whatever does not end by itself is killed next
            stops = [w.stop.remote() for w in self.workers]
            if self.pool is not None:
                stops.append(self.pool.stop())
            await asyncio.wait_for(asyncio.gather(*stops, return_exceptions=True), STOP_DEADLINE_S)


def _own_error(cause: BaseException, role: str) -> BaseException:
    """The error of an actor as a user should meet it; what is a bug of ours stays as it is, traceback included."""
    if isinstance(cause, ComposerError):
        return cause
    # What came from another process has its chain as text only.
    if is_disk_full(cause) or "No space left on device" in "".join(traceback.format_exception(cause)):
        return MachineError(
            f"the disk is full: the {role} process could not write; free space and resume, what is finished is kept"
        )
    return cause


async def _drain(stream: Any) -> None:
    async for answer in stream:
        await answer


def _last_line(error: BaseException) -> str:
    """Of a traceback as text: what was raised, without our own types' names."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return line.partition(": ")[2] if line.startswith("composer.errors.") else line


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
