"""The report's section on a classifier: areas under the ROC curve, weight by modality, and what sites retrieved."""

from __future__ import annotations

import numpy as np
import torch

from fedvlp.core.types import State
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods.car_mfl import PARTNERS, ROUNDS
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.report import figures, html
from fedvlp.run.assembly import Assembly
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import SERVER, Record, by_site

SHOWN = 6  # rounds of a record in one picture
SAID = (
    "Area under the ROC curve on held-out records, 0 to 1: of the server's model on the public set, and of every site "
    "on what it holds (where a modality is absent, its feature is zero). Macro is the unweighted mean over findings "
    "with both classes, rare the mean over those with fewer than one positive in ten. A classifier that listens to "
    "both modalities alike has half of its absolute weight on the image."
)


def section(folder: RunFolder, history: list[Record]) -> str:
    """Tables and curves of a classifier's run, and pictures of the public items that a record was given by round."""
    measured = [(r["round"], by_site(r) | {SERVER: r.get("server", {})}) for r in history]
    measured = [(x, found) for x, found in measured if any("/auc/" in n for m in found.values() for n in m)]
    if not measured:
        return "<p>The model of this run is no classifier.</p>"
    sites = sorted({site for _, found in measured for site in found}, key=lambda site: (site != SERVER, site))
    curves = {
        "Macro AUC, val": "val/auc/macro", "Share of classifier weight on the image": "classifier/image",
        "Different public items a record has had, mean": "probe/distinct_partners",
    }  # fmt: skip
    drawn = ""
    for title, name in curves.items():
        lines = [
            (site, {x: found[site][name] for x, found in measured if name in found.get(site, {})}, figures.look(place))
            for place, site in enumerate(sites)
            if site == SERVER or name != "classifier/image"  # one model: the same everywhere
        ]
        drawn += figures.lines(title, lines, "rounds completed")
    areas = _areas(folder, [found[SERVER] for _, found in measured])
    return f"<p>{SAID}</p>{areas}{html.grid(drawn + _films(folder))}"


def _areas(folder: RunFolder, server: list[dict[str, float]]) -> str:
    """The server's areas before and after; findings that had one class only are named."""
    names = [n for n in dict.fromkeys(n for found in server for n in found) if "/auc/" in n]
    rows = []
    for split in ("test", "val"):
        ends = [found for found in server if any(name.startswith(split) for name in found)]
        for name in [name for name in names if name.startswith(split)]:
            areas = [html.number(end.get(name)) for end in (ends[0], ends[-1])]
            rows.append([name.partition("/auc/")[2], split, *areas])
    model = folder.experiment().model if folder.config.exists() else None
    labels = model.labels if isinstance(model, MultimodalConfig) else ()
    skipped = [f"{n} ({split})" for split in ("test", "val") for n in labels if f"{split}/auc/{n}" not in names]
    said = f"<p>Skipped, as all known labels are alike: {html.text(', '.join(skipped))}.</p>" if skipped else ""
    return html.table(["AUC on the public set", "split", "initial", "last"], rows, "text") + said


def _films(folder: RunFolder) -> str:
    """For the first record of every site that retrieves: its public item in each round. Nothing private is drawn."""
    memories = {path.name: SiteMemory(path).newest() for path in sorted((folder.path / "sites").glob("*"))}
    memories = {site: memory for site, memory in memories.items() if PARTNERS in memory}
    if not memories:
        return ""
    cohort = Assembly(folder.experiment()).cohort
    public = cohort.rows("train", PUBLIC)
    return "".join(_film(site, memory, cohort, public) for site, memory in memories.items())


def _film(site: str, memory: State, cohort: Cohort, public: np.ndarray) -> str:
    """The last rounds of the record that was given the most different items."""
    partners, rounds = memory[PARTNERS], memory[ROUNDS].tolist()[-SHOWN:]
    changes = (partners.diff(dim=0) != 0).sum(dim=0)  # [n]
    record = int(torch.argmax(changes))
    items = partners[-SHOWN:, record].tolist()
    rows = public[items]
    names = np.asarray(cohort.label_names)
    found = [", ".join(names[cohort.labels[row] == 1]) or "nothing" for row in rows]
    captions = [f"round {x}\n{names}" for x, names in zip(rounds, found, strict=True)]
    title = f"Public items retrieved for record {record} of {site}"
    numbers = {"public item": dict(zip(rounds, items, strict=True))}
    return figures.films(title, list(cohort.images(rows)), captions, numbers)
