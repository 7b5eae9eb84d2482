"""FedProx (Li et al., 2020, https://arxiv.org/abs/1812.06127): pulls local weights towards the global ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.types import Batch, Broadcast
from fedvlp.core.validate import require


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term over the trainable parameters (buffers are not pulled)."""

    mu: float = 0.01  # proximal coefficient, eq. 2, >= 0; 0 is FedAvg

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mu >= 0, f"mu is {self.mu}; the proximal coefficient must not be negative")

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        terms = super().losses(client, batch, message)
        if self.mu == 0:
            return terms
        drift = [(p - message.state[name]).square().sum() for name, p in client.trainable()]
        return {**terms, "prox": self.mu / 2 * sum(drift[1:], drift[0])}
