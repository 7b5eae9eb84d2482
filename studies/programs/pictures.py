"""Draws the pictures of README and docs from two runs: retrieval.png, saliency.png and compare.svg.

    fedvlp simulate feddra --sites 2 --set data.size=800 --set rounds.rounds=2 --set method.local_steps=8
    fedvlp simulate fedavg --like runs/feddra/001
    fedvlp compare runs/fedavg/001 runs/feddra/001 --html compare.html
    python studies/programs/pictures.py runs/feddra/001 compare.html

`make pictures` runs all. The images are the first of a site's test split whose own report is ranked first or second.
"""

from __future__ import annotations

import argparse
import base64
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from fedvlp.run.compare import FinishedRun
from fedvlp.run.folder import RunFolder

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SHOWN, REPORTS = 2, 3


def main() -> None:
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("comparison", type=Path, help="the page of fedvlp compare --html")
    parser.add_argument("--out", type=Path, default=PICTURES)
    options = parser.parse_args()
    folder = RunFolder(options.run)
    figure = pyplot.figure(figsize=(9, 5), layout="constrained")
    grid = figure.add_gridspec(SHOWN, 3, width_ratios=[1.0, 1.5, 1.1])
    for row, (image, reports) in enumerate(retrieved(folder)):
        film, beside = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        film.imshow(image, cmap="gray", vmin=0, vmax=255)
        film.axis("off")
        write(beside, reports)
    curves(figure.add_subplot(grid[:, 2]), folder)
    figure.savefig(options.out / "retrieval.png", dpi=130, facecolor="white")
    for name, page, title in (
        ("saliency.png", folder.page(False), "site-2, "),
        ("compare.svg", options.comparison, "R@1 of every model"),
    ):
        (options.out / name).write_bytes(picture_of(page, title))


def picture_of(page: Path, title: str) -> bytes:
    """The first picture of a page whose text begins with the title. Raises TypeError where there is none."""
    found = re.search(rf'<img alt="{re.escape(title)}[^"]*" src="data:[^,]*,([^"]*)"', page.read_text(encoding="utf-8"))
    return base64.b64decode(found[1])


def retrieved(folder: RunFolder) -> list[tuple[np.ndarray, list[tuple[str, bool]]]]:
    """Images [S, S], each with the reports ranked first and whether a report is its own."""
    run = FinishedRun(folder, "run")
    vectors = run.embedded(*run.trained())
    site = next(iter(vectors))
    image, text = vectors[site]
    cohort = run.assembly.cohort
    rows = cohort.rows("test", site)[: len(image)]
    order = (image @ text.T).argsort(dim=1, descending=True)  # [n, n]
    found = []
    for query in range(len(rows)):
        ranked = order[query].tolist()
        if ranked.index(query) < 2:
            reports = [(cohort.reports[rows[other]], other == query) for other in ranked[:REPORTS]]
            found.append((cohort.images(rows[query : query + 1])[0], reports))
        if len(found) == SHOWN:
            break
    return found


def write(axis: Any, reports: list[tuple[str, bool]]) -> None:
    """The reports below each other; the image's own is bold."""
    axis.axis("off")
    axis.set_title("ranked first (green: its own)", fontsize=9, loc="left")
    y = 0.98
    for rank, (report, own) in enumerate(reports, 1):
        lines = textwrap.wrap(report, 40)[:4]
        said = "\n".join(lines)
        weight, colour = ("bold", "tab:green") if own else ("normal", "0.25")
        axis.text(0, y, f"{rank}. {said}", va="top", fontsize=8, weight=weight, color=colour, transform=axis.transAxes)
        y -= 0.078 * len(lines) + 0.04


def curves(axis: Any, folder: RunFolder) -> None:
    """Validation R@1 of every site over the rounds."""
    sites: dict[str, list[float]] = {}
    evaluated = [record for record in folder.history() if any("val/mean/r1" in one for one in record["sites"].values())]
    for record in evaluated:
        for site, metrics in record["sites"].items():
            sites.setdefault(site, []).append(metrics["val/mean/r1"])
    for site, values in sites.items():
        axis.plot(range(len(values)), values, marker="o", label=site)
    axis.axhline(100 / 32, color="0.6", linestyle=":", label="chance")
    axis.set(xlabel="round", ylabel="R@1, %", title="validation, 32 candidates", xticks=range(len(evaluated)))
    axis.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
