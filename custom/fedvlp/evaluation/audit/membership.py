"""Membership inference: can an attacker tell the records that a model was trained on from others that are like them?

Scores are those of attacks on contrastive image-text models: the cosine of a record's image and text (Ko et al., 2023,
https://arxiv.org/abs/2310.00108), its contrastive loss among pairs that nobody trained on, and how far training moved
the score of this very record (Watson et al., 2022, https://arxiv.org/abs/2111.08440). Published attacks often compare
members with records of another source and measure the source; here every other record counts against members of its
own stratum (:func:`matching_weights`) alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.types import Batch
from fedvlp.evaluation.audit.gradients import Directions, directions
from fedvlp.evaluation.intervals import Figure, Interval, area_of, bootstrap
from fedvlp.evaluation.retrieval import embed

TEMPERATURE = 0.07
"""Of the loss by which a pair is scored (CLIP's)."""

RATES = (0.01, 0.1)
"""False positive rates at which the true positive rate is reported."""

LOSS, COSINE = "loss", "cosine"


@dataclass(frozen=True)
class Membership:
    """How well one attack tells members from others. Percent; 50 is chance for the AUC."""

    model: str  # whose scores
    attack: str
    site: str  # "" for all sites together
    members: int  # records that count
    others: int
    area: Interval
    rates: tuple[Interval, ...]  # true positive rate at each of ``RATES``


def pair_scores(image: Tensor, text: Tensor, others: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Scores [N] by attack of pairs image [N, d] and text [N, d], unit vectors: higher is more like a member.

    ``others``: images and texts [R, d] of pairs that nobody trained on; a pair's loss is among them and itself.
    """
    image, text = image.double(), text.double()
    own = (image * text).sum(dim=1, keepdim=True)  # [N, 1]
    first = torch.zeros(len(own), dtype=torch.int64)  # the own pair is column 0
    loss = torch.zeros(len(own), dtype=torch.float64)
    for half, candidates in ((image, others[1]), (text, others[0])):
        scores = torch.cat([own, half @ candidates.double().T], dim=1) / TEMPERATURE  # [N, 1 + R]
        loss += F.cross_entropy(scores, first, reduction="none") / 2
    return {LOSS: -loss, COSINE: own.squeeze(1)}


def label_scores(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The score [N] of a classifier: minus its mean cross-entropy over the labels [N, L] that are 1 or 0."""
    known = (labels == 0) | (labels == 1)
    each = F.binary_cross_entropy_with_logits(
        logits.double(), torch.where(known, labels, 0.0).double(), reduction="none"
    )
    return {LOSS: -(each * known).sum(dim=1) / known.sum(dim=1).clamp(min=1)}


def matching_weights(strata: Sequence[Hashable], member: Tensor) -> Tensor:
    """Weights [N] with which members are distributed over the strata as the others are; ``member`` [N] bool.

    Records of a stratum without a member, or with members alone, weigh nothing: there is nobody to compare them with.
    """
    index = {name: number for number, name in enumerate(dict.fromkeys(strata))}
    of = torch.tensor([index[name] for name in strata])  # [N]
    count = torch.stack([torch.bincount(of[member == side], minlength=len(index)) for side in (False, True)]).double()
    others, members = count[:, of]  # [N] each: of the record's own stratum
    both = (others > 0) & (members > 0)
    weight = torch.where(member, others / members.clamp(min=1), 1.0)
    return torch.where(both, weight, 0.0)


def standardised(scores: Tensor, member: Tensor, weight: Tensor, sites: Sequence[str]) -> Tensor:
    """Scores [N] minus the mean of their site, over its SD: a site's scale is no evidence of membership.

    Members and others weigh the same in both, so neither side is the measure.
    """
    out = torch.zeros_like(scores)
    for site in dict.fromkeys(sites):
        here = torch.tensor([name == site for name in sites])
        sides = [here & (member == side) & (weight > 0) for side in (True, False)]
        if not all(bool(side.any()) for side in sides):
            continue
        share = sum(torch.where(side, weight, 0.0) / weight[side].sum() for side in sides) / 2  # [N]
        mean = (share * scores).sum()
        deviation = (share * (scores - mean).square()).sum().sqrt()
        out[here] = (scores[here] - mean) / deviation.clamp(min=1e-12)
    return out


def rate_at(scores: Tensor, truth: Tensor, false_positives: float) -> Figure:
    """The true positive rate at the lowest threshold that flags at most this share of the others; 0..1.

    ``scores`` [N], ``truth`` [N] bool. Records with equal scores are flagged together.
    """
    _, distinct = (-scores.double()).unique(return_inverse=True)  # [N], 0 is the highest score

    def figure(times: Tensor) -> Tensor:
        zeros = torch.zeros(len(times), int(distinct.max()) + 1, dtype=torch.float64)
        members, others = (zeros.index_add(1, distinct, times * side.double()) for side in (truth, ~truth))
        flagged = others.cumsum(1) / others.sum(1, keepdim=True)  # [B, D]
        allowed = flagged <= false_positives + 1e-12
        hits = members.cumsum(1) / members.sum(1, keepdim=True)
        return torch.where(allowed, hits, 0.0).amax(dim=1)

    return figure


def membership(
    model: str,
    attack: str,
    site: str,
    scores: Tensor,
    member: Tensor,
    weight: Tensor,
    patients: Sequence[Hashable],
    resamples: int = 1000,
) -> Membership:
    """The figures of one attack, in percent, with intervals over resamples of the patients.

    ``scores``, ``member`` (bool) and ``weight`` (:func:`matching_weights`) are [N]. Raises ValueError where no record
    is left to compare.
    """
    counted = weight > 0
    if not bool(counted.any()):
        raise ValueError("membership: no stratum holds members and others, so nothing can be compared")
    scores, member, weight = scores[counted], member[counted], weight[counted]
    whose = [patient for patient, one in zip(patients, counted.tolist(), strict=True) if one]
    figures = [area_of(scores, member.double()), *(rate_at(scores, member, rate) for rate in RATES)]
    area, *rates = (bootstrap(_percent(figure, weight), whose, resamples) for figure in figures)
    return Membership(model, attack, site, int(member.sum()), int((~member).sum()), area, tuple(rates))


def _percent(figure: Figure, weight: Tensor) -> Figure:
    """The figure in percent, each record weighing ``weight`` [N] too."""
    return lambda times: 100 * figure(times * weight)


def largest_rate(false_positives: float, epsilon: float, delta: float) -> float:
    """The largest true positive rate, 0..1, that (epsilon, delta)-differential privacy leaves to any attack.

    Kairouz et al., 2015, https://arxiv.org/abs/1311.0776: TPR <= e^eps FPR + delta, and the same with the roles of both
    errors changed.
    """
    factor = math.exp(min(epsilon, 700.0))
    return min(1.0, factor * false_positives + delta, 1 - (1 - delta - false_positives) / factor)


def largest_area(epsilon: float, delta: float) -> float:
    """The area, 0..1, under the curve of :func:`largest_rate`, which has its corners at these points."""
    turn = (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
    corners = [(0.0, delta), (turn, 1 - turn), (1 - delta, 1.0), (1.0, 1.0)]
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(corners))


# The scores of records that somebody computes who has a model and the records: the start of every attack on them.

MEMBERS, OTHERS, POOL = "members", "others", "reference"
"""Records that were trained on, that were not, and pairs among which a pair's loss is counted."""

Batches = Mapping[str, Sequence[Batch]]
"""Batches of each of ``MEMBERS``, ``OTHERS`` and ``POOL``."""


@torch.no_grad()
def record_scores(model: Any, batches: Batches) -> dict[str, Tensor]:
    """Scores [members + others] by attack, of an image-text model or a classifier; sets eval mode."""
    model.eval()
    asked = [*batches[MEMBERS], *batches[OTHERS]]
    if classifies(model, asked):
        logits = torch.cat([model(batch).logits.cpu() for batch in asked])
        return label_scores(logits, torch.cat([batch["labels"].cpu() for batch in asked]))
    image, text = embed(model, iter(asked))
    return pair_scores(image, text, embed(model, iter(batches[POOL])))


def record_directions(model: Any, batches: Batches, change: Mapping[str, Tensor]) -> Directions:
    """The gradients of the same records' losses (gradients.py), beside ``change``, the change of the model's tensors.

    The parameters that do not require a gradient are left out; sets eval mode.
    """
    model.eval()
    asked = [*batches[MEMBERS], *batches[OTHERS]]
    with torch.no_grad():
        pool = None if classifies(model, asked) else embed(model, iter(batches[POOL]))

    def loss(batch: Batch) -> Tensor:
        output = model(batch)
        if pool is None:
            return -label_scores(output.logits.cpu(), batch["labels"].cpu())[LOSS]
        return -pair_scores(output.image.cpu(), output.text.cpu(), pool)[LOSS]

    return directions(model, asked, loss, change)


@torch.no_grad()
def classifies(model: Any, batches: Sequence[Batch]) -> bool:
    """Whether the model's scores are of findings, and not of pairs."""
    return model(batches[0]).logits is not None


# Membership by what sites show of public records, where no weights travel (CreamFL and its relatives).
#
# The attacker has a model of its own and, of every public record, what the site's model makes of it. From its own
# representations it guesses the site's by a linear map (ridge regression on the public records), which is a simple form
# of stealing an encoder (Liu et al., 2022, https://arxiv.org/abs/2201.05889). The score of any other record is the
# cosine of the guesses for its image and its report: a site's model was trained to align these for its own records.

GUESSED = "cosine, guessed"
RIDGE = 1e-2  # of the mean variance of a value


def guessed(known: Tensor, sent: Tensor, own: Tensor) -> Tensor:
    """What the site's model may make [N, e] of records that the attacker's makes ``own`` [N, d] of.

    ``known`` [P, d] and ``sent`` [P, e]: the attacker's and the site's representations of the public records.
    """
    known, sent, own = known.double(), sent.double(), own.double()
    middle, to = known.mean(dim=0), sent.mean(dim=0)
    centred = known - middle
    square = centred.T @ centred
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    weights = torch.linalg.solve(square + ridge, centred.T @ (sent - to))
    return (own - middle) @ weights + to


def guessed_cosines(known: dict[str, Tensor], sent: dict[str, Tensor], own: dict[str, Tensor]) -> Tensor:
    """The score [N] of records; each argument by modality, "image" and "text", as in :func:`guessed`."""
    film, report = (guessed(known[name], sent[name], own[name]) for name in ("image", "text"))
    return F.cosine_similarity(film, report)
