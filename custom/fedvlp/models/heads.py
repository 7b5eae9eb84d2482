"""Projection heads of FedDRA, FedRGB and MGCA (spec 1.1)."""

from __future__ import annotations

from torch import Tensor, nn

NORMS = ("batch", "layer", "none")


class _BatchNorm(nn.BatchNorm1d):
    """BatchNorm1d that refuses a training batch of one, whose variance is undefined, and says what to do."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and len(input) < 2:
            raise ValueError(
                f"projection head: training batch of {len(input)} with head_norm 'batch', expected at least 2; drop "
                "the short last batch, or set head_norm to 'layer'"
            )
        return super().forward(input)


def head(width: int, hidden: int | None, d: int, kind: str) -> nn.Sequential:
    """Projection head [B, W] -> [B, d]: Linear(W, hidden), norm, ReLU, Linear(hidden, d), norm without affine weights.

    ``hidden`` None gives one Linear(W, d). ``kind`` of the norm is one of ``NORMS``.
    """
    if hidden is None:
        return nn.Sequential(nn.Linear(width, d))

    def norm(features: int, affine: bool) -> nn.Module:
        if kind == "batch":
            return _BatchNorm(features, affine=affine)
        if kind == "layer":
            return nn.LayerNorm(features, elementwise_affine=affine)
        return nn.Identity()

    return nn.Sequential(nn.Linear(width, hidden), norm(hidden, True), nn.ReLU(), nn.Linear(hidden, d), norm(d, False))
