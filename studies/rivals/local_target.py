"""What FedU and FedEMA share (Zhuang et al., 2021, https://arxiv.org/abs/2108.06492): BYOL's target network stays.

Of a BYOL-style objective (``fedvlp.objectives.BYOLConfig``) the online network and the predictor travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlp.core.client import PREDICTOR, TARGET, Client
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, State

DIVERGENCE = "divergence"


@dataclass(frozen=True)
class LocalTarget(Method):
    """FedAvg of all but the target network, which each site keeps in its memory.

    A site that has not trained yet begins with a target network that is a copy of the received model. With an objective
    that has no target network there is nothing to keep.
    """

    def shares(self, name: str, phase: str) -> bool:
        return super().shares(name, phase) and not name.startswith(TARGET)

    # What the methods differ in
    def begins(self, client: Client, received: State) -> State:
        """The weights from which this site trains, of the ``received`` ones and its memory, which is not empty."""
        return received

    def remembers(self, client: Client, start: State) -> State:
        """What the site keeps beside its target network, having trained from ``start``."""
        return {}

    # Server half
    def start(self, server: Server) -> None:
        server.state = {name: tensor for name, tensor in server.state.items() if not name.startswith(TARGET)}

    # Site half
    def receive(self, client: Client, message: Broadcast) -> None:
        target = {name: tensor for name, tensor in client.state().items() if name.startswith(TARGET)}
        mine = {name: tensor for name, tensor in client.memory.items() if name.startswith(TARGET)}
        client.load({**message.state, **target, **mine, **self._start(client, message)})
        if not mine:
            client.restart_target()

    def upload(self, client: Client, message: Broadcast) -> State:
        start = self._start(client, message)
        mine = {name: tensor for name, tensor in client.state().items() if name.startswith(TARGET)}
        client.memory = mine | self.remembers(client, start)
        return super().upload(client, message)

    def _start(self, client: Client, message: Broadcast) -> State:
        """What travels, as this site trains from it: the same when it is asked for again before :meth:`upload`."""
        received = {name: tensor for name, tensor in message.state.items() if not name.startswith(TARGET)}
        return self.begins(client, received) if client.memory else received


@torch.no_grad()
def divergence(client: Client, start: State) -> Tensor:
    """How far training has moved the online network from ``start``: the mean of |w - w_start| over weight matrices.

    A scalar in float64. Matrices are parameters of two dimensions or more; the predictor's do not count. Differs: the
    released code takes tensors with "conv" in their name, of which a ViT has none.
    """
    moved = []
    for name, parameter in client.parameters():
        if parameter.ndim > 1 and name in start and not name.startswith(PREDICTOR):
            moved.append(torch.dist(parameter.double(), start[name].double()))
    return torch.stack(moved).mean()
