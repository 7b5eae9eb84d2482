"""FedDRA (Shuai et al., 2024, https://arxiv.org/abs/2404.03854): aligns, then trains all, robustly weighting sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.types import Batch, Broadcast, VLOutput, group
from fedvlp.core.validate import require
from fedvlp.methods.guidance import guidance
from fedvlp.methods.robust import RobustWeights

REDUCTIONS = ("sum_dim", "mean_dim")


@dataclass(frozen=True)
class FedDRA(RobustWeights):
    """Algorithm 1, in the paper's symbols, and the hook that does each line.

    enc: encoders; al: alignment modules and projection heads; z = al(enc(x)): an embedding; a star: frozen as received;
    N: sites; w: their weights; eta: the learning rate. Round r:

    1. The server sends site i the model and N w_i (``RobustWeights.broadcast``). The frozen copy of what is received is
       the anchor of the phase (``losses``).
    2. ``align``, E1 steps, enc frozen (``trains``): al <- al - N w_i eta grad L.
    3. Server: al <- 1/N sum_i al_i (``weighting``). Sites go on from this mean, and so does the anchor.
    4. ``joint``, E2 steps: (enc, al) <- (enc, al) - N w_i eta grad L.
    5. Server: (enc, al) <- 1/N sum_i (enc_i, al_i).
    6. Server: w <- Proj_rho(w exp(gamma v) / sum), v_i being the loss of the model of line 1 on the records of site i
       (``RobustWeights.probe``, ``reweigh``).

        L = L_MI(z_x, z_y) + mu L_C,  L_C = mean over the batch of |z_x - z*_x|^2 + |z_y - z*_y|^2       (eq. 1)

    ``align_steps=0, mu=0, rho=0`` is FedAvg with uniform weights, bit for bit.
    Differs from the released code: line 4 starts from the mean of line 3, not from the site's own al; anchors have
    no dropout; the weights act, and are kept from round to round (there, every round begins with uniform ones).
    """

    fixes_encoders: ClassVar[bool] = True

    local_steps: int = 50  # E2, steps of the joint phase
    align_steps: int = 20  # E1, steps of the align phase; 0 = one stage
    align_every: int = 1  # the align phase comes in rounds 0, k, 2k, ...
    mu: float = 5.0  # weight of the global constraint L_C (eq. 1), >= 0; 0 = none (retina: 1)
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
        align = ("align",) if self.align_steps and round % self.align_every == 0 else ()  # line 2
        return align + (("joint",) if self.local_steps else ())  # line 4

    def steps(self, phase: str) -> int:
        return self.align_steps if phase == "align" else self.local_steps  # lines 2 and 4: E1 and E2

    def trains(self, name: str, phase: str) -> bool:
        return phase != "align" or group(name) != "encoder"  # line 2: enc is frozen and does not travel

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        # z = al(enc(x)). In ``align`` enc is frozen, so the anchor has the same features: they serve both.
        fixed = message.phase == "align"
        encoded = client.model.encode(client.encoded(batch, message.state) if fixed else batch)
        output = client.model.project(encoded)
        # L_MI, the contrast of images and reports; without L_C that is all.
        terms: dict[str, Tensor] = client.objective(output, batch)  # eq. 1: L_MI
        if self.mu == 0:
            return terms
        # L_C: how far the embeddings z have moved from z*, those of the received model, which has no gradient. Both are
        # of the whole batch: heads that normalise by part of it are another function, and L_C is not 0 at the anchor.
        target = client.target(batch, message.state, encoded=encoded if fixed else None)  # line 1: as received
        return {**terms, "constraint": self.mu * guidance(output, target, self.constraint_reduction)}  # eq. 1: mu L_C

    def received(self, client: Client, batch: Batch, message: Broadcast) -> VLOutput:
        return super().received(client, batch, message) if client.fixed is None else client.target(batch, message.state)
