"""Recall of a finished run on its test records again, with intervals over patients: by site, over sites, and gained.

The server of a run knows the figures that sites sent and no patients, so an interval can only be measured where the
records are: for a run on this machine. The file holds figures alone, no record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.intervals import Bootstrap, Interval, of_draws, of_worst
from fedvlp.evaluation.output import write_csv
from fedvlp.evaluation.retrieval import EVERYTHING, recall_rows
from fedvlp.run import measurements
from fedvlp.run.compare import BATCH, INITIAL, FinishedRun, Hits, Vectors, hits_of
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder

TRAINED, GAIN, FROM_AVERAGE = "trained", "gain", "from average"
"""Beside ``INITIAL``: the other model, the trained minus the initial one, the trained one's minus its average."""

KS = (1, 5)
UNASKED = 20_000  # studies of the synthetic cohort: the test records of more take minutes
COLUMNS = ("figure", "over", "site", "scope", "k", "queries", "recall", "low", "high", "chance", "oracle")
SITE, TOGETHER = "site", "together"


@dataclass(frozen=True)
class Recall:
    """Recall@k on the test split in percent, or a difference of two: mean of both directions."""

    figure: str  # INITIAL, TRAINED, GAIN or FROM_AVERAGE
    over: str  # SITE: of one site; ``metric_names.AVERAGE`` or ``WORST`` over sites; TOGETHER: all records are one set
    site: str  # "" unless over is SITE
    scope: str  # ``metric_names.IN_BATCH`` or ``WHOLE_SET``
    k: int
    queries: int  # test pairs; each asks once in either direction
    recall: Interval
    chance: float  # of a random order; nan for a difference
    oracle: float = math.nan  # of the source oracle, a record's source being its site; nan but for TOGETHER


def file_of(folder: RunFolder) -> Path:
    """Where the recalls of a run are."""
    return measurements.folder_of(folder) / measurements.RECALLS


def measure(folder: RunFolder, run: FinishedRun | None = None) -> Path:
    """Measures the initial and the trained model on the test records and writes ``evaluation/recall.csv``.

    Of a closed form the trained model alone.

    ``run``: the folder's, whose records are read already.

    Raises ValueError as ``compare`` does: for a run that has not finished, that retrieves nothing, or whose models are
    at sites elsewhere.
    """
    run = run or FinishedRun(folder, folder.experiment().name)
    own, state = run.trained()
    shared = not own and not run.assembly.site_only() and len(run.data) > 1  # one model sees all records
    vectors = {TRAINED: run.embedded(own, state)}
    if run.experiment.takes_steps:  # else the initial model has random heads that take no part
        vectors = {INITIAL: run.embedded({}, run.assembly.initial(), start=True), **vectors}
    scopes = [names.WHOLE_SET]
    if min(map(len, run.patients.values())) >= BATCH:
        scopes.insert(0, names.IN_BATCH)
    lines: list[Recall] = []
    for scope in scopes:
        of_k = {
            k: {model: hits_of(of_model, k, scope == names.IN_BATCH) for model, of_model in vectors.items()} for k in KS
        }
        queries = {site: len(hits) for site, hits in of_k[KS[0]][TRAINED].items()}
        bootstrap = Bootstrap({site: run.patients[site][:count] for site, count in queries.items()})
        for k, hits in of_k.items():
            lines += _lines(bootstrap, hits, scope, k, queries)
    if shared:
        lines += _together(run, vectors)
    rows = ((*astuple(line)[:6], *vars(line.recall).values(), line.chance, line.oracle) for line in lines)
    file = write_csv(file_of(folder), [COLUMNS, *rows])
    measurements.note(folder, file)
    return file


def _together(run: FinishedRun, vectors: Mapping[str, Vectors]) -> Iterator[Recall]:
    """Recall among the test records of all sites, with the source oracle; of models that all sites share."""
    sources = [site for site, (image, _) in vectors[TRAINED].items() for _ in range(len(image))]
    patients = [patient for site in vectors[TRAINED] for patient in run.patients[site]]
    for model, of_model in vectors.items():
        image, text = (torch.cat(halves) for halves in zip(*of_model.values(), strict=True))
        for row in recall_rows(image, text, sources, patients, KS):
            if row.scope == EVERYTHING:
                shown = model, TOGETHER, "", names.WHOLE_SET, row.k, row.queries
                yield Recall(*shown, row.recall, row.chance, row.oracle)


def is_built_in(experiment: Experiment) -> bool:
    """Whether its records are the synthetic cohort's, which are nobody's."""
    return isinstance(experiment.data, SyntheticCohort)


def _lines(
    bootstrap: Bootstrap, hits: Mapping[str, Hits], scope: str, k: int, queries: Mapping[str, int]
) -> Iterator[Recall]:
    """The recalls of one k in one scope: of both models (name -> hits), and of their differences."""
    sites = list(queries)
    of_sites = {model: bootstrap.by_site(of_model) for model, of_model in hits.items()}  # [sites, 1 + draws] each
    average = {model: drawn.mean(axis=0) for model, drawn in of_sites.items()}
    worst = {model: drawn.min(axis=0) for model, drawn in of_sites.items()}
    of_sites[FROM_AVERAGE] = of_sites[TRAINED] - average[TRAINED]
    for of_figures in (of_sites, average, worst) if INITIAL in hits else ():
        of_figures[GAIN] = of_figures[TRAINED] - of_figures[INITIAL]
    by_random = {site: 100 * k / BATCH if scope == names.IN_BATCH else 100 * k / queries[site] for site in sites}
    for figure, drawn in of_sites.items():
        known = figure in hits
        for site, values in zip(sites, drawn, strict=True):
            chance = min(100.0, by_random[site]) if known else math.nan
            yield Recall(figure, SITE, site, scope, k, queries[site], of_draws(values), chance)
    mean_chance = float(np.mean([min(100.0, chance) for chance in by_random.values()]))
    same_chance = len(set(by_random.values())) == 1  # or that of the worst site is not known: it may change by draw
    asked = sum(queries.values())
    for over, of_figures in ((names.AVERAGE, average), (names.WORST, worst)):
        for figure, values in of_figures.items():
            known = figure in hits and (over == names.AVERAGE or same_chance)
            chance = mean_chance if known else math.nan
            least = 0.0 if figure in hits else -100.0
            interval = of_worst(values, least) if over == names.WORST else of_draws(values)
            yield Recall(figure, over, "", scope, k, asked, interval, chance)


def read(folder: RunFolder) -> list[Recall]:
    """The recalls that ``measure`` wrote; none where it did not, or of another model. Raises ValueError for damage."""
    return measurements.lines_of(folder, file_of(folder), _read)


def _read(line: Mapping[str, str]) -> Recall:
    interval = Interval(*(float(line[name]) for name in ("recall", "low", "high")))
    figure, over, site, scope = (line[name] for name in COLUMNS[:4])
    k, queries = int(line["k"]), int(line["queries"])
    return Recall(figure, over, site, scope, k, queries, interval, float(line["chance"]), float(line["oracle"]))
