"""FedDRA (Shuai et al., 2024, https://arxiv.org/abs/2404.03854): aligns, then trains all, robustly weighting sites."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.method import require
from fedvlp.core.types import Batch, Broadcast, group
from fedvlp.methods.guidance import guidance
from fedvlp.methods.robust import RobustWeights

REDUCTIONS = ("sum_dim", "mean_dim")


@dataclass(frozen=True)
class FedDRA(RobustWeights):
    """Each round: ``align`` trains alignment modules and heads with frozen encoders, ``joint`` trains everything.

    Anchors come from the frozen global model that the phase starts from. ``align_steps=0, mu=0, rho=0`` is FedAvg
    with uniform weights, bit for bit. Differs from the released code, as spec 4.5 says: stage 2 starts from the
    averaged alignment modules, anchors run in eval mode, the weights act and are kept.
    """

    local_steps: int = 50  # steps of the joint phase, E2
    align_steps: int = 20  # steps of the align phase, E1; 0 = one stage
    align_every: int = 1  # the align phase comes in rounds 0, k, 2k, ...
    mu: float = 5.0  # weight of the global constraint L_C, >= 0; 0 = none (retina: 1)
    constraint_reduction: str = "sum_dim"  # sum_dim (paper) | mean_dim (released code)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.align_steps >= 0, f"align_steps is {self.align_steps}; 0 leaves the align phase out")
        require(self.align_steps + self.local_steps > 0, "align_steps and local_steps are both 0; nothing would train")
        require(self.align_every >= 1, f"align_every is {self.align_every}; 1 = in every round")
        require(self.local_steps > 0 or self.align_every == 1, "without a joint phase, align_every must be 1")
        require(self.mu >= 0, f"mu is {self.mu}; the constraint's weight must not be negative")
        require(
            self.constraint_reduction in REDUCTIONS,
            f"constraint_reduction is {self.constraint_reduction!r}; choose one of {', '.join(REDUCTIONS)}",
        )

    def phases(self, round: int) -> tuple[str, ...]:
        align = ("align",) if self.align_steps and round % self.align_every == 0 else ()
        return align + (("joint",) if self.local_steps else ())

    def steps(self, phase: str) -> int:
        return self.align_steps if phase == "align" else self.local_steps

    def trains(self, name: str, phase: str) -> bool:
        return phase != "align" or group(name) != "encoder"

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        encoded = client.model.encode(batch)
        output = client.model.project(encoded)
        terms: dict[str, Tensor] = client.objective(output, batch)
        if self.mu == 0:
            return terms
        anchor = client.anchor(message.state)
        with torch.no_grad():  # a frozen encoder is the anchor's own: its features serve both
            target = anchor.project(encoded if message.phase == "align" else anchor.encode(batch))
        return {**terms, "constraint": self.mu * guidance(output, target, self.constraint_reduction)}
