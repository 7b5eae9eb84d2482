"""Words from tokens: the features of a word's pieces are summed (MGCA's and GLoRIA's code, spec 1.1).

Whether a token begins a word follows from its id (``Tokenizer.pieces``), so batches do not carry that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedvlp.core.types import CONTINUATION, SPECIAL

FAR = -1e4
"""Value of a masked logit: so far below any other that its share of a softmax is exactly 0, yet finite."""


def word_index(ids: Tensor, mask: Tensor, pieces: Tensor) -> Tensor:
    """Number of the word that each token belongs to: [B, T] int64, from 0 in each report; -1 for none.

    The summary token at position 0, special tokens ([SEP]) and padding belong to none. ``ids`` and ``mask`` are
    [B, T], ``pieces`` [V] is the tokenizer's.
    """
    kind = pieces[ids]
    real = mask & (kind != SPECIAL)
    real[:, 0] = False
    before = torch.cat([torch.zeros_like(real[:, :1]), real[:, :-1]], dim=1)  # whether the token before is of a word
    begins = real & ~((kind == CONTINUATION) & before)
    return torch.where(real, begins.cumsum(1) - 1, -1)


def sum_by_word(values: Tensor, index: Tensor) -> Tensor:
    """Token values [B, T, W] summed over the tokens of each word: [B, T-1, W], zero beyond a report's words.

    Computed as a product with 0 and 1 and not as a scatter, so that a GPU gives the same bits in every run.
    """
    numbers = torch.arange(index.shape[1] - 1, device=index.device)[:, None]  # [T-1, 1]
    with torch.autocast(values.device.type, enabled=False):
        return (index[:, None, :] == numbers).to(values.dtype) @ values


def word_mask(index: Tensor) -> Tensor:
    """[B, T-1] bool: True where ``sum_by_word`` has a word of the report."""
    return torch.arange(index.shape[1] - 1, device=index.device) <= index.amax(dim=1, keepdim=True)
