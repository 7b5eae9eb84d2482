"""Heads for findings beside a saved model: for each a linear layer on the image tower's pooled features.

Two files in the model's folder, beside ``model.safetensors``:

- ``findings.safetensors``: ``weight`` [L, W] and ``bias`` [L], float32. The probability of finding l in an image with
  pooled features x [W] is sigmoid(weight_l . x + bias_l). Whatever calibrates a head is part of these numbers.
- ``findings.json``: ``format``, ``origin`` (how the heads came to be) and ``findings``, for each in the order of the
  rows its ``name`` and what was measured of it on validation records, e.g. ``auc``, ``calibration_error``,
  ``threshold`` and the ``sensitivity`` at it. What nobody measured is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.checkpoint import load_tensors, save_json, save_tensors
from fedvlp.core.json_file import read_json
from fedvlp.core.validate import require

FORMAT = 1
TENSORS, SAID = "findings.safetensors", "findings.json"


@dataclass(frozen=True, eq=False)
class FindingHeads:
    """Linear heads for L findings on pooled image features of width W.

    Args:
        names: of the findings, in the order of the rows; each once, at least one.
        weight: [L, W] float32.
        bias: [L] float32.
        origin: how the heads came to be, a phrase for people.
        figures: by finding, what was measured of its head on validation records; numbers alone.

    Raises:
        ValueError: names, weight and bias do not fit each other, or a number is not finite.
    """

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor
    origin: str = ""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.names)
        require(0 < count == len(set(self.names)), f"finding heads: {count} names; give at least one, each once")
        shapes = list(self.weight.shape), list(self.bias.shape)
        fits = self.weight.ndim == 2 and len(self.weight) == count and shapes[1] == [count]
        require(fits, f"finding heads: weight {shapes[0]} and bias {shapes[1]} for {count} findings")
        finite = bool(self.weight.isfinite().all() and self.bias.isfinite().all())
        require(finite, "finding heads: a weight or bias is not finite")
        strange = sorted(self.figures.keys() - set(self.names))
        require(not strange, f"finding heads: figures of {', '.join(strange)}, which have no head")

    def probabilities(self, features: Tensor) -> Tensor:
        """[N, L] float64 in 0..1, of pooled image features [N, W]. Raises ValueError for another width."""
        width = self.weight.shape[1]
        require(features.shape[-1] == width, f"finding heads: features of width {features.shape[-1]}, not {width}")
        return (features.double() @ self.weight.double().T + self.bias.double()).sigmoid()

    def save(self, folder: Path) -> None:
        """Writes both files into the folder of a model."""
        save_tensors(folder / TENSORS, {"weight": self.weight.float(), "bias": self.bias.float()})
        findings = [{"name": name, **self.figures.get(name, {})} for name in self.names]
        save_json(folder / SAID, {"format": FORMAT, "origin": self.origin, "findings": findings})

    @classmethod
    def read(cls, folder: Path) -> FindingHeads | None:
        """The heads beside the model in ``folder``; None where it has none. Raises ValueError for a damaged file."""
        if not (folder / SAID).exists():
            return None
        said: Any = read_json(folder / SAID)
        try:
            seen = said["format"]
            require(seen == FORMAT, f"{SAID} has format {seen}, this fedvlp reads {FORMAT}; use the one that wrote it")
            tensors, _ = load_tensors(folder / TENSORS)
            figures = {one["name"]: {key: one[key] for key in one if key != "name"} for one in said["findings"]}
            return cls(tuple(figures), tensors["weight"], tensors["bias"], said["origin"], figures)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{SAID} or {TENSORS} lacks {error}; copy the model's folder again") from None


def calibrated(scores: Tensor, truth: Tensor) -> tuple[float, float]:
    """Platt's scale a > 0 and offset b: sigmoid(a s + b) are the probabilities nearest to ``truth`` [n] in {1, 0}.

    Args:
        scores: [n] float, what an uncalibrated head says of n records.
        truth: [n], 1 where the finding is there. Both kinds of records must be among them.

    Targets are Platt's smoothed ones (1999), (P + 1) / (P + 2) and 1 / (N + 2), so that separable scores stay finite.
    Raises ValueError where all records are of one kind.
    """
    positive, total = int((truth == 1).sum()), len(truth)
    require(0 < positive < total, f"calibration: {positive} of {total} records are positive; both kinds are needed")
    target = torch.where(truth == 1, (positive + 1) / (positive + 2), 1 / (total - positive + 2)).double()
    mean, deviation = scores.double().mean(), scores.double().std(correction=0).clamp(min=1e-12)
    z = (scores.double() - mean) / deviation
    design = torch.stack([z, torch.ones_like(z)], dim=1)  # [n, 2]
    solution = torch.zeros(2, dtype=torch.float64)
    for _ in range(50):  # Newton's steps of a convex loss in two numbers
        stated = (design @ solution).sigmoid()
        curvature = design.T @ (design * (stated * (1 - stated))[:, None]) + 1e-9 * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(curvature, design.T @ (stated - target))
        solution = solution - step
        if float(step.abs().max()) < 1e-10:
            break
    scale = float(solution[0] / deviation)
    return scale, float(solution[1] - solution[0] * mean / deviation)
