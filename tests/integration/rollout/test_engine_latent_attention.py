"""DeepSeek's attention in vLLM on CPU: right positions, and weights that can be replaced."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from composer.rollout.engine import Engine
from composer.schema import GeneratorConfig, WeightSyncConfig
from composer.types import Probe
from composer.weight_sync.publish import publish
from composer.weight_sync.store import VersionStore

sys.path.insert(0, str(Path(__file__).parent))

from small_models import deepseek_v3, difference, log_probs, weights  # noqa: E402


def test_latent_attention_is_transformers_before_and_after_a_swap(tmp_path: Path) -> None:
    a, b = deepseek_v3(tmp_path / "a", seed=0), deepseek_v3(tmp_path / "b", seed=1)
    context = [(7 * i * i + 3 * i) % 512 for i in range(100)]
    store = VersionStore.create(tmp_path / "store")

    async def swap() -> tuple[list[float], list[float]]:
        engine = await Engine.start(a, GeneratorConfig(kv_cache_bytes=32 * 2**20))
        try:
            before = await engine._score(context)
            probe = Probe(context[:20], log_probs(b, context[:20]))
            report = publish(store, 1, weights(b).items(), probe)
            await engine.load_weights(report.directory, 1, probe, WeightSyncConfig(verify_tolerance=1e-4))
            generation = await engine.generate(context, max_tokens=20)
            sampled = log_probs(b, context + generation.token_ids)
            assert difference(generation.log_probs, sampled[len(context) - 1 :]) < 1e-4
            return before, await engine._score(context)
        finally:
            await engine.stop()

    before, after = asyncio.run(swap())
    assert difference(before, log_probs(a, context)) < 1e-4
    assert difference(after, log_probs(b, context)) < 1e-4
