"""MGCA (Wang et al., 2022, https://arxiv.org/abs/2210.06044): aligns studies, words with regions, and clusters.

Differs: the freeze of the prototypes counts optimiser steps over all rounds, not epochs of one site's trainer, which
every round starts anew; their rows are normalised in the loss, gradient included, not in place.
Differs: padding is masked everywhere (the released code has it as negatives of the words), and a region's attended
vector is normalised, as a word's is (the released code: for CNNs alone).
Differs: with alignment modules, words, regions and their weights are those of the alignment modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.seeds import seeded
from fedvlp.core.types import Batch, VLOutput
from fedvlp.objectives.convirt import info_nce
from fedvlp.objectives.gloria import FAR, sum_by_word, word_index, word_mask

SOFT = 0.03
"""From this epsilon on the exponentials of cosines, and their shares, are numbers that float32 has."""


@torch.no_grad()
def sinkhorn(scores: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    """Codes q [B, K] of ``scores`` [B, K]: rows sum to 1, and the K clusters get about equal shares of the batch.

    A smaller ``epsilon`` > 0 gives harder codes. Scores are cosines, -1 to 1.
    """
    if epsilon < SOFT:
        logs = scores / epsilon  # [B, K]
        for _ in range(iterations):
            logs = logs.log_softmax(dim=0).log_softmax(dim=1)
        return logs.exp()
    q = (scores / epsilon).exp().T  # [K, B]
    q = q / q.sum()
    for _ in range(iterations):
        q = q / q.sum(dim=1, keepdim=True) / q.shape[0]
        q = q / q.sum(dim=0, keepdim=True) / q.shape[1]
    return (q / q.sum(dim=0, keepdim=True)).T


@torch.no_grad()
def token_weights(attention: Tensor | None, mask: Tensor) -> Tensor:
    """omega [B, N]: attention [B, N], clipped to its 10th and 90th percentile where ``mask`` [B, N] is True, else 0.

    Rows sum to 1; a row without any token is 0. Without attention, omega is uniform.
    """
    if attention is None:
        weights = mask.float()
    else:
        known = torch.where(mask, attention, torch.nan)
        low, high = (torch.nanquantile(known, share, dim=1, keepdim=True) for share in (0.1, 0.9))
        weights = torch.where(mask, attention.clamp(low, high), 0.0)
    return weights / weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def token_alignment(
    own: Tensor, own_mask: Tensor, other: Tensor, other_mask: Tensor, weights: Tensor, tau: float
) -> Tensor:
    """1/2 (1/B) sum_ij omega_ij [CE(S_j., j) + CE(S_.j, j)], a scalar in nats: own [B, J, d], other [B, K, d].

    alpha_jk = softmax_k(own_j . other_k / tau), o_j = normalise(sum_k alpha_jk other_k), S_jl = own_j . o_l / tau.
    ``weights`` omega [B, J]; masks [B, J] and [B, K] are True at tokens.
    """
    near = (own @ other.transpose(1, 2) / tau).masked_fill(~other_mask[:, None], FAR).softmax(dim=2)  # [B, J, K]
    attended = F.normalize(near @ other, dim=2)  # [B, J, d]
    scores = own @ attended.transpose(1, 2) / tau  # [B, J, J]
    rows = scores.masked_fill(~own_mask[:, None], FAR).log_softmax(dim=2).diagonal(dim1=1, dim2=2)  # [B, J]
    columns = scores.masked_fill(~own_mask[:, :, None], FAR).log_softmax(dim=1).diagonal(dim1=1, dim2=2)
    return -(weights * (rows + columns)).sum() / (2 * len(own))


def prototype_loss(image: Tensor, text: Tensor, prototypes: Tensor, config: MGCAConfig) -> Tensor:
    """Predicts each modality's codes q from the other modality; a scalar in nats.

    1/2 [-mean_i sum_k q^img_ik log p^txt_ik - the same with both swapped], p = softmax(scores / proto_temperature).
    Unit vectors image, text [B, d] and prototypes [K, d].
    """
    of_image, of_text = image @ prototypes.T, text @ prototypes.T  # [B, K]
    total = image.new_zeros(())
    for codes_of, predicted in ((of_image, of_text), (of_text, of_image)):
        codes = sinkhorn(codes_of, config.epsilon, config.iterations)
        total = total - (codes * (predicted / config.proto_temperature).log_softmax(dim=1)).sum(dim=1).mean() / 2
    return total


@torch.no_grad()
def code_entropy(image: Tensor, text: Tensor, prototypes: Tensor, config: MGCAConfig) -> Tensor:
    """The least value of ``prototype_loss`` with these codes: 1/2 of the mean entropies of q^img and q^txt, in nats."""
    total = image.new_zeros(())
    for embedding in (image, text):
        codes = sinkhorn(embedding @ prototypes.T, config.epsilon, config.iterations)
        total = total + torch.special.entr(codes).sum(dim=1).mean() / 2
    return total


class MGCA(ObjectiveModule):
    """Terms ``contrastive`` (studies), ``local`` (words and regions) and ``prototype`` (clusters), in nats.

    All are absent when a modality is, ``local`` also when the output has no tokens. ``local`` is 0 for a batch with
    fewer than two words; reports without a word do not count. The loop calls ``after_step`` after every step.
    """

    needs = ("image", "text", "patches", "words", "attention")

    def __init__(self, config: MGCAConfig, model: Any) -> None:
        super().__init__()
        self.config = config
        self.image_local, self.text_local = model.new_head("image"), model.new_head("text")
        self.prototypes = nn.Parameter(F.normalize(torch.randn(config.prototypes, model.config.embedding_dim)))
        # The share 0..1 of freeze_steps that has passed. It travels and is averaged like every float tensor. It is at
        # most 1 so that it takes little of the norm of an update that a site clips.
        self.register_buffer("thawed", torch.tensor(0.0 if config.freeze_steps else 1.0))
        self.register_buffer("pieces", model.tokenizer.pieces.clone(), persistent=False)
        self.thawed: Tensor
        self.pieces: Tensor

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The terms of a batch of pairs."""
        image, text, config = output.image, output.text, self.config
        if image is None or text is None:
            return {}
        i2t, t2i = info_nce(image, text, config.temperature)
        terms = {"contrastive": config.instance_weight * (i2t + t2i)}
        if output.image_tokens is not None and output.text_tokens is not None and output.text_mask is not None:
            index = word_index(batch["text"], output.text_mask, self.pieces)  # [B, T]
            terms["local"] = config.local_weight * self.local(output, index)
        with torch.autocast(image.device.type, enabled=False):
            prototypes = F.normalize(self.prototypes.to(image.dtype))
            moving = self.thawed > 1 - 0.5 / max(1, config.freeze_steps)
            prototypes = torch.where(moving, prototypes, prototypes.detach())
            terms["prototype"] = config.prototype_weight * prototype_loss(image, text, prototypes, config)
        return terms

    def entropy(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The least value of ``prototype``, whose targets are soft."""
        if output.image is None or output.text is None:
            return {}
        with torch.autocast(output.image.device.type, enabled=False):
            prototypes = F.normalize(self.prototypes.to(output.image.dtype))
            least = code_entropy(output.image, output.text, prototypes, self.config)
        return {"prototype": self.config.prototype_weight * least}

    def local(self, output: VLOutput, index: Tensor) -> Tensor:
        """L_word + L_patch, a scalar; ``index`` [B, T] is the word of each token (``word_index``)."""
        assert output.image_tokens is not None
        assert output.text_tokens is not None
        is_word, tau = word_mask(index), self.config.local_temperature  # [B, N]
        if int(is_word.sum()) < 2:  # no statistics for batch normalisation, and nothing to tell a word from
            return (output.image_tokens.sum() + output.text_tokens.sum()) * 0.0
        patches = output.image_tokens[:, 1:]  # [B, R, W]
        regions = _unit(self.image_local(patches.flatten(0, 1))).unflatten(0, patches.shape[:2])  # [B, R, d]
        packed = _unit(self.text_local(sum_by_word(output.text_tokens, index)[is_word]))  # [words of the batch, d]
        words = packed.new_zeros(*is_word.shape, packed.shape[1]).masked_scatter(
            is_word[..., None], packed
        )  # [B, N, d]
        attention = output.text_attention
        if attention is not None:
            attention = sum_by_word(F.pad(attention, (1, 0))[..., None], index)[..., 0]  # [B, N]
        everywhere = torch.ones_like(regions[..., 0], dtype=torch.bool)  # [B, R]
        of_words = token_weights(attention, is_word)
        of_regions = token_weights(output.image_attention, everywhere) * is_word.any(dim=1, keepdim=True)
        with torch.autocast(words.device.type, enabled=False):
            word = token_alignment(words, is_word, regions, everywhere, of_words, tau)
            return word + token_alignment(regions, everywhere, words, is_word, of_regions, tau)

    def after_step(self) -> None:
        """Counts an optimiser step towards ``freeze_steps``, after which the prototypes are trained."""
        if self.training and self.config.freeze_steps:
            done = (self.thawed * self.config.freeze_steps).round() + 1
            self.thawed.copy_((done / self.config.freeze_steps).clamp(max=1.0))


def _unit(vectors: Tensor) -> Tensor:
    """Rows of ``vectors`` [N, d] scaled to unit length, in at least float32."""
    return F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)


@dataclass(frozen=True)
class MGCAConfig:
    """Configuration of ``MGCA``; the defaults are the released code's (spec 2.3), except for ``freeze_steps``.

    Raises ValueError for a value outside of its range.
    """

    temperature: float = 0.07  # of InfoNCE, above 0
    local_temperature: float = 0.1  # tau of words and regions, above 0
    proto_temperature: float = 0.2  # of the predicted cluster probabilities, above 0
    prototypes: int = 500  # K, at least 2
    epsilon: float = 0.05  # softness of the codes, above 0
    iterations: int = 3  # of Sinkhorn's algorithm, at least 1
    freeze_steps: int = (
        50  # optimiser steps of a site, over all rounds, before prototypes are trained; released: 1 epoch
    )
    instance_weight: float = 1.0  # of the term ``contrastive``, at least 0
    local_weight: float = 1.0  # of the term ``local``, at least 0
    prototype_weight: float = 1.0  # of the term ``prototype``, at least 0

    def __post_init__(self) -> None:
        for name in ("temperature", "local_temperature", "proto_temperature", "epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"MGCA: {name} {getattr(self, name)}, expected a finite number above 0")
        for name, least in (("prototypes", 2), ("iterations", 1), ("freeze_steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"MGCA: {name} {getattr(self, name)}, expected at least {least}")
        for name in ("instance_weight", "local_weight", "prototype_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"MGCA: {name} {getattr(self, name)}, expected a finite number of at least 0")

    def build(self, model: Any, seed: int = 0) -> nn.Module:
        """The loss for outputs of ``model``, a DualEncoder; the same weights for the same seed."""
        return seeded(seed, 7, lambda: MGCA(self, model))
