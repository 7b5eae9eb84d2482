"""Guidance towards frozen embeddings (Shuai et al., 2024, https://arxiv.org/abs/2404.03854): FedDRA's and FedRGB's."""

from __future__ import annotations

import torch
from torch import Tensor

from fedvlp.core.types import VLOutput


def guidance(output: VLOutput, target: VLOutput, reduction: str = "sum_dim") -> Tensor:
    """Mean over the batch of ||z_x - z*_x||^2 + ||z_y - z*_y||^2 (eq. 1 of both papers; <= 8 for unit vectors).

    Differs: FedDRA prints its second norm without the square, FedRGB sums over the samples. ``mean_dim`` divides by d,
    as FedDRA's released code does.
    """
    terms = []
    for embedding, anchor in ((output.image, target.image), (output.text, target.text)):
        if embedding is not None and anchor is not None:
            squared = (embedding - anchor).square()  # eq. 1: [B, d]
            terms.append(squared.sum(1).mean() if reduction == "sum_dim" else squared.mean())  # eq. 1: L_C
    return torch.stack(terms).sum()
