"""The report of a run in progress, stopped or finished: one HTML page; what the folder lacks is left out and named."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from fedvlp import drift, findings, updates
from fedvlp import figures as draw
from fedvlp.core.checkpoint import save_text
from fedvlp.core.server import Server
from fedvlp.core.site import EVALUATE
from fedvlp.core.types import State
from fedvlp.evaluation.held_out import Retrieval
from fedvlp.experiment import POOLED
from fedvlp.figures import ABSENT, AVERAGE, WORST, Curve, Points, grid, table, text
from fedvlp.runs import Record, RunFolder, by_site, is_retrieval, overall

BATCH = Retrieval().batch_size
KS, ARROW = (1, 5), " \N{RIGHTWARDS ARROW} "
MOST = 12  # loss terms drawn for a phase
KINDS = {"average": "average", "worst": "worst site", "disparity_population_std": "disparity (population std)"}
SCOPES = {"mean": f"in batches of {BATCH}", "all/mean": "whole set"}


@dataclass(frozen=True)
class Run:
    """What the page is made of."""

    folder: RunFolder
    config: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    history: list[Record]
    samples: dict[str, int]
    memory: State  # the server's
    saved: str  # when the last phase was
    refused: int  # reported recalls outside of 0 to 100, which no average survives

    @staticmethod
    def read(folder: RunFolder) -> Run:
        """Whatever the folder has so far. Raises CheckpointError for a damaged checkpoint."""
        server, saved, refused = Server((), {}), "", 0
        if folder.checkpoint.exists():
            server = Server.load(folder.checkpoint)[0]
            moment = datetime.fromtimestamp(folder.checkpoint.stat().st_mtime, timezone.utc)
            saved = f"{moment:%Y-%m-%d %H:%M} UTC"
        for metrics in (metrics for record in server.history for metrics in record["sites"].values()):
            for name in [name for name, value in metrics.items() if is_retrieval(name) and not 0 <= value <= 100]:
                del metrics[name]
                refused += 1
        config, environment, status = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            for path in (folder.config, folder.path / "environment.json", folder.path / "run_status.json")
        )
        return Run(folder, config, environment, status, server.history, server.samples, server.memory, saved, refused)

    def setting(self, key: str) -> Any:
        """A setting such as ``rounds.seed``, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get("args", {}).get(part) if isinstance(value, dict) else None
        return value

    @cached_property
    def measured(self) -> list[tuple[Record, dict[str, float]]]:
        """The records with an evaluation, each with its figures over sites."""
        return [(record, figures) for record in self.history if (figures := overall(record))]

    @cached_property
    def training(self) -> list[tuple[Record, dict[str, dict[str, float]]]]:
        """The records of training phases, each with its metrics by site."""
        return [(record, by_site(record)) for record in self.history if record["phase"] != EVALUATE]

    @cached_property
    def sites(self) -> list[str]:
        """Every site that was asked or measured, site-2 before site-10."""
        names = {name for record in self.history for name in (*record["members"], *by_site(record))}
        return sorted(names, key=lambda name: (name == POOLED, [p.zfill(9) for p in re.split(r"(\d+)", name)]))

    def style(self, site: str) -> dict[str, Any]:
        """The line of a site, the same in every figure."""
        chosen = draw.look(self.sites.index(site))
        return {**chosen, "color": "#555555"} if site == POOLED else chosen


def write(folder: RunFolder) -> Path:
    """Writes ``report.html`` into the run's folder and returns its path."""
    import matplotlib

    run = Run.read(folder)
    sections = {
        "": _head, "Retrieval": _retrieval, "Sites": _sites, "Loss": _loss, "Site weights": _weights,
        "Classifier": lambda run: findings.section(run.folder, run.history),
        "Public set": lambda run: drift.section(run.history, run.memory), "Bytes and seconds": _costs,
        "Changes that sites sent": lambda run: updates.changes(run.history, run.sites, run.style),
        "Dropped updates": lambda run: updates.dropped(run.history), "All settings and versions": _settings,
    }  # fmt: skip
    with matplotlib.rc_context(draw.RC):
        parts = [(f"<h2>{title}</h2>\n" if title else "") + section(run) + "\n" for title, section in sections.items()]
    path = folder.path / "report.html"
    save_text(path, draw.page(f"fedvlp: {run.setting('name') or 'run'} {folder.path.name}", "".join(parts)))
    return path


def _head(run: Run) -> str:
    """Status and, in short, what was run."""
    last: Record = run.history[-1] if run.history else {"round": 0, "phase": "", "members": []}
    done = [f"trained up to round {record['round']}, phase {record['phase']}" for record, _ in run.training]
    where = done[-1] if done else "not trained yet"
    where += f" ({run.setting('rounds.rounds')} rounds planned, counted from 0)" if run.config else ""
    older = "round" in run.status and (run.status["round"], run.status.get("phase")) != (last["round"], last["phase"])
    status = run.status.get("status")
    if run.folder.model.exists():
        status = "finished"
    elif status is None or older:
        status = "in progress or interrupted"
    out = f'<p><span class="status">{text(status)}</span> {text(where)}{"; saved " * bool(run.saved)}{run.saved}.</p>'
    if run.status.get("reason"):
        out += f"<p>{'An earlier attempt ended with: ' if older else ''}{text(run.status['reason'])}</p>"
    if not run.config:
        return out + "<p>The folder has no config.json, so what was run is not known.</p>"
    image, words, size = (run.setting(f"model.{key}") for key in ("image_tower", "text_tower", "embedding_dim"))
    method = run.setting("method") or {}
    facts = {
        "method": draw.kind(method),
        "hyper-parameters": ", ".join(f"{k} = {draw.shown(v)}" for k, v in method.get("args", {}).items()) or ABSENT,
        "objective": draw.kind(run.setting("objective")),
        "model": f"image tower {image}, text tower {words}, {size} dimensions",
        "data": draw.kind(run.setting("data")),
        "sites": ", ".join(site for site in run.sites if site in last["members"]) or "not known yet",
        "seed": run.setting("rounds.seed"),
        "fingerprint": run.environment.get("fingerprint", "not recorded"),
    }
    return out + draw.pairs(facts)


def _retrieval(run: Run) -> str:
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
    return draw.bars(f"R@1 by site, {split}, {SCOPES[middle]} (%)", values, colours, level)


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
        out += draw.lines(f"R@{k} over rounds, val, {SCOPES[middle]} (%)", curves, "rounds completed", level)
    return out


def _loss(run: Run) -> str:
    """Every term of every phase: the average over the sites that answered, and each site."""
    out = ""
    for phase in dict.fromkeys(record["phase"] for record, _ in run.training):
        sites = [(record["round"], metrics) for record, metrics in run.training if record["phase"] == phase]
        terms = dict.fromkeys(n for _, m in sites for values in m.values() for n in values if n.startswith("loss/"))
        for term in list(terms)[:MOST]:
            average: Points = {}
            for x, metrics in sites:
                present = [values[term] for values in metrics.values() if term in values]
                if present:
                    average[x] = sum(value / len(present) for value in present)
            curves = [(s, {x: m[s][term] for x, m in sites if term in m.get(s, {})}, run.style(s)) for s in run.sites]
            curves = [curve for curve in curves if curve[1]]
            if len(curves) > 1:
                curves.insert(0, ("average", average, AVERAGE))
            out += draw.lines(f"{phase}: {term.removeprefix('loss/')}", curves, "round")
        out += f"<p>{phase}: {len(terms) - MOST} more terms are in metrics.csv.</p>" if len(terms) > MOST else ""
    return grid(out, "No loss has been reported.")


def _weights(run: Run) -> str:
    """The robust weights after each round, and the losses that moved them."""
    out = ""
    for name, title in (("dro_weights", "DRO weight w"), ("dro_losses", "Loss v that moves the weights")):
        sites: dict[str, Points] = {}
        for record, _ in run.training:
            for site, value in zip(record["members"], record["memory"].get(name, ()), strict=False):
                sites.setdefault(site, {})[record["round"]] = value
        level = ("uniform", 1 / len(sites)) if sites and name == "dro_weights" else None
        curves = [(site, sites[site], run.style(site)) for site in run.sites if site in sites]
        out += draw.lines(f"{title}, at the end of the round", curves, "round", level)
    return grid(out, "The records have no robust site weights.")


def _costs(run: Run) -> str:
    """Bytes and seconds of each round."""
    if not run.history:
        return "<p>No phase is complete.</p>"
    traffic: dict[str, Points] = {"to sites": {}, "from sites": {}}
    seconds: dict[str, Points] = {}
    for record in run.history:
        added = [(seconds.setdefault(record["phase"], {}), record["seconds"])]
        for points, key in zip(traffic.values(), ("bytes_down", "bytes_up"), strict=True):
            added.append((points, record.get("bytes", {}).get(key, 0) / 1e6))
        for points, value in added:
            points[record["round"]] = points.get(record["round"], 0.0) + value
    down, up = (sum(points.values()) for points in traffic.values())
    took = sum(sum(points.values()) for points in seconds.values())
    said = f"Tensors: {down:,.1f} MB to sites, {up:,.1f} MB from sites. Phases: {took:,.1f} s."
    drawn = draw.stack("Megabytes per round, all sites", traffic) + draw.stack("Seconds per round", seconds)
    return f"<p>{said}</p>{grid(drawn)}"


def _sites(run: Run) -> str:
    """Training samples and answers of every site that trains."""
    total = sum(run.samples.values())
    rows = []
    for site in run.sites:
        records = [record for record in run.history if site in record["members"]]
        if records:
            count = run.samples.get(site, 0)
            share = f"{100 * count / total:.1f} %" if count else ABSENT
            rows.append([site, f"{count:,}", share, f"{sum(site in r['sites'] for r in records)} of {len(records)}"])
    head = "site", "training samples", "share", "phases answered"
    return table(head, rows) if rows else "<p>No site has answered so far.</p>"


def _settings(run: Run) -> str:
    """Everything that was set, and the versions."""
    groups = [(key, value) for key, value in run.config.get("args", {}).items() if isinstance(value, dict)]
    cards = {f"{key}: {draw.kind(of)}": {n: draw.shown(v) for n, v in of.get("args", {}).items()} for key, of in groups}
    cards["versions"] = {"python": run.environment.get("python", ABSENT), **run.environment.get("packages", {})}
    parts = [f"<div><h3>{text(title)}</h3>{draw.pairs(items)}</div>" for title, items in cards.items()]
    return grid("".join(parts), kind="cards")
