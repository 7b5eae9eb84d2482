"""Local, "Decentralized" in FedDRA and FedRGB: every site trains alone, nothing is ever aggregated."""

from __future__ import annotations

from dataclasses import dataclass

from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.types import Broadcast, State


@dataclass(frozen=True)
class Local(Method):
    """The lower bound. Each site's model stays in its memory; the global model is the initial one throughout."""

    def shares(self, name: str, phase: str) -> bool:
        return False

    def evaluates(self) -> str:
        return "the model that it trained alone"

    def receive(self, client: Client, message: Broadcast) -> None:
        client.load(client.memory or message.state)

    def upload(self, client: Client, message: Broadcast) -> State:
        client.memory = client.state()
        return {}
