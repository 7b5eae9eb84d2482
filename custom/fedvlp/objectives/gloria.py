"""GLoRIA (Huang et al., 2021, https://doi.org/10.1109/ICCV48922.2021.00391): also matches words with image regions.

Differs: backbones and embeddings are those of the model, as in the federated papers (spec 2.2): global vectors come
from its heads, regions and words from its last tokens (alignment module included), words without the mean of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.seeds import seeded
from fedvlp.core.types import CONTINUATION, SPECIAL, Batch, VLOutput
from fedvlp.objectives.convirt import info_nce

# Words from tokens: the features of a word's pieces are summed (MGCA's and GLoRIA's code, spec 1.1).
#
# Whether a token begins a word follows from its id (``Tokenizer.pieces``), so batches do not carry that.

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


LARGEST = 2**24  # elements of one array [captions, images, regions, words], at most


def similarities(regions: Tensor, words: Tensor, mask: Tensor, temp1: float, temp2: float) -> Tensor:
    """Z(b, c) [B, C] of images b and captions c: regions v [B, R, D], words w [C, N, D], mask [C, N] True at words.

    A_rj = softmax_j(v_r . w_j), a_jr = softmax_r(temp1 A_rj), c_j = sum_r a_jr v_r,
    Z = log sum_j exp(temp2 cos(w_j, c_j)). Every caption needs a word.
    """
    # A: how well each region fits each word, shared out over the words.
    scores = torch.einsum("brd,cnd->cbrn", regions, words).masked_fill(~mask[:, None, None], FAR)
    # a: for each word, which regions it is about; c: the mean of these.
    attention = (temp1 * scores.softmax(dim=3)).softmax(dim=2)  # [C, B, R, N], over regions
    context = torch.einsum("cbrn,brd->cbnd", attention, regions)
    # Z: how well the words fit what they are about, a soft maximum over the words.
    cosine = F.cosine_similarity(words[:, None], context, dim=3)  # [C, B, N]
    return (temp2 * cosine).masked_fill(~mask[:, None], FAR).logsumexp(dim=2).T


class GLoRIA(ObjectiveModule):
    """Terms ``contrastive`` (global, both directions) and ``local`` (words and regions, both directions), in nats.

    ``contrastive`` is absent when a modality is, ``local`` also when the output has no tokens. The words of a report
    include its [CLS], not its [SEP]. A linear layer maps regions to the width of the words.
    """

    needs = ("image", "text", "patches", "words")

    def __init__(self, config: GLoRIAConfig, image_width: int, text_width: int, pieces: Tensor) -> None:
        """``pieces`` [V] is the tokenizer's (``Tokenizer.pieces``)."""
        super().__init__()
        self.config = config
        self.image_local = nn.Linear(image_width, text_width, bias=False)  # the 1x1 convolution
        self.register_buffer("pieces", pieces.clone(), persistent=False)
        self.pieces: Tensor

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The terms of a batch of pairs."""
        if output.image is None or output.text is None:
            return {}
        i2t, t2i = info_nce(output.image, output.text, 1 / self.config.temp3)
        terms = {"contrastive": self.config.global_weight * (i2t + t2i)}
        if output.image_tokens is not None and output.text_tokens is not None and output.text_mask is not None:
            regions = self.image_local(output.image_tokens[:, 1:])  # [B, R, D]
            index = word_index(batch["text"], output.text_mask, self.pieces)  # [B, T]
            terms["local"] = self.config.local_weight * self.local(regions, output.text_tokens, index)
        return terms

    def local(self, regions: Tensor, tokens: Tensor, index: Tensor) -> Tensor:
        """Cross entropy of temp3 Z, sum of both directions: regions [B, R, D], tokens [B, T, D], word ``index`` [B, T].

        A few captions are computed at a time, and again in the backward pass, so only these take memory.
        """
        with torch.autocast(regions.device.type, enabled=False):
            dtype = torch.promote_types(torch.promote_types(regions.dtype, tokens.dtype), torch.float32)
            regions, tokens = regions.to(dtype), tokens.to(dtype)
            words = torch.cat([tokens[:, :1], sum_by_word(tokens, index)], dim=1)  # [B, N, D], N = T
            mask = F.pad(word_mask(index), (1, 0), value=True)  # [B, N]
            chunk = max(1, LARGEST // max(1, regions[..., 0].numel() * words.shape[1]))
            temperatures = self.config.temp1, self.config.temp2
            columns = [
                checkpoint(similarities, regions, captions, known, *temperatures, use_reentrant=False)
                for captions, known in zip(words.split(chunk), mask.split(chunk), strict=True)
            ]
            logits = self.config.temp3 * torch.cat(columns, dim=1)  # [B, B]
            target = torch.arange(len(logits), device=logits.device)
            return F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)


@dataclass(frozen=True)
class GLoRIAConfig:
    """Configuration of ``GLoRIA``; the defaults are the released code's (spec 2.2).

    Raises ValueError for a value outside of its range.
    """

    temp1: float = 4.0  # above 0; a larger one sharpens a word's attention over regions
    temp2: float = 5.0  # above 0; a larger one lets well-matched words dominate a caption's similarity
    temp3: float = 10.0  # above 0; scale of the logits, local and global
    local_weight: float = 1.0  # of the term ``local``, at least 0
    global_weight: float = 1.0  # of the term ``contrastive``, at least 0

    def __post_init__(self) -> None:
        for name in ("temp1", "temp2", "temp3"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"GLoRIA: {name} {getattr(self, name)}, expected a finite number above 0")
        for name in ("local_weight", "global_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"GLoRIA: {name} {getattr(self, name)}, expected a finite number of at least 0")

    def build(self, model: Any, seed: int = 0) -> nn.Module:
        """The loss for outputs of ``model``, a DualEncoder; the same weights for the same seed."""
        widths = model.image_encoder.width, model.text_encoder.width
        return seeded(seed, 7, lambda: GLoRIA(self, *widths, model.tokenizer.pieces))
