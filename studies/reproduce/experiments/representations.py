"""CreamFL's experiments: sites and a server with models of their own, which exchange representations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import fitted
from studies.claims.ledger import seeded
from studies.collections.creamfl_collections import FOLDERS as COLLECTIONS
from studies.collections.creamfl_collections import CreamFLSource
from studies.reproduce import measures
from studies.reproduce.experiments.records import MODEL, most_steps, on_data, source, with_public
from studies.reproduce.table import DEMO, PAPER, SMALLEST, Size, Study


def representations(size: Size, seed: int) -> Mapping[str, Experiment]:
    """The ladder, what CreamFL is compared with, larger and smaller public sets, and narrower representations."""
    names = (*presets.REAMFL, "creamfl", "fedmd", "fedet", "fedgems", "fediot")
    if size.demo:
        cells = {name: _small_ensemble(size, seeded(presets.get(name), seed)) for name in names}
    else:
        cells = {name: _on_collections(size, name, seed) for name in names}
    once: Any = cells["fediot"].method
    cells["fedavg"] = replace(cells["fediot"], method=replace(once, alpha=1.0))
    for name in ("fedgems", "fedet", "reamfl-avg", "reamfl-iot", "creamfl"):
        cells[f"{name}-large"] = with_public(cells[name], 0.4, 100_000)
    for name in ("creamfl", "reamfl-iot"):
        cells[f"{name}-small"] = with_public(cells[name], 0.15, 25_000)
        cells |= {f"{name}-{part}": _narrow(cells[name], part) for part in NARROW}
    for name in ("fedavg", "fediot"):
        cells |= {f"{name}-{tower}": _with_tower(size, cells[name], tower) for tower in SMALLER}
    return cells


NARROW = {"half": 2, "quarter": 4}
"""Of the width of the representations, in figure 4."""

SMALLER = {"resnet50": presets.SMALL, "resnet34": presets.SMALLEST}
"""Image towers of smaller servers in figure 4, and the demo's models in their place."""


def _narrow(experiment: Experiment, part: str) -> Experiment:
    objective: Any = experiment.objective
    dim = experiment.model.embedding_dim // NARROW[part]
    model, sites = replace(experiment.model, embedding_dim=dim), experiment.site_models
    sites = tuple((site, replace(one, embedding_dim=dim)) for site, one in sites)
    return replace(experiment, model=model, site_models=sites, objective=replace(objective, dim=dim))


def _with_tower(size: Size, experiment: Experiment, tower: str) -> Experiment:
    if size.name == PAPER:
        return replace(experiment, model=replace(experiment.model, image_tower=tower))
    return replace(experiment, model=SMALLER[tower] if size.name == DEMO else experiment.model)


LADDER = ("aggregation", "inter", "intra")
"""What tells the steps from plain averaging to CreamFL apart."""

EPOCHS_IN_STEPS = 378
"""Five epochs of a site with a fifteenth of Flickr30k's 145,000 pairs in batches of 128, for FedIoT."""


def _on_collections(size: Size, name: str, seed: int) -> Experiment:
    """The method of a preset, with the towers, sites and schedule of CreamFL's paper preset."""
    assert size.root is not None
    if strange := [name for name in size.elsewhere if name in COLLECTIONS]:
        raise ValueError(f"reproduce: {', '.join(strange)}: read below --root alone; put or link it there")
    paper, preset = presets.get("creamfl-paper"), presets.get(name)
    own = {f.name for f in fields(preset.method)} - set(LADDER)
    shared = {f.name: getattr(paper.method, f.name) for f in fields(paper.method) if f.name in own}
    if not preset.site_models:  # models are averaged, so all sites have the server's
        shared |= {"local_steps": EPOCHS_IN_STEPS}
        paper = replace(paper, site_models=())
    few: dict[str, Any] = {"pairs": 2, "images": 1, "texts": 1, "shards": 2} if size.quick else {}
    pixels = 36 if size.quick else 256
    cache = size.cache and str(size.cache.absolute())
    data = CreamFLSource.at(size.root.absolute(), image_size=pixels, colour=True, seed=seed, cache=cache, **few)
    if size.quick:
        shared |= {one: 1 for one in ("local_steps", "local_epochs", "server_rounds") if shared.get(one)}
        paper = replace(paper, site_models=(), model=MODEL, objective=CreamFLTaskConfig())
    method = replace(preset.method, **shared)
    return fitted(on_data(size, replace(paper, name=name, method=method, data=data), seed))


def _small_ensemble(size: Size, experiment: Experiment) -> Experiment:
    """The preset with fewer rounds, and few records at the smallest size."""
    rounds = 4 if size.name == DEMO else 1
    method: Any = experiment.method
    if hasattr(method, "server_rounds"):
        method = replace(method, server_rounds=rounds)
    if size.name == SMALLEST:
        data: Any = experiment.data
        experiment = replace(
            experiment, data=replace(data, size=240), training=replace(experiment.training, batch_size=16)
        )
        method = replace(method, local_steps=1) if method.local_steps else method
    return replace(experiment, method=method, rounds=replace(experiment.rounds, rounds=rounds))


NO_PIE = (
    "AdamW for AdamP, one rate at all sites, no PIE attention, no GloVe vectors; photographs are cropped at random, "
    "and not resized at random, mirrored or erased in part as in the released code. FedAvg and FedIoT average models, "
    "so their sites have the server's; they take as many steps as five epochs of a mean site with pairs. They train "
    "all sites in every round, also where the others train ten of 35, as in the paper."
)
RECALL = Study(
    "representations",
    "representations",
    representations,
    lambda size: measures.server if size.demo else measures.coco,
    sources=COLLECTIONS,
    differs=NO_PIE,
    stands_in="The public set of the built-in cohort stands in for COCO, its test split for the "
    "1K test set, and nothing for the 5K one; 2, 2 and 1 sites for 15, 10 and 10.",
)


def questions(size: Size) -> measures.Answers:
    """VQA v2, or in the demo questions about films of other people than any cohort's."""
    if not size.demo:
        return measures.Answers(source(size, "vqa_v2", colour=True), most_steps(size))
    if size.quick:
        return measures.Answers(SyntheticCohort(sites=1, size=60, image_size=36, seed=2000), 1)
    return measures.Answers(SyntheticCohort(sites=1, size=1200, image_size=36, beta=1000.0, seed=2000))


ANSWERS = Study(
    "representations-answers",
    "representations",
    representations,
    questions,
    sources=(*COLLECTIONS, "vqa_v2"),
    differs=NO_PIE,
    stands_in="Questions about other drawn films (which finding, on which side, how severe) stand in for VQA v2, the "
    "public set of the built-in cohort for COCO; 2, 2 and 1 sites for 15, 10 and 10.",
)
"""The same runs, and heads that answer questions."""
