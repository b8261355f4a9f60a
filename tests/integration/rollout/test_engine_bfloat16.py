"""A generator in bfloat16: versions that travel in its own format are those that it would have rounded itself."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from composer.rollout.engine import Engine
from composer.schema import Dtype, GeneratorConfig, WeightSyncConfig
from composer.types import Probe
from composer.weight_sync.publish import publish
from composer.weight_sync.store import VersionStore

sys.path.insert(0, str(Path(__file__).parent))

from small_models import deepseek_v3, log_probs, mixed, weights  # noqa: E402

PROBE_IDS = [(7 * i * i + 3 * i) % 512 for i in range(64)]
SYNC = WeightSyncConfig(verify_tolerance=10.0)  # random weights in bfloat16 are far from float32: routers flip


def test_versions_in_bfloat16_load_like_those_in_float32(tmp_path: Path) -> None:
    a, plain = deepseek_v3(tmp_path / "a", seed=0), deepseek_v3(tmp_path / "plain", seed=1)
    gate = "model.layers.1.mlp.gate."
    # All experts have one score, so that the bias alone decides between them; in bfloat16 it would be 0.2 for all.
    scores = weights(plain)[gate + "weight"][:1].repeat(8, 1)
    bias = 0.2 + 1e-4 * torch.arange(8)
    b = mixed(tmp_path / "b", plain, {gate + "weight": scores, gate + "e_score_correction_bias": bias})
    store = VersionStore.create(tmp_path / "store")
    sizes: list[int] = []

    async def load_in_turn() -> list[list[float]]:
        engine = await Engine.start(a, GeneratorConfig(dtype=Dtype.bfloat16, kv_cache_bytes=32 * 2**20))
        try:
            scores = []
            for version, (model, dtype) in enumerate([(b, None), (a, None), (b, Dtype.bfloat16), (a, Dtype.bfloat16)]):
                probe = Probe(PROBE_IDS, log_probs(model, PROBE_IDS))
                report = publish(store, version + 1, weights(model).items(), probe, dtype)
                sizes.append(report.bytes)
                await engine.load_weights(report.directory, version + 1, probe, SYNC)
                scores.append(await engine._score(PROBE_IDS))
            return scores
        finally:
            await engine.stop()

    b_float32, a_float32, b_bfloat16, a_bfloat16 = asyncio.run(load_in_turn())
    assert b_bfloat16 == b_float32 and a_bfloat16 == a_float32
    assert max(abs(x - y) for x, y in zip(b_float32, a_float32, strict=True)) > 0.1, "the two differ"
    assert sizes[2] < 0.55 * sizes[0]
