"""What the study of real X-rays says, from its tables alone: `python -m studies.real_federation_page` writes it anew.

The section of docs/results.md, the paragraph of README.md and the picture of model by site, light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from textwrap import fill

from fedvlp.evaluation.intervals import Interval, over_seeds
from fedvlp.evaluation.output import new_figure, write_png
from studies.page import lines_of, table

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "real-federation"
FEDERATED, MEAN = "federated", "mean of the labelled sites"
LABELLED = {"nih-pa": "NIH, standing", "nih-ap": "NIH, portable", "adult": "adults, three classes"}
PAIRS = ("eurorad", "journals", "radiopaedia", "sirm")
SITES = (*LABELLED, *PAIRS)
ALONE = tuple(f"{site} alone" for site in SITES)
STEPS = {"FedAvg": "FedAvg", "recommended": "`recommended`", "FedDRA": "FedDRA", "all records pooled": "all pooled"}
MARKS = "<!-- real-federation -->", "<!-- /real-federation -->"


@cache
def figures() -> dict[tuple[str, str, str], dict[tuple[int, int], float]]:
    """(model, site, measure) -> (repeat, fold) -> figure; AUCs in percent."""
    found: dict[tuple[str, str, str], dict[tuple[int, int], float]] = {}
    for line in lines_of("real-federation"):
        value = float(line["value"]) * (100 if line["measure"] in ("zero-shot", "supervised") else 1)
        key = line["model"], line["site"], line["measure"]
        found.setdefault(key, {})[int(line["repeat"]), int(line["fold"])] = value
    return found


def mean(model: str, site: str = MEAN, measure: str = "zero-shot") -> float:
    """Over the folds that have the figure."""
    return fmean(one for one in figures()[model, site, measure].values() if not math.isnan(one))


def minus(one: str, other: str, site: str = MEAN, measure: str = "zero-shot") -> Interval:
    """One row minus another on the folds that both have."""
    left, right = figures()[one, site, measure], figures()[other, site, measure]
    apart = [left[fold] - right[fold] for fold in sorted(left.keys() & right.keys())]
    return over_seeds([one for one in apart if not math.isnan(one)], splits=1 / 4)


def primary() -> dict[str, Interval]:
    """The federated closed form minus each site's own, mean over the labelled sites."""
    return {site: minus(FEDERATED, f"{site} alone") for site in SITES}


def at_home() -> dict[str, Interval]:
    """At each labelled site, the federated closed form minus that site's own."""
    return {site: minus(FEDERATED, f"{site} alone", site) for site in LABELLED}


def verdict() -> str:
    """What the primary contrast says."""
    sides = {site: interval.side for site, interval in primary().items()}
    ahead = [site for site in SITES if sides[site] > 0]
    if len(ahead) == len(SITES):
        return "**Federating is ahead of every site alone.**"
    behind = [site for site in SITES if sides[site] < 0]
    undecided = [site for site in SITES if not sides[site]]
    few = f"all but {_list([*undecided, *behind])}" if len(ahead) > 3 else _list(ahead)
    said = [f"ahead of {few}"] * bool(ahead) + [f"undecided against {_list(undecided)}"] * bool(undecided)
    said += [f"behind {_list(behind)}"] * bool(behind)
    return f"**Federating is not shown to be ahead of every site alone:** it is {', '.join(said)}."


def _list(sites: Sequence[str]) -> str:
    return ", ".join(f"`{site}`" for site in sites)


def _row(name: str, model: str, measure: str = "zero-shot", less: bool = True) -> list[str]:
    cells = [f"{mean(model, site, measure):.1f}" for site in (*LABELLED, MEAN)]
    pairs = (model, "pairs", "R@1 within sources")
    cells.append(f"{mean(*pairs):.1f}" if pairs in figures() else "")
    shown = less and model != FEDERATED and measure == "zero-shot"
    return [name, *cells, str(minus(FEDERATED, model)) if shown else ""]


def rows() -> list[list[str]]:
    """The table of docs/results.md."""
    named = {
        "random heads": "untouched",
        **{f"`{site}` alone": f"{site} alone" for site in SITES},
        "**federated**": FEDERATED,
        "without the judged site": "without the judged site",
        "the judged site's sums four times": "the judged site four times",
        "the labelled sites alone": f"{FEDERATED}, labelled sites only",
        "one report for each image": f"{FEDERATED}, one report",
        "sites' means out of the vectors, too": f"{FEDERATED}, site means out of the vectors",
        "words: presence against denials": f"{FEDERATED}, denials",
        "words: presence alone": f"{FEDERATED}, phrase alone",
        "random reports": "random reports",
        "labels permuted within each site": "permuted labels",
    }
    found = [_row(name, model) for name, model in named.items()]
    found += [
        _row(f"{name}, 6 rounds of 12 steps from it", f"steps, {model}")
        for model, name in STEPS.items()
        if (f"steps, {model}", MEAN, "zero-shot") in figures()
    ]
    heads = {f"ridge heads, `{site}` alone": f"ridge heads, {site} alone" for site in LABELLED}
    heads["ridge heads, federated = pooled"] = "ridge heads, federated"
    return found + [_row(name, model, "supervised") for name, model in heads.items()]


def prose(text: str, indent: str = "") -> str:
    """Lines of at most 118 characters."""
    return fill(text, 118, initial_indent=indent, subsequent_indent=" " * len(indent), break_on_hyphens=False)


def point(text: str) -> str:
    """A point of a list."""
    return prose(text, "- ")


def shown(folder: str) -> str:
    """The picture, as a reader's screen is light or dark."""
    name = f"{folder}/{PICTURE.name}"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}-dark.png">'
        f'<img alt="Zero-shot AUC by model and site" src="{name}.png"></picture>'
    )


def section() -> str:
    """The section of docs/results.md."""
    folds = figures()[FEDERATED, MEAN, "zero-shot"]
    repeats = len({repeat for repeat, _ in folds})
    stepped = len(figures().get(("steps, FedAvg", MEAN, "zero-shot"), {}))
    home = [f"`{site}` {interval}" for site, interval in at_home().items()]
    inner = {
        f"{ridge:g}, means {where}": mean(f"inner, ridge {ridge:g}, means {where}")
        for where in ("out", "in")
        for ridge in (10.0, 30.0, 100.0)
    }
    membership = [
        [
            f"{ridge:g}",
            f"{mean(f'{FEDERATED}, ridge {ridge:g}, means out'):.1f}",
            f"{mean(f'{FEDERATED}, ridge {ridge:g}, means in'):.1f}",
            f"{mean(f'ridge {ridge:g}', MEAN, 'membership, the reports it learned from'):.1f}",
            f"{mean(f'ridge {ridge:g}', MEAN, 'membership, others of the same labels'):.1f}",
        ]
        for ridge in (10.0, 30.0, 100.0)
    ]
    return "\n".join(
        [
            MARKS[0],
            "",
            prose(
                "Seven sites: NIH's X-rays by view (440 standing, 264 portable, 171 patients), 601 X-rays of adults "
                "(no finding, pneumonia, COVID-19), and 361 pairs of four sources. X-rays with labels have no reports: "
                "each gets the eight Open-i reports, of 3,832, whose findings agree best with its own. Linear heads on "
                "frozen EfficientNet-Lite0 and MiniLM, from one round of sums (preset `one-round-reports-real`; "
                f"`studies/programs/real_federation.py`). {FOLDS[repeats]}, by patient; zero-shot macro AUC in percent "
                "on held-out patients; settings chosen on inner folds; design and contrast fixed before the first "
                f"result. Rows with steps: {stepped} of the {len(folds)} folds. R@1: of the pairs, within sources."
            ),
            "",
            shown("pictures"),
            "",
            table(["", *LABELLED.values(), "mean", "R@1", "federated minus this, mean"], rows()),
            prose(
                f"{verdict()} The primary contrast is the federated form minus each site's own, mean over the labelled "
                "sites, by the corrected resampled t over the folds. It stands in the last column."
            ),
            "",
            point(f"**At home**, federated minus the site's own: {', '.join(home)}."),
            point(
                f"**A site that took no part** is at {mean('without the judged site'):.1f} in the mean: the gain needs "
                f"the site's own sums. Counted four times they give {mean('the judged site four times'):.1f}."
            ),
            point(
                f"**It is the labels:** random reports give {mean('random reports'):.1f}, labels permuted within each "
                f"site {mean('permuted labels'):.1f}; chance is 50."
            ),
            point(
                f"**Eight reports or one:** {mean(FEDERATED):.1f} and {mean(f'{FEDERATED}, one report'):.1f}, a "
                f"difference of {minus(FEDERATED, f'{FEDERATED}, one report')}."
            ),
            point(
                "**Ridge and sites' means**, on the inner folds by which they were chosen: "
                + "; ".join(f"{name} {value:.1f}" for name, value in inner.items())
                + "."
            ),
            point(
                f"**Words:** presence against a normal X-ray's sentences {mean(FEDERATED):.1f}, against denials "
                f"{mean(f'{FEDERATED}, denials'):.1f}, presence alone {mean(f'{FEDERATED}, phrase alone'):.1f}."
            ),
            point(
                "**Ridge heads for the findings, from the same sums,** see the labels themselves, and reach "
                + ", ".join(
                    f"{mean('ridge heads, federated', site, 'supervised'):.1f} ({name})"
                    for site, name in LABELLED.items()
                )
                + ". Within a view, NIH's X-rays of 64 pixels and 171 patients teach little by labels, and no more by "
                "words."
            ),
            "",
            prose(
                "What leaves a site are means and covariances of features. Whether an X-ray was trained on, by the "
                "mean cosine with the reports that it learned from, and with eight others of the same labels (AUC in "
                "percent; true pairs above: 98.9):"
            ),
            "",
            table(["image ridge", "zero-shot, means out", "means in", "membership, its reports", "others"], membership),
            MARKS[1],
        ]
    )


FOLDS = {count: f"Five folds, {count} repeats" for count in range(2, 9)} | {1: "Five folds"}


def paragraph() -> str:
    """What README says."""
    return "\n".join(
        [
            MARKS[0],
            "",
            shown("docs/pictures"),
            "",
            prose(
                "One round of sums, no training, public reports found by labels "
                f"([how](docs/reports-of-others.md)). Zero-shot AUC, mean of three sites: {mean(FEDERATED):.1f} "
                f"together, alone {min(mean(one) for one in ALONE):.1f} to {max(mean(one) for one in ALONE):.1f} "
                "(chance 50); at home, "
                f"together minus alone: {', '.join(str(interval) for interval in at_home().values())}. {verdict()} "
                "[All rows](docs/results.md#real-x-rays-reports-of-other-people)."
            ),
            "",
            MARKS[1],
        ]
    )


def draw(dark: bool) -> Path:
    """The matrix of model by site."""
    models = [*(f"{site} alone" for site in SITES), "without the judged site", FEDERATED]
    values = [[mean(model, site) for site in LABELLED] for model in models]
    figure, axes = new_figure(7.2, 4.6)
    ink, ground = ("#e6edf3", "#0d1117") if dark else ("#1f2328", "#ffffff")
    figure.set_facecolor(ground)
    image = axes.imshow(values, cmap="cividis", vmin=40, vmax=95, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.0f}", ha="center", va="center", color="white" if value < 68 else "black")
    axes.set_xticks(range(len(LABELLED)), list(LABELLED.values()), color=ink)
    axes.set_yticks(range(len(models)), models, color=ink)
    axes.set_xlabel("held-out patients of", color=ink)
    axes.set_title("Zero-shot macro AUC, percent; chance is 50", color=ink)
    axes.tick_params(color=ink)
    bar = figure.colorbar(image)
    bar.ax.tick_params(colors=ink)
    return write_png(PICTURE.with_name(PICTURE.name + "-dark" * dark), figure)


def replaced(page: str, block: str) -> str:
    """The page with the block in the place of what stands between its marks. Raises ValueError without them."""
    before, found, rest = page.partition(MARKS[0])
    _, ended, after = rest.partition(MARKS[1])
    if not found or not ended:
        raise ValueError(f"the page has no {MARKS[0]} ... {MARKS[1]}")
    return before + block + after


PAGES = {ROOT / "docs" / "results.md": section, ROOT / "README.md": paragraph}


if __name__ == "__main__":
    for path, block in PAGES.items():
        path.write_text(replaced(path.read_text(encoding="utf-8"), block()), encoding="utf-8")
    print(draw(False), draw(True))
