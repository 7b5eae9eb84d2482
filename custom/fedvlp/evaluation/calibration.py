"""Expected calibration error (Guo et al., 2017, https://arxiv.org/abs/1706.04599): stated beside true probability."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 15
"""Of equal width on 0..1, as in the paper."""


def calibration_error(stated: Tensor, happened: Tensor, bins: int = BINS) -> float:
    """Mean over records of |mean stated probability - share that happened| in the record's bin, 0..1.

    ``stated`` [N] in 0..1, ``happened`` [N] in {1, 0}. Bin b holds (b - 1) / bins < p <= b / bins, the first 0 too.
    Raises ValueError without a record.
    """
    if not len(stated) or len(stated) != len(happened):
        raise ValueError(f"calibration: {len(stated)} probabilities and {len(happened)} outcomes; expected one each")
    inner = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    index = torch.bucketize(stated.double(), inner)  # [N]
    zeros = torch.zeros(bins, dtype=torch.float64)
    gap = zeros.index_add(0, index, stated.double() - happened.double())  # [bins], count times difference of the means
    return float(gap.abs().sum() / len(stated))
