"""FedIoT, Mm-FedAvg (Zhao et al., 2022, https://arxiv.org/abs/2109.04833): towers are averaged modality by modality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Generator

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import OBJECTIVE, Client
from fedvlp.core.method import Method
from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.server_state import Server
from fedvlp.core.types import MODALITIES, Batch, Broadcast, Expected, State, Update, modality
from fedvlp.core.validate import require
from fedvlp.methods.ensemble import trainer

SHARED = ""  # what belongs to no modality, e.g. the objective
KINDS = (MODALITIES, *((name,) for name in MODALITIES))  # of sites, by what their records have


@dataclass(frozen=True)
class FedIoT(Method):
    """FedAvg in which a site sends, and is averaged over, the tensors that its records train; multimodal sites count

    more. These are the towers of its modalities, and of the objective what that does not call ``idle`` there.

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
        return Expected(trained(server.modalities[site], server.state, trainer(server).client.objective))

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return ModalityMeans(self, server)

    def batches(self, client: Client, message: Broadcast, batch_size: int, generator: Generator) -> Iterator[Batch]:
        private = super().batches(client, message, batch_size, generator)
        if not self.share_public or client.public is None or len(client.modalities) < 2:
            yield from private
            return
        public = client.public.train_batches(self.steps(message.phase), batch_size, generator)
        for step, batch in enumerate(private):
            yield next(public) if step % 2 else batch

    def upload(self, client: Client, message: Broadcast) -> State:
        return trained(client.modalities, client.state(), client.objective)


class ModalityMeans:
    """A mean for the tensors that the same kinds of sites train, over those sites; others stay as they are."""

    def __init__(self, method: FedIoT, server: Server) -> None:
        self._method = method
        self._server = server
        of_kind = {kind: trained(kind, server.state, trainer(server).client.objective) for kind in KINDS}
        # One mean for all tensors that the same kinds of sites train.
        together: dict[tuple[tuple[str, ...], ...], State] = {}  # tensors by the kinds of sites that train them
        for name, tensor in server.state.items():
            kinds = tuple(kind for kind in KINDS if name in of_kind[kind])
            together.setdefault(kinds, {})[name] = tensor
        self._means = {kinds: server.mean(tensors) for kinds, tensors in together.items()}

    def add(self, update: Update) -> None:
        modalities = self._server.modalities[update.site]
        weight = self._method.weight(self._server, update)
        if modalities == MODALITIES:
            weight *= self._method.alpha
        for kinds, mean in self._means.items():
            if modalities in kinds:
                mean.add(update.state, weight)

    def commit(self) -> None:
        for mean in self._means.values():
            self._server.replace(mean.result())


def trained(modalities: Sequence[str], state: State, objective: Any) -> State:
    """The tensors of ``state`` that a site with records of ``modalities`` trains.

    An objective whose own parameters are not all trained by all records says so in ``idle(modalities)``.
    """
    idle = {OBJECTIVE + name for name in ObjectiveModule.of(objective).idle(modalities)}
    return {name: t for name, t in state.items() if modality(name) in (*modalities, SHARED) and name not in idle}
