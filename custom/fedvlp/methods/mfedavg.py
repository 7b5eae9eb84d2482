"""mFedAvg and mFedAvgP (Poudel et al., 2024, https://arxiv.org/abs/2407.04011): each tower averaged over its owners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from fedvlp.core.aggregation import StreamingMean
from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import MODALITIES, Broadcast, State, Update, modality
from fedvlp.core.validate import require

VIRTUAL = "public"
"""The phase in which the server trains on the public set, as one more client."""


@dataclass(frozen=True)
class MFedAvg(Method):
    """FedAvg for sites with images, reports or both; the model puts zeros where an absent modality's feature would be.

    A tower is averaged, by samples, over the sites that have its modality; what both share (the classifier) over all.
    Where nobody has a modality, its tower stays as it is. With every site paired and no public set this is FedAvg.
    Differs: a fixed number of local steps at every site, not three epochs; no gradient clipping, no half precision.
    """

    uses_public: ClassVar[bool] = True

    public: bool = False  # mFedAvgP: the server trains on the public set, as one more client of n_p samples
    private: bool = True  # False is the paper's lower bound: the public set alone, trained centrally

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.public or self.private, "neither public nor private records would train; set one of them")

    def steps(self, phase: str) -> int:
        return self.local_steps if self.private or phase == VIRTUAL else 0

    # Server half
    def expects(self, server: Server, site: str) -> tuple[State, State]:
        return {n: t for n, t in server.state.items() if self.sends(server.modalities[site], n)}, {}

    def share(self, held: tuple[str, ...], part: str) -> float:
        """The factor of n_k in the mean of a ``part`` (image, text, or "" for what both share) at a site."""
        return float(not part or part in held)

    def factors(self, server: Server, update: Update) -> dict[str, float]:
        """The factor of every part for one update."""
        held = server.modalities.get(update.site, MODALITIES)  # the server itself has both
        counts = self.private or update.site not in server.sites
        return {part: counts * self.share(held, part) for part in (*MODALITIES, "")}

    def weighted(self, server: Server, updates: Iterable[Update]) -> Iterator[tuple[Update, dict[str, float]]]:
        """Every update with its weight in the mean of each part; only ratios count."""
        for update in updates:
            n = self.weight(server, update)
            yield update, {part: n * share for part, share in self.factors(server, update).items()}
            del update  # before the next one comes

    def aggregate(self, server: Server, updates: Iterable[Update], phase: str) -> None:
        parts = {part: {n: t for n, t in server.state.items() if modality(n) == part} for part in (*MODALITIES, "")}
        means = {part: StreamingMean(tensors) for part, tensors in parts.items()}
        for update, weights in self.weighted(server, chain(updates, self.virtual_client(server))):
            for part, mean in means.items():
                mean.add(update.state, weights[part])
            del update
        server.replace({name: tensor for mean in means.values() for name, tensor in mean.result().items()})

    def virtual_client(self, server: Server) -> Iterator[Update]:
        """The server's own update, trained on the public set from the weights that the sites were sent."""
        if self.public and server.host is not None:
            host = server.host
            state = host.trained(self, server, VIRTUAL)
            yield Update(host.client.name, server.round, server.phase, host.client.data.num_train, state)

    # Site half
    def sends(self, held: tuple[str, ...], name: str) -> bool:
        """Whether a site that holds the modalities ``held`` sends the tensor ``name``."""
        return modality(name) in (*held, "")

    def upload(self, client: Client, message: Broadcast) -> State:
        return {name: t for name, t in client.state().items() if self.sends(client.data.modalities, name)}
