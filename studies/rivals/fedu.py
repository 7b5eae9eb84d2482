"""FedU (Zhuang et al., 2021, https://arxiv.org/abs/2108.06492): BYOL whose predictor stays where sites diverge."""

from __future__ import annotations

from dataclasses import dataclass

from fedvlp.core.client import PREDICTOR, Client
from fedvlp.core.types import State
from fedvlp.core.validate import require
from studies.rivals.local_target import DIVERGENCE, LocalTarget, divergence


@dataclass(frozen=True)
class FedU(LocalTarget):
    """Online network w, predictor p, target network xi; site k, its divergence d_k of the round before:

    1. The site takes the received w and, if d_k < ``threshold``, the received p; else its own p_k. xi_k is its own.
    2. It trains w and p, xi_k following; d_k is the mean of |w_after - w_before| over weight matrices.
    3. Server: w, p <- the sites' means. Which p a site continues from is decided at the site.

    Under an objective without predictor and target network it is FedAvg, bit for bit.
    Differs: the text tower is averaged with w, since a report's matching image is on the other side of the loss.
    """

    threshold: float = 0.4  # of the divergence, >= 0; 0: always the site's own predictor, inf: always the global one

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.threshold >= 0, f"threshold is {self.threshold}; it must not be negative")

    def begins(self, client: Client, received: State) -> State:
        if float(client.memory[DIVERGENCE]) < self.threshold:
            return received
        return received | {name: t for name, t in client.memory.items() if name.startswith(PREDICTOR)}

    def remembers(self, client: Client, start: State) -> State:
        own = {name: tensor for name, tensor in client.state().items() if name.startswith(PREDICTOR)}
        return own | {DIVERGENCE: divergence(client, start)}
