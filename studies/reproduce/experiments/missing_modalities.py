"""CAR-MFL's experiments: sites of which some have films alone or reports alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedvlp.data.cohort import PUBLIC
from fedvlp.data.labels import CHEXPERT
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.site_sources import PatientSites, Shares, deal
from studies.claims.cell_results import Figures
from studies.claims.ledger import ALL_PAIRED, POOLED, POOLED_SHARE, seeded
from studies.reproduce import measures
from studies.reproduce.experiments.records import Cells, counted, dealt, on_data, source, with_public
from studies.reproduce.table import Size, Study

MIXES = ((4, 0, 6), (0, 4, 6), (2, 2, 6), (6, 0, 4), (0, 6, 4), (3, 3, 4), (8, 0, 2), (0, 8, 2), (4, 4, 2))
"""Sites with images alone, with texts alone, and with both."""

SCARCE = "-8-0-2"
METHODS = ("mfedavg", "mfedavg-p", "car-mfl")


def mixed(mix: tuple[int, int, int]) -> str:
    """The end of the name of a cell with such sites; "" for 8:0:2, as in the ledger."""
    name = "-" + "-".join(map(str, mix))
    return "" if name == SCARCE else name


FEWER = {8: 500, 4: 250}
"""Percent of the demo's patients who are public, in place of 15: the patients of the paper's smaller public sets."""


def missing_modalities(size: Size, seed: int, unlike: bool = True) -> Mapping[str, Experiment]:
    """Ten sites of which some lack a modality; bounds; other alphas; smaller public sets.

    Without ``unlike`` the heterogeneous setting is left out, whose data sets are read when its cells are made.
    """
    base = {name: _classifier(size, name, seed) for name in METHODS}
    base["creamfl"] = _with_representations(size, base["mfedavg-p"])
    cells: Cells = {}
    for name, one in base.items():
        for images, texts, both in MIXES:
            partition = replace(one.partition, image_only=images, text_only=texts)
            cells[name + mixed((images, texts, both))] = replace(one, partition=partition)
        starts = {name: cells[name]} | ({f"{name}-hetero": _unlike(size, cells[name])} if unlike else {})
        cells |= starts
        cells |= {
            f"{start}-public-{percent}": _fewer(size, of, percent) for start, of in starts.items() for percent in FEWER
        }
    alphas: Any = cells["car-mfl-4-0-6"].method
    for alpha in (1.0, 0.5, 0.4, 0.2, 0.0):
        cells[f"car-mfl-alpha-{round(10 * alpha)}"] = replace(
            cells["car-mfl-4-0-6"], method=replace(alphas, alpha=alpha)
        )
    public: Any = cells["mfedavg-p"]
    lower = replace(public, method=replace(public.method, private=False))
    nobody_lacks = replace(public, partition=replace(public.partition, image_only=0))
    return cells | {"lower": lower, ALL_PAIRED: nobody_lacks, POOLED: _pooled(size, lower)}


def _with_representations(size: Size, experiment: Experiment) -> Experiment:
    """CreamFL with the others' classifier and schedule: representations of the public set travel, and no weights.

    Every site trains a classifier of its own, with one pass over the public set a round; the server trains its own
    there, and distils.
    """
    preset, rounds = presets.get("creamfl" if size.demo else "creamfl-paper"), experiment.rounds.rounds
    shared: dict[str, Any] = {"local_steps": experiment.method.local_steps, "local_epochs": 1, "server_rounds": rounds}
    return replace(experiment, method=replace(preset.method, **shared))


def _pooled(size: Size, lower: Experiment) -> Experiment:
    """The lower bound with nearly all records public, and as many a step as all sites and the server have together.

    The sites, which do not train there, keep a batch each.
    """
    training = replace(lower.training, batch_size=lower.training.batch_size * (1 if size.quick else 11))
    data: Any = lower.data
    if size.demo:
        partition = replace(lower.partition, image_only=0, public=0.6 if size.quick else POOLED_SHARE)
        return replace(lower, partition=partition, training=training)
    ((records, _),) = data.collections
    left = _patients(size, 50)
    everybody = 10 * _patients(size, 810) + _patients(size, 1000) - 10 * left
    shares = (*((site, left) for site in TEN), (PUBLIC, everybody))
    return replace(lower, data=replace(data, collections=((records, shares),)), training=training)


def _classifier(size: Size, name: str, seed: int) -> Experiment:
    if not size.demo:
        return _paper_classifier(size, name, seed)
    preset = seeded(presets.get(name), seed)
    small = size.quick
    model: Any = replace(preset.model, **({"image_size": 32} if small else {"init": "tiny-pool"}))
    data = SyntheticCohort(
        sites=10,
        size=420 if small else 3000,
        image_size=36 if small else 72,
        seed=seed,
        omitted=0.5,
        shared_habits=True,
    )
    steps = 1 if small else 10
    training = replace(preset.training, batch_size=8 if small else 32, warmup_steps=5)
    rounds = replace(preset.rounds, rounds=1 if small else 3)
    method = replace(preset.method, local_steps=steps)
    return replace(preset, model=model, data=data, training=training, rounds=rounds, method=method)


def _paper_classifier(size: Size, name: str, seed: int) -> Experiment:
    """A method with CAR-MFL's towers and schedule on MIMIC: ten sites, and a public set, by patients (spec 12.2)."""
    paper = presets.get("car-mfl-paper")
    model: Any = replace(paper.model, labels=CHEXPERT)  # type: ignore[call-arg]
    method = replace(presets.get(name).method, local_steps=1)  # at the smallest size; the paper's are epochs
    data = PatientSites(((source(size, "mimic_cxr"), _of_mimic(size)),), seed)
    return on_data(size, replace(paper, model=model, method=method, data=data, partition=Partition()), seed)


def _patients(size: Size, number: int) -> int:
    """So many of the paper's patients; at the smallest size a 200th, and at least three."""
    return max(3, number // 200) if size.quick else number


def _of_mimic(size: Size, public: int = 1000) -> Shares:
    """Who has how many patients of MIMIC; the public set stands last, so that the sites' do not depend on its size."""
    sites = [(site, _patients(size, 810)) for site in TEN]
    return (*sites, (PUBLIC, _patients(size, public)))


TEN = tuple(f"site-{number}" for number in range(1, 11))
PAIRED = 2
"""So many of the ten sites of the heterogeneous setting have pairs, the first ones; the others have films alone."""


def _unlike(size: Size, scarce: Experiment) -> Experiment:
    """Eight sites of CheXpert's films, two of Open-I's pairs, public patients of MIMIC; or the demo's unlike habits."""
    data: Any = scarce.data
    if size.demo:
        return replace(scarce, data=replace(data, shared_habits=False))
    return replace(scarce, data=PatientSites(_unlike_shares(size), data.seed))


def _unlike_shares(size: Size) -> tuple[tuple[Any, Shares], ...]:
    """Who has how many patients of which data set."""
    return (
        (source(size, "mimic_cxr"), ((PUBLIC, _patients(size, 1000)),)),
        (source(size, "openi"), tuple((site, 0) for site in TEN[:PAIRED])),
        (source(size, "chexpert"), tuple((site, _patients(size, 900)) for site in TEN[PAIRED:])),
    )


def _fewer(size: Size, experiment: Experiment, percent: int) -> Experiment:
    """The same with a smaller public set, of the patients that ``FEWER`` has for so many percent of the demo's."""
    data: Any = experiment.data
    if size.demo:
        return with_public(experiment, percent / 100)
    wanted = _patients(size, FEWER[percent])
    collections = tuple(
        (records, tuple((site, wanted if site == PUBLIC else count) for site, count in shares))
        for records, shares in data.collections
    )
    return replace(experiment, data=replace(data, collections=collections))


DRAWN_ANEW = (
    "Films are cropped at random where the released code scales, mirrors and turns them, as a film has a side, and "
    "grey values lose 0.5 and are divided by 0.5, in place of ImageNet's means and SDs. "
    "The authors' partitions are positions in their own file of annotations, and name no patient: patients of MIMIC's "
    "training split are drawn anew with each seed, and its validation and test splits choose the round and judge."
)
MACRO_AUC = Study(
    "missing-modalities",
    "missing-modalities",
    lambda size, seed: missing_modalities(size, seed, unlike=size.demo),
    lambda size: measures.classified,
    sources=("mimic_cxr",),
    stands_in="Five findings of drawn films stand in for 14 of MIMIC; 10 sites of 300 studies; reports "
    "leave out half of what the films show; sites of unlike scanners and habits stand in for CheXpert and "
    "Open-I (heterogeneous).",
    differs=DRAWN_ANEW,
)
MACRO_AUC_UNLIKE = replace(
    MACRO_AUC,
    experiments=missing_modalities,
    sources=("mimic_cxr", "chexpert", "openi"),
    differs=f"{DRAWN_ANEW} Heterogeneous: the patients of Open-I (one for each report) are halved, and all views of "
    "theirs are records.",
)
"""The same study, for tables with heterogeneous sites."""

PUBLIC_SIZES = (1000, 750, 500, 250)
"""Patients of the paper's public sets."""


def patients_dealt(size: Size, seed: int) -> Figures:
    """Training records of CAR-MFL's sites and public sets, and how many of them have each finding."""
    texts = source(size, "mimic_cxr", labels=CHEXPERT).undecoded()
    figures: Figures = {}
    for number in PUBLIC_SIZES:
        dealt_to = deal(texts, _of_mimic(size, number), seed)
        of_size = counted(texts.with_sites(dealt_to.tolist()), (*TEN, PUBLIC), "train")
        figures |= {public_of(number): of_size[dealt(PUBLIC)]}
        if number == PUBLIC_SIZES[0]:
            figures |= of_size
    return figures


UNLIKE = "heterogeneous: "
"""Begins the names of the numbers of records of the heterogeneous sites."""


def unlike_patients_dealt(size: Size, seed: int) -> Figures:
    """``patients_dealt``, and the training records of the heterogeneous sites."""
    figures = patients_dealt(size, seed)
    for number, (records, shares) in enumerate(_unlike_shares(size)):
        cohort = records.undecoded()
        owner = deal(cohort, shares, seed + number).tolist()
        of_sites = counted(cohort.with_sites(owner), [site for site, _ in shares], "train")
        figures |= {UNLIKE + dealt(site): of_sites[dealt(site)] for site, _ in shares}
    return figures


def public_of(patients: int) -> str:
    """Name of the number of training records of a public set of so many patients."""
    return f"records of {patients} public patients"


DEALT = Study(
    "patients",
    "patients",
    lambda size, seed: {},
    lambda size: measures.classified,
    drawn=patients_dealt,
    sources=("mimic_cxr",),
    differs=DRAWN_ANEW,
)

DEALT_UNLIKE = replace(
    DEALT, drawn=unlike_patients_dealt, sources=MACRO_AUC_UNLIKE.sources, differs=MACRO_AUC_UNLIKE.differs
)
