"""Membership by what sites show of public records, where no weights travel (CreamFL and its relatives).

The attacker has a model of its own and, of every public record, what the site's model makes of it. From its own
representations it guesses the site's by a linear map (ridge regression on the public records), which is a simple form
of stealing an encoder (Liu et al., 2022, https://arxiv.org/abs/2201.05889). The score of any other record is the cosine
of the guesses for its film and its report: a site's model was trained to make these alike for its own records.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

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
