"""A real vLLM engine against transformers: numbers, swaps in place and in flight, and every way a load can fail.

Two engines serve the whole file: `engine` starts from model A, `fresh_b` from model B.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from composer.errors import GeneratorError, WeightSyncError
from composer.identity import start_time
from composer.rollout import vllm_internals
from composer.rollout.engine import Engine
from composer.schema import GeneratorConfig, WeightSyncConfig
from composer.types import Generation, LoadReport, Probe
from composer.weight_sync.publish import publish
from composer.weight_sync.store import VersionStore

sys.path.insert(0, str(Path(__file__).parent))

from small_models import VOCABULARY, difference, log_probs, mixed, qwen3_moe, weights  # noqa: E402

CONFIG = GeneratorConfig(max_model_len=384, max_num_seqs=32, kv_cache_bytes=32 * 2**20, request_timeout_s=60.0)
SYNC = WeightSyncConfig(verify_tolerance=1e-4)
EXACT = 1e-4
"""Float32 against float32, another order of summation."""
RANDOM = random.Random(0)
PROBE_IDS = [RANDOM.randrange(VOCABULARY) for _ in range(48)]


def prompts(count: int, length: int = 24) -> list[list[int]]:
    return [[RANDOM.randrange(VOCABULARY) for _ in range(length + i)] for i in range(count)]


@dataclass
class Models:
    """A and B are strangers; the others are A with a part of B."""

    a: Path
    b: Path
    experts_of_b: Path
    embedding_of_b: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    a, b = qwen3_moe(root / "a", seed=0), qwen3_moe(root / "b", seed=1)
    experts = {n: t for n, t in weights(b).items() if ".experts." in n}
    embedding = {n: t for n, t in weights(b).items() if "embed_tokens" in n}
    assert len(experts) == 2 * 8 * 3 and len(embedding) == 1
    return Models(a, b, mixed(root / "x", a, experts), mixed(root / "e", a, embedding))


class Live:
    """An engine and its event loop, for tests that are not asynchronous."""

    def __init__(self, runner: asyncio.Runner, model: Path, store: VersionStore) -> None:
        self.run, self.store, self.version = runner.run, store, 0
        self.engine: Engine = runner.run(Engine.start(model, CONFIG))

    def generate(self, contexts: list[list[int]], **options: Any) -> list[Generation]:
        async def all_of_them() -> list[Generation]:
            return list(await asyncio.gather(*(self.engine.generate(c, **options) for c in contexts)))

        return self.run(all_of_them())

    def publish(self, model: Path, probe_model: Path | None = None, drop: str = "") -> tuple[Path, int, Probe]:
        self.version = (self.store.latest() or 0) + 1
        probe = Probe(PROBE_IDS, log_probs(probe_model or model, PROBE_IDS))
        tensors = [(n, t) for n, t in weights(model).items() if n != drop]
        return publish(self.store, self.version, tensors, probe).directory, self.version, probe

    def load(self, model: Path) -> LoadReport:
        return self.run(self.engine.load_weights(*self.publish(model), SYNC))

    @property
    def processes(self) -> list[int]:
        return [p.pid for p in self.engine._processes]


def live(model: Path, directory: Path) -> Iterator[Live]:
    with asyncio.Runner() as runner:
        engine = Live(runner, model, VersionStore.create(directory))
        processes = engine.processes
        assert processes and all(start_time(p) is not None for p in processes)
        # A semaphore that still has a name would outlive a killed engine. Mappings show inodes in their fifth field.
        mapped = {line.split()[4] for p in processes for line in Path(f"/proc/{p}/maps").read_text().splitlines()}
        assert not [s for s in Path("/dev/shm").glob("sem.*") if str(s.stat().st_ino) in mapped]
        yield engine
        runner.run(engine.engine.stop())
        assert not any(start_time(p) is not None for p in processes)


@pytest.fixture(scope="module")
def engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    yield from live(models.a, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def fresh_b(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    yield from live(models.b, tmp_path_factory.mktemp("store"))


def sampled(model: Path, context: list[int], generation: Generation, temperature: float = 1.0) -> list[float]:
    return log_probs(model, context + generation.token_ids, temperature)[len(context) - 1 :]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probabilities_are_transformers_at_the_temperature_of_sampling(
    engine: Live, models: Models, temperature: float
) -> None:
    contexts = prompts(8)
    for context, generation in zip(
        contexts, engine.generate(contexts, max_tokens=24, temperature=temperature), strict=True
    ):
        assert len(generation.token_ids) == 24 and generation.finish_reason == "length"
        assert generation.policy_versions == [0] * 24
        expected = sampled(models.a, context, generation, temperature or 1.0)  # 0 takes the likeliest token
        assert difference(generation.log_probs, expected) < EXACT


def test_requests_of_several_temperatures_share_a_batch(engine: Live, models: Models) -> None:
    contexts, temperatures = prompts(6), (0.0, 0.5, 1.0, 1.5, 0.0, 0.7)

    async def together() -> list[Generation]:
        pairs = zip(contexts, temperatures, strict=True)
        asked = [engine.engine.generate(c, max_tokens=16, temperature=t) for c, t in pairs]
        return list(await asyncio.gather(*asked))

    for context, temperature, generation in zip(contexts, temperatures, engine.run(together()), strict=True):
        expected = sampled(models.a, context, generation, temperature or 1.0)
        assert difference(generation.log_probs, expected) < EXACT


def test_scores_are_transformers_also_when_the_prefix_is_cached(engine: Live, models: Models) -> None:
    context = prompts(1, 100)[0]
    for _ in range(2):
        assert difference(engine.run(engine.engine._score(context)), log_probs(models.a, context)) < EXACT
        engine.generate([context], max_tokens=1)


def test_the_stop_token_ends_a_generation_and_belongs_to_it(engine: Live) -> None:
    context = prompts(1)[0]
    (whole,) = engine.generate([context], max_tokens=12, temperature=0.0)
    stop = whole.token_ids[5]
    (stopped,) = engine.generate([context], max_tokens=12, temperature=0.0, stop_token_ids=[stop])
    end = whole.token_ids.index(stop) + 1
    assert stopped.token_ids == whole.token_ids[:end] and stopped.finish_reason == "stop"


def test_a_seed_repeats_a_generation_also_when_prompts_are_computed_in_chunks(engine: Live) -> None:
    contexts = prompts(32, 150)  # 5,300 tokens: more than vLLM computes in one step
    first = engine.generate(contexts, max_tokens=4, seed=5)
    engine.run(engine.engine._llm.reset_prefix_cache())
    second = engine.generate(contexts, max_tokens=4, seed=5)
    assert [g.token_ids for g in first] == [g.token_ids for g in second]
    assert [g.token_ids for g in first] != [g.token_ids for g in engine.generate(contexts, max_tokens=4, seed=6)]


def test_the_second_turn_reuses_the_first(engine: Live) -> None:
    context = prompts(1, 128)[0]
    (turn,) = engine.generate([context], max_tokens=8)
    params = vllm_internals.sampling(8, 1.0, [], None)
    output = engine.run(engine.engine._answer(context + turn.token_ids + [1, 2, 3], params, None, None))
    assert output.num_cached_tokens == 128  # four blocks of 32


def test_a_context_that_is_too_long_is_named(engine: Live) -> None:
    with pytest.raises(GeneratorError, match="generator.max_model_len=384.*400 tokens"):
        engine.generate([[1] * 400], max_tokens=1)
    (last,) = engine.generate([[1] * 380], max_tokens=100)
    assert len(last.token_ids) == 4 and last.finish_reason == "length"


def test_a_missed_deadline_aborts_the_request_only(engine: Live) -> None:
    with pytest.raises(GeneratorError, match="generator.request_timeout_s=0.05.*aborted"):
        engine.generate(prompts(1), max_tokens=350, timeout_s=0.05)
    assert len(engine.generate(prompts(1), max_tokens=2)[0].token_ids) == 2


def test_swapping_back_and_forth_equals_fresh_engines_exactly(engine: Live, fresh_b: Live, models: Models) -> None:
    contexts = prompts(8)
    fresh = {
        models.a: engine.generate(contexts, max_tokens=16, temperature=0.0),
        models.b: fresh_b.generate(contexts, max_tokens=16, temperature=0.0),
    }
    assert fresh[models.a] != fresh[models.b]
    for model in (models.b, models.a, models.b, models.a):
        report = engine.load(model)
        assert report.policy_version == engine.version and report.mismatch.max < EXACT
        swapped = engine.generate(contexts, max_tokens=16, temperature=0.0)
        assert [g.token_ids for g in swapped] == [g.token_ids for g in fresh[model]]
        assert [g.log_probs for g in swapped] == [g.log_probs for g in fresh[model]]
        assert swapped[0].policy_versions == [engine.version] * 16
    assert engine.engine.policy_version == engine.version


@pytest.mark.parametrize("part", ["experts_of_b", "embedding_of_b"])
def test_packed_weights_change_where_vllms_own_reload_leaves_them(engine: Live, models: Models, part: str) -> None:
    """The negative control: without `forget_packed_experts` and `pack_tied_head`, a reload is silently wrong."""
    changed = getattr(models, part)
    truth = log_probs(changed, PROBE_IDS)
    engine.load(models.a)
    reload = engine.engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(changed)})
    engine.run(reload)
    assert difference(engine.run(engine.engine._score(PROBE_IDS)), truth) > 0.1
    engine.load(changed)
    assert difference(engine.run(engine.engine._score(PROBE_IDS)), truth) < EXACT
    engine.load(models.a)


def test_a_swap_in_flight_ends_no_request_and_each_token_says_who_sampled_it(engine: Live, models: Models) -> None:
    engine.load(models.a)
    old = engine.version
    contexts = prompts(16)

    async def swap_under_way() -> list[Generation]:
        requests = [asyncio.create_task(engine.engine.generate(c, max_tokens=300)) for c in contexts]
        running = engine.engine._llm.output_processor.request_states
        while len(running) < 16 or not all(r.detokenizer.num_output_tokens() > 4 for r in running.values()):
            await asyncio.sleep(0.01)
        await engine.engine.load_weights(*version, SYNC)
        return list(await asyncio.gather(*requests))

    version = engine.publish(models.b)
    generations = engine.run(swap_under_way())
    parted = 0
    for context, generation in zip(contexts, generations, strict=True):
        assert len(generation.token_ids) == 300
        before = generation.policy_versions.count(old)
        assert 0 < before < 300
        assert generation.policy_versions == [old] * before + [engine.version] * (300 - before)
        # After the swap every token is sampled as by a fresh engine that is given the same prefix.
        olds = difference(generation.log_probs[:before], sampled(models.a, context, generation)[:before])
        news = difference(generation.log_probs[before:], sampled(models.b, context, generation)[before:])
        parted += max(olds, news) >= EXACT
    # Wrong weights would part all 16. One of 4800 tokens may meet two experts that are as likely, see below.
    assert parted <= 2
    engine.load(models.a)


def test_a_damaged_or_incomplete_version_leaves_the_old_one_in_use(engine: Live, models: Models) -> None:
    version = engine.engine.policy_version
    directory, number, probe = engine.publish(models.b)
    path = directory / "weights-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(WeightSyncError, match="weights-00000.safetensors.*damaged"):
        engine.run(engine.engine.load_weights(directory, number, probe, SYNC))
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    directory, number, probe = engine.publish(models.b, drop=name)
    with pytest.raises(WeightSyncError, match=f"tensor='{name}'.*missing"):
        engine.run(engine.engine.load_weights(directory, number, probe, SYNC))
    with pytest.raises(WeightSyncError, match="superseded"):
        engine.run(engine.engine.load_weights(directory.parent / "v00009999", 9999, probe, SYNC))
    assert engine.engine.alive and engine.engine.policy_version == version
    assert difference(engine.run(engine.engine._score(PROBE_IDS)), log_probs(models.a, PROBE_IDS)) < EXACT


def test_a_token_that_took_another_expert_does_not_end_the_engine(engine: Live, models: Models) -> None:
    """Where two experts are as likely, trainer and generator may part on a token although all weights are in place."""
    directory, number, probe = engine.publish(models.b)
    parted = Probe(probe.token_ids, [p - 0.05 * (i == 4) for i, p in enumerate(probe.log_probs)])
    report = engine.run(engine.engine.load_weights(directory, number, parted, SYNC))
    assert report.mismatch.max == pytest.approx(0.05, abs=EXACT) and report.mismatch.p90 < EXACT
    assert engine.engine.policy_version == number


def test_a_probe_that_disagrees_ends_the_engine_and_lets_no_token_out(fresh_b: Live, models: Models) -> None:
    """The files are whole, but they are not the policy that the trainer measured."""

    async def mismatch() -> list[Generation | BaseException]:
        request = asyncio.create_task(fresh_b.engine.generate(PROBE_IDS, max_tokens=300))
        await asyncio.sleep(0.1)
        load = fresh_b.engine.load_weights(*version, SYNC)
        return list(await asyncio.gather(load, request, return_exceptions=True))

    version = fresh_b.publish(models.a, probe_model=models.b)
    failed, request = fresh_b.run(mismatch())
    assert isinstance(failed, WeightSyncError) and "weight_sync.verify_tolerance=0.0001" in str(failed)
    assert isinstance(request, GeneratorError) and "verify_tolerance" in str(request)
    assert not fresh_b.engine.alive
    assert not any(start_time(p) is not None for p in fresh_b.processes)
    with pytest.raises(GeneratorError, match="dead.*must be started again"):
        fresh_b.generate(prompts(1), max_tokens=1)
    with pytest.raises(GeneratorError, match="dead"):
        fresh_b.load(models.b)


def test_a_killed_engine_core_fails_all_requests_at_once(engine: Live) -> None:  # the last: `engine` does not survive
    async def kill() -> tuple[float, list[Generation | BaseException]]:
        requests = [asyncio.create_task(engine.engine.generate(c, max_tokens=300)) for c in prompts(4)]
        await asyncio.sleep(0.2)
        start = time.monotonic()
        os.kill(engine.processes[0], signal.SIGKILL)
        answers = await asyncio.gather(*requests, return_exceptions=True)
        return time.monotonic() - start, list(answers)

    seconds, answers = engine.run(kill())
    assert seconds < 10.0
    for answer in answers:
        assert isinstance(answer, GeneratorError) and "is dead" in str(answer)


def test_a_start_that_cannot_be_in_time_leaves_no_process(models: Models) -> None:
    config = GeneratorConfig(start_timeout_s=1.0, kv_cache_bytes=32 * 2**20)
    with asyncio.Runner() as runner, pytest.raises(GeneratorError, match="generator.start_timeout_s=1.0"):
        runner.run(Engine.start(models.a, config))
