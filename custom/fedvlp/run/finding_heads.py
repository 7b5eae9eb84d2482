"""The classifier of a run whose server solved one beside the model, calibrated on the sites' validation records.

A method that solves heads for findings (methods/one_round_cca.py) keeps them in the server's memory. In a simulation
the validation records are here: each head is calibrated on them, and its figures are kept beside it. A federation's
server has no records, so there the heads are kept as they were solved, without figures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.server_state import Server
from fedvlp.core.types import State
from fedvlp.evaluation.intervals import area_of
from fedvlp.evaluation.linear_probe import calibration_error
from fedvlp.methods.one_round_cca import BIAS, WEIGHT, before_heads, labels_of
from fedvlp.models.findings import FindingHeads, calibrated
from fedvlp.run.experiment import Experiment

SENSITIVITY = 0.9
"""At which a head's threshold is chosen: at least so many of the validation images with the finding are named."""

BATCH = 32


def solved(experiment: Experiment, server: Server | None) -> FindingHeads | None:
    """The heads that a run's server solved; None where it solved none, or none of them has a direction."""
    if server is None or WEIGHT not in server.memory:
        return None
    weight, bias = server.memory[WEIGHT], server.memory[BIAS]
    there = weight.any(dim=1)  # no site knew the others, or all records were of one kind
    names = [name for name, one in zip(experiment.method.findings, there.tolist(), strict=True) if one]  # type: ignore[attr-defined]
    if not names:
        return None
    origin = f"ridge regression on the sums of {len(server.sites)} sites, one round"
    return FindingHeads(tuple(names), weight[there], bias[there], origin)


@torch.no_grad()
def on_validation(heads: FindingHeads, assembly: Any, state: State) -> FindingHeads:
    """The heads, calibrated (Platt) on the validation records of all sites that know a finding, with its figures.

    ``state``: the trained model, whose image tower they read. A finding with fewer than two validation images of either
    kind stays as it was solved, without figures.
    """
    scores, labels = _validation(heads, assembly, state)
    weight, bias, figures = heads.weight.clone(), heads.bias.clone(), {}
    for index, name in enumerate(heads.names):
        known = ~labels[:, index].isnan()
        score, truth = scores[known, index], labels[known, index]
        if min(int((truth == 1).sum()), int((truth == 0).sum())) < 2:
            continue
        scale, offset = calibrated(score, truth)
        weight[index], bias[index] = scale * weight[index], scale * bias[index] + offset
        figures[name] = figures_of((scale * score + offset).sigmoid(), truth)
    return replace(heads, weight=weight, bias=bias, figures=figures)


def _validation(heads: FindingHeads, assembly: Any, state: State) -> tuple[Tensor, Tensor]:
    """Log-odds [N, L] and labels [N, L] in {1, 0, nan not judged}, of all sites' validation records with an image."""
    scores, truths = [torch.empty(0, len(heads.names)).double()], [torch.empty(0, len(heads.names)).double()]
    for site in assembly.data_sites():
        client = assembly.client(site, assembly.data(site))
        client.load({**client.state(), **state})
        client.model.eval()
        own = []
        with before_heads(client.model) as seen:
            for batch in client.data.batches("val", BATCH, drop_last=False):
                client.model(batch)
                scores.append(seen["image"].double().cpu() @ heads.weight.double().T + heads.bias.double())
                own.append(labels_of(client, batch, heads.names))
        if own:
            labels = torch.cat(own)
            asked = ~labels.isnan().all(dim=0)  # a blank is "not mentioned", unless the site knows nothing of it
            labels = torch.where(labels == -1, torch.nan, torch.where(labels.isnan() & asked, 0.0, labels))
            truths.append(labels)
    return torch.cat(scores), torch.cat(truths)


def figures_of(stated: Tensor, truth: Tensor, sensitivity: float = SENSITIVITY) -> dict[str, float]:
    """What findings.json says of one head, from probabilities and truth [n] in {1, 0}, with both kinds among them."""
    one = torch.ones(1, len(truth), dtype=torch.float64)
    present = stated[truth == 1].sort(descending=True).values
    threshold = float(present[int(sensitivity * len(present) + 0.999999) - 1])
    named = stated >= threshold
    return {
        "records": len(truth),
        "positive": len(present),
        "auc": round(float(area_of(stated, truth)(one)), 4),
        "calibration_error": round(calibration_error(stated, truth), 4),
        "threshold": threshold,
        "sensitivity": round(float(named[truth == 1].double().mean()), 4),
        "specificity": round(1 - float(named[truth == 0].double().mean()), 4),
    }
