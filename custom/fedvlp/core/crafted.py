"""Signs that a received model was made to single out records: a site refuses it before it trains.

A server that is curious and dishonest sends weights by which an update holds single records almost as they are: towers
that pass pixels through, and a layer whose rows all measure one thing with staggered thresholds, so that each bin holds
one record (Fowl et al., 2022, https://arxiv.org/abs/2110.13057; MedLeak, Shi et al., 2024,
https://arxiv.org/abs/2407.09972). Such weights differ from any that training gives. Each sign is compared with the
model that the run starts from, which the site builds itself: what that has too is no sign.

An adapter of a frozen weight W (LoRA: W + s B A) is judged by the sum, for B begins at 0 and its first steps lie nearly
in one direction. A state has neither W nor s: W is taken for as large as A at the start, as linear layers start so too,
and s for ``AMPLIFIED``.

What this cannot see: a model that was trained, by ordinary training, to answer some records with a large loss (Geminio,
Shan et al., 2025), and constructions that hide below these limits. The envelope's least number of records per update
and differential privacy hold against these too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

SMALLEST = 8
"""Rows and columns of the smallest matrix that is looked at: of fewer, honest ones may be of any form."""

ZEROS = 0.5  # share of weights that are exactly 0
VANISHING = 0.9  # share of weights below ``TINY`` of the largest: an identity or a dead layer with a little noise
TINY = 1e-2
DIAGONAL = 0.9  # share of the square sum that lies on the diagonal of a square matrix
ONE_DIRECTION = 0.9  # share of the square sum that one direction has: all rows measure the same
GROWTH = 50.0  # times the root mean square of the start, or the usual one of this model (at least ``FLOOR``)
SPIKE = 500.0  # times the same, of the largest value
FLOOR = 0.1
AMPLIFIED = 10.0  # alpha / r of an adapter, at most
UP, DOWN = ".up", ".down"  # B [out, r] and A [r, in] of an adapter (models/adapters.py)


@dataclass(frozen=True)
class Signs:
    """What is measured of one tensor; 0 where it does not apply."""

    zeros: float
    vanishing: float
    diagonal: float
    one_direction: float
    staggered: bool  # a bias in rising or falling order
    scale: float  # root mean square
    largest: float


@torch.no_grad()
def signs_of(name: str, tensor: Tensor) -> Signs | None:
    """The signs of a trained tensor; None for one that is not looked at: buffers, scalars, whole numbers."""
    if not tensor.is_floating_point() or tensor.numel() < SMALLEST or "running_" in name:
        return None
    values = tensor.detach().float()
    largest = float(values.abs().max())
    scale = float(values.square().mean().sqrt())
    matrix = values.flatten(1) if values.ndim > 1 else values[None]
    # A vector, or a matrix too small to tell: only dead weights and staggered thresholds can be seen.
    if min(matrix.shape) < SMALLEST:
        weights = name.endswith("weight")  # of a normalisation: with zeros its layer is dead; a bias may be 0
        zeros = float((values == 0).float().mean()) if weights else 0.0
        return Signs(zeros, 0.0, 0.0, 0.0, values.ndim == 1 and not weights and _is_staggered(values), scale, largest)
    total = float(matrix.square().sum())
    vanishing = float((matrix.abs() <= TINY * largest).float().mean())  # all of a tensor that starts at 0
    diagonal = float(matrix.diagonal().square().sum()) / total if total and matrix.shape[0] == matrix.shape[1] else 0.0
    zeros = float((matrix == 0).float().mean())
    return Signs(zeros, vanishing, diagonal, _one_direction(matrix, total), False, scale, largest)


def _is_staggered(values: Tensor) -> bool:
    """Whether values [N] only rise or only fall: chance does that once in N! / 2 times."""
    if len(values) < 2 * SMALLEST:
        return False
    steps = values.diff()
    return bool((steps > 0).all()) or bool((steps < 0).all())


def _one_direction(matrix: Tensor, total: float) -> float:
    """The share of the square sum that the strongest direction has, by power iteration from the longest row."""
    if not total:
        return 0.0
    # Three steps are enough for a share near 1, which is all that is asked.
    direction = matrix[matrix.square().sum(dim=1).argmax()]  # [I]
    for _ in range(3):
        direction = direction / direction.norm().clamp(min=1e-30)
        direction = matrix.T @ (matrix @ direction)
    direction = direction / direction.norm().clamp(min=1e-30)
    return float((matrix @ direction).square().sum()) / total


Start = dict[str, Signs]
"""By name of a tensor: the signs of the model that a run starts from."""


def start_of(state: Mapping[str, Tensor]) -> Start:
    """The signs of every tensor that is looked at."""
    return {name: signs for name, tensor in state.items() if (signs := signs_of(name, tensor)) is not None}


def check_crafted(state: Mapping[str, Tensor], start: Start) -> str | None:
    """Why this received model looks made to single out records, or None. Tensors that ``start`` lacks are passed by."""
    seen = {name: now for name in start if name in state and (now := _signs_in(state, name, start)) is not None}
    usual = median(now.scale for now in seen.values()) if seen else 0.0
    for name, now in seen.items():
        problem = _problem(now, start[name], usual)
        if problem:
            return f"{name} {problem}; training gives no such weights: the model may be made to single out records"
    return None


def _signs_in(state: Mapping[str, Tensor], name: str, start: Start) -> Signs | None:
    """As ``signs_of`` a tensor of ``state``; the one direction of an adapter is that of its whole weight."""
    now, down = signs_of(name, state[name]), name.removesuffix(UP) + DOWN
    adapter = name.endswith(UP) and down in state and down in start
    if now is None or not adapter or min(state[name].shape) < SMALLEST:
        return now
    return replace(now, one_direction=_of_whole(state[name], state[down], start[down].scale))


@torch.no_grad()
def _of_whole(up: Tensor, down: Tensor, scale: float) -> float:
    """The share that one direction of s B A [out, in] has of the square sum of W + s B A; W has this root mean square.

    Where B = Q R, with Q orthonormal, R A [r, in] has the singular values of B A.
    """
    change = AMPLIFIED * torch.linalg.qr(up.detach().float(), mode="r").R @ down.detach().float()
    total = float(change.square().sum())
    return _one_direction(change, total + scale**2 * len(up) * down.shape[1])


def _problem(now: Signs, before: Signs, usual: float) -> str | None:
    """``usual``: the median of this model's root mean squares, as a privacy policy's noise raises all."""
    # Each sign counts only where the start has not got it as well.
    limit = max(before.scale, usual, FLOOR)
    if now.zeros > ZEROS >= before.zeros:
        return f"is 0 in {now.zeros:.0%} of its values"
    if now.vanishing > VANISHING >= before.vanishing:
        return f"has {now.vanishing:.0%} of its values next to 0"
    if now.diagonal > DIAGONAL >= before.diagonal:
        return "is nearly the identity"
    if now.one_direction > ONE_DIRECTION >= before.one_direction:
        return "measures one direction in all of its rows"
    if now.staggered and not before.staggered:
        return "is a row of staggered thresholds"
    if now.scale > GROWTH * limit:
        return f"has a root mean square of {now.scale:.3g}, at the start {before.scale:.3g}"
    if now.largest > SPIKE * limit:
        return f"has a value of {now.largest:.3g}, where the root mean square at the start is {before.scale:.3g}"
    return None
