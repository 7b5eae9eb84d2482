"""FedIoT, Mm-FedAvg (Zhao et al., 2022, https://arxiv.org/abs/2109.04833): towers are averaged modality by modality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Generator

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import MODALITIES, Batch, Broadcast, Expected, State, Update, modality
from fedvlp.core.validate import require

SHARED = ""  # what belongs to no modality, e.g. the objective


@dataclass(frozen=True)
class FedIoT(Method):
    """FedAvg in which a site sends, and is averaged over, the modalities that it has; multimodal sites count more.

    ``alpha=1`` and only multimodal sites is FedAvg. As in CreamFL's comparison all have the server's architecture, and
    the public set is given to the multimodal sites: every second step of theirs is on it.
    """

    uses_public: ClassVar[bool] = True

    alpha: float = 100.0  # how often a sample of a multimodal site counts, > 0
    share_public: bool = True  # whether multimodal sites train on the public set, too

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 0, f"alpha is {self.alpha}; it must be positive")

    def expects(self, server: Server, site: str) -> Expected:
        return Expected(held(server.modalities[site], server.state))

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return ModalityMeans(self, server)

    def batches(self, client: Client, message: Broadcast, batch_size: int, generator: Generator) -> Iterator[Batch]:
        private = super().batches(client, message, batch_size, generator)
        if not self.share_public or client.public is None or len(client.data.modalities) < 2:
            yield from private
            return
        public = client.public.train_batches(self.steps(message.phase), batch_size, generator)
        for step, batch in enumerate(private):
            yield next(public) if step % 2 else batch

    def upload(self, client: Client, message: Broadcast) -> State:
        return held(client.data.modalities, client.state())


class ModalityMeans:
    """One mean for each modality's tensors, over the sites that have it, and one for what all share."""

    def __init__(self, method: FedIoT, server: Server) -> None:
        self._method = method
        self._server = server
        self._means = {
            kind: server.mean({name: t for name, t in server.state.items() if modality(name) == kind})
            for kind in (*MODALITIES, SHARED)
        }

    def add(self, update: Update) -> None:
        modalities = self._server.modalities[update.site]
        weight = self._method.weight(self._server, update)
        if modalities == MODALITIES:
            weight *= self._method.alpha
        for kind in (*modalities, SHARED):
            self._means[kind].add(update.state, weight)

    def commit(self) -> None:
        for mean in self._means.values():
            self._server.replace(mean.result())


def held(modalities: Sequence[str], state: State) -> State:
    """The tensors that a site with records of ``modalities`` trains."""
    return {name: tensor for name, tensor in state.items() if modality(name) in (*modalities, SHARED)}
