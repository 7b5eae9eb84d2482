"""FedET (Cho et al., 2022, https://arxiv.org/abs/2204.12703): confident sites weigh more in what the server distils."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedvlp.core.server_state import Server
from fedvlp.core.types import Update
from fedvlp.methods.ensemble import PublicEnsemble


@dataclass(frozen=True)
class FedET(PublicEnsemble):
    """A site's weight for a public item is the variance of what it sent for it, over the d entries.

    Differs: representations in place of class scores, so the weighted mean is met in squared distance and there is no
    diversity term; no layers travel back, as every site has its own architecture.
    """

    def log_weights(self, server: Server, update: Update, modality: str, sent: Tensor) -> Tensor:
        return sent.var(dim=1, unbiased=False).log()
