"""What a site may do to an update before it leaves: clip and noise it, or refuse it. Pure tensors, without FLARE.

Guarantee of :func:`clip_and_noise`: each release is a Gaussian mechanism (Dwork and Roth, 2014, App. A) whose unit is
the site's whole data set, as DP-FedAvg's is a client's (McMahan et al., 2018, https://arxiv.org/abs/1710.06963).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.site_error import SiteError
from fedvlp.core.types import CHANGE, State, is_statistic, subject

SENSITIVITY = 2.0
"""In units of the clipping norm: two data sets give two differences inside one ball, so at most its diameter apart."""

BLOCK = 1 << 20
"""Values noised at a time."""

TOWERS = ("image_encoder", "text_encoder")
"""What the names of the towers' tensors begin with, which do not travel where they are frozen."""


class PrivacyError(SiteError, ValueError):
    """The update may not leave this site; the message says why and holds nothing of the data."""


def gaussian(count: int) -> Tensor:
    """Standard normal float64 [count] from the operating system's cryptographic generator.

    Not from torch's: its Mersenne Twister keeps 32 bits of a seed, so a server that tries them all could subtract the
    noise; and the run's seed is known to everybody. The normal quantile is taken of 52 uniform bits.
    """
    bits = torch.from_numpy(np.frombuffer(os.urandom(8 * count), dtype=np.int64) & ((1 << 52) - 1))
    return torch.special.ndtri((bits.double() + 0.5) / 2.0**52)  # 0.5 / 2^52 to 1 - 0.5 / 2^52, all exact


def clip_and_noise(update: State, received: Mapping[str, Tensor], clip: float, noise_multiplier: float) -> State:
    """``received + d * min(1, clip / |d|) + N(0, (noise_multiplier * clip)^2)`` with ``d = update - received``.

    ``|d|`` is the L2 norm over all tensors together. What a method sends as a change (``change/...``: a step of
    SCAFFOLD's control variates, OneRoundCCA's moments) is its own difference. New tensors; the update is left as it is.
    Raises PrivacyError for a tensor that this cannot protect.
    """
    changes = {name: torch.zeros_like(tensor) for name, tensor in update.items() if name.startswith(CHANGE)}
    received = {**received, **changes}
    for name, tensor in update.items():
        _refuse_unprotected(name, tensor, received)
    with torch.no_grad():
        norm = math.sqrt(sum(float(_difference(t, received[n]).square().sum()) for n, t in update.items()))
        if not math.isfinite(norm):
            raise PrivacyError(public="the update holds NaN or infinite values; lower training.lr or look at the data")
        scale = min(1.0, clip / norm) if norm else 1.0
        return {
            name: _noised(tensor, received[name], scale, noise_multiplier * clip) for name, tensor in update.items()
        }


def _noised(tensor: Tensor, received: Tensor, scale: float, deviation: float) -> Tensor:
    released = torch.empty(tensor.shape, dtype=tensor.dtype)
    blocks = (t.reshape(-1).split(BLOCK) for t in (released, tensor, received))
    for out, value, base in zip(*blocks, strict=True):
        out.copy_(base.cpu().double() + _difference(value, base) * scale + deviation * gaussian(len(out)))
    return released


def _difference(tensor: Tensor, received: Tensor) -> Tensor:
    return tensor.cpu().double() - received.cpu().double()


def _refuse_unprotected(name: str, tensor: Tensor, received: Mapping[str, Tensor]) -> None:
    # Statistics are means of records, and no gradient bounds what one record does to them.
    if is_statistic(name):
        raise PrivacyError(
            f"{name} is a batch statistic of this site's data; use a model without batch norm (model.head_norm=layer)",
            public=(
                "a tensor is a batch statistic of this site's data; use a model without batch norm "
                "(model.head_norm=layer)"
            ),
        )
    if tensor.dtype not in (torch.float32, torch.float64):
        raise PrivacyError(
            f"{name} is {tensor.dtype}; noise protects float32 and float64 alone",
            public="a tensor has another type than float32 and float64, which alone noise protects",
        )
    if name not in received or received[name].shape != tensor.shape or received[name].dtype != tensor.dtype:
        raise PrivacyError(
            f"{name} was not received in this shape and type, so there is no difference to clip; take a method that "
            "sends tensors of the model alone, e.g. FedAvg",
            public="a tensor was not received in this shape and type, so there is no difference to clip",
        )


def is_named(name: str, pattern: str) -> bool:
    """Whether a site means the tensor ``name`` by ``pattern`` (``*``, ``?``, ``[ab]``).

    What a method sends of a tensor beside it (``change/<name>``) has the tensor's name here, and an adapter's tensors
    also have those of the tower that they change.
    """
    own = subject(name)
    return any(fnmatchcase(one, pattern) for one in (name, own, own.replace("_adapter.", "_encoder.", 1)))


def is_mistake(pattern: str, names: Iterable[str]) -> bool:
    """Whether ``pattern`` is of none of the tensors ``names`` that travel, so that it protects nothing.

    It is right where it names a tower that does not travel: one that is frozen, beside its adapters or without.
    """
    names = list(names)
    if any(is_named(name, pattern) for name in names):
        return False
    tower = next((tower for tower in TOWERS if pattern.startswith(tower)), None)
    return tower is None or any(name.startswith(tower) for name in names)


def refuse_named(update: State, received: Mapping[str, Tensor], patterns: Iterable[str]) -> None:
    """Raises PrivacyError if a tensor's name matches one of ``patterns`` (:func:`is_named`).

    A pattern that matches nothing of the received model or the update is an error too: a misspelt one forbids nothing.
    """
    for pattern in patterns:
        if is_mistake(pattern, {*received, *update}):
            raise PrivacyError(
                f"the forbidden name {pattern!r} matches no tensor of this model; correct the site's list",
                public=(
                    "a name on this site's list of forbidden tensors matches no tensor of this model; its engineer "
                    "corrects the list"
                ),
            )
        forbidden = sorted(name for name in update if is_named(name, pattern))
        if forbidden:
            raise PrivacyError(
                f"this site does not let {forbidden[0]} go ({len(forbidden)} tensors match {pattern!r}); "
                "agree on a method that does not share them",
                public="this site does not let {count} of the tensors go; agree on a method that does not share them",
                count=len(forbidden),
            )


def allowed_metrics(metrics: Mapping[str, object], patterns: Iterable[str], drop: bool) -> dict[str, float]:
    """The metrics whose names match ``patterns``; others are left out (``drop``) or raise PrivacyError.

    A value that is not a finite number always raises PrivacyError.
    """
    patterns = list(patterns)
    allowed: dict[str, float] = {}
    for index, (name, value) in enumerate(metrics.items()):
        known = isinstance(name, str) and any(fnmatchcase(name, pattern) for pattern in patterns)
        if not known and not drop:  # neither name nor value is repeated: both may be text of the data
            raise PrivacyError(
                public=(
                    "metric {number} of {count} is not on this site's list of names; its engineer adds the name "
                    "to AllowMetrics in local/privacy.json, or sets drop there"
                ),
                number=index + 1,
                count=len(metrics),
            )
        if known:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise PrivacyError(f"metric {name!r} is no finite number", public="a metric is no finite number")
            allowed[name] = float(value)
    return allowed
