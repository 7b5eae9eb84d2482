"""The figures of FedRGB's claims on distortion: what a round at one site does to every site's pairs (spec 10.7)."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean

from fedvlp.run.folder import RunFolder
from studies.claims.cell_results import Figures
from studies.protocols.distortion import MEAN, Retrained, distort

PLAIN, OWN = "plain", "own"
"""How a site trains the shared model for one more round: as FedAvg does, or as the run's own method does."""

BEFORE = "paired cosine, x 100"


def change(way: str) -> str:
    """Name of the change of the paired cosine, x 100: mean over the sites that train and those that are measured."""
    return f"its change by {way} training"


def change_at(site: str, way: str) -> str:
    """Name of the same on the records of one site."""
    return f"{change(way)}, {site}"


def change_elsewhere(way: str) -> str:
    """Name of the same without the records of the site that trains."""
    return f"{change(way)}, other sites"


def of_run(folder: RunFolder) -> Figures:
    """All figures of a finished run. FedAvg's own training is the plain one."""
    figures: Figures = {}
    for way in (PLAIN, OWN):
        figures |= of_table(distort(folder, Retrained(own=way == OWN))[0], way)
    return figures


def of_table(path: Path, way: str) -> Figures:
    """The figures of a table that `fedvlp evaluate --what distortion` writes, x 100; a loss is negative."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    means = {row["measured_on"]: -100 * float(row["distortion"]) for row in rows if row["trained_on"] == MEAN}
    pairs = [row for row in rows if row["trained_on"] != MEAN]
    elsewhere = [-100 * float(row["distortion"]) for row in pairs if row["trained_on"] != row["measured_on"]]
    before = {row["measured_on"]: 100 * float(row["similarity_before"]) for row in pairs}
    by_site = {change_at(site, way): value for site, value in means.items()}
    return {
        **by_site,
        change(way): fmean(means.values()),
        change_elsewhere(way): fmean(elsewhere),
        BEFORE: fmean(before.values()),
    }
