"""SoftPull (Xu et al., 2022, FedSM, https://arxiv.org/abs/2203.10144): personalised models pulled towards each other.

The part that FedSM and PMS-FM share: beside the global model the server keeps one model per site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import EXTRA
from fedvlp.core.method import Method
from fedvlp.core.robust_mean import MEAN
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, State, Update
from fedvlp.core.validate import require


@dataclass(frozen=True)
class SoftPull(Method):
    """Each round: ``train`` is FedAvg on the global model, then ``personal`` trains site k's own model w_k at site k.

    After it, w_k <- softpull w_k + (1 - softpull) / (K - 1) sum_{j != k} w_j for each of the K sites. A site is sent
    its own w_k alone. The global model is FedAvg's, bit for bit. Where the run asks for a robust average
    (``rounds.averaging``), w_k is pulled towards that of all K models instead: in the sum one site reaches all others.
    """

    softpull: float = 0.7  # lambda in (0, 1]: 1 leaves the personalised models alone, 1/K makes them all the same

    def __post_init__(self) -> None:
        super().__post_init__()
        # 0 would hand each of two sites the other's very model
        require(0 < self.softpull <= 1, f"softpull is {self.softpull}; it must be in (0, 1]")

    def phases(self, round: int) -> tuple[str, ...]:
        return ("train", "personal")

    def trains(self, name: str, phase: str) -> bool:
        return not name.startswith(EXTRA)

    def trainee(self, phase: str) -> str:
        return "personal" if phase == "personal" else "model"

    def start(self, server: Server) -> None:
        for site in server.sites:
            own = {name: t.clone() for name, t in server.state.items() if self.shares(name, "personal")}
            server.memory |= {_owned(site, name): tensor for name, tensor in own.items()}

    def personal(self, server: Server, site: str) -> State:
        """The personalised model of ``site``: every tensor that ``personal`` trains."""
        prefix = _owned(site, "")
        return {n.removeprefix(prefix): t for n, t in server.memory.items() if n.startswith(prefix)}

    def broadcast(self, server: Server, site: str) -> Broadcast:
        message = super().broadcast(server, site)
        if server.phase != "personal":
            return message
        return replace(message, state=server.state | self.personal(server, site))

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return PersonalModels(self, server) if phase == "personal" else super().aggregator(server, phase)


class PersonalModels:
    """Aggregator of the ``personal`` phase: pulls the personalised models of all sites towards each other."""

    def __init__(self, method: SoftPull, server: Server) -> None:
        self._method = method
        self._server = server
        self._models = {site: method.personal(server, site) for site in server.sites}  # the silent keep what they have

    def add(self, update: Update) -> None:
        self._models[update.site] = {name: tensor.clone() for name, tensor in update.state.items()}

    def commit(self) -> None:
        for site, own in self._pulled().items():
            self._server.memory |= {_owned(site, name): tensor for name, tensor in own.items()}

    def _pulled(self) -> dict[str, State]:
        """The models of all sites after the pull."""
        models, factor = self._models, self._method.softpull
        if self._server.averaging.kind == MEAN or len(models) == 1:
            return soft_pull(models, factor)
        average = self._server.mean(next(iter(models.values())))
        for model in models.values():
            average.add(model, 1.0)
        middle = average.result()
        return {
            site: model | {n: torch.lerp(t.double(), model[n].double(), factor).to(t.dtype) for n, t in middle.items()}
            for site, model in models.items()
        }


def _owned(site: str, name: str) -> str:
    return f"personal/{site}/{name}"


@torch.no_grad()
def soft_pull(models: Mapping[str, State], factor: float) -> dict[str, State]:
    """w_k <- factor w_k + (1 - factor) / (K - 1) sum_{j != k} w_j: the sum over the K models stays the same.

    In float64. Integer buffers stay each model's own; a single model stays as it is.
    """
    if len(models) == 1:
        return dict(models)
    share = (1 - factor) / (len(models) - 1)
    pulled: dict[str, State] = {site: dict(model) for site, model in models.items()}
    for name, example in next(iter(models.values())).items():
        if example.is_floating_point():
            total = torch.stack([model[name].double() for model in models.values()]).sum(dim=0)
            for site, model in models.items():
                own = model[name].double()
                pulled[site][name] = (factor * own + share * (total - own)).to(example.dtype)
    return pulled
