"""mFedAvg and mFedAvgP (Poudel et al., 2024, https://arxiv.org/abs/2407.04011): each tower averaged over its owners."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.metric_keys import MACRO_AUC_ON_VAL
from fedvlp.core.server_state import Server
from fedvlp.core.types import MODALITIES, Broadcast, Expected, State, Update, modality
from fedvlp.core.validate import require

VIRTUAL = "public"
"""The phase in which the server trains on the public set, as one more client."""

BEST, BEST_FIGURE, BEST_ROUND = "best/", "best_figure", "best_round"
"""In the server's memory: the weights of the best round so far, its figure [] on the public set, and how many rounds []
were complete then. After the last evaluation, of whose model these are, the figure and the round remain."""


@dataclass(frozen=True)
class MFedAvg(Method):
    """FedAvg for sites with images, reports or both; the model puts zeros where an absent modality's feature would be.

    A tower is averaged, by samples, over the sites that have its modality; what both share (the classifier) over all.
    Where no site has a modality, its tower stays as it is. With every site paired and no public set this is FedAvg.
    Differs: a fixed number of local steps at every site, not three epochs; gradient clipping and half precision are
    settings of ``training``.
    """

    uses_public: ClassVar[bool] = True

    public: bool = False  # mFedAvgP: the server trains on the public set, as one more client of n_p samples
    private: bool = True  # False is the paper's lower bound: the public set alone, trained centrally
    best_by: str = MACRO_AUC_ON_VAL  # the figure on the public set whose best round is the model (8.4); "" = the last

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.public or self.private, "neither public nor private records would train; set one of them")

    def steps(self, phase: str) -> int:
        return self.local_steps if self.private or phase == VIRTUAL else 0

    # Server half
    def start(self, server: Server) -> None:
        require(
            not self.best_by or server.trainer is None or not server.trainer.client.site_only,
            f"method.best_by is {self.best_by}: the best round's model would be served with the last round's "
            "normalisation or private adapters, which stay at the sites (norm_statistics=site, "
            "model.adapter_private=true); set method.best_by to nothing (method.best_by=) for the last round's model",
        )

    def prepare(self, server: Server) -> None:
        if server.round:  # before round 0 nothing has been trained
            keep_best(server, server.metrics.get(self.best_by))

    def conclude(self, server: Server) -> None:
        """The best of the rounds that were evaluated, the last among them, is the model (spec 8.4)."""
        if BEST_FIGURE in server.memory and server.trainer is not None:
            keep_best(server, server.trainer.measure(server.state, 1).get(self.best_by))
            best = {name.removeprefix(BEST): t for name, t in server.memory.items() if name.startswith(BEST)}
            server.replace(best)
            server.memory = {name: t for name, t in server.memory.items() if not name.startswith(BEST)}

    def expects(self, server: Server, site: str) -> Expected:
        return Expected({n: t for n, t in server.state.items() if self.sends(server.modalities[site], n)})

    def share(self, held: tuple[str, ...], tower: str) -> float:
        """The factor of n_k in the mean of a ``tower`` (image, text, or "" for what both share) at a site."""
        return float(not tower or tower in held)

    def factors(self, server: Server, update: Update) -> dict[str, float]:
        """The factor of every tower for one update."""
        held = server.modalities.get(update.site, MODALITIES)  # the server itself has both
        counts = self.private or update.site not in server.sites
        return {tower: counts * self.share(held, tower) for tower in (*MODALITIES, "")}

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return TowerMeans(self, server)

    def virtual_client(self, server: Server) -> Update | None:
        """The server's own update, trained on the public set from the weights that the sites were sent."""
        trainer = server.trainer
        if not self.public or trainer is None:
            return None
        state = trainer.as_client(self, server, VIRTUAL)
        return Update(trainer.client.name, server.round, server.phase, trainer.client.data.num_train, state)

    # Site half
    def sends(self, held: tuple[str, ...], name: str) -> bool:
        """Whether a site that holds the modalities ``held`` sends the tensor ``name``."""
        return modality(name) in (*held, "")

    def upload(self, client: Client, message: Broadcast) -> State:
        return {name: t for name, t in client.state().items() if self.sends(client.modalities, name)}


def keep_best(server: Server, figure: float | None) -> None:
    """Notes the server's weights in its memory if no round before had a better ``figure``; None says nothing."""
    if figure is not None and figure > float(server.memory.get(BEST_FIGURE, -math.inf)):
        server.memory |= {BEST + name: tensor.clone() for name, tensor in server.state.items()}
        server.memory[BEST_FIGURE] = torch.tensor(figure, dtype=torch.float64)
        server.memory[BEST_ROUND] = torch.tensor(server.round)


class TowerMeans:
    """One mean for each tower, over the sites that have its modality, and one for what both share."""

    def __init__(self, method: MFedAvg, server: Server) -> None:
        self.method = method
        self.server = server
        self._means = {}
        for tower in (*MODALITIES, ""):
            tensors = {name: t for name, t in server.state.items() if modality(name) == tower}
            self._means[tower] = server.mean(tensors)

    def add(self, update: Update) -> None:
        samples = self.method.weight(self.server, update)
        factors = self.method.factors(self.server, update)
        self.fold(update, {tower: samples * factor for tower, factor in factors.items()})

    def fold(self, update: Update, weights: Mapping[str, float]) -> None:
        """Adds an update with its weight in the mean of each tower; only ratios count."""
        for tower, mean in self._means.items():
            mean.add(update.state, weights[tower])

    def commit(self) -> None:
        # The server trains on the public set as one more site, after the others' updates have come.
        own = self.method.virtual_client(self.server)
        if own is not None:
            self.add(own)
        self.write()

    def write(self) -> None:
        """The means become the server's weights."""
        for mean in self._means.values():
            self.server.replace(mean.result())
