"""FedEMA (Zhuang et al., 2022, https://arxiv.org/abs/2204.04385): BYOL; sites merge the global model into their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedvlp.core.client import Client
from fedvlp.core.types import State
from fedvlp.core.validate import require
from studies.rivals.local_target import DIVERGENCE, LocalTarget, divergence

OWN, SCALE = "own/", "scale"


@dataclass(frozen=True)
class FedEMA(LocalTarget):
    """Online network and predictor w; site k, its own w_k and its divergence d_k of the round before:

    1. The site starts from mu_k w_k + (1 - mu_k) w, mu_k = min(lambda_k d_k, 1); its target network is its own.
    2. It trains; d_k is the mean of |w_after - w_before| over weight matrices.
    3. Server: w <- the sites' mean.

    lambda_k = ``tau`` / d_k of the site's first round, or ``scale``. In its first round a site starts from w.
    ``tau=0`` and ``scale=0`` are FedAvg of the same objective, whose target networks stay at the sites.
    """

    tau: float = 0.7  # mu_k of a site's second round, 0 to 1 (paper; default of the released code: 0.8)
    scale: float | None = None  # lambda, the same for every site, >= 0; None: from ``tau``; a large one: sites alone

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.tau <= 1, f"tau is {self.tau}; it must be in [0, 1]")
        require(self.scale is None or self.scale >= 0, f"scale is {self.scale}; it must not be negative")

    def evaluates(self) -> str:
        merges = self.tau if self.scale is None else self.scale
        return "a mixture of its own model and the server's" if merges else ""

    @torch.no_grad()
    def begins(self, client: Client, received: State) -> State:
        # Step 1: the more the last training moved the model, the more of its own the site keeps.
        share = min(float(client.memory[SCALE] * client.memory[DIVERGENCE]), 1.0)  # mu_k
        own = {name.removeprefix(OWN): t for name, t in client.memory.items() if name.startswith(OWN)}
        return received | {name: torch.lerp(received[name], tensor, share) for name, tensor in own.items()}

    def remembers(self, client: Client, start: State) -> State:
        moved = divergence(client, start)
        # lambda_k is set once, by the divergence of the site's first round.
        first = moved.new_tensor(self.scale) if self.scale is not None else self.tau / moved.clamp_min(1e-12)
        own = {OWN + name: t for name, t in client.state().items() if name in start and t.is_floating_point()}
        own = {name: t for name, t in own.items() if name.removeprefix(OWN) not in client.site_only}
        return own | {DIVERGENCE: moved, SCALE: client.memory.get(SCALE, first)}
