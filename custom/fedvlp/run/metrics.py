"""The figures of a run's records: by site, over sites, as curves, and in a summary."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedvlp.core.metric_keys import SECONDS
from fedvlp.core.types import EVALUATE, curve
from fedvlp.evaluation import metric_names
from fedvlp.evaluation.retrieval import across_sites
from fedvlp.run.experiment import POOLED

log = logging.getLogger(__name__)

Record = dict[str, Any]
"""What the server notes of one phase (federation/loop.py)."""

SERVER = "server"
"""Stands for a site in the curves of the server's own figures, and begins their names in a summary."""


def of_server(name: str) -> str:
    """Name in a summary of a figure of the server's model on the public set, e.g. ``server/val/all/mean/r1``."""
    return f"{SERVER}/{name}"


def about(site: str, name: str) -> str:
    """Name of a figure about a site's records that the pooled site reports, e.g. ``site-1:val/mean/r1``."""
    return f"{site}:{name}"


def by_site(record: Record) -> dict[str, dict[str, float]]:
    """Site -> name -> figure of a record, without the figures that cannot be (:func:`impossible`).

    In a run that pools, what the pooled site reports ``about`` a site counts as that site's. In any other run a site
    speaks for itself alone, whatever it is called.
    """
    sites: dict[str, dict[str, float]] = {}
    pools = record.get("members") == [POOLED]
    for reporter, metrics in record["sites"].items():
        for name, value in metrics.items():
            site, metric = _told_about(name) if pools else ("", name)
            if not metric_names.is_impossible(metric, value):
                sites.setdefault(site or reporter, {})[metric] = value
    return sites


def impossible(record: Record) -> int:
    """How many figures of a record no evaluation can have, as a recall of a billion: a site may report anything."""
    figures = [figure for metrics in record["sites"].values() for figure in metrics.items()]
    return sum(metric_names.is_impossible(name, value) for name, value in figures)


def _told_about(name: str) -> tuple[str, str]:
    """The site and the figure of a name that ``about`` made; ("", name) for any other.

    A finding may have a colon in its name. A site names a folder of curves, so none leads out of it.
    """
    site, colon, metric = name.partition(":")
    plausible = colon and metric_names.parse_auc(site) is None and not {"", ".", ".."} & set(site.split("/"))
    return (site, metric) if plausible else ("", name)


def overall(record: Record) -> dict[str, float]:
    """Average, worst site and disparity of every recall, over the sites that were measured on its split.

    A site with fewer than two pairs in a split is not measured on it; the run's notes name it (run/cautions.py). What
    not all measured sites have, as recall in batches where a split is smaller than one, is left out.
    """
    measured: dict[str, dict[str, dict[str, float]]] = {}  # split -> site -> name -> recall
    for site, metrics in by_site(record).items():
        for name, value in metrics.items():
            if metric_names.is_recall(name):
                measured.setdefault(metric_names.split_of(name), {}).setdefault(site, {})[name] = value
    over: dict[str, float] = {}
    for _, sites in sorted(measured.items()):
        common = sorted(set.intersection(*map(set, sites.values())))
        over |= across_sites({site: {name: recalls[name] for name in common} for site, recalls in sites.items()})
    return over


def scalars(record: Record) -> dict[str, dict[str, float]]:
    """Site -> name -> value of everything that makes a curve; the server's own figures are under ``SERVER``."""
    own: dict[str, float] = {SECONDS: record["seconds"], **record.get("bytes", {}), **overall(record)}
    own |= record.get("server", {})
    sites = by_site(record)
    names = record["members"]
    for tensor, values in record["memory"].items():
        own |= {f"{tensor}/{site}": v for site, v in zip(names, values, strict=True) if math.isfinite(v)}
    return {SERVER: own, **sites}


def summary(history: list[Record], initial: bool = True) -> dict[str, dict[str, float]]:
    """Figures of the "initial" and the "trained" model: recalls over sites, and the server's on the public set.

    Empty where nothing was measured, and without "trained" while that is the model before the first round alone. Of a
    run of no rounds the last evaluation is of the same model. ``initial``: False for a closed form, whose random heads
    take no part.
    """
    measured = [(record, figures) for record in history if (figures := overall(record) | on_public_set(record))]
    if not measured:
        return {}
    (_, first), (record, last) = measured[0], measured[-1]
    ended = record["round"] > 0 or record["phase"] == EVALUATE
    return ({"initial": first} if initial else {}) | ({"trained": last} if ended else {})


def on_public_set(record: Record) -> dict[str, float]:
    """Every recall and AUC of the server's model on the public set, named by ``of_server``."""
    figures = record.get("server", {})
    return {
        of_server(name): value
        for name, value in figures.items()
        if metric_names.is_recall(name) or metric_names.parse_auc(name)
    }


def areas_of_sites(record: Record) -> dict[str, float]:
    """Split -> macro area under the ROC curve of a classifier, mean over the sites that have one."""
    areas = {}
    for split in ("test", "val"):
        name = metric_names.auc(split, metric_names.MACRO)
        values = [figures[name] for figures in by_site(record).values() if name in figures]
        if values:
            areas[split] = fmean(values)
    return areas


class TensorBoard:
    """Writes records as TensorBoard events below ``folder``, in one folder per site.

    Curves that a full disk does not take are a warning: they must not hide the error of the checkpoint, which says what
    to do, and metrics.csv has their figures.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, Any] = {}

    def __call__(self, record: Record) -> None:
        """Writes the curves of a record at the step ``round``."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            for site, values in scalars(record).items():
                if site not in self._writers:
                    self._writers[site] = SummaryWriter(str(self.folder / site))
                for tag, value in values.items():
                    self._writers[site].add_scalar(curve(tag, record["phase"]), value, record["round"])
        except OSError as error:
            log.warning("round %d: its curves are not all in %s: %s", record["round"], self.folder, error.strerror)

    def close(self) -> None:
        """Closes the files."""
        for site, writer in self._writers.items():
            try:
                writer.close()
            except OSError as error:
                log.warning("%s: its last curves are not in %s: %s", site, self.folder, error.strerror)


def largest_by_site(history: Sequence[Record], name: str) -> dict[str, float]:
    """Site -> the largest value of its figure ``name`` in a run."""
    seen: dict[str, float] = {}
    for record in history:
        for site, figures in by_site(record).items():
            if name in figures:
                seen[site] = max(figures[name], seen.get(site, 0.0))
    return seen
