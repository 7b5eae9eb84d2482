"""How often PMS-FM's selector names the site of an image (Wang et al., 2025, Table 5), from what inference has.

https://openreview.net/forum?id=zfLHmnU1fs. At inference a study has no report: the selector sees the image and
sentences of every class. Differs: the paper's selector sees the report or template and the study's own labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.client import Client, embedded_texts
from fedvlp.core.optimizers import Adam
from fedvlp.evaluation.retrieval import embed_images
from fedvlp.evaluation.zero_shot import class_texts, prompts, site_probabilities
from fedvlp.models.selector import Selector

PROMPTS = 10  # of each class, with seed 0


@torch.no_grad()
def images_of(client: Client, data: Mapping[str, Any], split: str, most: int | None = None) -> dict[str, Tensor]:
    """Unit vectors [n, d] by the loaded model of the images of each site's ``split``, or of the first ``most``.

    A site without records there has none.
    """
    client.model.eval()
    by_site = {}
    for site, records in data.items():
        rows = torch.arange(min(records.sizes.get(split, 0), most or records.sizes.get(split, 0)))
        embedded = [*embed_images(client.model, records.batches(split, 64, drop_last=False, rows=rows))]
        by_site[site] = torch.cat(embedded) if embedded else torch.empty(0)
    return by_site


def told(selector: Selector, client: Client, images: Mapping[str, Tensor], classes: Sequence[str]) -> dict[str, float]:
    """Site -> share, 0..1, of its ``images`` [n, d] whose site the selector names, with prompts of the ``classes``.

    The sites of ``images`` are all of the selector's, in its order; one without images is left out of the result.
    """
    with torch.no_grad():
        reports, words = _texts(selector, client, classes)
        shares = {}
        for index, (site, own) in enumerate(images.items()):
            if len(own):
                named = site_probabilities(selector, own, reports, words).argmax(dim=1)
                shares[site] = float((named == index).double().mean())
    return shares


def _texts(selector: Selector, client: Client, classes: Sequence[str]) -> tuple[Mapping[str, Tensor], Tensor]:
    """Prompts [P, d] by class, and the selector's words [W, d], as the loaded model embeds them."""
    sentences = {name: prompts(name, PROMPTS, 0) for name in classes}
    reports, _, _ = class_texts(client, sentences)
    return reports, embedded_texts(client, selector.words)


def fit(selector: Selector, client: Client, images: Mapping[str, Tensor], steps: int, lr: float) -> None:
    """Trains a selector by full-batch Adam steps on all ``images`` [n, d] with its templates, by site in its order.

    One such step is a round's (methods/selection.py) on encoders that stand still. Raises ValueError for a selector
    without templates.
    """
    if not selector.sentences:
        raise ValueError("site selection: the selector has no templates (extra.templates), and images have no report")
    with torch.no_grad():
        templates, words = (embedded_texts(client, said) for said in (selector.sentences, selector.words))
    adam = Adam(selector.parameters(), lr=lr)
    total = sum(map(len, images.values()))
    for _ in range(steps):
        adam.zero_grad()
        for index, own in enumerate(images.values()):
            if len(own):
                loss = selector.loss_on_templates(own, templates, words, index)
                (loss * len(own) / total).backward()
        adam.step()
