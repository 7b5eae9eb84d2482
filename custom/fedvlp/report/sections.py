"""The short sections of a run's report: each function writes the HTML of one, "" where the run has nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.metric_keys import BYTES_DOWN, BYTES_UP, loss_term, probe, update_norm
from fedvlp.core.types import MODALITIES, State
from fedvlp.evaluation.intervals import Interval
from fedvlp.evaluation.metric_names import WHOLE_SET, recall
from fedvlp.methods.ensemble import SAMPLE
from fedvlp.methods.robust import ERROR, LOSSES, WEIGHTS
from fedvlp.report import figures, html
from fedvlp.report.figures import AVERAGE, Curve, Points
from fedvlp.report.html import ABSENT, grid, table, text
from fedvlp.report.run import Run
from fedvlp.run.audit import BOUNDS, COLUMNS, bound_cells, row_cells
from fedvlp.run.compare import INITIAL
from fedvlp.run.metrics import Record
from fedvlp.run.recalls import TRAINED
from fedvlp.run.zero_shot_areas import RATES, Area

ARROW = "\N{RIGHTWARDS ARROW}"
ZERO_SHOT = (
    "AUC on the test images of every site, 0 to 1: the model ranks the images by sentences that say the finding, and "
    "was trained on no label. Chance is 0.5. In brackets and as bars: 95 % bootstrap intervals over the test patients. "
    "A finding that a report does not mention counts as absent, an uncertain one is left out. Last: positives / total."
)


def zero_shot(run: Run) -> str:
    """AUCs of the trained model beside those of the initial one, as HTML; "" where nobody measured them."""
    areas = [one for one in run.areas if one.site in run.sites]
    if not areas:
        return ""
    findings = list(dict.fromkeys(one.finding for one in areas))
    sites = list(dict.fromkeys(one.site for one in areas))
    rows = [[finding, *(_areas_of(areas, site, finding) for site in sites)] for finding in findings]
    rows.append(["mean of these", *(_mean_areas(areas, site) for site in sites)])
    shown: dict[str, dict[str, Interval]] = {site: {} for site in sites}
    for one in areas:
        if one.model == TRAINED:
            shown[one.site][one.finding] = one.area
    looks = {site: run.style(site) for site in sites}
    drawing = figures.ranges("Zero-shot AUC of the trained model", shown, looks, ("chance", 0.5))
    head = ("finding", *(f"{site}: initial {ARROW} trained" for site in sites))
    curves = "".join(_roc(areas, finding, looks) for finding in findings)
    return f"<p>{text(ZERO_SHOT)}</p>{table(head, rows)}{grid(drawing)}{grid(curves, kind='cards')}"


def _roc(areas: Sequence[Area], finding: str, looks: Mapping[str, figures.Style]) -> str:
    """The trained model's ROC curve of a finding at every site; "" in a run that an older fedvlp measured."""
    curves = [
        (one.site, list(zip(RATES, one.sensitivities, strict=True)), {**looks[one.site], "marker": ""})
        for one in areas
        if (one.model, one.finding) == (TRAINED, finding) and one.sensitivities
    ]
    return figures.unit(f"ROC, {finding}", curves, "1 - specificity", "sensitivity")


def _areas_of(areas: Sequence[Area], site: str, finding: str) -> str:
    """Both models at one site, with the number of positive images."""
    of = {one.model: one for one in areas if (one.site, one.finding) == (site, finding)}
    if TRAINED not in of:
        return ABSENT
    trained = of[TRAINED]
    before = f"{of[INITIAL].area.value:.2f}" if INITIAL in of else ABSENT
    return f"{before} {ARROW} {trained.area.unsigned(2)}, {trained.positive} / {trained.films}"


def _mean_areas(areas: Sequence[Area], site: str) -> str:
    """The mean over findings of both models at one site."""
    means = []
    for model in (INITIAL, TRAINED):
        values = [one.area.value for one in areas if (one.model, one.site) == (model, site)]
        means.append(f"{fmean(values):.2f}" if values else ABSENT)
    return f" {ARROW} ".join(means)


def sites(run: Run) -> str:
    """Table of the training samples of every site that trains, and how often it answered, as HTML; "" before any."""
    total = sum(run.samples.values())
    rows = []
    for site in run.sites:
        records = [record for record in run.history if site in record["members"]]
        if records:
            count = run.samples.get(site, 0)
            share = f"{100 * count / total:.1f} %" if count else ABSENT
            answered = sum(site in record["sites"] for record in records)
            rows.append([site, f"{count:,}", share, f"{answered} of {len(records)}"])
    head = "site", "training samples", "share", "phases answered"
    return table(head, rows) if rows else ""


MOST_TERMS = 12  # loss terms drawn for a phase


def losses(run: Run) -> str:
    """Curves of every term in every phase, as HTML: the average over the sites that answered, and each site."""
    out = ""
    for phase in dict.fromkeys(record["phase"] for record, _ in run.training):
        sites = [(record["round"], metrics) for record, metrics in run.training if record["phase"] == phase]
        reported = (name for _, metrics in sites for values in metrics.values() for name in values)
        names = [name for name in dict.fromkeys(reported) if loss_term(name) is not None]
        for name in names[:MOST_TERMS]:
            average: Points = {}
            for round, metrics in sites:
                present = [values[name] for values in metrics.values() if name in values]
                if present:
                    average[round] = sum(value / len(present) for value in present)
            curves: list[Curve] = []
            for site in run.sites:
                points = {round: metrics[site][name] for round, metrics in sites if name in metrics.get(site, {})}
                if points:
                    curves.append((site, points, run.style(site)))
            if len(curves) > 1:
                curves.insert(0, ("average", average, AVERAGE))
            out += figures.lines(f"{phase}: {loss_term(name)}", curves, "round")
        if len(names) > MOST_TERMS:
            out += f"<p>{phase}: {len(names) - MOST_TERMS} more terms are in metrics.csv.</p>"
    return grid(out)


def site_weights(run: Run) -> str:
    """Curves of the robust weights after each round, and of the losses that moved them, as HTML; "" without any."""
    weights = _by_site(run, WEIGHTS)
    level = ("uniform", 1 / len(weights)) if weights else None
    out = figures.lines("DRO weight w, at the end of the round", _curves(run, weights), "round", level)
    losses = _curves(run, _by_site(run, LOSSES))
    title = "Loss v that moves the weights, at the end of the round"
    out += figures.lines(title, losses, "round", errors=_errors(run))
    return grid(out)


def _by_site(run: Run, name: str) -> dict[str, Points]:
    """Site -> round -> value of a tensor of the server's memory that holds one number for each site."""
    sites: dict[str, Points] = {}
    for record, _ in run.training:
        for site, value in zip(record["members"], record["memory"].get(name, ()), strict=False):
            sites.setdefault(site, {})[record["round"]] = value
    return sites


def _curves(run: Run, sites: dict[str, Points]) -> list[figures.Curve]:
    return [(site, sites[site], run.style(site)) for site in run.sites if site in sites]


def _errors(run: Run) -> dict[str, Points]:
    """Site -> round -> standard error of the loss that it sent in the round."""
    sites: dict[str, Points] = {}
    for record, by_site in run.training:
        for site, metrics in by_site.items():
            if probe(ERROR) in metrics:
                sites.setdefault(site, {})[record["round"]] = metrics[probe(ERROR)]
    return sites


PUBLIC_KS = (1, 5, 10)


def public_set(history: list[Record], memory: State) -> str:
    """Curves of the server's recall, and the first two principal components of public pairs by site, as HTML.

    "" for a run without a public set.
    """
    curves: list[figures.Curve] = []
    for index, k in enumerate(PUBLIC_KS):
        key = recall("val", k, WHOLE_SET)
        points = {r["round"]: r["server"][key] for r in history if key in r.get("server", {})}
        curves.append((f"R@{k}", points, figures.look(index)))
    drawings = figures.lines("The server's model on the public set, val, whole set (%)", curves, "rounds completed")
    for modality in MODALITIES:
        sent = samples(memory, modality)
        if len(sent) > 1:
            drawings += _clouds(modality, sent)
    return html.grid(drawings)


def samples(memory: State, modality: str) -> State:
    """Site -> the vectors [n, d] of the first n public pairs that it sent last."""
    prefix = f"{SAMPLE}{modality}/"
    return {name.removeprefix(prefix): tensor for name, tensor in sorted(memory.items()) if name.startswith(prefix)}


def components(sent: State) -> dict[str, Tensor]:
    """Site -> first two principal components [n, 2] of its vectors; the axes are those of all sites' vectors together.

    The sign of an axis is chosen so that its entries have a positive sum.
    """
    together = torch.cat(list(sent.values())).double()
    axes = torch.linalg.svd(together - together.mean(0), full_matrices=False).Vh[:2].T  # [d, 2]
    axes = axes * torch.where(axes.sum(0) < 0, -1.0, 1.0)
    return {site: (tensor.double() - together.mean(0)) @ axes for site, tensor in sent.items()}


def drift(sent: State) -> dict[str, float]:
    """Site -> mean distance of its vectors from the mean over sites of the vectors of the same public item."""
    centre = torch.stack([tensor.double() for tensor in sent.values()]).mean(0)
    return {site: float((tensor.double() - centre).norm(dim=1).mean()) for site, tensor in sent.items()}


def _clouds(modality: str, sent: State) -> str:
    """The sites' vectors of one modality in the plane, and their distances, as HTML."""
    points = {site: [(x, y) for x, y in tensor.tolist()] for site, tensor in components(sent).items()}
    title = f"Sites' {modality} representations of the same public pairs (PCA)"
    colours = {site: figures.look(index)["color"] for index, site in enumerate(sent)}
    distances = figures.bars(f"Mean distance from the sites' mean, {modality}", {"distance": drift(sent)}, colours)
    return figures.clouds(title, points) + distances


MEMBERSHIP = (
    "Membership: can an attacker who has the model and a record say whether it was trained on? Training records are "
    "compared with held-out ones of other patients of the same site, as many findings, and reports of like length. "
    "AUC in percent, 50 is chance; then the share of training records that are found while "
    "so many of the others are taken for some. In brackets: 95 % intervals over patients. A stronger attack may exist, "
    "and a low AUC is no guarantee; only differential privacy gives a bound."
)
EPSILON = "What epsilon leaves to any attack at most, on a record or on whether the whole data set of a site took part."


def attacks(run: Run) -> str:
    """The attacks, their controls and the bound of epsilon, as HTML; "" where no audit was run."""
    audit = run.audit
    if audit is None:
        return ""
    out = f"<p>{text(MEMBERSHIP)}</p>" + "".join(f"<p>{text(sentence)}</p>" for sentence in audit.controls())
    out += table(COLUMNS, [row_cells(row) for row in audit.rows])
    if audit.bounds:
        out += f"<p>{text(EPSILON)}</p>{table(BOUNDS, [bound_cells(one) for one in audit.bounds])}"
    return out


def costs(run: Run) -> str:
    """Bytes and seconds of each round, as HTML; "" before there is one."""
    if not run.history:
        return ""
    down: Points = {}  # megabytes by round
    up: Points = {}
    seconds: dict[str, Points] = {}  # by phase
    for record in run.history:
        round, traffic = record["round"], record.get("bytes", {})
        of_phase = seconds.setdefault(record["phase"], {})
        of_phase[round] = of_phase.get(round, 0.0) + record["seconds"]
        down[round] = down.get(round, 0.0) + traffic.get(BYTES_DOWN, 0) / 1e6
        up[round] = up.get(round, 0.0) + traffic.get(BYTES_UP, 0) / 1e6
    megabytes = f"{sum(down.values()):,.1f} MB to sites, {sum(up.values()):,.1f} MB from sites"
    total = sum(sum(points.values()) for points in seconds.values())
    drawings = figures.stack("Megabytes per round, all sites", {"to sites": down, "from sites": up})
    drawings += figures.stack("Seconds per round", seconds)
    return f"<p>Tensors: {megabytes}. Phases: {total:,.1f} s.</p>{grid(drawings)}"


def changes(history: Sequence[Record], sites: Sequence[str], style: Callable[[str], dict[str, Any]]) -> str:
    """Curves of the L2 norm of every site's change, by phase, as HTML; ``style`` gives the line of a site.

    A norm far above the others is a reason to look at that site.
    """
    drawings = ""
    for phase in dict.fromkeys(record["phase"] for record in history):
        norms = [(record["round"], record.get("server", {})) for record in history if record["phase"] == phase]
        curves: list[figures.Curve] = []
        for site in sites:
            name = update_norm(site)
            curves.append((site, {round: metrics[name] for round, metrics in norms if name in metrics}, style(site)))
        drawings += figures.lines(f"{phase}: L2 norm of the change, as sent", curves, "round")
    return html.grid(drawings)


def dropped(history: Sequence[Record]) -> str:
    """Table of the updates that were not used, with the reasons, as HTML; "" where all were."""
    rows = [
        [record["round"], record["phase"], site, reason]
        for record in history
        for site, reason in sorted(record["dropped"].items())
    ]
    if not rows:
        return ""
    return html.table(["round", "phase", "site", "reason"], rows, "text")


def settings(run: Run) -> str:
    """All settings by group, and the versions, as HTML."""
    groups = [(key, value) for key, value in run.config.get("args", {}).items() if isinstance(value, dict)]
    cards = {
        f"{key}: {html.kind(of)}": {name: html.shown(value, name) for name, value in of.get("args", {}).items()}
        for key, of in groups
    }
    cards["versions"] = {"python": run.environment.get("python", ABSENT), **run.environment.get("packages", {})}
    cells = [f"<div><h3>{text(title)}</h3>{html.pairs(items)}</div>" for title, items in cards.items()]
    return grid("".join(cells), kind="cards")
