"""The figures of CreamFL's claims: recall of the server and of sites with pairs, and how far apart sites start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedvlp.evaluation.metric_names import recall_at
from fedvlp.evaluation.retrieval import embed, retrieval
from fedvlp.methods.ensemble import MODEL
from fedvlp.methods.math.contrast import representations
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.folder import RunFolder
from studies.claims.cell_results import Figures

HELD_OUT = ("val", "test")
KS = (1, 5, 10)
RSUM = "sum of R@1, R@5, R@10"
SITE_RSUM = "sum of R@1, R@5, R@10 at the best site with pairs"
UNTAUGHT = "R@10 between lone sites before training, above chance, standard errors"


def at(k: int) -> str:
    """Name of the server's recall at ``k``."""
    return f"R@{k}, %"


def of_run(folder: RunFolder) -> Figures:
    """All figures of a finished run, on the studies that neither a site nor the public set trains on.

    These are the validation and test studies of the whole cohort, ranked as one set; recall is the mean of both
    directions in percent. ``SITE_RSUM`` is of the model that the site has at the end.
    """
    experiment, saved = folder.experiment(), folder.server()
    assert saved is not None
    assembly = Assembly(experiment, folder.path)
    client = assembly.client("figures", None)
    client.load(experiment.method.finish(saved[0]))
    recalls = recalled(client.model, held_out(assembly, None))
    figures = {at(k): value for k, value in zip(KS, recalls, strict=True)}
    figures[RSUM] = sum(recalls)
    if not experiment.site_models:  # one model of all sites
        return figures
    return {**figures, SITE_RSUM: max(of_sites(assembly)), UNTAUGHT: untaught(assembly)}


def held_out(assembly: Assembly, site: str | None) -> Any:
    """The validation and test studies of the cohort as the model of a site (None: the server's) reads them."""
    cohort = assembly.experiment.data.build()
    return assembly.serve(cohort, {split: cohort.rows(split) for split in HELD_OUT}, site)


def recalled(model: Any, records: Any) -> list[float]:
    """R@k for each of ``KS``, in percent, of all records of all splits as one set."""
    batches = (batch for split in HELD_OUT for batch in records.batches(split, 64, drop_last=False))
    return recalls(*embed(model, batches))


def recalls(image: Tensor, text: Tensor) -> list[float]:
    """R@k for each of ``KS``, in percent, of the paired unit vectors image [N, d] and text [N, d]."""
    figures = retrieval(image, text, KS)
    return [figures[recall_at(k)] for k in KS]


def site_model(assembly: Assembly, name: str) -> Any:
    """The model that a site has at the end of a run; sites with one architecture share it until the next call."""
    client = assembly.client(name, None, name)
    memory = assembly.memory(name).newest()
    client.load({key.removeprefix(MODEL): tensor for key, tensor in memory.items() if key.startswith(MODEL)})
    return client.model


def of_sites(assembly: Assembly) -> Sequence[float]:
    """``RSUM`` of the model of every site that has images and reports."""
    sums = []
    served: dict[ModelConfig, Any] = {}  # by models of one architecture, whose frozen towers see the same
    for name in assembly.data_sites():
        if len(assembly.data(name).modalities) == 2:
            config = assembly.config(name)
            if config not in served:
                served[config] = held_out(assembly, name)
            sums.append(sum(recalled(site_model(assembly, name), served[config])))
    return sums


def untaught(assembly: Assembly) -> float:
    """How well an image-only site's images find a text-only site's reports of the public set, both untrained.

    R@10 less chance, in standard errors of chance.
    """
    lone = {assembly.data(name).modalities: name for name in assembly.data_sites()}
    sent: dict[str, Tensor] = {}
    for modality in ("image", "text"):
        name = lone[(modality,)]
        client = assembly.client(name, None, name)
        client.load(assembly.initial(name))
        sent |= representations(client, (modality,))
    items = len(sent["image"])
    chance = 1000 / items
    error = math.sqrt(chance * (100 - chance) / (2 * items))
    return (retrieval(sent["image"], sent["text"], (10,))[recall_at(10)] - chance) / error
