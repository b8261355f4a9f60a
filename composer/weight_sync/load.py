"""Generator side: the controller's `load`, and `WeightLoader`, which vLLM mixes into its workers.

A worker that cannot load answers with a sentence instead of raising: vLLM carries only the text of errors between its
processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from composer.errors import WeightSyncError
from composer.rollout import vllm_internals
from composer.schema import WeightSyncConfig
from composer.types import LoadReport
from composer.weight_sync.store import Manifest, VersionStore, checksum, read_manifest

if TYPE_CHECKING:
    import torch

    from composer.rollout.generator import GeneratorPool

# Here, since vLLM imports this module in each worker before it loads a model.
vllm_internals.watch_owner()
vllm_internals.use_thread_locks()


async def load(
    pool: GeneratorPool, store: VersionStore, sync: WeightSyncConfig, version: int | None = None
) -> list[LoadReport]:
    """Load a version, by default the newest, into all replicas and verify it there.

    Raises:
        WeightSyncError: there is no such version, or a replica could not load it.
    """
    manifest = store.manifest(version)
    return await pool.load_weights(str(store.path(manifest.version)), manifest.version, manifest.probe, sync)


class WeightLoader:
    """What vLLM's worker can do for us. Methods run in the worker's process, between two steps of the model."""

    def composer_prepare(self) -> str:
        """Repair the worker; called before the first request."""
        vllm_internals.prepare_worker()
        return ""

    def composer_stage(self, directory: str, version: int) -> str:
        """Map the files of a version and check everything about them. Touches no weight.

        Returns:
            "" or what is wrong, in a sentence.
        """
        try:
            manifest = read_manifest(Path(directory))
            if manifest.version != version:
                raise WeightSyncError(f"directory={directory!r}: it holds version {manifest.version}, not {version}")
            check_names(manifest, vllm_internals.checkpoint_directory(self))
            self.composer_staged = [_open(Path(directory), name, manifest) for name in manifest.files]
        except WeightSyncError as e:
            return str(e)
        return ""

    def composer_swap(self) -> str:
        """Load the staged version in place of the old weights."""
        staged, self.composer_staged = self.composer_staged, []
        try:
            vllm_internals.replace_weights(self, _tensors(staged))
        except Exception as e:
            return f"the model did not take the weights ({type(e).__name__}: {e})"
        return ""


def check_names(manifest: Manifest, checkpoint: Path) -> None:
    """Check that a version has the tensors of the checkpoint that the engine started from, no more and no fewer.

    vLLM itself keeps the old values of a missing tensor and only logs it.

    Raises:
        WeightSyncError: names or shapes differ.
    """
    expected = checkpoint_shapes(checkpoint)
    published = {name: info.shape for name, info in manifest.tensors.items()}
    # With tied embeddings a checkpoint may hold the output layer or not; vLLM takes the embedding for both.
    if json.loads((checkpoint / "config.json").read_text()).get("tie_word_embeddings"):
        expected.pop("lm_head.weight", None)
        published.pop("lm_head.weight", None)
    wrong = sorted(n for n in expected.keys() | published.keys() if expected.get(n) != published.get(n))
    if wrong:
        name = wrong[0]
        raise WeightSyncError(
            f"tensor={name!r}: shape {published.get(name, 'missing')} in version {manifest.version}, "
            f"{expected.get(name, 'missing')} in {str(checkpoint)!r}, and {len(wrong) - 1} more like it; "
            "publish the weights of the model that the generator was started on, under the same names"
        )


def checkpoint_shapes(checkpoint: Path) -> dict[str, list[int]]:
    """Name -> shape of the tensors of a Hugging Face checkpoint."""
    from safetensors import safe_open

    shapes = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
    return shapes


def _open(directory: Path, name: str, manifest: Manifest) -> object:
    """Map a file of a version and verify its content. It stays readable when the version is removed."""
    from safetensors import SafetensorError, safe_open

    path, info = directory / name, manifest.files[name]
    try:
        file = safe_open(path, framework="pt")
        size, actual = path.stat().st_size, checksum(path)
    except (OSError, SafetensorError) as e:
        raise WeightSyncError(
            f"file={str(path)!r}: version {manifest.version} cannot be read ({e}); load the newest version"
        ) from e
    if size != info.bytes or actual != info.blake2b:
        raise WeightSyncError(
            f"file={str(path)!r}: it has {size} bytes with checksum {actual[:12]}, the manifest says {info.bytes} "
            f"with {info.blake2b[:12]}; it was damaged after version {manifest.version} was published, publish again"
        )
    return file


def _tensors(files: list) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            yield name, file.get_tensor(name)
