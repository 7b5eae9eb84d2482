"""FedGEMS (Cheng et al., 2021, https://arxiv.org/abs/2110.11027): the server distils from confident sites alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.server_state import Server
from fedvlp.core.types import State, Update
from fedvlp.methods.ensemble import GLOBAL, trainer
from fedvlp.methods.math.contrast import best_is_own, opposite
from studies.rivals.fedmd import FedMD


@dataclass(frozen=True)
class FedGEMS(FedMD):
    """A site's weight is the softmax over sites of 1/H, H the entropy of the softmax of what it sent for an item.

    Items that the server already matches with their own partner, of all public ones, keep the server's own
    representation as target. Sites train towards the server's representations.
    Differs, as in CreamFL's comparison: representations in place of class scores.
    """

    public_first: ClassVar[bool] = False

    def teachers(self, server: Server) -> State:
        return {name: server.memory[GLOBAL + name] for name in ("image", "text")}

    def log_weights(self, server: Server, update: Update, modality: str, sent: Tensor) -> Tensor:
        log = F.log_softmax(sent, dim=1)
        return 1 / -(log.exp() * log).sum(dim=1)

    def targets(self, server: Server, combined: State) -> State:
        own = self.teachers(server)
        there = trainer(server).client.here(own)
        with trainer(server).threads():
            right = {name: best_is_own(there[name], there[opposite(name)]).cpu() for name in combined}
        return {name: torch.where(right[name][:, None], own[name], tensor) for name, tensor in combined.items()}

    def close(self, server: Server, combined: State) -> None:
        super().close(server, {})  # sites are taught by the server: no consensus is kept
