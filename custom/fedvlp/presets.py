"""Experiments by name, and how one is put together: the one table that the CLI, the recipe and the jobs use."""

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
from fedvlp.methods import METHODS, Centralized, FedAvg, FedDRA, FedProx, FedRGB, Local
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


TINY = ModelConfig(head_hidden=256)
PAPER = ModelConfig(
    image_tower="vit_base_patch16_224", text_tower="bert-base-cased", text_layers=6, max_tokens=112,
    image_size=224, head_hidden=2048, pretrained=True,
)  # fmt: skip


def _demo(name: str, method: Method, batch_size: int = 32) -> Experiment:
    """Demo size: tiny towers on the built-in cohort, minutes on two CPU cores."""
    training = Training(batch_size=batch_size, lr=5e-4, weight_decay=0.05, warmup_steps=10)
    data = SyntheticCohort(image_size=72)  # trained on random 64-pixel crops
    return Experiment(name, method, TINY, data=data, training=training, rounds=Rounds(rounds=6))


def _paper(name: str, method: Method) -> Experiment:
    """The papers' towers and schedule (spec 4.4): 25 rounds, AdamW 2e-5, batch 388."""
    training = Training(batch_size=388, lr=2e-5, weight_decay=0.05, threads=8)
    data = SyntheticCohort(image_size=256)
    return Experiment(name, method, PAPER, data=data, training=training, rounds=Rounds(rounds=25))


PRESETS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        _demo("fedavg", FedAvg(local_steps=50)),
        _demo("fedprox", FedProx(local_steps=50)),
        _demo("local", Local(local_steps=50)),
        _demo("centralized", Centralized(local_steps=50), batch_size=5 * 32),  # as many records a step as five sites
        # mu = 5, the papers' value, holds back towers that start from random weights; theirs are pre-trained
        _demo("feddra", FedDRA(align_steps=10, local_steps=40, mu=1.0, rho=0.1)),
        _demo("fedrgb", FedRGB(local_steps=40, aligner_steps=40, rho=0.1)),
        _paper("feddra-paper", FedDRA(align_steps=20, local_steps=50, mu=5.0, rho=0.1)),
        _paper("fedrgb-paper", FedRGB(local_steps=50, aligner_steps=50, alpha=1.0, beta=2.0, gamma=1.0, rho=1.0)),
        _paper("fedavg-paper", FedAvg(local_steps=50, weighting="uniform")),
    )
}


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


def get(name: str) -> Experiment:
    """The preset ``name``. Raises ValueError naming the nearest one."""
    from fedvlp.config import nearest

    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{nearest(name, list(PRESETS))}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]


__all__ = ["METHODS", "PRESETS", "Assembly", "Experiment", "Partition", "get"]
