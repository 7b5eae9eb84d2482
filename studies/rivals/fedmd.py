"""FedMD (Li & Wang, 2019, https://arxiv.org/abs/1910.03581): sites digest the consensus, then revisit their records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, Broadcast, State, VLOutput
from fedvlp.core.validate import require
from fedvlp.methods.ensemble import PublicEnsemble, squared_distance

CONSENSUS = "consensus/"


@dataclass(frozen=True)
class FedMD(PublicEnsemble):
    """The consensus is the plain mean of the sites' representations of the public set, per modality.

    Differs, as in CreamFL's comparison: representations in place of class scores, and a larger model at the server
    that distils the consensus. In the first round there is no consensus yet, so nothing is digested.
    """

    public_first: ClassVar[bool] = True

    digest: float = 1.0  # weight of the squared distance to the consensus, >= 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.digest >= 0, f"digest is {self.digest}; the weight must not be negative")

    def teachers(self, server: Server) -> State:
        return {n.removeprefix(CONSENSUS): t for n, t in server.memory.items() if n.startswith(CONSENSUS)}

    def public_losses(self, client: Client, output: VLOutput, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        known = [name for name in client.modalities if name in message.aux]
        distances = [squared_distance(getattr(output, name), message.aux[name][batch["row"]]) for name in known]
        return {"digest": self.digest * torch.stack(distances).sum()} if distances else {}

    def close(self, server: Server, combined: State) -> None:
        super().close(server, combined)
        server.memory |= {CONSENSUS + name: tensor for name, tensor in combined.items()}
