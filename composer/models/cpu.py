"""What a CPU process answers where torchtitan expects an accelerator, and masks that need no compiled kernel.

Only torch is used here; `titan.py` puts these in torchtitan's places.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


class CpuDevice:
    """What torchtitan calls on `torch.cuda`, answered for a CPU process."""

    def __getattr__(self, name: str) -> Any:
        """Whatever torch.cpu has."""
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        """One."""
        return 1

    def current_device(self) -> int:
        """The first."""
        return 0

    def set_device(self, device: object) -> None:
        """Nothing to set."""

    def empty_cache(self) -> None:
        """Nothing to empty."""

    def reset_peak_memory_stats(self, *args: object) -> None:
        """The system keeps the peak of the whole process."""

    def get_device_name(self, *args: object) -> str:
        """Always cpu."""
        return "cpu"

    def get_device_properties(self, *args: object) -> SimpleNamespace:
        """Its memory."""
        return SimpleNamespace(name="cpu", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, *args: object) -> dict[str, int]:
        """The peak memory of this process, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}


def context_parallel_mask(
    mask_mod: Callable,
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: Any,  # noqa: N803
    load_balancer: Any = None,
) -> BlockMask:
    """The mask of a rank's part of the sequence; torch's own function also demands length % (128 x ranks) == 0.

    The demand comes from the padding of the compiled kernel, which CPU does not use.
    """
    rank, size = device_mesh.get_local_rank(), device_mesh.size()
    shard = Q_LEN // size
    order = load_balancer._generate_indices(restore=False) if load_balancer else None

    def original(b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if order is None:
            return index
        return order[0][index] if order.size(0) == 1 else order[b][index]

    def local_mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return mask_mod(b, h, original(b, q + rank * shard), original(b, kv))

    return create_block_mask(local_mask, B, H, shard, KV_LEN, device=device_mesh.device_type)


def document_mask(positions: torch.Tensor) -> torch.Tensor | None:
    """The attention mask of packed documents: causal, and only within a document.

    Args:
        positions: int64 [B, L]; a document starts where they are 0.

    Returns:
        None when every row is one document (plain causal attention is then enough), else float32 [B, 1, L, L] with 0
        where a query (third axis) may see a key (fourth axis) and -inf elsewhere.
    """
    starts = positions == 0
    if not bool(starts[:, 1:].any()):
        return None
    document = starts.cumsum(1)
    length = positions.shape[1]
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None]
