"""The report's section on single records: films with the reports that they find, and a map of all test records.

Patients' films and reports are in no report unless a person asks for them: only the built-in cohort's, which shows
nobody, are there unasked.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fedvlp.evaluation.retrieval import ranks
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.report import figures
from fedvlp.report.explore.pictures import film
from fedvlp.report.html import grid, text
from fedvlp.report.run import Run
from fedvlp.report.sections import components
from fedvlp.run.compare import FinishedRun, Vectors
from fedvlp.run.recalls import is_built_in
from fedvlp.training.config import DeviceError

log = logging.getLogger(__name__)

TOP = 3  # reports shown for a film
SITES = 6  # sites of which films are shown
POINTS = 300  # records of a site on the map, at most
LETTERS = 280  # of a report, at most

EXPLANATION = (
    "Of each site, with the trained model: the first test film whose own report comes first among the reports of the "
    "site's test split, and the first film whose own does not. Beside each film are the reports nearest to it, with "
    "their cosine; its own is marked. Patients may share a sentence, so another report need not be wrong."
)
MAP = (
    "First two principal components of the trained model's vectors of the test records. Where sites lie apart, the "
    "model tells sites apart, and not findings alone. What is near here need not be near in the space."
)
OWNERS_EYES = (
    "This page shows films and reports of the site's own records. It is for their owner's eyes alone: do not send it "
    "to anybody, and remove it when you have looked"
)


def wanted(run: Run) -> bool:
    """Whether records are shown: where a person asked, or of a measured run on the built-in cohort."""
    if not run.folder.model.exists():
        return False
    return run.films or (bool(run.recalls) and is_built_in(run.folder.experiment()))


def section(run: Run) -> str:
    """Films with the reports that they find, and the map, as HTML; "" where no record is to be shown.

    Raises ValueError where films are asked for of a run that has not finished, or whose models are elsewhere.
    """
    if run.films and not run.folder.model.exists():
        raise ValueError(f"{run.folder.path} has not finished, so there is no model to show films with; go on with it")
    if not wanted(run) or isinstance(run.folder.experiment().model, MultimodalConfig):
        return ""
    try:
        return _shown(run)
    except (ValueError, DeviceError) as error:  # as where the folder was copied without the sites' models
        if run.films:
            raise
        log.warning("%s: no films: %s", run.folder.path, error)
        return ""


def _shown(run: Run) -> str:
    """The cards of all sites, and the map."""
    finished = FinishedRun(run.folder, run.folder.path.name)
    own, state = finished.trained()
    vectors = finished.embedded(own, state)
    shown = list(vectors)[:SITES]
    cards = "".join(_site(finished, site, *vectors[site]) for site in shown)
    left = len(vectors) - len(shown)
    more = f" {left} more sites are not shown." if left else ""
    plane = "" if own else _map(vectors)
    return f'<p>{text(EXPLANATION + more)}</p><div class="films">{cards}</div>{plane}'


def _site(run: FinishedRun, site: str, image: Tensor, reports: Tensor) -> str:
    """The cards of one site: of unit vectors image [n, d] and reports [n, d] of its test pairs."""
    rank, _ = ranks(image, reports)
    cohort = run.assembly.cohort
    rows = cohort.rows("test", site)
    out = ""
    for chosen in (rank == 0, rank > 0):
        if not chosen.any():
            continue
        query = int(torch.nonzero(chosen)[0])
        cosines, nearest = (image[query] @ reports.T).topk(min(TOP, len(reports)))
        listed = "".join(
            _report(number, cohort.reports[rows[index]], index == query, cosine)
            for number, (index, cosine) in enumerate(zip(nearest.tolist(), cosines.tolist(), strict=True), start=1)
        )
        own = int(rank[query]) + 1
        if own > TOP:
            listed += _report(own, cohort.reports[rows[query]], True, float(image[query] @ reports[query]))
        first = f"{site}: its own report is number {own} of {len(reports)}"
        picture = f'<img alt="a test film of {text(site)}" src="{film(cohort.images(rows[[query]])[0])}">'
        out += f"<div>{picture}<div><h3>{text(first)}</h3><ol>{listed}</ol></div></div>"
    return out


def _report(number: int, report: str, own: bool, cosine: float) -> str:
    """A report in the list of a film, the ``number``-th of all."""
    said = report if len(report) <= LETTERS else f"{report[:LETTERS]}\N{HORIZONTAL ELLIPSIS}"
    marked = ' class="own"' if own else ""
    of = "its own, " if own else ""
    return f'<li value="{number}"{marked}>{text(said)} <span>({of}cosine {cosine:+.2f})</span></li>'


def _map(vectors: Vectors) -> str:
    """Films and reports of all sites in the plane, for a model that all sites share."""
    out = ""
    for index, title in enumerate(("Films", "Reports")):
        of_sites = {site: pair[index][:POINTS] for site, pair in vectors.items()}
        if sum(map(len, of_sites.values())) < 3:
            continue
        points = {site: [(x, y) for x, y in tensor.tolist()] for site, tensor in components(of_sites).items()}
        out += figures.clouds(f"{title} of the test split by site (PCA)", points)
    return f"<p>{text(MAP)}</p>{grid(out)}" if out else ""
