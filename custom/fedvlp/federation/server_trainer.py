"""The server as a trainee: its own model on the public set, for methods that train or measure it there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedvlp.core import metric_keys, norm_statistics
from fedvlp.core.client import Client
from fedvlp.core.device import threads
from fedvlp.core.method import Method
from fedvlp.core.seeds import seed, set_global
from fedvlp.core.types import Broadcast, State, with_prefix, without_prefix
from fedvlp.federation.site import Evaluate
from fedvlp.training import autotune
from fedvlp.training.local_training import train
from fedvlp.training.settings import Training

if TYPE_CHECKING:
    from fedvlp.core.server_state import Server

OPTIMIZER = "optimizer/"

SERVER = "server"
"""The model whose normalisation the server keeps in its memory, where the sites keep theirs."""


@dataclass
class ServerTrainer:
    """``client`` is named "server" and its data are the public set. Every call starts from the state it is given.

    Where sites keep their normalisation, so does the server for its own training; ``memory()`` is the server's.
    """

    client: Client
    training: Training
    evaluate: Evaluate | None = None
    memory: Callable[[], State] = dict
    should_stop: Callable[[], bool] = lambda: False

    def stop_when(self, asked: Callable[[], bool]) -> None:
        """Training raises Aborted at the next step after ``asked()`` is True."""
        self.should_stop = asked

    def threads(self) -> AbstractContextManager[None]:
        """The threads of the settings alone, as another number gives other last bits."""
        return threads(self.training.threads)

    @contextmanager
    def session(self, state: Mapping[str, Tensor], *purpose: object) -> Iterator[Client]:
        """The client with ``state`` loaded, in eval mode; random numbers are seeded by ``purpose``, then restored."""
        with self.threads(), torch.random.fork_rng(devices=[]):
            set_global(seed(self.client.seed, self.client.name, *purpose))
            self.client.load(self._complete(state) if self.client.site_only else state)
            self.client.model.eval()
            self.client.objective.eval()
            try:
                yield self.client
            finally:
                self.client.release()

    def _complete(self, state: Mapping[str, Tensor]) -> State:
        """The model with the server's own normalisation: its statistics are estimated on the public set."""
        own = norm_statistics.own(self.memory(), SERVER)
        return norm_statistics.complete(self.client, self.client.here(dict(state)), self.client.here(own))

    def served(self, state: State) -> State:
        """The trained model as it is saved: with the public set's statistics where the sites keep theirs."""
        if not self.client.site_only:
            return state
        with self.session(state, "serve") as client:
            return {name: tensor.cpu().clone() for name, tensor in client.state().items()}

    def train(
        self, method: Method, server: Server, phase: str, aux: State | None = None, lr_scale: float = 1.0
    ) -> None:
        """Trains ``server.state`` by the one loop and commits it; see :meth:`trained`.

        One optimiser serves all such phases of a run: its tensors are ``optimizer/...`` in ``server.memory``. A fresh
        AdamW would make full-sized steps whatever the weight of a loss, and so undo the phase before.
        """
        moments = without_prefix(server.memory, OPTIMIZER)
        server.replace(self.trained(method, server, phase, aux, lr_scale, moments))
        _keep(server, moments)

    def as_client(self, method: Method, server: Server, phase: str) -> State:
        """What a client that trains ``phase`` would send: its moments are kept where those of the sites are."""
        if self.training.optimizer_state != "keep":
            return self.trained(method, server, phase)
        moments = without_prefix(server.memory, OPTIMIZER)
        state = self.trained(method, server, phase, optimizer=moments)
        _keep(server, moments)
        return state

    def trained(
        self,
        method: Method,
        server: Server,
        phase: str,
        aux: State | None = None,
        lr_scale: float = 1.0,
        optimizer: State | None = None,
    ) -> State:
        """What ``server.state`` becomes by the one loop, as ``phase`` (a name that is none of the method's phases).

        ``method.steps``, ``batches`` and ``losses`` see this client and a message of this phase with ``aux``.
        The mean loss terms go to ``server.metrics`` as ``loss/<term>``.
        """
        here = self.client.here
        with self.session(server.state, server.round, phase) as client:
            own = {name: tensor.clone() for name, tensor in client.state().items() if name in client.site_only}
            message = Broadcast(server.round, phase, here(server.state | own), here(aux or {}), lr_scale=lr_scale)
            training = autotune.fixed(self.training, client.device, server.folder)
            terms = train(method, client, message, training, self.should_stop, optimizer=optimizer)
            state = {name: tensor.cpu().clone() for name, tensor in client.state().items()}
            stays = {name: state.pop(name) for name in sorted(client.site_only)}
            server.memory |= norm_statistics.remembered(stays, SERVER)
        server.metrics |= {metric_keys.loss(f"{phase}/{name}"): value for name, value in terms.items()}
        return state

    @torch.no_grad()
    def measure(self, state: State, splits: int) -> dict[str, float]:
        """The held-out figures of ``state`` on the public set's first ``splits`` of val, test."""
        if not splits or self.evaluate is None:
            return {}
        with self.session(state, "evaluate") as client:
            return self.evaluate(client, ("val", "test")[:splits])


def _keep(server: Server, moments: State) -> None:
    """Puts the optimiser's tensors in the place of those in the server's memory."""
    rest = {name: tensor for name, tensor in server.memory.items() if not name.startswith(OPTIMIZER)}
    server.memory = rest | with_prefix(OPTIMIZER, moments)
