"""The report's section on a classifier: areas under the ROC curve, weight by modality, retrieved public items.

The public set of a hospital's own table is its patients, so its images are drawn only where a person asks for them, as
in report/records.py. The synthetic cohort's show nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from fedvlp.core.metric_keys import probe
from fedvlp.core.types import EVALUATE, State
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.evaluation import metric_names
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods.car_mfl import COMPLETE, PARTNERS, ROUNDS, SHOWN
from fedvlp.methods.mfedavg import BEST_ROUND
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.report import figures, html
from fedvlp.report.run import Run
from fedvlp.run.assembly import Assembly
from fedvlp.run.metrics import SERVER, Record, by_site
from fedvlp.run.recalls import is_built_in
from fedvlp.training.settings import DeviceError

log = logging.getLogger(__name__)

EXPLANATION = (
    "AUC on held-out studies, 0 to 1: of the server's model on the public set, and of every site "
    "on what it holds (where a modality is absent, its feature is zero). Macro is the unweighted mean over findings "
    "with both classes, rare the mean over those with fewer than one positive in ten. A classifier that listens to "
    "both modalities alike has half of its absolute weight on the image; what either is worth shows where the same "
    "model gets zeros for it (without image, without text)."
)


PARTNERS_MET = probe("distinct_partners")


def section(run: Run) -> str:
    """Tables and curves of a classifier's run, and the public items that a record was given by round, as HTML.

    "" for a model that is no classifier. Where its method goes back to the best round, the last evaluation is of that
    round's model again, and no point after the last round. Raises ValueError where images are asked for and cannot be
    drawn.
    """
    measured: list[tuple[int, dict[str, dict[str, float]]]] = []  # (round, site -> name -> figure)
    for record in run.history:
        figures_of = by_site(record) | {SERVER: record.get("server", {})}
        if any(metric_names.parse_auc(name) for metrics in figures_of.values() for name in metrics):
            measured.append((record["round"], figures_of))
    if not measured:
        return ""
    sites = sorted({site for _, figures_of in measured for site in figures_of}, key=lambda site: (site != SERVER, site))
    curves = {
        "Macro AUC, val": metric_names.auc("val", metric_names.MACRO),
        "Share of classifier weight on the image": metric_names.IMAGE_WEIGHT,
        "Different public items a record has had, mean": PARTNERS_MET,
    }
    best = _best_round(run.history, run.memory)
    drawings = ""
    for title, name in curves.items():
        lines: list[figures.Curve] = []
        for index, site in enumerate(sites):
            if name == metric_names.IMAGE_WEIGHT and site != SERVER:
                continue  # all sites have the same model
            again = best is not None and best != measured[-1][0] and name != PARTNERS_MET
            shown = measured[:-1] if again else measured
            points = {round: figures_of[site][name] for round, figures_of in shown if name in figures_of.get(site, {})}
            lines.append((site, points, figures.look(index)))
        drawings += figures.lines(title, lines, "rounds completed")
    end = "last" if best is None else f"best round on val ({best})"
    areas = _areas(run, [figures_of[SERVER] for _, figures_of in measured], end)
    note = f"<p>{html.text(run.left_out)}</p>" if run.left_out else ""
    return f"<p>{EXPLANATION}</p>{note}{areas}{html.grid(drawings + _films(run))}"


def _best_round(history: Sequence[Record], memory: State) -> int | None:
    """How many rounds the model of the last evaluation has behind it, where the method chose it among all rounds."""
    ended = history[-1]["phase"] == EVALUATE
    return int(memory[BEST_ROUND]) if ended and BEST_ROUND in memory else None


def _areas(run: Run, server: list[dict[str, float]], end: str) -> str:
    """Table of the server's AUCs, initial and last, and the names of findings without an AUC; "" where it has none.

    ``server`` has its figures (name -> value) by evaluation; ``end`` says which model the last one is of.
    """
    rows = []
    findings_of: dict[str, list[str]] = {}
    for split in ("test", "val"):
        names = dict.fromkeys(name for metrics in server for name in metrics)
        parsed = (metric_names.parse_auc(name) for name in names)
        findings_of[split] = [area[1] for area in parsed if area is not None and area[0] == split]
        evaluated = [metrics for metrics in server if any(name.startswith(split) for name in metrics)]
        for finding in findings_of[split]:
            name = metric_names.auc(split, finding)
            rows.append([finding, split, *(html.number(of.get(name)) for of in (evaluated[0], evaluated[-1]))])
    if not rows:
        return ""
    model = run.folder.experiment().model if run.method is not None else None
    labels = model.labels if isinstance(model, MultimodalConfig) else ()
    table = html.table(["AUC on the public set", "split", "initial", end], rows, "text")
    measured = [split for split in findings_of if findings_of[split]]
    unmeasured = [split for split in findings_of if not findings_of[split]]
    skipped = [f"{name} ({split})" for split in measured for name in labels if name not in findings_of[split]]
    said = [f"Skipped, as all known labels are alike: {', '.join(skipped)}."] if skipped else []
    said += [f"The server's model was not measured on {split}." for split in unmeasured]
    return table + "".join(f"<p>{html.text(sentence)}</p>" for sentence in said)


def _films(run: Run) -> str:
    """For one record of every site that retrieves: the public items it was given. No private image is shown.

    "" unless a person asked for images, or they are the synthetic cohort's.
    """
    if not (run.films or (run.method is not None and is_built_in(run.folder.experiment()))):
        return ""
    memories = {path.name: SiteMemory(path).newest() for path in sorted((run.folder.path / "sites").glob("*"))}
    memories = {site: memory for site, memory in memories.items() if PARTNERS in memory}
    if not memories:
        return ""
    try:
        cohort = Assembly(run.folder.experiment()).cohort
        public = cohort.rows("train", PUBLIC)
        return "".join(_film(site, memory, cohort, public) for site, memory in memories.items())
    except (ValueError, DeviceError) as error:  # as where the records are not on this machine
        if run.films:
            raise
        log.warning("%s: no images of the public set: %s", run.folder.path, error)
        return ""


def _film(site: str, memory: State, cohort: Cohort, public: np.ndarray) -> str:
    """Pictures of the items, in the last rounds, of the record whose item changed most often."""
    partners, rounds = memory[PARTNERS][-SHOWN:], memory[ROUNDS].tolist()[-SHOWN:]
    changes = (partners.diff(dim=0) != 0).sum(dim=0)  # [n]
    record = int(torch.argmax(changes.where(partners[-1] != COMPLETE, -1)))
    items = partners[:, record].tolist()
    rows = public[items]
    names = np.asarray(cohort.label_names)
    captions = []
    for round, row in zip(rounds, rows, strict=True):
        positive = ", ".join(names[cohort.labels[row] == 1]) or "nothing"
        captions.append(f"round {round}\n{positive}")
    title = f"Public items retrieved for record {record} of {site}"
    numbers = {"public item": dict(zip(rounds, items, strict=True))}
    return figures.films(title, list(cohort.images(rows)), captions, numbers)
