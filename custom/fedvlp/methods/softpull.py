"""SoftPull (Xu et al., 2022, FedSM, https://arxiv.org/abs/2203.10144): personalised models pulled towards each other.

The part that FedSM and PMS-FM share: beside the global model the server keeps one model per site.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedvlp.core.aggregation import MEAN, Aggregator
from fedvlp.core.client import EXTRA
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.tensor_file import TensorFile
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
        shared = {name: t for name, t in server.state.items() if self.shares(name, "personal")}
        own = server.copy("personal", shared)
        for site in server.sites:  # a file is the same for all until they have trained
            server.remember(_owned(site), own if isinstance(own, TensorFile) else server.copy(_owned(site), shared))

    def personal(self, server: Server, site: str) -> State:
        """The personalised model of ``site``: every tensor that ``personal`` trains."""
        return server.remembered(_owned(site), server.state)

    def broadcast(self, server: Server, site: str) -> Broadcast:
        return replace(super().broadcast(server, site), state=self.sent(server, site))

    def sent(self, server: Server, site: str) -> State:
        return server.state | self.personal(server, site) if server.phase == "personal" else server.state

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return PersonalModels(self, server) if phase == "personal" else super().aggregator(server, phase)


class PersonalModels:
    """Aggregator of the ``personal`` phase: pulls the personalised models of all sites towards each other.

    Large ones are on disk, and pulled there piece by piece: one of them is in memory while it comes, none afterwards.
    """

    def __init__(self, method: SoftPull, server: Server) -> None:
        self._method = method
        self._server = server
        self._models: dict[str, Mapping[str, Tensor]] = {}

    def add(self, update: Update) -> None:
        self._models[update.site] = self._server.copy(_owned(update.site), update.state)

    def commit(self) -> None:
        server = self._server
        for site in server.sites:
            if site not in self._models:  # the silent keep what they have
                self._models[site] = server.copy(_owned(site), self._method.personal(server, site))
        models = {site: self._models[site] for site in server.sites}
        for site, own in self._pulled(models).items():
            server.remember(_owned(site), own)

    def _pulled(self, models: dict[str, Mapping[str, Tensor]]) -> Mapping[str, Mapping[str, Tensor]]:
        """The models of all sites after the pull."""
        factor = self._method.softpull
        if self._server.averaging.kind == MEAN or len(models) == 1:
            return pulled_together(models, factor)
        average = self._server.mean(dict(next(iter(models.values()))))
        for model in models.values():
            average.add(model, 1.0)
        middle = average.result()
        return {site: changed(model, towards(model, middle, factor)) for site, model in models.items()}


def towards(model: Mapping[str, Tensor], middle: State, factor: float) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model that are pulled towards ``middle``, one at a time."""
    for name, tensor in middle.items():
        yield name, torch.lerp(tensor.double(), model[name].double(), factor).to(tensor.dtype)


def changed(model: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> Mapping[str, Tensor]:
    """The model with other values for some of its tensors; on disk in place."""
    if not isinstance(model, TensorFile):
        return {**model, **dict(tensors)}
    for name, tensor in tensors:
        model.write(name, 0, tensor)
    return model


def pulled_together(models: Mapping[str, Mapping[str, Tensor]], factor: float) -> Mapping[str, Mapping[str, Tensor]]:
    """:func:`soft_pull` of models that are all in memory or all on disk, where it is done in place."""
    files = {site: model for site, model in models.items() if isinstance(model, TensorFile)}
    if len(files) < len(models):
        return soft_pull({site: dict(model) for site, model in models.items()}, factor)
    first = next(iter(files.values()))
    for name in first:
        for start, stop in first.pieces(name):
            values = {site: {name: file.read(name, start, stop)} for site, file in files.items()}
            for site, own in soft_pull(values, factor).items():
                files[site].write(name, start, own[name])
    return files


def _owned(site: str) -> str:
    """The group of the server's memory that holds the model of ``site``."""
    return f"personal/{site}"


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
            # Of K models each needs the sum of the other K - 1: the whole sum less its own.
            total = torch.stack([model[name].double() for model in models.values()]).sum(dim=0)
            for site, model in models.items():
                own = model[name].double()
                pulled[site][name] = (factor * own + share * (total - own)).to(example.dtype)
    return pulled
