"""FedCLIP (Lu et al., 2023, https://arxiv.org/abs/2302.13485): a small adapter on a frozen pair's image vectors.

Of the adapter there are two forms: FedCLIP's attention, and CLIP-Adapter's residual (Gao et al., 2021,
https://arxiv.org/abs/2110.04544). FedMedCLIP (Wu and Chaddad, 2025, https://arxiv.org/abs/2511.07929) adds a classifier
that stays at its site, and lets the two learn from each other: ``kl`` above 0.
Differs: images are compared with the texts of the classes, not with those of the batch; FedMedCLIP's adapter is this
one without mask, its classifier has two layers without batch normalisation and a fixed threshold (in the released code
the learned one has no gradient), its weight of the divergence is fixed, and what is judged is the adapter alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.client import Client
from fedvlp.core.seeds import seeded
from fedvlp.core.validate import require
from fedvlp.methods.prompt_learning import (
    ClassText,
    ClassTextConfig,
    FrozenPair,
    cross_entropy,
    log_probabilities,
    targets,
)

FORMS = ("residual", "attention")
WEAK = 0.01  # an output of a masked layer whose weights are smaller on average is switched off


@dataclass(frozen=True)
class CLIPAdapter(FrozenPair):
    """x' = unit(adapter(x)); its classes are the frozen text tower's sentences, so that w_c do not change.

    With the site's classifier h: L = CE(x' . w / temperature) + CE(h(x)) + kl/2 [KL(p || q) + KL(q || p)], p of the
    adapter and q of the classifier.
    """

    kl: float = 0.0  # weight of the divergence, >= 0; 0: no classifier, FedCLIP

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.kl >= 0, f"kl is {self.kl}; it must not be negative")

    def refuse_settings(self, experiment: Any) -> None:
        super().refuse_settings(experiment)
        classifies = not isinstance(experiment.extra, AdapterConfig) or experiment.extra.private_hidden > 0
        require(
            not self.kl or classifies, f"kl is {self.kl} without a classifier; set extra.private_hidden, e.g. to 512"
        )

    def class_losses(self, client: Client, vectors: Tensor, labels: Tensor) -> dict[str, Tensor]:
        terms = super().class_losses(client, vectors, labels)
        extra: Adapter = client.extra
        if not self.kl:
            return terms
        exclusive, (wanted, known) = extra.config.exclusive, targets(labels, extra.config)
        own = extra.private(vectors)  # [B, C]
        p, q = (log_probabilities(logits, exclusive) for logits in (self.logits(client, extra.images(vectors)), own))
        apart = (p.exp() - q.exp()) * (p - q)  # KL(p || q) + KL(q || p), summand by summand
        return {
            **terms,
            "classifier": cross_entropy(own, wanted, known, exclusive),
            "kl": self.kl / 2 * apart.sum(dim=-1).mean(),
        }


@dataclass(frozen=True)
class AdapterConfig(ClassTextConfig):
    """Configuration of ``Adapter``. Raises ValueError for a value outside of its range."""

    form: str = "residual"  # "residual" (CLIP-Adapter) or "attention" (FedCLIP)
    ratio: float = 0.2  # alpha of "residual", 0 to 1; 0: the adapter changes nothing
    reduction: int = 4  # "residual" goes through d / reduction numbers, at least 1
    private_hidden: int = 0  # width of the site's classifier (FedMedCLIP: 512); 0: there is none

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.form in FORMS, f"form is {self.form!r}; choose {' or '.join(FORMS)}")
        require(0 <= self.ratio <= 1, f"ratio is {self.ratio}; it must be in [0, 1]")
        require(self.reduction >= 1, f"reduction is {self.reduction}; at least 1")
        require(self.private_hidden >= 0, f"private_hidden is {self.private_hidden}; it must not be negative")

    def build(self, model: Any, seed: int) -> Adapter:
        """An adapter for the vectors [B, d] of ``model``, a ModelConfig; the same weights for the same seed."""
        return seeded(seed, 6, lambda: Adapter(self, model.embedding_dim))


class Adapter(ClassText):
    """residual: (1 - alpha) x + alpha W_2 relu(W_1 x), CLIP-Adapter's; attention: x * softmax(W_2 tanh(W_1 x)).

    ``private``: the site's own classifier [B, d] -> [B, C], which never leaves it.
    """

    def __init__(self, config: AdapterConfig, dim: int) -> None:
        super().__init__(config)
        narrow = max(1, dim // config.reduction)
        self.layers = (
            nn.Sequential(nn.Linear(dim, narrow, bias=False), nn.ReLU(), nn.Linear(narrow, dim, bias=False))
            if config.form == "residual"
            else nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Softmax(dim=1))
        )
        hidden = config.private_hidden
        if hidden:
            self.private = nn.Sequential(Masked(dim, hidden), nn.ReLU(), Masked(hidden, len(config.classes)))

    def images(self, vectors: Tensor) -> Tensor:
        made = self.layers(vectors)
        alpha = self.config.ratio
        changed = vectors * made if self.config.form == "attention" else (1 - alpha) * vectors + alpha * made
        return F.normalize(changed, dim=1)

    @torch.no_grad()
    def texts(self, model: Any, sentences: Any) -> Tensor:
        return super().texts(model, sentences)


class Masked(nn.Linear):
    """A linear layer without those of its outputs whose weights are small."""

    def forward(self, input: Tensor) -> Tensor:
        strong = self.weight.detach().abs().mean(dim=1, keepdim=True) > WEAK
        return F.linear(input, self.weight * strong, self.bias)
