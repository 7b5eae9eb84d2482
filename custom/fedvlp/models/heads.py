"""Projection heads of FedDRA, FedRGB and MGCA (spec 1.1)."""

from __future__ import annotations

from torch import Tensor, nn

NORMS = ("batch", "layer", "none")


class _BatchNorm(nn.BatchNorm1d):
    """BatchNorm1d that says what to do about a training batch of one, where the batch statistics are undefined."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and len(input) < 2:
            raise ValueError(
                f"projection head: training batch of {len(input)} with head_norm 'batch', expected at least 2; drop "
                "the short last batch, or set head_norm to 'layer'"
            )
        return super().forward(input)


def head(width: int, hidden: int | None, d: int, kind: str) -> nn.Sequential:
    """Linear(W, hidden), norm, ReLU, Linear(hidden, d), norm without affine: [B, W] -> [B, d]; or Linear(W, d).

    ``kind`` of norm is one of ``NORMS``; ``hidden`` None is the one linear layer.
    """
    if hidden is None:
        return nn.Sequential(nn.Linear(width, d))

    def norm(features: int, affine: bool) -> nn.Module:
        if kind == "batch":
            return _BatchNorm(features, affine=affine)
        return nn.LayerNorm(features, elementwise_affine=affine) if kind == "layer" else nn.Identity()

    return nn.Sequential(nn.Linear(width, hidden), norm(hidden, True), nn.ReLU(), nn.Linear(hidden, d), norm(d, False))
