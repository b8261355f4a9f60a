"""From logits to log-probabilities of the labels and to entropies. Pure torch.

    z = logits / temperature    p = softmax(z)
    log p_y                     d log p_y / d z_j = [j = y] - p_j
    H = -sum_j p_j log p_j      d H / d z_j = -p_j (log p_j + H)

Logits of a vocabulary of 160,000 tokens are the largest tensors of a step. Of them only the log-softmax is kept for
the backward pass; all else is made for a block of rows at a time. Shapes: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from composer.types import NO_LABEL

_BLOCK = 2**25
"""Numbers of a block of rows: 128 MiB in float32."""


def label_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Natural log-probabilities of labels, without gradient.

    Args:
        logits: [B, L, V], of any floating format; a `DTensor` may be cut over the vocabulary.
        labels: int64 [B, L]; `NO_LABEL` where there is none.
        temperature: the logits are divided by it first.

    Returns:
        float32 [B, L]; 0 where there is no label.
    """
    with torch.no_grad():
        rows, ids, known = _flatten(logits, labels)
        found = torch.empty(ids.shape, dtype=torch.float32, device=rows.device)
        for part in _blocks(rows):
            log_p = torch.log_softmax(_tempered(rows[part], temperature), -1)
            found[part] = log_p.gather(1, ids[part, None])[:, 0]
        return torch.where(known, found, 0.0).view(labels.shape)


def log_probs_and_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, entropy_has_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels, with gradient, and the entropy at each position.

    Args:
        logits: [B, L, V], as for `label_log_probs`.
        labels: int64 [B, L]; `NO_LABEL` where there is none.
        temperature: the logits are divided by it first.
        entropy_has_gradient: else the entropy is a number to look at and costs no backward pass.

    Returns:
        Natural log-probabilities, float32 [B, L], 0 and without gradient where there is no label; entropies of the
        whole distribution in nats, float32 [B, L].
    """
    rows, ids, known = _flatten(logits, labels)
    log_probs, entropy = _Statistics.apply(rows, ids, known, temperature, entropy_has_gradient)
    return log_probs.view(labels.shape), entropy.view(labels.shape)


class _Statistics(torch.autograd.Function):
    """Log-probabilities [R] of labels [R] and entropies [R] from logits [R, V]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, known: Tensor, temperature: float, entropy_has_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        log_p = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        entropy = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        for part in _blocks(logits):
            torch.log_softmax(_tempered(logits[part], temperature), -1, out=log_p[part])
            entropy[part] = -torch.linalg.vecdot(log_p[part].exp(), log_p[part])
        ctx.save_for_backward(log_p, ids, known, entropy)
        ctx.dtype, ctx.temperature, ctx.entropy_has_gradient = logits.dtype, temperature, entropy_has_gradient
        ctx.set_materialize_grads(False)
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return torch.where(known, log_p.gather(1, ids[:, None])[:, 0], 0.0), entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, log_prob_gradient: Tensor | None, entropy_gradient: Tensor | None
    ) -> tuple:
        log_p, ids, known, entropy = ctx.saved_tensors
        direct = torch.zeros_like(entropy) if log_prob_gradient is None else torch.where(known, log_prob_gradient, 0.0)
        out = torch.empty(log_p.shape, dtype=ctx.dtype, device=log_p.device)
        for part in _blocks(log_p):
            p, to_label = log_p[part].exp(), direct[part, None]
            if ctx.entropy_has_gradient and entropy_gradient is not None:
                weight = (log_p[part] + entropy[part, None]).mul_(entropy_gradient[part, None]).add_(to_label)
                gradient = p.mul_(weight).neg_()
            else:
                gradient = p.mul_(-to_label)
            gradient.scatter_add_(1, ids[part, None], to_label)
            out[part] = gradient if ctx.temperature == 1 else gradient.div_(ctx.temperature)
        return out, None, None, None, None


def _flatten(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B L, V], labels [B L] with 0 where there is none, and where there is one."""
    if isinstance(logits, DTensor):  # tensor parallelism cuts the vocabulary
        last = logits.ndim - 1
        whole = [Replicate() if isinstance(p, Shard) and p.dim in (-1, last) else p for p in logits.placements]
        logits = logits.redistribute(placements=whole).to_local()
    ids, known = labels.flatten(), labels.flatten() != NO_LABEL
    return logits.flatten(0, 1), torch.where(known, ids, 0), known


def _blocks(rows: Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK // rows.shape[1])
    return (slice(start, start + size) for start in range(0, rows.shape[0], size))


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()  # before the division, as vLLM does
    return logits if temperature == 1 else logits / temperature
