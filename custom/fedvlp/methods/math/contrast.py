"""Representations of the public set: how they are made, contrasted, scored and combined, never as a [P, P] matrix.

P is the number of public pairs in the training split, d the common dimension. Source: CreamFL (Yu et al., 2023,
https://arxiv.org/abs/2302.08888), by equation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedvlp.core.client import Client
from fedvlp.core.types import MODALITIES, Batch, State

TILE = 1024
"""Rows and columns of the piece of a [P, P] matrix that is in memory at a time: 4 MB, which a cache holds."""

LARGEST = 1e30
"""Log-weights are clamped to plus or minus this, so that rows with weight 0 everywhere have equal weights."""


def opposite(modality: str) -> str:
    """The other one of image and text."""
    return "text" if modality == "image" else "image"


def only(batch: Batch, modalities: Iterable[str]) -> Batch:
    """The batch without the inputs of other modalities."""
    left_out = tuple(set(MODALITIES) - set(modalities))
    return {name: tensor for name, tensor in batch.items() if not name.startswith(left_out)}


@torch.no_grad()
def representations(client: Client, modalities: Iterable[str], batch_size: int = 128) -> State:
    """{modality: [P, d]} of the public training split in its order: eval mode, no augmentation."""
    assert client.public is not None
    client.model.eval()
    batches = client.public.batches("train", batch_size, drop_last=False)
    outputs = [client.model(only(batch, modalities)) for batch in batches]
    vectors = {}
    for name in modalities:
        vectors[name] = torch.cat([getattr(output, name) for output in outputs])
    return vectors


def inter_contrast(own: Tensor, others: Tensor, rows: Tensor, temperature: float, tile: int = TILE) -> Tensor:
    """[B] -log softmax_j(own . others_j / temperature)[rows]: ``own`` [B, d] against all of ``others`` [P, d] (LCR).

    Beyond one tile the scores are computed again in the backward pass instead of being kept. Computed in at least
    float32, also under autocast.
    """
    with torch.autocast(own.device.type, enabled=False):
        own, others = _wide(own), _wide(others)
        pieces = others.split(tile)
        if len(pieces) == 1:
            total = _log_sum_exp(own, others, temperature)
        else:
            tiles = [
                checkpoint(_log_sum_exp, own, piece, temperature, use_reentrant=False, preserve_rng_state=False)
                for piece in pieces
            ]
            total = torch.stack(tiles).logsumexp(dim=0)
        return total - (own * others[rows]).sum(dim=1) / temperature


def _wide(values: Tensor) -> Tensor:
    """The same in float32, if they have fewer bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def sampled_contrast(
    own: Tensor, others: Tensor, rows: Tensor, sample: Tensor, temperature: float, tile: int = TILE
) -> Tensor:
    """[B] ``inter_contrast`` of ``own`` [B, d] with items k = ``rows`` [B], its sum over ``others`` [P, d] estimated.

    The estimate is exp(a_k) + (P - 1) / m sum_{j in D} exp(a_j), with a_j = own . others_j / temperature and D those m
    of ``sample`` [n], distinct items, that are not k: the positive is exact, and where the sample is drawn uniformly
    D is too, so the estimate is unbiased. Its logarithm is not: by Jensen's inequality it is too small, for large n
    by (1 - m / (P - 1)) v^2 / 2m, v the deviation of exp(a_j) over j in units of its mean. All items as the sample
    give the whole sum. Computed in at least float32, also under autocast.
    """
    with torch.autocast(own.device.type, enabled=False):
        own, others = _wide(own), _wide(others)
        negatives = _log_negatives(own, others, rows, sample, temperature, tile)
        return F.softplus(negatives - (own * others[rows]).sum(dim=1) / temperature)


def _log_negatives(own: Tensor, others: Tensor, rows: Tensor, sample: Tensor, temperature: float, tile: int) -> Tensor:
    """[B] log of the estimated sum over all items but each row's own."""
    pieces = sample.split(tile)
    if len(pieces) == 1:
        total = _log_sum_exp_of(own, others, rows, sample, temperature)
    else:
        tiles = [
            checkpoint(
                _log_sum_exp_of, own, others, rows, piece, temperature, use_reentrant=False, preserve_rng_state=False
            )
            for piece in pieces
        ]
        total = torch.stack(tiles).logsumexp(dim=0)
    counted = (sample != rows[:, None]).sum(dim=1).clamp(min=1).to(total.dtype)  # m [B]
    return total + ((len(others) - 1) / counted).log()


def _log_sum_exp(own: Tensor, others: Tensor, temperature: float) -> Tensor:
    return (own @ others.T / temperature).logsumexp(dim=1)  # [B]


def _log_sum_exp_of(own: Tensor, others: Tensor, rows: Tensor, sample: Tensor, temperature: float) -> Tensor:
    """[B] over the items of ``sample`` but each row's own; -inf where that is none."""
    scores = own @ others[sample].T / temperature  # [B, n]
    return scores.masked_fill(sample == rows[:, None], -torch.inf).logsumexp(dim=1)


def intra_contrast(own: Tensor, same: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """[B] -log of the share of ``same`` against ``previous``, all [B, d] (LCR); equal to log 2 where they agree."""
    return F.softplus((own * (previous - same)).sum(dim=1) / temperature)


@torch.no_grad()
def contrast_scores(
    own: Tensor, paired: Tensor, temperature: float = 1.0, exclude_positive: bool = True, tile: int = TILE
) -> Tensor:
    """[P] log(exp(own_k . paired_k / T) / sum_{j != k} exp(own_k . paired_j / T)), both [P, d] (Eq. 4).

    ``exclude_positive=False`` sums over all j, as the released code does. A single pair has score 0.
    """
    if len(own) == 1:
        return own.new_zeros(1)
    # log sum_j exp(own_k . paired_j / T), tile by tile: all P x P scores would not fit into memory.
    total = own.new_full((len(own),), -torch.inf)
    for row in range(0, len(own), tile):
        rows = slice(row, row + tile)
        for column in range(0, len(own), tile):
            scores = own[rows] @ paired[column : column + tile].T / temperature  # [R, C]
            if exclude_positive and row == column:
                scores.fill_diagonal_(-torch.inf)
            total[rows] = torch.logaddexp(total[rows], scores.logsumexp(dim=1))
    return (own * paired).sum(dim=1) / temperature - total


@torch.no_grad()
def sampled_scores(
    own: Tensor,
    paired: Tensor,
    sample: Tensor,
    temperature: float = 1.0,
    exclude_positive: bool = True,
    tile: int = TILE,
) -> Tensor:
    """[P] ``contrast_scores``, their sum over j != k estimated from ``sample`` [n] as in ``sampled_contrast``."""
    scores = []
    for rows in torch.arange(len(own), device=own.device).split(tile):
        positive = (own[rows] * paired[rows]).sum(dim=1) / temperature
        margin = positive - _log_negatives(own[rows], paired, rows, sample, temperature, tile)
        scores.append(margin if exclude_positive else F.logsigmoid(margin))
    return torch.cat(scores)


@torch.no_grad()
def best_is_own(own: Tensor, paired: Tensor, tile: int = TILE) -> Tensor:
    """[P] bool: whether ``own_k`` scores higher with ``paired_k`` than with any other of ``paired`` [P, d]."""
    best = own.new_full((len(own),), -torch.inf)  # of the others
    for row in range(0, len(own), tile):
        rows = slice(row, row + tile)
        for column in range(0, len(own), tile):
            scores = own[rows] @ paired[column : column + tile].T  # [R, C]
            if row == column:
                scores.fill_diagonal_(-torch.inf)
            best[rows] = torch.maximum(best[rows], scores.amax(dim=1))
    return (own * paired).sum(dim=1) > best


class Ensemble:
    """The weighted mean of representations [P, d] of several suppliers, row by row, folded one supplier at a time.

    Row k is sum_c softmax_c(log_weights_kc) r_kc (Eq. 5, 6); it is not normalised again.
    """

    def __init__(self) -> None:
        self.suppliers = 0
        self._sum, self._total, self._top = torch.empty(0), torch.empty(0), torch.empty(0)

    @torch.no_grad()
    def add(self, representations: Tensor, log_weights: Tensor) -> None:
        """Adds one supplier's [P, d] with its log-weights [P]; only their differences to the others' count."""
        weights = log_weights.clamp(-LARGEST, LARGEST)
        if not self.suppliers:
            self._sum, self._total, self._top = representations.clone(), torch.ones_like(weights), weights
        else:
            # A softmax whose terms come one after the other: what is summed so far is scaled to the new largest weight.
            top = torch.maximum(self._top, weights)
            old, new = (self._top - top).exp(), (weights - top).exp()
            self._sum.mul_(old[:, None]).addcmul_(representations, new[:, None])
            self._total, self._top = self._total * old + new, top
        self.suppliers += 1

    def mean(self) -> Tensor:
        """[P, d]; there must be a supplier."""
        return self._sum / self._total[:, None]
