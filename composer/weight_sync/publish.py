"""Trainer side: write a version of the weights, complete or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from composer.errors import WeightSyncError
from composer.models.base import BALANCING_BIAS
from composer.schema import Dtype
from composer.types import Probe
from composer.weight_sync.store import FileInfo, Manifest, TensorInfo, VersionStore, checksum, manifest_json

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 4 * 2**30
"""A file holds at most this, so that no more than this is held in memory beside the model."""


@dataclass(frozen=True)
class PublishReport:
    """What one publish wrote."""

    version: int
    directory: Path
    bytes: int
    seconds: float


def publish(
    store: VersionStore,
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    probe: Probe,
    dtype: Dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> PublishReport:
    """Write a version and make it visible at once; then remove superseded ones.

    Args:
        store: where.
        version: the policy version, newer than all published ones.
        tensors: the whole model under Hugging Face names, each tensor in full, on any device. They are copied one file
            at a time, so they must stay unchanged until this returns.
        probe: a sequence and the trainer's log-probabilities of it *under these weights*.
        dtype: what the generators compute in. They would round to it anyway, to the nearest and ties to even as here,
            so that nothing but the bytes changes; balancing biases stay as they are. None: everything does.
        max_shard_bytes: size of a file.

    Raises:
        WeightSyncError: the version is not newer, the device is full, or a tensor is not finite or given twice.
    """
    import torch
    from safetensors.torch import save_file

    start = time.monotonic()
    latest = store.latest()
    if latest is not None and version <= latest:
        raise WeightSyncError(f"version={version!r}: version {latest} is published already; versions must grow")
    temporary = store.directory / f".publishing-{version}-{os.getpid()}"
    infos: dict[str, TensorInfo] = {}
    files: dict[str, FileInfo] = {}
    shard: dict[str, torch.Tensor] = {}
    shard_bytes = 0

    def write() -> None:
        nonlocal shard, shard_bytes
        name = f"weights-{len(files):05d}.safetensors"
        path = temporary / name
        save_file(shard, path)
        infos.update(
            {n: TensorInfo(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in shard.items()}
        )
        files[name] = FileInfo(path.stat().st_size, checksum(path))
        _sync(path)
        shard, shard_bytes = {}, 0

    try:
        temporary.mkdir()
        for name, tensor in tensors:
            if name in shard or name in infos:
                raise WeightSyncError(
                    f"tensor={name!r}: it was given twice for version {version}; the export must name each once"
                )
            tensor = tensor.detach()
            if dtype is not None and not name.endswith(BALANCING_BIAS):
                tensor = tensor.to(getattr(torch, dtype.value))  # where it is: half as much leaves the GPU
            if not bool(tensor.isfinite().all()):
                raise WeightSyncError(
                    f"tensor={name!r}: version {version} of it is not finite; training has diverged, lower the "
                    "learning rate and resume from the last checkpoint"
                )
            size = tensor.numel() * tensor.element_size()
            if shard and shard_bytes + size > max_shard_bytes:
                write()
            # A copy: safetensors refuses tensors that share memory, as the experts of one stacked parameter do.
            shard[name] = tensor.to("cpu", copy=True).contiguous()
            shard_bytes += size
        if shard:
            write()
        manifest = temporary / "manifest.json"
        manifest.write_text(manifest_json(Manifest(version, infos, files, probe)))
        _sync(manifest)
        _sync(temporary)
        temporary.rename(store.path(version))
        _sync(store.directory)
    except BaseException as e:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, WeightSyncError) or not isinstance(e, Exception):
            raise
        remedy = (
            "it is full; free space there, lower weight_sync.keep_versions, or choose another weight_sync.directory"
            if getattr(e, "errno", None) == errno.ENOSPC or "No space" in str(e)
            else f"version {version} could not be written ({e}); check that the directory exists and is writable"
        )
        raise WeightSyncError(f"weight_sync.directory={str(store.directory)!r}: {remedy}") from e
    store.prune()
    return PublishReport(version, store.path(version), sum(f.bytes for f in files.values()), time.monotonic() - start)


def _sync(path: Path) -> None:
    """Reach the disk before the rename does: a crash or another machine must not see a version with empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
