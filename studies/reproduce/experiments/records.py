"""The records of a study, the paper's or drawn ones, and what is counted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedvlp.data.cohort import Cohort
from fedvlp.data.sources import SOURCES
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.methods import FedSM
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import with_paths
from studies.claims.cell_results import Figures
from studies.collections import SOURCES as MORE_SOURCES
from studies.collections.creamfl_collections import CreamFLSource
from studies.reproduce.table import PAPER, Size
from studies.rivals import FedFed
from studies.rivals.mae import MAEConfig

Cells = dict[str, Experiment]
"""Name of a cell -> its experiment."""

SITES = tuple(f"site-{number}" for number in range(1, 6))
MODEL = ModelConfig(image_size=32, head_hidden=16, embedding_dim=16, head_norm="layer")
"""Of the smallest size."""


def source(size: Size, name: str, pixels: int = 256, **settings: Any) -> Any:
    """The data set ``name`` of ``size``, with ``settings`` of its source; what --data sets goes before them."""
    kind: Any = {**SOURCES, **MORE_SOURCES}[name]
    made = kind.at(size.folder(name).absolute(), image_size=36 if size.quick else pixels, **settings)
    for key, _, value in (setting.partition("=") for setting in size.elsewhere.get(name, ())[1:]):
        made = override(made, key, value)
    made = with_paths(made, lambda path: str(Path(path).absolute()))
    return replace(made, cache=str(size.cache.absolute())) if size.cache and hasattr(made, "cache") else made


def on_data(size: Size, experiment: Experiment, seed: int) -> Experiment:
    """An experiment on the paper's data with that seed; at the smallest size a round of tiny towers."""
    rounds = replace(experiment.rounds, seed=seed)
    if not size.quick:
        return replace(experiment, rounds=rounds)
    model: ModelConfig = MODEL
    if isinstance(experiment.model, MultimodalConfig):
        model = MultimodalConfig(labels=experiment.model.labels, image_size=32)
    training = replace(presets.get("fedavg").training, batch_size=8, warmup_steps=5)
    return replace(experiment, model=model, training=training, rounds=replace(rounds, rounds=1))


PUBLISHED: dict[str, dict[str, Any]] = {
    "fedmae": {"objective": MAEConfig()},
    "fedsm": {"method": FedSM()},
    "fedfed": {"method": FedFed(share=True, distil_steps=2900)},  # each a pass of PMS-FM's mean site in batches of 48
}
"""What the presets of these, which are demos, have otherwise than docs/methods/baselines.md."""


def baseline(size: Size, name: str) -> Experiment:
    """The preset ``name``; at the paper's size its method and objective are those of docs/methods/baselines.md."""
    return replace(presets.get(name), **PUBLISHED.get(name, {}) if size.name == PAPER else {})


def most_steps(size: Size) -> int | None:
    """On the paper's data: at most so many steps of training a head; None: as many as the protocol has."""
    return 1 if size.quick else None


def films_for_heads(size: Size) -> tuple[SyntheticCohort, int]:
    """Drawn films of other people than any run's, for heads, and at most so many steps of training a decoder."""
    if size.quick:
        return SyntheticCohort(sites=1, size=60, image_size=36, seed=2000), 1
    return SyntheticCohort(sites=1, size=2000, image_size=72, beta=1000.0, seed=2000), 60


def films_of_strangers(size: Size, seed: int) -> SyntheticCohort:
    """Drawn films of other people than any run's, enough in the test split for batches of 32."""
    if size.quick:
        return SyntheticCohort(sites=1, size=80, image_size=36, seed=seed, test_rows=32)
    return SyntheticCohort(sites=1, size=1200, image_size=72, beta=1000.0, seed=seed)


@dataclass(frozen=True)
class Given:
    """Records that have been read, as a data set."""

    cohort: Cohort

    def build(self) -> Cohort:
        """The records."""
        return self.cohort


def counted(cohort: Cohort, sites: Sequence[str], split: str = "") -> Figures:
    """How many records of a ``split`` ("": of all) each site has, and how many of them have each finding."""
    owner = np.asarray(cohort.sites)
    asked = np.asarray(cohort.splits) == split if split else np.ones(len(cohort), dtype=bool)
    figures: Figures = {}
    for site in sites:
        here = (owner == site) & asked
        figures[dealt(site)] = float(here.sum())
        for index, name in enumerate(cohort.label_names):
            figures[dealt(site, name)] = float((cohort.labels[here, index] == 1).sum())
    return figures


def dealt(site: str, finding: str = "") -> str:
    """Name of the number of a site's records, of all or of those with a finding."""
    return f"{finding or 'records'} at {site}"


def with_public(experiment: Experiment, share: float, captions: int = 0) -> Experiment:
    """With a ``share`` of the built-in patients in the public set, or so many of COCO's ``captions``."""
    data: Any = experiment.data
    if isinstance(data, CreamFLSource):
        return replace(experiment, data=replace(data, captions=captions))
    return replace(experiment, partition=replace(experiment.partition, public=share))
