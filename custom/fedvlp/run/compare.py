"""Finished runs on one cohort beside each other: recall over sites, with intervals over the test patients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fedvlp.core.method import sends
from fedvlp.core.types import State
from fedvlp.core.validate import require
from fedvlp.evaluation.intervals import Bootstrap, Interval, of_draws, of_worst
from fedvlp.evaluation.retrieval import Retrieval, embed, in_batch_ranks, ranks
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import last_server, load_shared, loader, models_at_sites, paired_sites, trained_state
from fedvlp.run.folder import RunFolder
from fedvlp.run.terms import terms

INITIAL = "initial"
"""Name of the model that the runs start from."""

BATCH = Retrieval().batch_size

Hits = dict[str, np.ndarray]
"""Site -> [n]: 100, 50 or 0 where both, one or none of a test pair's halves finds the other; the mean is Recall@k."""

Vectors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Site -> unit vectors of its test pairs: images [n, d], texts [n, d]."""


@dataclass(frozen=True)
class Row:
    """One model: Recall@k in percent over sites."""

    name: str
    average: Interval
    worst: Interval


@dataclass(frozen=True)
class Comparison:
    """Models on the same records, and how far the last one is ahead of each of the other runs."""

    k: int
    in_batch: bool  # among the records of a batch of ``BATCH``, or of the whole split
    queries: Mapping[str, int]  # site -> test pairs that were measured
    seed: int | None  # of every run; None: they differ
    models: tuple[Row, ...]  # initial ones, then the runs as given
    ahead: tuple[Row, ...]  # of each run but the last: the last one's figures minus its own
    steps: Mapping[str, str]  # run -> its steps in a round, as ``FinishedRun.steps`` says them
    sites: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)  # model -> site -> its recall

    def __post_init__(self) -> None:
        shown = [row.name for row in self.models]
        require(len(set(shown)) == len(shown), "compare: two models have one name, so one would hide the other")

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs, as given."""
        return (*(row.name for row in self.ahead), self.last)

    @property
    def last(self) -> str:
        """Name of the run that is compared with the others."""
        return self.models[-1].name


def compare(folders: Sequence[RunFolder], k: int = 1) -> Comparison:
    """Recall@k of finished runs on the test split: mean of both directions, average and worst over sites.

    In batches where every site has one, else among the whole split. Differences are paired: in every draw of the
    bootstrap both models answer the same queries. Raises ValueError for fewer than two runs, for one that has not
    finished or retrieves nothing, and for runs whose test records differ.
    """
    require(k >= 1, f"--k is {k}; Recall@K counts what is among the first K, so give 1 or more")
    require(len(folders) > 1, f"{len(folders)} run to compare; give two or more")
    paths = [folder.path.resolve() for folder in folders]
    require(len(set(paths)) == len(paths), "a run is given twice; it differs in nothing from itself, so leave one out")
    runs = [FinishedRun(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    first = runs[0]
    for run in runs[1:]:
        require(
            run.records == first.records,
            f"{run.name} and {first.name} were not measured on the same test records; compare runs with the same data, "
            "seed and partition",
        )
    in_batch = min(map(len, first.patients.values())) >= BATCH
    vectors = _of_starts(runs) | {run.name: run.embedded(*run.trained()) for run in runs}
    hits = {name: hits_of(of_model, k, in_batch) for name, of_model in vectors.items()}
    queries = {site: len(of_site) for site, of_site in hits[first.name].items()}
    bootstrap = Bootstrap({site: of_site[: queries[site]] for site, of_site in first.patients.items()})
    average = {name: bootstrap.average(of_model) for name, of_model in hits.items()}
    worst = {name: bootstrap.worst(of_model) for name, of_model in hits.items()}
    last, seeds = runs[-1].name, {run.experiment.rounds.seed for run in runs}
    return Comparison(
        k,
        in_batch,
        queries,
        seeds.pop() if len(seeds) == 1 else None,
        tuple(Row(name, of_draws(average[name]), of_worst(worst[name])) for name in hits),
        tuple(
            Row(run.name, of_draws(average[last] - average[run.name]), of_worst(worst[last] - worst[run.name], -100.0))
            for run in runs[:-1]
        ),
        {run.name: run.steps() for run in runs},
        {
            name: {site: of_draws(drawn) for site, drawn in zip(of_model, bootstrap.by_site(of_model), strict=True)}
            for name, of_model in hits.items()
        },
    )


class FinishedRun:
    """A finished run, and the test pairs of its sites."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self.folder, self.name, self.experiment = folder, name, folder.experiment()
        require(folder.model.exists(), f"{name} has not finished; resume it first")
        require(
            not isinstance(self.experiment.model, MultimodalConfig),
            f"{name} is a classifier and retrieves nothing; its figures are in its report",
        )
        self.assembly = Assembly(self.experiment, folder.path)
        self.data = paired_sites(self.assembly)
        cohort = self.assembly.cohort
        self.rows = {site: cohort.rows("test", site)[data.having("test")].tolist() for site, data in self.data.items()}
        ids = {site: [cohort.ids[row] for row in of_site] for site, of_site in self.rows.items()}
        self.records = cohort.fingerprint, ids
        self.patients = {site: [cohort.patients[row] for row in of_site] for site, of_site in self.rows.items()}

    def steps(self) -> str:
        """Steps of the encoders at the full rate, and all steps, of a site in a mean round (spec 4.4)."""
        try:
            spent = terms(self.experiment)
        except ValueError:
            return "as many as its records make"
        return f"{spent.axes[0]:g} / {spent.total:g}"

    def trained(self) -> tuple[dict[str, State], State]:
        """Site -> its own model, for methods that leave models at the sites; and the server's.

        Raises ValueError where the sites trained alone and their models are not in the run's folder, and where they
        have models of their own beside the server's.
        """
        method, state = self.experiment.method, trained_state(self.assembly, last_server(self.folder))
        own = models_at_sites(self.assembly, state)
        require(
            sends(method, state) or not method.uses_public,
            f"every site of {self.name} has a model of its own beside the server's, and such models are not measured "
            "again; the recalls that the sites sent, and the server's on the public set, are in its report",
        )
        require(
            bool(own) or sends(method, state),
            f"the models of {self.name} stayed at its sites, and its folder has none of them; compare a run that "
            "`fedvlp simulate` made",
        )
        return own, state

    def embedded(self, own: Mapping[str, State], state: State, start: bool = False) -> Vectors:
        """Test pairs as a site's ``own`` model, or else ``state``, sees them. At the ``start`` no site has trained."""
        torch.set_num_threads(self.experiment.training.threads)
        load = load_shared if start else loader(self.assembly)
        vectors: Vectors = {}
        for site, data in self.data.items():
            client = self.assembly.client(site, data)
            load(client, own.get(site, state), site)
            vectors[site] = embed(client.model, data.batches("test", BATCH, drop_last=False, rows=data.having("test")))
        return vectors


def hits_of(vectors: Vectors, k: int, in_batch: bool) -> Hits:
    """What each half of a site's pairs finds of the other, in batches of ``BATCH`` or among the whole split."""
    hits: Hits = {}
    for site, (image, text) in vectors.items():
        of_image, of_text = in_batch_ranks(image, text, BATCH) if in_batch else ranks(image, text)
        hits[site] = 50.0 * ((of_image < k).double() + (of_text < k).double()).numpy()
    return hits


def _of_starts(runs: Sequence[FinishedRun]) -> dict[str, Vectors]:
    """What each of the different models that runs start from sees; ``INITIAL`` where all start from one."""
    different: list[tuple[FinishedRun, State]] = []
    for run in runs:
        start = run.assembly.initial()
        if not any(_same(start, other) for _, other in different):
            different.append((run, start))
    names = [f"{INITIAL} of {run.name}" for run, _ in different] if len(different) > 1 else [INITIAL]
    return {name: run.embedded({}, start, start=True) for name, (run, start) in zip(names, different, strict=True)}


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """A name for each run, no two the same: its experiment's; where that is another's too, its number as well.

    Where both are another's too, the name is the end of the run's path, as much of it as tells the runs apart.
    """
    paths = [folder.path.resolve() for folder in folders]
    names = [folder.experiment().name for folder in folders]
    longer = [[f"{name}/{path.name}" for name, path in zip(names, paths, strict=True)]]
    longer += [["/".join(path.parts[-n:]) for path in paths] for n in range(2, max(len(path.parts) for path in paths))]
    for ends in longer:
        taken = [*names, INITIAL]
        names = [name if taken.count(name) == 1 else end for name, end in zip(names, ends, strict=True)]
    return names


def _same(one: State, other: State) -> bool:
    """Whether two models have the same tensors."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
