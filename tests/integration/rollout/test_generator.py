"""The pool over real Ray actors: routing, deadlines and death; and one real replica, killed at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from composer.errors import EngineDeadError, GeneratorError, WeightSyncError
from composer.identity import start_time
from composer.rollout import engine
from composer.rollout.generator import GeneratorPool, Replica
from composer.schema import GeneratorConfig, WeightSyncConfig
from composer.types import Probe
from composer.weight_sync.load import load
from composer.weight_sync.publish import publish
from composer.weight_sync.store import VersionStore

sys.path.insert(0, str(Path(__file__).parent))

from small_models import log_probs, qwen3_moe, weights  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        ray.shutdown()


@pytest.fixture
def actors() -> Iterator[Callable[..., Any]]:
    """Makes actors that answer like replicas, with their name in place of tokens, after `seconds`."""
    made = []

    def make(name: str, seconds: float = 0.0, *, dead: bool = False) -> Any:
        class Answering:
            async def generate(self, token_ids: list[int], **options: Any) -> tuple[str, int]:
                await asyncio.sleep(seconds)
                if token_ids == [666]:
                    raise GeneratorError("the context is wrong")
                if dead:
                    raise EngineDeadError("EngineCore ended")
                return name, os.getpid()

            async def load_weights(self, *args: Any) -> None:
                raise WeightSyncError("the file is damaged")

        made.append(ray.remote(Answering).options(num_cpus=0, max_concurrency=100).remote())
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


def ask(pool: GeneratorPool, *episodes: str) -> list[Any]:
    async def all_of_them() -> list[Any]:
        calls = (pool.generate([1], episode_id=e, max_tokens=1) for e in episodes)
        return list(await asyncio.gather(*calls, return_exceptions=True))

    return asyncio.run(all_of_them())


def test_new_episodes_go_to_the_least_loaded_replica_and_stay_there(actors: Callable[..., Any]) -> None:
    pool = GeneratorPool({"g0": actors("g0", 0.2), "g1": actors("g1", 0.2)}, request_timeout_s=30.0)
    first = [name for name, _ in ask(pool, "a", "b", "c", "d")]
    assert sorted(first) == ["g0", "g0", "g1", "g1"]
    assert [name for name, _ in ask(pool, "d", "c", "b", "a")] == first[::-1]
    pool.release("a"), pool.release("c")
    remaining = {name for e, name in zip("abcd", first, strict=True) if e in "bd"}
    assert len(remaining) == 1  # both on one replica, so that the next episode goes to the other
    assert {name for name, _ in ask(pool, "e")}.isdisjoint(remaining)


def test_errors_keep_their_type_and_name_the_replica(actors: Callable[..., Any]) -> None:
    pool = GeneratorPool({"g0": actors("g0")}, request_timeout_s=30.0)
    with pytest.raises(GeneratorError, match="replica='g0': the context is wrong"):
        asyncio.run(pool.generate([666], episode_id="a", max_tokens=1))
    with pytest.raises(WeightSyncError, match="replica='g0': the file is damaged"):
        asyncio.run(pool.load_weights("/nowhere", 1, Probe([1, 2], [0.0]), WeightSyncConfig()))


def test_a_replica_that_hangs_is_named(actors: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.rollout.generator.GRACE_S", 0.5)
    pool = GeneratorPool({"g0": actors("g0", 60.0)}, request_timeout_s=0.5)
    (answer,) = ask(pool, "a")
    assert isinstance(answer, GeneratorError) and "replica='g0': no answer to generate within 1 s" in str(answer)


def test_a_dead_replica_is_named_and_then_avoided(actors: Callable[..., Any]) -> None:
    pool = GeneratorPool({"g0": actors("g0"), "g1": actors("g1")}, request_timeout_s=30.0)
    ((victim, pid),) = ask(pool, "a")
    os.kill(pid, signal.SIGKILL)
    (answer,) = ask(pool, "a")
    assert isinstance(answer, GeneratorError) and f"replica='{victim}': its process is dead" in str(answer)
    assert all(name != victim for name, _ in ask(pool, "a", "b", "c"))
    with pytest.raises(WeightSyncError, match=f"version=1: replica='{victim}'"):  # a version counts when all have it
        asyncio.run(pool.load_weights("/nowhere", 1, Probe([1, 2], [0.0]), WeightSyncConfig()))


def test_a_replica_whose_engine_is_dead_does_not_attract_what_is_left(actors: Callable[..., Any]) -> None:
    pool = GeneratorPool({"g0": actors("g0", dead=True), "g1": actors("g1", 0.1)}, request_timeout_s=30.0)
    answers = [ask(pool, episode)[0] for episode in "abcdef"]
    assert [isinstance(answer, EngineDeadError) for answer in answers].count(True) == 1
    assert [answer[0] for answer in answers if isinstance(answer, tuple)] == ["g1"] * 5


def test_no_replica_is_refused() -> None:
    with pytest.raises(GeneratorError, match="num_replicas=0"):
        GeneratorPool({}, request_timeout_s=1.0)


def test_a_real_replica_loads_the_newest_version_and_dies_with_its_actor(tmp_path: Path) -> None:
    a, b = qwen3_moe(tmp_path / "a", seed=0), qwen3_moe(tmp_path / "b", seed=1)
    config = GeneratorConfig(kv_cache_bytes=32 * 2**20)
    actor = ray.remote(Replica).options(num_cpus=1, max_concurrency=100).remote("generator-0", str(a), config)
    ray.get(actor.start.remote(), timeout=200)
    pool = GeneratorPool({"generator-0": actor}, config.request_timeout_s)
    context = list(range(20, 60))
    store = VersionStore.create(tmp_path / "store")

    async def work() -> None:
        first = await pool.generate(context, episode_id="e", max_tokens=8, temperature=0.0)
        assert first.policy_versions == [0] * 8
        for version, model in ((1, a), (2, b)):  # version 1 is superseded before anybody loads it
            publish(store, version, weights(model).items(), Probe(context, log_probs(model, context)))
        (report,) = await load(pool, store, WeightSyncConfig(verify_tolerance=1e-4))
        assert report.policy_version == 2
        second = await pool.generate(context, episode_id="e", max_tokens=8, temperature=0.0)
        assert second.policy_versions == [2] * 8 and second.token_ids != first.token_ids

    asyncio.run(work())
    actor_pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    children = [int(p) for p in Path(f"/proc/{actor_pid}/task/{actor_pid}/children").read_text().split()]
    children += [
        int(c) for t in Path(f"/proc/{actor_pid}/task").iterdir() for c in (t / "children").read_text().split()
    ]
    cores = {c for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()
             or b"EngineCore" in Path(f"/proc/{c}/cmdline").read_bytes()}  # fmt: skip
    assert len(cores) == 1
    os.kill(actor_pid, signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while any(start_time(c) is not None for c in cores):
        assert time.monotonic() < deadline, "EngineCore outlives its actor"
        time.sleep(0.05)
    with pytest.raises(GeneratorError, match="replica='generator-0': its process is dead"):
        asyncio.run(pool.generate(context, episode_id="e", max_tokens=1))
    engine.sweep()  # its sockets, which go as soon as it is dead, reaped or not
    assert not list(Path(tempfile.gettempdir()).glob(f"composer-engine-*-{actor_pid}-*"))
