"""FedMOON: MOON (Li et al., 2021, https://arxiv.org/abs/2103.16257): embeddings are drawn to the global model's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.client import OBJECTIVE, Client
from fedvlp.core.method import Method
from fedvlp.core.types import Batch, Broadcast, State, VLOutput
from fedvlp.core.validate import require


@dataclass(frozen=True)
class FedMOON(Method):
    """FedAvg with a contrast between models. z: embeddings of a batch under the model that trains; z_g: under the
    received one; z_p: under the one that this site ended its last training with; sim: the cosine:

        L = L_VLP - mu mean log [ e^{sim(z, z_g)/T} / (e^{sim(z, z_g)/T} + e^{sim(z, z_p)/T}) ]     (1)

    the mean over the batch, and over image and text where a batch has both. A site's last model stays in its memory; at
    first it is the received one, so the term is log 2 and its gradient 0 until a site has trained once.

    What leaves a site is what leaves it under FedAvg.
    ``mu=0`` is FedAvg, bit for bit.
    Differs: the paper has one modality and a projection of 256 for z; here z is what the objective compares. z_g and
    z_p have no dropout, and normalise as the model that trains does (spec Z1), not as in eval mode.
    """

    fixes_encoders: ClassVar[bool] = True
    sends_plainly: ClassVar[bool] = True  # ``upload`` remembers the model as well

    mu: float = 1.0  # weight of the contrast, eq. 1, >= 0; 0 is FedAvg (paper: 5 or 1)
    temperature: float = 0.5  # T, eq. 1, > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mu >= 0, f"mu is {self.mu}; the weight of the contrast must not be negative")
        require(0 < self.temperature < math.inf, f"temperature is {self.temperature}; it must be positive and finite")

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        if self.mu == 0:
            return super().losses(client, batch, message)
        output = client.model(batch)
        terms: dict[str, Tensor] = client.objective(output, batch)
        # z_g and z_p; before its first training a site has no last model, and the term is log 2.
        received = client.target(batch, message.state)
        last = client.target(batch, message.state, client.memory) if client.memory else received
        contrasts = self.contrasts(output, received, last)
        return {**terms, "model_contrast": self.mu * torch.stack(contrasts).mean()} if contrasts else terms

    def contrasts(self, output: VLOutput, received: VLOutput, last: VLOutput) -> list[Tensor]:
        """The term of eq. 1 without mu, of every modality that the batch has."""
        terms = []
        for name in ("image", "text"):
            z, z_g, z_p = (getattr(one, name) for one in (output, received, last))  # [B, d]
            if z is not None:
                towards, away = (F.cosine_similarity(z, other) / self.temperature for other in (z_g, z_p))  # [B]
                terms.append(F.softplus(away - towards).mean())  # -log(e^a / (e^a + e^b)) = log(1 + e^{b - a})
        return terms

    def upload(self, client: Client, message: Broadcast) -> State:
        if self.mu:
            last = {name: t for name, t in client.state().items() if not name.startswith(OBJECTIVE)}
            # The site keeps its own normalisation beside the memory, and one file cannot hold a tensor twice.
            client.memory = last | {name: last[name].clone() for name in client.site_only & last.keys()}
        return super().upload(client, message)
