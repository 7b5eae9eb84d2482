"""The report's section on single studies: test images with the reports retrieved for them, and a map of all.

Patients' images and reports are in no report unless a person asks for them: only the synthetic cohort's, which shows
nobody, are there unasked.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from fedvlp.data.labels import CHEXPERT
from fedvlp.data.loader import eval_batch
from fedvlp.data.screening import DataSource
from fedvlp.evaluation.attribution import attribution, drawn, within
from fedvlp.evaluation.retrieval import ranks
from fedvlp.models.load import load_model
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.report import figures
from fedvlp.report.explore.pictures import address, film
from fedvlp.report.html import grid, text
from fedvlp.report.run import Run
from fedvlp.report.sections import components
from fedvlp.run.compare import FinishedRun, Vectors
from fedvlp.run.recalls import is_built_in
from fedvlp.training.settings import DeviceError

log = logging.getLogger(__name__)

TOP = 3  # reports shown for an image
SIDE = 600  # of an image, pixels
SITES = 6  # sites of which images are shown
POINTS = 300  # records of a site on the map, at most
LETTERS = 600  # of a report, at most
NEGATED = '"negated"'
NEGATIONS = {"no", "not", "non", "nor", "neither", "without", "absent", "negative", "free", "denies", "kein", "keine"}
NEGATIONS |= {"keinen", "ohne", "sin", "sans", "senza", "sem", "pas"}
CLAUSE = re.compile(r"[.;:!?\n]|^(?:but|however|although|aber|pero|mais)$", re.IGNORECASE)
PLAIN = {"no", "finding", "lung", "other", "support", "enlarged"}  # words of labels that name no finding

EXPLANATION = (
    "Of each site, with the trained model: the first test image whose own report ranks first among the reports of the "
    "site's test split, and the first image whose own does not. Beside each image are the reports nearest to it, with "
    "their cosine; its own is shaded, words of findings are marked, those that are negated in grey. Another report "
    "with the same findings is not wrong."
)
MAP = (
    "First two principal components of the trained model's embeddings of the test studies. Where sites lie apart, the "
    "model distinguishes sites, and not findings alone. What is near here need not be near in the whole space."
)
SALIENCY = (
    "Of each site a test image with a finding, and with masks where there are any: red squares raise the cosine with "
    "the finding's name, black lines are the masks. A map that "
    "knows nothing has the same share of its strongest tenth within a mask as the mask has of the image. It says what "
    "the model looks at, and not whether it is right."
)
LUNGS = "lungs"
LOOKED_AT = 100  # findings of a site among whose images one with masks is looked for
OWNERS_EYES = (
    "This page shows images and reports of the site's own patients. It is for their owner's eyes alone: do not send it "
    "to anybody, and remove it when you have looked"
)


def wanted(run: Run) -> bool:
    """Whether records are shown: where a person asked, or of a measured run on the synthetic cohort."""
    if not run.folder.model.exists():
        return False
    return run.films or (bool(run.recalls) and is_built_in(run.folder.experiment()))


def section(run: Run) -> str:
    """Images with the reports that they find, and the map, as HTML; "" where no record is to be shown.

    Raises ValueError where images are asked for of a run that has not finished, or whose models are elsewhere.
    """
    if run.films and not run.folder.model.exists():
        raise ValueError(f"{run.folder.path} has not finished, so there is no model to show images with; resume it")
    if not wanted(run) or isinstance(run.folder.experiment().model, MultimodalConfig):
        return ""
    try:
        return _shown(run)
    except (ValueError, DeviceError) as error:  # as where the folder was copied without the sites' models
        if run.films:
            raise
        log.warning("%s: no images: %s", run.folder.path, error)
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
    plane, maps = ("", "") if own else (_map(vectors), _saliency(finished, shown))
    return f'<p>{text(EXPLANATION + more)}</p><div class="films">{cards}</div>{maps}{plane}'


def _saliency(run: FinishedRun, sites: Sequence[str]) -> str:
    """Of each site a test image with a finding, and where the model looks for it; "" without masks."""
    cohort = run.assembly.cohort
    if cohort.masks is None or run.assembly.site_only():  # such a run has no one model that is loaded from its folder
        return ""
    model, out = load_model(run.folder.path), ""
    for site in sites:
        rows = cohort.rows("test", site)
        rows = rows[cohort.has_image()[rows]]
        present = np.argwhere(cohort.labels[rows] == 1)[:LOOKED_AT]
        if not len(present):
            continue
        labels = [cohort.label_names[column] for column in present[:, 1]]
        masks = cohort.masks(rows[present[:, 0]])
        drawn_on = [
            {name for name in (LUNGS, label) if name in masks and masks[name][i].any()}
            for i, label in enumerate(labels)
        ]
        chosen = max(range(len(present)), key=lambda i: len(drawn_on[i]))  # the first of those with most masks
        label, size = labels[chosen], model.config.image_size
        levels = torch.from_numpy(cohort.images(rows[[present[chosen, 0]]]))
        result = attribution(model, eval_batch(levels, size)[0], label.lower())
        seen = {
            name: eval_batch(torch.from_numpy(np.uint8(255) * masks[name][[chosen]]), size)[0, 0] > 0
            for name in sorted(drawn_on[chosen])
        }
        said = [f"{site}, {label}: {result.sentence}"]
        said += [f"{name}: {within(result, mask)}" for name, mask in seen.items()]
        picture = f'<img alt="{text(said[0])}" src="{address(drawn(result, seen.values()))}">'
        out += f"<figure>{picture}<p>{text('; '.join(said))}.</p></figure>"
    return f"<h3>Where the model looks for a finding</h3><p>{text(SALIENCY)}</p>{grid(out)}" if out else ""


def _site(run: FinishedRun, site: str, image: Tensor, reports: Tensor) -> str:
    """The cards of one site: of unit vectors image [n, d] and reports [n, d] of its test pairs."""
    rank, _ = ranks(image, reports)
    cohort, rows = run.assembly.cohort, run.rows[site]
    written = DataSource.of(run.assembly.experiment.data).written()
    said = [written.get(cohort.ids[row], cohort.reports[row]) for row in rows]
    findings = {word for name in (*CHEXPERT, *cohort.label_names) for word in name.lower().split()} - PLAIN
    out = ""
    for chosen in (rank == 0, rank > 0):
        if not chosen.any():
            continue
        query = int(torch.nonzero(chosen)[0])
        cosines, nearest = (image[query] @ reports.T).topk(min(TOP, len(reports)))
        listed = "".join(
            _report(number, _marked(said[index], findings), index == query, cosine)
            for number, (index, cosine) in enumerate(zip(nearest.tolist(), cosines.tolist(), strict=True), start=1)
        )
        own = int(rank[query]) + 1
        if own > TOP:
            listed += _report(own, _marked(said[query], findings), True, float(image[query] @ reports[query]))
        first = f"{site}: its own report is number {own} of {len(reports)}"
        picture = f'<img alt="a test image of {text(site)}" src="{film(cohort.original(int(rows[query]), SIDE))}">'
        out += f"<div>{picture}<div><h3>{text(first)}</h3><ol>{listed}</ol></div></div>"
    return out


def _marked(report: str, findings: Collection[str]) -> str:
    """The report as HTML, cut where it is long, the words of ``findings`` marked; those that are negated, as such.

    A negation reaches to the end of its clause: a full stop, a semicolon, a colon, or a "but".
    """
    said = report if len(report) <= LETTERS else f"{report[:LETTERS]}\N{HORIZONTAL ELLIPSIS}"
    out, negated = "", False
    for word in re.split(r"(\w+)", said):
        if CLAUSE.search(word):
            negated = False
        negated = negated or word.lower() in NEGATIONS
        opened = f"<mark{' class=' * negated}{NEGATED * negated}>"
        out += f"{opened}{text(word)}</mark>" if word.lower() in findings else text(word)
    return out


def _report(number: int, said: str, own: bool, cosine: float) -> str:
    """A report (HTML) in the list of an image, the ``number``-th of all."""
    marked = ' class="own"' if own else ""
    of = "its own, " if own else ""
    return f'<li value="{number}"{marked}>{said} <span>({of}cosine {cosine:+.2f})</span></li>'


def _map(vectors: Vectors) -> str:
    """Images and reports of all sites in the plane, for a model that all sites share."""
    out = ""
    for index, title in enumerate(("Images", "Reports")):
        of_sites = {site: pair[index][:POINTS] for site, pair in vectors.items()}
        if sum(map(len, of_sites.values())) < 3:
            continue
        points = {site: [(x, y) for x, y in tensor.tolist()] for site, tensor in components(of_sites).items()}
        out += figures.clouds(f"{title} of the test split by site (PCA)", points)
    return f"<h3>Embeddings</h3><p>{text(MAP)}</p>{grid(out)}" if out else ""
