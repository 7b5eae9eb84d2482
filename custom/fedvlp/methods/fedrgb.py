"""FedRGB (Shuai & Shen, 2024, https://arxiv.org/abs/2404.03854v1): a robustly trained aligner guides local training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, Broadcast, State, VLOutput, group
from fedvlp.core.validate import require
from fedvlp.methods.guidance import guidance
from fedvlp.methods.robust import RobustWeights, contrastive

FORMS = ("guidance", "eq2")


def aligner(name: str) -> bool:
    """Whether the tensor belongs to an aligner: alignment module and projection head."""
    return group(name) in ("alignment", "head")


@dataclass(frozen=True)
class FedRGB(RobustWeights):
    """Each round: ``local`` trains encoders and aligners under a teacher aligner, ``aligner`` trains the teacher.

    With encoders enc, site i's aligner al_i and the teacher al* (all received at the start of a round, al_i = al*):

        local    z = al_i(enc(x)), zt = al*(enc(x)):  L_task(z) + alpha (|zt_I - z_I|^2 + |zt_T - z_T|^2)  (eq. 1, 2)
        aligner  f = mean of the encoders, frozen; f' = a copy that learns; zt = al*(f'(x)), zt~ = al*(f(x)):
                 beta (|zt~_I - zt_I|^2 + |zt~_T - zt_T|^2) + L_CL(zt_I, zt_T) + L_task(al_i(f'(x)))  (eq. 6)

    ``local`` uploads encoders (and the objective's own parameters), ``aligner`` uploads al*, weighted by w; f' is
    dropped and al_i stays in the site's memory. The model is (enc, al*). ``avg_aligner, alpha=0`` is FedAvg with
    uniform weights, bit for bit.
    Differs: alpha weighs the guidance, as the paper's section 5.4 describes, not L_task, as eq. 2 prints (``eq2``);
    al_i is not sent; v_i is L_dro of the model that the round starts from (zt~ = zt, so L_CL + L_task), measured in
    ``local``; a site that missed ``local`` uses its al_i of an earlier round, or the teacher if it has none.
    """

    fixes_encoders: ClassVar[bool] = True

    local_steps: int = 50  # steps of the local phase, E
    aligner_steps: int = 50  # steps of the aligner phase, E
    alpha: float = 1.0  # weight of the teacher's guidance, >= 0; 0 = none
    beta: float = 2.0  # weight of the teacher's consistency (eq. 6), >= 0
    gamma: float = 1.0  # step of the weights, >= 0
    rho: float = 1.0  # radius of the weights' ball, >= 0; 0 = uniform
    loss_form: str = "guidance"  # what alpha weighs: guidance | eq2 (as printed: guidance + alpha L_task)
    avg_aligner: bool = False  # ablation: no aligner phase, the teacher is the mean of the sites' aligners
    contrastive_guidance: bool = False  # ablation "CL": a contrastive loss between zt and z instead of the distance

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha >= 0, f"alpha is {self.alpha}; the weight must not be negative")
        require(self.beta >= 0, f"beta is {self.beta}; the weight must not be negative")
        require(self.loss_form in FORMS, f"loss_form is {self.loss_form!r}; choose one of {', '.join(FORMS)}")
        require(self.local_steps > 0, "local_steps is 0; the encoders would never train")
        require(self.aligner_steps > 0 or self.avg_aligner, "aligner_steps is 0; avg_aligner leaves that phase out")

    def phases(self, round: int) -> tuple[str, ...]:
        return ("local",) if self.avg_aligner else ("local", "aligner")

    def steps(self, phase: str) -> int:
        return self.aligner_steps if phase == "aligner" else self.local_steps

    def trains(self, name: str, phase: str) -> bool:
        return phase == "local" or aligner(name) or group(name) == "encoder"

    def shares(self, name: str, phase: str) -> bool:
        return self.avg_aligner or aligner(name) == (phase == "aligner")

    def moments(self, name: str, phase: str) -> str:
        """In ``aligner`` the teacher has its own, al_i being another model, and those of f' are dropped as f' is."""
        if phase != "aligner":
            return self.trainee(phase)
        return "teacher" if aligner(name) else ""

    def multiplier(self, server: Server, site: str) -> float:
        """The weights act on the aligner phase alone (min over al* of max over w)."""
        return super().multiplier(server, site) if server.phase == "aligner" else 1.0

    def hardness(self, terms: dict[str, Tensor]) -> Tensor:
        return contrastive(terms) + torch.stack(list(terms.values())).sum()  # L_CL + L_task

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        encoded = client.model.encode(batch)
        output = client.model.project(encoded)
        if message.phase == "aligner":
            return self._aligner_losses(client, batch, message, encoded, output)
        terms: dict[str, Tensor] = client.objective(output, batch)
        if self.loss_form == "eq2":
            terms = {name: self.alpha * term for name, term in terms.items()}
        elif self.alpha == 0:
            return terms
        # zt = al*(enc(x)), by which alpha pulls z.
        teacher = client.anchor(message.state).project(encoded)  # frozen, but enc learns through it
        weight = 1.0 if self.loss_form == "eq2" else self.alpha
        return {**terms, "guide": weight * self._guide(client, batch, output, teacher)}

    def _aligner_losses(
        self, client: Client, batch: Batch, message: Broadcast, encoded: Any, output: VLOutput
    ) -> dict[str, Tensor]:
        # L_task(al_i(f'(x))): the site's own aligner, frozen, on the encoders that learn.
        frozen = client.anchor(message.state, client.memory)  # f with al_i
        terms: dict[str, Tensor] = client.objective(frozen.project(encoded), batch)
        with torch.no_grad():
            features = frozen.encode(client.encoded(batch, message.state, client.memory))
        # L_CL(zt_I, zt_T), then beta times the distance of zt = al*(f'(x)) from zt~ = al*(f(x)).
        terms["teacher"] = contrast(client, batch, (output.image, output.text))
        return {**terms, "consistency": self.beta * guidance(output, client.model.project(features))}

    def _guide(self, client: Client, batch: Batch, output: VLOutput, teacher: VLOutput) -> Tensor:
        if not self.contrastive_guidance:
            return guidance(output, teacher)
        return contrast(client, batch, (teacher.image, output.image), (teacher.text, output.text))

    def upload(self, client: Client, message: Broadcast) -> State:
        if message.phase == "local" and not self.avg_aligner:
            client.memory = {name: tensor for name, tensor in client.state().items() if aligner(name)}
        return super().upload(client, message)


def contrast(client: Client, batch: Batch, *pairs: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """The objective's contrastive loss between paired embeddings [B, d], summed over the pairs that are there."""
    there = [VLOutput(image=one, text=other) for one, other in pairs if one is not None and other is not None]
    losses = [contrastive(client.objective(output, batch)) for output in there]
    return torch.stack(losses).sum() if losses else torch.zeros(())
