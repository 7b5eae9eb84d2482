"""The report's section on retrieval: initial and trained, by site, and over rounds."""

from __future__ import annotations

from fedvlp.core.types import EVALUATE
from fedvlp.evaluation.site_metrics import Retrieval
from fedvlp.report import figures
from fedvlp.report.figures import AVERAGE, WORST, Curve
from fedvlp.report.html import ABSENT, grid, table, text
from fedvlp.report.run import Run
from fedvlp.run.experiment import POOLED
from fedvlp.run.metrics import Record, by_site, is_retrieval

BATCH = Retrieval().batch_size
KS, ARROW = (1, 5), " \N{RIGHTWARDS ARROW} "
KINDS = {"average": "average", "worst": "worst site", "disparity_population_std": "disparity (population std)"}
SCOPES = {"mean": f"in batches of {BATCH}", "all/mean": "whole set"}


def section(run: Run) -> str:
    """The tables of initial and trained, the bars of the sites, and the curves over rounds."""
    if not run.measured:
        never = run.setting("rounds.evaluate_every") == 0
        return f"<p>No evaluation{': rounds.evaluate_every is 0' if never else ' so far'}.</p>"
    (first, _), (last, _) = run.measured[0], run.measured[-1]
    sites = [{site for site, m in by_site(record).items() if any(map(is_retrieval, m))} for record in (first, last)]
    said = [
        "Recall@K (R@K) on held-out records, in percent, mean of both directions. Average and worst are over sites; "
        "disparity is the population standard deviation over sites, as the papers do not define theirs. By chance, "
        f"R@K is 100 K / {BATCH} in batches and 100 K / N in a whole set of N records, another at every site."
    ]
    if first is last:
        said.append(f"Only one evaluation so far ({_moment(first)}).")
    if sites[0] != sites[1]:
        one_sided = ", ".join(site for site in run.sites if site in sites[0] ^ sites[1])
        said.append(f"Not the same sites were measured at both ends ({one_sided}), so compare the averages with care.")
    if run.training and not any(record.get("bytes", {}).get("bytes_up", 1) for record, _ in run.training):
        said.append("No site sent a tensor: each was measured with the model that it trained alone.")
    if any(record["members"] == [POOLED] for record in run.history):
        said.append("All records train at one place (pooled); its model is measured on the records of every site.")
    if run.refused:
        said.append(f"Left out: {run.refused} reported recalls outside of 0 to 100.")
    ends = {_moment(record): (record, figures) for record, figures in (run.measured[0], run.measured[-1])}
    tables = "".join(_ends(split, {name: figures for name, (_, figures) in ends.items()}) for split in ("test", "val"))
    figures = _over_rounds(run) + _by_site(run, {name: record for name, (record, _) in ends.items()})
    return "".join(f"<p>{text(line)}</p>" for line in said) + tables + grid(figures)


def _moment(record: Record) -> str:
    """Which model a record measured: the one that its round starts from."""
    if record["round"] == 0:
        return "initial"
    return f"trained, {record['round']} rounds" if record["phase"] == EVALUATE else f"after {record['round']} rounds"


def _ends(split: str, ends: dict[str, dict[str, float]]) -> str:
    """The table of one split, both ends in each cell."""
    rows = []
    for middle, scope in SCOPES.items():
        for k in KS:
            found = [[of.get(f"{split}/{middle}/r{k}/{kind}") for of in ends.values()] for kind in KINDS]
            if any(value is not None for values in found for value in values):
                cells = [ARROW.join(ABSENT if v is None else f"{v:.2f}" for v in values) for values in found]
                rows.append([f"R@{k}, {scope}", *cells, f"{100 * k / BATCH:g}" if middle == "mean" else ABSENT])
    title = f"{split.capitalize()} split: {ARROW.join(ends)}"
    return f"<h3>{text(title)}</h3>{table(['', *KINDS.values(), 'chance'], rows)}" if rows else ""


def _by_site(run: Run, ends: dict[str, Record]) -> str:
    """R@1 of every site at both ends, in batch on the test split if that is there."""
    measured = {name: by_site(record) for name, record in ends.items()}
    choices = [(split, middle) for middle in SCOPES for split in ("test", "val")]
    found = [sum(f"{s}/{m}/r1" in v for of in measured.values() for v in of.values()) for s, m in choices]
    if not any(found):
        return ""
    split, middle = choices[found.index(max(found))]
    key = f"{split}/{middle}/r1"
    values = {name: {site: m[key] for site, m in of.items() if key in m} for name, of in measured.items()}
    colours = {site: run.style(site)["color"] for site in run.sites if any(site in of for of in values.values())}
    level = ("chance", 100 / BATCH) if middle == "mean" else None
    return figures.bars(f"R@1 by site, {split}, {SCOPES[middle]} (%)", values, colours, level)


def _over_rounds(run: Run) -> str:
    """Validation recall of every site, the average and the worst."""
    middle = "mean" if any("val/mean/r1/average" in figures for _, figures in run.measured) else "all/mean"
    sites = [(record["round"], by_site(record)) for record, _ in run.measured]
    out = ""
    for k in KS:
        key = f"val/{middle}/r{k}"
        curves: list[Curve] = []
        for kind, style in (("average", AVERAGE), ("worst", WORST)):
            points = {r["round"]: figures[name] for r, figures in run.measured if (name := f"{key}/{kind}") in figures}
            curves.append((KINDS[kind], points, style))
        curves += [(s, {x: m[s][key] for x, m in sites if key in m.get(s, {})}, run.style(s)) for s in run.sites]
        level = ("chance", 100 * k / BATCH) if middle == "mean" else None
        out += figures.lines(f"R@{k} over rounds, val, {SCOPES[middle]} (%)", curves, "rounds completed", level)
    return out
