"""FedX (Han et al., 2022, https://arxiv.org/abs/2207.09158): the site learns views from itself and the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.client import OBJECTIVE, Client
from fedvlp.core.method import Method
from fedvlp.core.types import Batch, Broadcast
from fedvlp.core.validate import require


@dataclass(frozen=True)
class FedX(Method):
    """An image's views x, x'; z = the projector's vectors, p = the predictor's of z, z* = the global model's vectors:

        L_ITC + NT-Xent(z, z')                                              the objective (``NTXentConfig``)
        + contrast_weight NT-Xent(p, z*')                                   global contrast
        + relation_weight [ JS(z, z'; z_ref) + JS(p, p'; z*_ref) ]          relations, local and global

    JS compares how two views relate to a reference set: with r(x) = softmax_j(cos(x, ref_j) / T),
    m = mean of the two r at ``student_temperature`` (local) or ``teacher_temperature`` (global),
    it is (KL(m || r) + KL(m || r')) / 2. The second half of a batch is the reference set of its first half.
    Both weights 0, or an objective without views, is FedAvg. The predictor is the objective's (``predictor=true``);
    without one p is z. Differs from the released code: contrasts are over the whole batch; the frozen global model
    normalises as the site's own does (spec Z1); sites are weighted by their records alone.
    """

    contrast_weight: float = 1.0  # of the global contrast, >= 0; 0 = none
    relation_weight: float = 1.0  # of both relations, >= 0; 0 = none
    temperature: float = 0.1  # T of the relations, > 0
    teacher_temperature: float = 0.1  # of the targets of the global relation, > 0
    student_temperature: float = 0.1  # of the targets of the local relation, > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("contrast_weight", "relation_weight"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("temperature", "teacher_temperature", "student_temperature"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        output, objective = client.model(batch), client.objective
        terms: dict[str, Tensor] = objective(output, batch)
        distils = self.contrast_weight > 0 or self.relation_weight > 0
        if not distils or output.views is None or not client.hooks.contrasts:
            return terms
        return terms | self.distilled(objective, output.views, self.taught(client, batch, message))

    @torch.no_grad()
    def taught(self, client: Client, batch: Batch, message: Broadcast) -> Tensor:
        """Vectors [B, 2, d] of the views by the received model and projector."""
        views = client.anchor(message.state)({"views": batch["views"]}).views  # [B, 2, M, W]
        received = {name.removeprefix(OBJECTIVE): t for name, t in message.state.items() if name.startswith(OBJECTIVE)}
        objective: Any = client.objective
        vectors: Tensor = objective.project(views, received)
        return vectors

    def distilled(self, objective: Any, views: Tensor, taught: Tensor) -> dict[str, Tensor]:
        """The terms beside the objective's, of the model's ``views`` [B, 2, M, W] and ``taught`` [B, 2, d]."""
        own = objective.project(views)  # [B, 2, d]
        predicted = objective.predictor(own)  # [B, 2, d]
        terms = {}
        if self.contrast_weight:
            terms["global"] = self.contrast_weight * objective.contrast(predicted[:, 0], taught[:, 1])
        # Relations are of a first half of the batch to the second: no item is compared with itself.
        half = len(own) // 2
        if self.relation_weight and half:
            local = relation(own[:half], own[half:, 0], self.temperature, self.student_temperature)
            shared = relation(predicted[:half], taught[half:, 0], self.temperature, self.teacher_temperature)
            terms["relation"] = self.relation_weight * (local + shared)
        return terms


def relation(views: Tensor, reference: Tensor, temperature: float, target_temperature: float) -> Tensor:
    """JS of two ``views`` [B, 2, d] in how they relate to ``reference`` [R, d]: a scalar in nats, mean over B.

    Computed in at least float32, also under autocast.
    """
    with torch.autocast(views.device.type, enabled=False):
        dtype = torch.promote_types(views.dtype, torch.float32)
        cosines = F.normalize(views.to(dtype), dim=2) @ F.normalize(reference.to(dtype), dim=1).T  # [B, 2, R]
        related = (cosines / temperature).log_softmax(dim=2)
        middle = (cosines / target_temperature).softmax(dim=2).mean(dim=1, keepdim=True).expand_as(related)
        return F.kl_div(related, middle, reduction="none").sum(dim=2).mean()
