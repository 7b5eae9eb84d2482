"""Exact nearest neighbours in a small pool, and the choice among them by labels (CAR-MFL's retrieval, spec 8.2)."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 1024
"""Queries that are compared with the whole pool at a time: 1,024 x 3,000 distances are 12 MB."""


def nearest(queries: Tensor, pool: Tensor, k: int, tile: int = TILE) -> Tensor:
    """Rows of the pool [P, d] nearest to each query [N, d] by squared Euclidean distance, nearest first: [N, k] int64.

    Equal distances are ordered by row. ||q - p||^2 ranks the pool as ||p||^2 - 2 q.p does: one matrix product.
    """
    if queries.ndim != 2 or pool.ndim != 2 or queries.shape[1] != pool.shape[1]:
        raise ValueError(f"nearest: queries {list(queries.shape)}, pool {list(pool.shape)}; expected [N, d] and [P, d]")
    if not 1 <= k <= len(pool):
        raise ValueError(f"nearest: k is {k}, expected 1 to {len(pool)}, the size of the pool")
    squared = pool.square().sum(dim=1)  # [P]
    best = [_smallest(torch.addmm(squared, rows, pool.T, alpha=-2), k) for rows in queries.split(tile)]
    return torch.cat(best) if best else torch.empty(0, k, dtype=torch.int64)


def _smallest(scores: Tensor, k: int) -> Tensor:
    """Columns of the k smallest scores of each row [n, P], in order; equals by column: [n, k]."""
    values, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1, largest=False)  # equals in no defined order
    best = columns[:, :k].sort(dim=1).values
    best = best.gather(1, scores.gather(1, best).sort(dim=1, stable=True).indices)
    if values.shape[1] > k:
        open_ = values[:, k - 1] == values[:, k]  # which of the equals topk took is not defined either
        if open_.any():
            best[open_] = scores[open_].sort(dim=1, stable=True).indices[:, :k]
    return best


def most_alike(labels: Tensor, pool_labels: Tensor, candidates: Tensor) -> Tensor:
    """The candidate [N, k] whose label set is most similar by Jaccard similarity, the first among equals: [N] int64.

    ``labels`` [N, L] and ``pool_labels`` [P, L] are True at the findings present; two empty sets are alike (1).
    """
    mine, theirs = labels[:, None, :], pool_labels[candidates]  # [N, 1, L], [N, k, L]
    union = (mine | theirs).sum(dim=2)
    similarity = torch.where(union == 0, 1.0, (mine & theirs).sum(dim=2) / union.clamp(min=1))  # [N, k]
    return candidates.gather(1, similarity.argmax(dim=1, keepdim=True))[:, 0]
