"""What CreamFL and its relatives share: no weights travel, only representations of a public set that all hold.

Every site has a model of its own, of any architecture and modality; the server distils what the sites send into its
own, larger one (Yu et al., 2023, https://arxiv.org/abs/2302.08888, Alg. 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch
from torch import Generator, Tensor

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import Client, Data
from fedvlp.core.gate import objection_to_rows
from fedvlp.core.method import Method
from fedvlp.core.optimizers import cosine, one_pass
from fedvlp.core.seeds import seed
from fedvlp.core.server_state import Server, Trainer
from fedvlp.core.types import EVALUATE, Batch, Broadcast, Expected, State, Update, VLOutput
from fedvlp.core.validate import require
from fedvlp.methods.math.contrast import Ensemble, only, representations

TASK, DISTIL = "task", "distil"  # what the server trains
GLOBAL, MODEL, PREVIOUS, SAMPLE, PUBLIC = "global/", "model/", "previous/", "sample/", "public/"
SHOWN = 100  # public pairs whose representations are kept for the report
ORDERS, NORMS = ("released", "paper"), ("mse", "squared", "l2")


@dataclass(frozen=True)
class PublicEnsemble(Method):
    """One phase a round. ``released``: the server trains on P, represents P, sites train and represent P, the server
    combines what it received and distils it. ``paper``: the server trains on P after the sites have answered.

    ``kd_weight=0`` without a public pass leaves the server training on P alone. A modality that no site supplied is
    not distilled. A site's model, and its last representations, stay in its memory; its first weights are its own
    (``client.initial``), so before round 0 no two sites have similar representations. The server distils the very
    inputs that the sites represented, without augmentation.
    """

    uses_public: ClassVar[bool] = True
    public_first: ClassVar[bool] = False  # whether a local epoch begins with its pass over P

    local_steps: int = 0  # steps on private records in a local epoch; 0 = one pass over them
    local_epochs: int = 5  # each with a pass over the public set, where there are teachers
    server_steps: int = 0  # the server's steps on P for its task; 0 = one pass
    distil_steps: int = 0  # the server's steps on P of distillation; 0 = one pass
    server_rounds: int = 0  # T_max of the cosine schedule of the server's learning rate, in rounds; 0 = constant
    sites_per_round: int = 0  # drawn anew every round; 0 = all
    order: str = "released"  # released | paper
    kd_weight: float = 0.3  # weight of the distillation, >= 0; 0 = none
    kd_norm: str = "mse"  # distance to the ensemble: mse, over rows and d (released code) | squared | l2 (Eq. 7)
    distil_augmented: bool = False  # distil crops as those of the server's task, which no site has represented

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("server_steps", "distil_steps", "server_rounds", "sites_per_round", "kd_weight"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must not be negative")
        require(self.local_epochs >= 1, f"local_epochs is {self.local_epochs}; at least 1")
        require(self.order in ORDERS, f"order is {self.order!r}; choose one of {', '.join(ORDERS)}")
        require(self.kd_norm in NORMS, f"kd_norm is {self.kd_norm!r}; choose one of {', '.join(NORMS)}")

    def shares(self, name: str, phase: str) -> bool:
        return False

    def evaluates(self) -> str:
        return "its own model"

    # What the methods differ in
    def log_weights(self, server: Server, update: Update, modality: str, sent: Tensor) -> Tensor:
        """[P] log of this supplier's weight for every public item; ``sent`` [P, d]. Here: the plain mean."""
        return sent.new_zeros(len(sent))

    def teachers(self, server: Server) -> State:
        """{modality: [P, d]} that sites are sent, and trained towards in a pass over P; none, and there is no pass."""
        return {}

    def targets(self, server: Server, combined: State) -> State:
        """{modality: [P, d]} that the server distils, from the combined ones."""
        return combined

    def public_losses(self, client: Client, output: VLOutput, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        """The site's loss on the public items ``batch["row"]`` [B], given the teachers in ``message.aux``."""
        return {}

    def public_batches(self, client: Client, size: int, generator: Generator) -> Iterator[Batch]:
        """A site's pass over the public set; the names of a batch begin with ``public/``."""
        return public_pass(client, size, generator)

    def asked(self, sites: int) -> int:
        return min(self.sites_per_round or sites, sites)

    # Server half
    def asks(self, server: Server) -> tuple[str, ...]:
        count = self.asked(len(server.sites))
        if count == len(server.sites):
            return server.sites
        generator = torch.Generator().manual_seed(seed(trainer(server).client.seed, "sites", server.round))
        drawn = torch.randperm(len(server.sites), generator=generator)[:count]
        return tuple(server.sites[index] for index in sorted(drawn.tolist()))

    def prepare(self, server: Server) -> None:
        if self.order == "released":
            self.train_server(server, TASK)
        with trainer(server).session(server.state) as client:
            reps = representations(client, ("image", "text"))
        server.memory |= {GLOBAL + name: tensor.cpu() for name, tensor in reps.items()}

    def broadcast(self, server: Server, site: str) -> Broadcast:
        aux = {} if server.phase == EVALUATE else self.teachers(server)
        return Broadcast(server.round, server.phase, {}, aux)

    def expects(self, server: Server, site: str) -> Expected:
        return Expected({name: server.memory[GLOBAL + name] for name in server.modalities[site]})

    def objection(self, server: Server, update: Update) -> str | None:
        """No row may count more than others."""
        return next((why for name, rows in update.state.items() if (why := objection_to_rows(name, rows))), None)

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return Distillation(self, server)

    def close(self, server: Server, combined: State) -> None:
        """Forgets the representations of the round that is over."""
        server.memory = {name: tensor for name, tensor in server.memory.items() if not name.startswith(GLOBAL)}

    def train_server(self, server: Server, phase: str, aux: State | None = None) -> None:
        """The server's steps on the public set, with the learning rate of this round."""
        trainer(server).train(self, server, phase, aux, cosine(server.round, self.server_rounds))

    # Site half
    def receive(self, client: Client, message: Broadcast) -> None:
        own = {name.removeprefix(MODEL): t for name, t in client.memory.items() if name.startswith(MODEL)}
        assert client.initial is not None
        client.load(own or client.initial())

    def batches(self, client: Client, message: Broadcast, batch_size: int, generator: Generator) -> Iterator[Batch]:
        if message.phase in (TASK, DISTIL):
            steps = self.server_steps if message.phase == TASK else self.distil_steps
            steps = steps or one_pass(client.data.num_train, batch_size)
            if message.phase == DISTIL and not self.distil_augmented:
                return islice(as_represented(client.data, batch_size, generator), steps)
            return client.data.train_batches(steps, batch_size, generator)
        return self.local_batches(client, message, batch_size, generator)

    def local_batches(self, client: Client, message: Broadcast, size: int, generator: Generator) -> Iterator[Batch]:
        """In each local epoch private batches and, if there are teachers, the public set once."""
        steps = self.local_steps or one_pass(client.data.num_train, size)
        private = client.data.train_batches(self.local_epochs * steps, size, generator)
        for _ in range(self.local_epochs):
            if message.aux and self.public_first:
                yield from self.public_batches(client, size, generator)
            yield from islice(private, steps)
            if message.aux and not self.public_first:
                yield from self.public_batches(client, size, generator)

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        if message.phase == DISTIL:
            output = client.model(batch)
            wanted = {name: target[batch["row"]] for name, target in message.aux.items()}
            return {name: self.kd_weight * self.distance(getattr(output, name), t) for name, t in wanted.items()}
        public = {name.removeprefix(PUBLIC): t for name, t in batch.items() if name.startswith(PUBLIC)}
        private = {name: t for name, t in batch.items() if not name.startswith(PUBLIC)}
        terms = super().losses(client, private, message) if private else {}
        if public:
            terms |= self.public_losses(client, client.model(public), public, message)
        return terms

    def distance(self, own: Tensor, target: Tensor) -> Tensor:
        """Mean distance of the rows of ``own`` and ``target``, both [B, d]."""
        if self.kd_norm == "l2":
            return torch.linalg.vector_norm(own - target, dim=1).mean()
        return squared_distance(own, target) if self.kd_norm == "squared" else (own - target).square().mean()

    def upload(self, client: Client, message: Broadcast) -> State:
        reps = representations(client, client.modalities)
        own = {MODEL + name: tensor for name, tensor in client.state().items()}
        client.memory = own | {PREVIOUS + name: tensor for name, tensor in reps.items()}
        return reps


class Distillation:
    """Combines what the sites sent for every public item, and distils it into the server's model."""

    def __init__(self, method: PublicEnsemble, server: Server) -> None:
        self._method = method
        self._server = server
        self._ensembles = {"image": Ensemble(), "text": Ensemble()}

    def add(self, update: Update) -> None:
        for name, sent in update.state.items():
            with trainer(self._server).threads():
                self._ensembles[name].add(sent, self._method.log_weights(self._server, update, name, sent))
            self._server.memory[f"{SAMPLE}{name}/{update.site}"] = sent[:SHOWN].clone()

    def commit(self) -> None:
        method, server = self._method, self._server
        # Paper: the server trains on the public pairs after the sites; the released code does it before (``prepare``).
        if method.order == "paper":
            method.train_server(server, TASK)
        # One vector a public item, which the server's model is then drawn to.
        combined = {name: ensemble.mean() for name, ensemble in self._ensembles.items() if ensemble.suppliers}
        if method.kd_weight and combined:
            method.train_server(server, DISTIL, method.targets(server, combined))
        method.close(server, combined)


def trainer(server: Server) -> Trainer:
    """The server as a trainee; Assembly has given it one."""
    assert server.trainer is not None
    return server.trainer


def squared_distance(own: Tensor, target: Tensor) -> Tensor:
    """Mean squared distance of the rows of ``own`` and ``target``, both [B, d]."""
    return (own - target).square().sum(dim=1).mean()


def as_represented(data: Data, size: int, generator: Generator) -> Iterator[Batch]:
    """Passes over a training split without end, each in a random order, of the inputs that are represented.

    A pass drops its last, smaller batch, unless there is no other.
    """
    while data.num_train:
        order = torch.randperm(data.num_train, generator=generator)
        yield from data.batches("train", size, drop_last=len(order) >= size, rows=order)


def public_pass(client: Client, size: int, generator: Generator) -> Iterator[Batch]:
    """The public training split once, in random order and without augmentation; names begin with ``public/``."""
    assert client.public is not None
    steps, held = one_pass(client.public.num_train, size), client.modalities
    for batch in islice(as_represented(client.public, size, generator), steps):
        yield {PUBLIC + name: tensor for name, tensor in only(batch, held).items()}
