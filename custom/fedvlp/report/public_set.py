"""The report's section on the public set: the server's recall, and how far the sites' representations differ."""

from __future__ import annotations

import torch
from torch import Tensor

from fedvlp.core.types import MODALITIES, State
from fedvlp.evaluation import metric_names
from fedvlp.methods.ensemble import SAMPLE
from fedvlp.report import figures, html
from fedvlp.run.metrics import Record

KS = (1, 5, 10)


def section(history: list[Record], memory: State) -> str:
    """Curves of the server's recall, and the first two principal components of public pairs by site, as HTML.

    "" for a run without a public set.
    """
    curves: list[figures.Curve] = []
    for index, k in enumerate(KS):
        key = metric_names.recall("val", k, metric_names.WHOLE_SET)
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
