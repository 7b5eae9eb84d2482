"""An experiment, everything that determines a run's result, and how one is put together in a process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedvlp.core.client import Client, named_state
from fedvlp.core.method import Method, Training
from fedvlp.core.server import Rounds, Server
from fedvlp.core.site import Evaluate, Site, SiteMemory
from fedvlp.data.loader import SiteData
from fedvlp.data.partition import dirichlet_partition
from fedvlp.data.record import Cohort
from fedvlp.data.synthetic import SyntheticCohort
from fedvlp.evaluation.held_out import Retrieval
from fedvlp.methods import Centralized
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives.convirt import ConVIRTConfig

POOLED = "pooled"


class Source(Protocol):
    """A configured data set."""

    def build(self) -> Cohort: ...


@dataclass(frozen=True)
class Partition:
    """How records without a site are dealt to sites in simulation (spec 12.1)."""

    sites: int = 5
    beta: float = 1.0  # Dirichlet concentration; smaller is more skewed
    label_code: str = "mention"  # mention (papers) | positive


@dataclass(frozen=True)
class Experiment:
    """Everything that determines the result of a run."""

    name: str
    method: Method
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ConVIRTConfig = field(default_factory=ConVIRTConfig)
    data: Source = field(default_factory=SyntheticCohort)
    partition: Partition = field(default_factory=Partition)
    training: Training = field(default_factory=Training)
    rounds: Rounds = field(default_factory=Rounds)


class Assembly:
    """Puts an experiment together in one process; the model and the cohort are built once and shared by its sites."""

    def __init__(self, experiment: Experiment, folder: Path | None = None) -> None:
        self.experiment = experiment
        self.folder = folder  # of the run; None keeps site memories in this process
        self._cohort: Cohort | None = None
        self._modules: tuple[Any, Any] | None = None

    @property
    def pooled(self) -> bool:
        """Whether all records train at one place."""
        return isinstance(self.experiment.method, Centralized)

    @property
    def cohort(self) -> Cohort:
        """The records, each with its site."""
        if self._cohort is None:
            cohort = self.experiment.data.build()
            if cohort.sites is None:
                cohort = cohort.with_sites(self._deal(cohort))
            self._cohort = cohort
        return self._cohort

    def _deal(self, cohort: Cohort) -> list[str]:
        split = self.experiment.partition
        if split.sites < 1:
            raise ValueError(f"partition.sites is {split.sites}; a run needs at least one site")
        groups = np.asarray(cohort.studies)
        owner = dirichlet_partition(
            cohort.labels, groups, split.sites, split.beta, self.experiment.rounds.seed, label_code=split.label_code
        )
        return [f"site-{index + 1}" for index in owner]

    def data_sites(self) -> tuple[str, ...]:
        """The sites that hold records, sorted by name."""
        return tuple(sorted(set(self.cohort.sites or ())))

    def sites(self) -> tuple[str, ...]:
        """The sites that train, sorted by name."""
        return (POOLED,) if self.pooled else self.data_sites()

    def modules(self) -> tuple[Any, Any]:
        """The model with its initial weights, and the objective."""
        if self._modules is None:
            model = self.experiment.model.build(self.experiment.rounds.seed)
            self._modules = model, self.experiment.objective.build()
        return self._modules

    def server(self, sites: tuple[str, ...]) -> Server:
        """A server with the initial weights, before round 0."""
        state = named_state(*self.modules())
        return Server(sites, {name: tensor.detach().clone() for name, tensor in state.items()})

    def data(self, site: str | None) -> SiteData:
        """The records of one site, or of all."""
        rows = {split: self.cohort.rows(split, site) for split in ("train", "val", "test")}
        return SiteData(self.cohort, rows, self.modules()[0].tokenizer, self.experiment.model.image_size)

    def site(self, name: str) -> Site:
        """The site ``name``, ready to answer broadcasts."""
        if name not in self.sites():
            raise ValueError(f"site {name!r} has no records in this experiment; there are: {', '.join(self.sites())}")
        if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
            raise ValueError("a site's name is also a folder's: it may hold letters, digits, '.', '_' and '-' only")
        model, objective = self.modules()
        seed = self.experiment.rounds.seed
        client = Client(name, seed, model, objective, self.data(None if self.pooled else name))
        memory = SiteMemory(self.folder / "sites" / name if self.folder else None)
        evaluate: Evaluate = EverySite(self) if self.pooled else Retrieval()
        return Site(client, self.experiment.method, self.experiment.training, memory, evaluate)


class EverySite:
    """Evaluates a pooled model on each site's held-out records; metric names are ``<site>:<metric>``."""

    def __init__(self, assembly: Assembly) -> None:
        self._data = {site: assembly.data(site) for site in assembly.data_sites()}

    def __call__(self, client: Client, splits: tuple[str, ...]) -> dict[str, float]:
        one = replace(client)
        metrics: dict[str, float] = {}
        for site, data in self._data.items():
            one.data = data
            metrics |= {f"{site}:{name}": value for name, value in Retrieval()(one, splits).items()}
        return metrics
