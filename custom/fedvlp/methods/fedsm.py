"""FedSM (Xu et al., 2022, https://arxiv.org/abs/2203.10144): global model, personalised models, and a selector."""

from __future__ import annotations

from dataclasses import dataclass

from fedvlp.methods.selection import Selection


@dataclass(frozen=True)
class FedSM(Selection):
    """SoftPull and a selector of the image alone (``SelectorConfig(embeddings=("image",))``), as in FLARE's example.

    ``softpull=1`` trains each site's model alone; ``threshold`` above 1 uses the global model alone, FedAvg's.
    Differs: the selector reads the image's embedding, not its pixels.
    """

    softpull: float = 0.7  # lambda, eq. 5; FLARE's research/fed-sm
    threshold: float = 0.9  # gamma; FLARE's research/fed-sm
