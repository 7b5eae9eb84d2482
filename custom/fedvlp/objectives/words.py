"""Words from tokens: the features of a word's pieces are summed (MGCA's and GLoRIA's code, spec 1.1).

Which token begins a word follows from its id alone (``Tokenizer.pieces``), so batches need not say it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedvlp.core.types import CONTINUATION, SPECIAL

FAR = -1e4
"""A masked logit: far below any other, so that its share of a softmax is exactly 0, yet finite."""


def word_index(ids: Tensor, mask: Tensor, pieces: Tensor) -> Tensor:
    """Which word of its report each token belongs to: ids, mask [B, T] -> [B, T] int64, from 0; -1 for none.

    None are the summary token at position 0, special tokens ([SEP]) and padding. ``pieces`` [V] is the tokenizer's.
    """
    kind = pieces[ids]
    real = mask & (kind != SPECIAL)
    real[:, 0] = False
    before = torch.cat([torch.zeros_like(real[:, :1]), real[:, :-1]], dim=1)  # whether the token before is of a word
    begins = real & ~((kind == CONTINUATION) & before)
    return torch.where(real, begins.cumsum(1) - 1, -1)


def sum_by_word(values: Tensor, index: Tensor) -> Tensor:
    """Token values [B, T, W] summed over the pieces of each word: [B, T-1, W], zero beyond a report's words.

    A product with 0 and 1, not a scatter: the same bits on every run of a GPU, too.
    """
    places = torch.arange(index.shape[1] - 1, device=index.device)[:, None]  # [T-1, 1]
    with torch.autocast(values.device.type, enabled=False):
        return (index[:, None, :] == places).to(values.dtype) @ values


def word_mask(index: Tensor) -> Tensor:
    """[B, T-1] bool: True at a report's words, as ``sum_by_word`` places them."""
    return torch.arange(index.shape[1] - 1, device=index.device) <= index.amax(dim=1, keepdim=True)
