"""A federated method: the hooks of both halves. The base class is FedAvg (McMahan et al., 2017).

A method is a frozen dataclass whose fields are its hyper-parameters; it overrides hooks and never copies the
loop (training/local_training.py). What it remembers between tasks is tensors: ``server.memory`` and ``client.memory``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Generator, Tensor

from fedvlp.core.aggregation import Aggregator, MeanAggregator
from fedvlp.core.client import Client
from fedvlp.core.types import Batch, Broadcast, Expected, State, Update
from fedvlp.core.validate import require

if TYPE_CHECKING:
    from fedvlp.core.server_state import Server


@dataclass(frozen=True)
class Schedule:
    """What both halves know: the phases of a round, their steps, and which tensors train and travel in each."""

    uses_public: ClassVar[bool] = False  # whether the server needs the public set and to know the sites' modalities
    pooled: ClassVar[bool] = False  # whether one site holds everybody's records (simulation only)
    fixes_encoders: ClassVar[bool] = False  # whether it asks for what a received encoder makes (``Client.encoded``)
    reads_films: ClassVar[bool] = False  # whether it needs the images themselves, so that cached tokens are not enough
    sends_plainly: ClassVar[bool] = False  # whether an ``upload`` of its own sends what FedAvg's does, and no more

    weighting: str = "samples"  # samples: n_k/n (McMahan et al., 2017, Alg. 1); uniform: 1/N (FedDRA, FedRGB)
    local_steps: int = 20  # optimiser steps of a site in its (last) phase of a round

    def __post_init__(self) -> None:
        require(self.weighting in ("samples", "uniform"), f"weighting is {self.weighting!r}; choose samples or uniform")
        require(self.local_steps >= 0, f"local_steps is {self.local_steps}; it must not be negative")

    def phases(self, round: int) -> tuple[str, ...]:
        """The phases of a round, in order; the server aggregates after each."""
        return ("train",)

    def steps(self, phase: str) -> int:
        """Optimiser steps of a site in ``phase``."""
        return self.local_steps

    def trains(self, name: str, phase: str) -> bool:
        """Whether the tensor ``name`` is trained in ``phase``."""
        return True

    def shares(self, name: str, phase: str) -> bool:
        """Whether the tensor ``name`` travels from the site to the server after ``phase``."""
        return self.trains(name, phase)

    def trainee(self, phase: str) -> str:
        """Which model ``phase`` trains, where the method has several: a site may keep normalisation for each."""
        return "model"

    def moments(self, name: str, phase: str) -> str:
        """Model whose optimiser state the tensor ``name`` resumes from in ``phase``; "": none is kept."""
        return self.trainee(phase)

    def asked(self, sites: int) -> int:
        """How many of a run's ``sites`` take part in a phase that trains."""
        return sites

    def discloses(self) -> str:
        """Record-level information revealed to other sites or the server besides weights, and its privacy cost.

        "" where there is none. A sentence for people: commands and the report print it (run/cautions.py). A hospital
        runs such a method only where it accepted the very experiment (deploy/envelope.py).
        """
        return ""

    def evaluates(self) -> str:
        """What a site measures in an evaluation where that is not the server's model, e.g. "its own model"; "": it is.

        A phrase for people: a model's card and the report print it beside the sites' figures.
        """
        return ""

    def probes(self) -> tuple[str, ...]:
        """Names of what ``probe`` returns; an update without them is refused. None: sites are not probed."""
        return ()

    def probe_records(self) -> int:
        """Training records that ``probe`` needs at a site; it measures nothing at a site with fewer."""
        return 0


@dataclass(frozen=True)
class ServerHooks(Schedule):
    """The server half, in the order in which a phase calls it."""

    def start(self, server: Server) -> None:
        """Puts the method's tensors into ``server.memory`` before round 0."""

    def prepare(self, server: Server) -> None:
        """Called once before the messages of a phase are made, e.g. to train the server's own model."""

    def asks(self, server: Server) -> tuple[str, ...]:
        """The sites that take part in this phase, in the order of ``server.sites``."""
        return server.sites

    def broadcast(self, server: Server, site: str) -> Broadcast:
        """What ``site`` is sent."""
        return Broadcast(server.round, server.phase, self.sent(server, site))

    def sent(self, server: Server, site: str) -> State:
        """The model that ``site`` is sent in this phase: what its change is measured from."""
        return server.state

    def expects(self, server: Server, site: str) -> Expected:
        """The tensors that the update of ``site`` must carry."""
        return Expected({name: t for name, t in server.state.items() if self.shares(name, server.phase)})

    def objection(self, server: Server, update: Update) -> str | None:
        """Why an update with the tensors that are expected must be dropped all the same, or None."""
        return None

    def weight(self, server: Server, update: Update) -> float:
        """The weight of one update in the mean; only ratios count."""
        return float(update.num_samples) if self.weighting == "samples" else float(update.num_samples > 0)

    def expected_weight(self, server: Server) -> float:
        """The weight of the whole cohort if every site replies as it last did: saves a pass over a large model."""
        known = [server.samples.get(site, 0) for site in server.sites]
        return float(sum(known)) if self.weighting == "samples" else float(len(server.sites))

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        """Folds the updates of ``phase`` into ``server.state``: here their weighted mean."""
        shared = {name: t for name, t in server.state.items() if self.shares(name, phase)}
        return MeanAggregator(server, shared, self.weight, self.expected_weight(server))

    def conclude(self, server: Server) -> None:
        """Called after the last round, before the last evaluation, e.g. to go back to the best round."""

    def finish(self, server: Server) -> State:
        """The trained model."""
        return server.state

    def personal(self, server: Server, site: str) -> State:
        """The tensors in which the model of ``site`` that is kept at the server differs from the global one, if any."""
        return {}


@dataclass(frozen=True)
class SiteHooks(Schedule):
    """The site half, in the order in which a task calls it."""

    def receive(self, client: Client, message: Broadcast) -> None:
        """Puts the received weights into the client."""
        client.load(message.state)

    def probe(self, client: Client, message: Broadcast) -> dict[str, float]:
        """What the server must know of the received model on this site's data, by the names of ``probes``.

        Called in eval mode, in the first phase of a round and in the last evaluation; nan where it cannot be known.
        What it returns by other names is a metric, as are ``figures``.
        """
        return {}

    def figures(self, client: Client, message: Broadcast) -> dict[str, float]:
        """Figures of the received model for people, when ``probe`` is called; they are metrics ``probe/<name>``."""
        return {}

    def batches(self, client: Client, message: Broadcast, batch_size: int, generator: Generator) -> Iterator[Batch]:
        """One batch of ``batch_size`` records for every optimiser step of the phase.

        On a GPU batches are drawn up to two steps ahead, so that what is drawn must not depend on the steps.
        """
        return client.data.train_batches(self.steps(message.phase), batch_size, generator)

    def complete(self, client: Client, batch: Batch, message: Broadcast) -> Batch:
        """Fills in what a batch lacks, e.g. a missing modality."""
        return batch

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        """Named loss terms of one step; the loop minimises their sum."""
        return client.objective(client.model(batch), batch)

    def after_backward(self, client: Client, message: Broadcast) -> None:
        """Called in every step with its gradients: to read and change ``p.grad`` of ``client.trainable()`` in place.

        They are those of the whole batch, over all processes, before ``training.clip_norm`` shortens them. A parameter
        that no loss reached has none. A step that float16 cannot hold is left out, and so is this call.
        """

    def after_step(self, client: Client, message: Broadcast) -> None:
        """Called after every optimiser step."""

    def upload(self, client: Client, message: Broadcast) -> State:
        """What travels back: the live tensors, not copies (they are read before the next task begins)."""
        return {name: t for name, t in client.state().items() if self.shares(name, message.phase)}


@dataclass(frozen=True)
class Method(ServerHooks, SiteHooks):
    """FedAvg, and the hooks of every other method."""

    def refuse_settings(self, experiment: Any) -> None:
        """Raises ValueError for settings of the ``Experiment`` that is being made, with which the method goes wrong."""


def sends(method: Schedule, names: Iterable[str]) -> bool:
    """Whether sites send any of these tensors, in any phase; where they send none, each keeps the model it trains."""
    phases = method.phases(0)
    return any(method.shares(name, phase) for name in names for phase in phases)


def stays_initial(method: Schedule, names: Iterable[str]) -> bool:
    """Whether the server's model, of these tensors, keeps its initial weights: it is never trained nor sent."""
    return not (method.uses_public or sends(method, names))


def overridden(method: Schedule, *groups: type) -> list[str]:
    """Names of the hooks defined by ``groups`` (e.g. ``ServerHooks``) that ``method`` has otherwise than FedAvg."""
    hooks = [name for group in groups for name, hook in vars(group).items() if inspect.isfunction(hook)]
    public = [name for name in hooks if not name.startswith("_")]
    return [name for name in public if getattr(type(method), name) is not getattr(Method, name)]
