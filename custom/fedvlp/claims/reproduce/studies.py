"""The experiments behind the papers' tables: every cell of a study, at each size.

Cells that the ledger knows have its names, so that its claims are judged of a table that has both of their methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fedvlp.claims.ledger import seeded
from fedvlp.claims.reproduce import measures
from fedvlp.claims.reproduce.measures import Downstream
from fedvlp.claims.reproduce.table import DEMO, PAPER, SMALLEST, Size, Study
from fedvlp.claims.scenario import Figures
from fedvlp.core.method import Method
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.labels import CHEXPERT
from fedvlp.data.sources import SOURCES
from fedvlp.data.sources.creamfl import FOLDERS as COLLECTIONS
from fedvlp.data.sources.creamfl import CreamFLSource
from fedvlp.data.sources.retina import NAMES as EYE_FINDINGS
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.evaluation.linear_probe import LBFGS
from fedvlp.evaluation.prompts import PROMPTS, prompts
from fedvlp.methods import Centralized, FedAvg, FedDRA, FedRGB, Local
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.models.selector import SelectorConfig
from fedvlp.objectives.creamfl import CreamFLTaskConfig
from fedvlp.objectives.gloria import GLoRIAConfig
from fedvlp.objectives.medclip import MedCLIPConfig
from fedvlp.objectives.mgca import MGCAConfig
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.fitting import fitted
from fedvlp.run.patient_sites import PatientSites, Shares, deal
from fedvlp.run.site_sources import SiteSources

Cells = dict[str, Experiment]
"""Name of a cell -> its experiment."""

SITES = tuple(f"site-{number}" for number in range(1, 6))
MODEL = ModelConfig(image_size=32, head_hidden=16, embedding_dim=16, head_norm="layer")
"""Of the smallest size."""


def source(size: Size, name: str, **settings: Any) -> Any:
    """The data set in the folder ``name`` of the root of ``size``, with ``settings`` of its source."""
    assert size.root is not None
    kind: Any = SOURCES[name]
    made = kind.at((size.root / name).absolute(), image_size=36 if size.quick else 256, **settings)
    return replace(made, cache=str(size.cache.absolute())) if size.cache and hasattr(made, "cache") else made


def mimic_texts(size: Size, labels: tuple[str, ...]) -> Cohort:
    """The reports and labels of MIMIC-CXR, for counts: no film is decoded."""
    assert size.root is not None
    reports = str((size.root / "mimic_cxr").absolute())
    films = source(size, "mimic_cxr", labels=labels)
    cohort: Cohort = replace(films, root=None, reports=reports).build()
    return cohort


def on_data(size: Size, experiment: Experiment, seed: int) -> Experiment:
    """An experiment on the paper's data with that seed; at the smallest size a round of tiny towers."""
    rounds = replace(experiment.rounds, seed=seed)
    if not size.quick:
        return replace(experiment, rounds=rounds)
    model: ModelConfig = MODEL
    if isinstance(experiment.model, MultimodalConfig):
        model = MultimodalConfig(labels=experiment.model.labels, image_size=32)
    training = replace(presets.get("fedavg").training, batch_size=8, warmup_steps=5)
    return replace(experiment, model=model, training=training, rounds=replace(rounds, rounds=1))


# FedDRA and FedRGB

LOCAL = {PAPER: 50, DEMO: 20, SMALLEST: 1}
"""Steps of the encoders a round."""

ALIGN = {PAPER: 20, DEMO: 5, SMALLEST: 1}
"""Steps of FedDRA's alignment modules before them."""

CHEST: dict[str, Any] = {"mu": 5.0, "rho": 0.1}
EYES: dict[str, Any] = {"mu": 1.0, "rho": 0.5}
"""FedDRA's settings for films of the chest and for photographs of the retina (spec 4.4)."""


def alignment_base(size: Size, seed: int, sites: int = 5) -> Experiment:
    """Everything but the method: the records, tiny towers from the shipped encoders, or the paper's.

    The smallest size has two sites, whatever is asked for.
    """
    if not size.demo:
        paper = presets.get("feddra-paper")
        films = source(size, "mimic_cxr", labels=FINDINGS)  # dealt by the mention of these five (spec 12.1)
        partition = Partition(sites=2 if size.quick else sites)
        return on_data(size, replace(paper, data=films, partition=partition), seed)
    demo = presets.get("fedavg")
    training, data, model = (
        replace(demo.training, warmup_steps=5),
        SyntheticCohort(sites=sites, image_size=72),
        demo.model,
    )
    if size.quick:
        model, data = MODEL, SyntheticCohort(sites=2, size=160, image_size=36, test_rows=32)
        training = replace(training, batch_size=8)
    rounds = replace(demo.rounds, rounds=3 if size.name == DEMO else 1)
    return seeded(replace(demo, model=model, data=data, training=training, rounds=rounds), seed)


def compared(size: Size, base: Experiment, local: int, of_feddra: dict[str, Any]) -> Cells:
    """The methods of the papers' main comparison, ConVIRT's loss, and pooled training with as many records a step.

    ``local``: steps of the encoders a round. ``of_feddra``: FedDRA's own settings.
    """
    align = ALIGN[size.name]
    tenth: dict[str, Any] = presets.TENTH if size.name == PAPER else {}
    even: dict[str, Any] = {"weighting": "uniform", "local_steps": local}
    methods: dict[str, Method] = {
        "local": Local(**even),
        "fedavg": FedAvg(**even),
        "feddra": FedDRA(align_steps=align, local_steps=local, **of_feddra, **tenth),
        "fedrgb": FedRGB(local_steps=local, aligner_steps=local, beta=2.0, gamma=1.0, rho=1.0, **tenth),
    }
    cells = {name: replace(base, method=method) for name, method in methods.items()}
    sites = getattr(base.data, "sites", base.partition.sites)
    wide = replace(base.training, batch_size=base.training.batch_size * (sites if size.demo else 1))
    return cells | {"centralized": replace(base, method=Centralized(local_steps=local), training=wide)}


def alignment(size: Size, seed: int) -> Mapping[str, Experiment]:
    """Every cell of FedDRA's and FedRGB's tables but those of the retina."""
    base = alignment_base(size, seed)
    # the preset's plain rounds are as many as the demo has, which would be FedAvg
    fewer: dict[str, Any] = {"fedldawa": {"plain_rounds": base.rounds.rounds // 3}} if size.demo else {}
    cells = compared(size, base, LOCAL[size.name], CHEST)
    for name in ("fedmoon", "fedldawa", "fedema", "fedu", "fedx", "fedmae"):
        preset = presets.get(name)
        method = replace(preset.method, local_steps=LOCAL[size.name], weighting="uniform", **fewer.get(name, {}))
        cells[name] = replace(base, method=method, objective=preset.objective)
    prototypes = 16 if size.quick else 500
    objectives: dict[str, Any] = {"gloria": GLoRIAConfig(), "mgca": MGCAConfig(prototypes=prototypes)}
    for loss, objective in objectives.items():
        for name in ("local", "fedavg", "feddra", "fedrgb", "centralized"):
            cells[f"{name}-{loss}"] = replace(cells[name], objective=objective)
    cells["fedldawa-mgca"] = replace(cells["fedldawa"], objective=objectives["mgca"])
    for start, beta in (("fedavg", 5.0), ("feddra", 5.0), ("centralized", 5.0)):
        for loss in ("", "-gloria"):
            cells[f"{start}{loss}-beta-5"] = _skewed(cells[start + loss], beta)
    two = compared(size, alignment_base(size, seed, 2), LOCAL[size.name], CHEST)
    return cells | _settings(cells) | {"feddra-2-sites": two["feddra"], "fedrgb-2-sites": two["fedrgb"]}


def _skewed(experiment: Experiment, beta: float) -> Experiment:
    """The same with another Dirichlet concentration of the labels over sites."""
    data: Any = experiment.data
    if isinstance(data, SyntheticCohort):
        return replace(experiment, data=replace(data, beta=beta))
    return replace(experiment, partition=replace(experiment.partition, beta=beta))


def _settings(cells: Cells) -> Cells:
    """FedDRA and FedRGB with one setting changed, or one of their means left out."""
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "feddra-one-stage": ("feddra", {"align_steps": 0}),
        "feddra-no-constraint": ("feddra", {"mu": 0.0}),
        "feddra-no-dro": ("feddra", {"rho": 0.0}),
        "feddra-rho-001": ("feddra", {"rho": 0.01}),
        "feddra-rho-1": ("feddra", {"rho": 1.0}),
        "feddra-mu-1": ("feddra", {"mu": 1.0}),
        "feddra-mu-10": ("feddra", {"mu": 10.0}),
        "fedrgb-average": ("fedrgb", {"avg_aligner": True}),
        "fedrgb-contrastive": ("fedrgb", {"contrastive_guidance": True}),
        "fedrgb-rho-1e-7": ("fedrgb", {"rho": 1e-7}),
        "fedrgb-rho-1e-4": ("fedrgb", {"rho": 1e-4}),
        "fedrgb-alpha-2": ("fedrgb", {"alpha": 2.0}),
        "fedrgb-alpha-5": ("fedrgb", {"alpha": 5.0}),
        "fedrgb-alpha-10": ("fedrgb", {"alpha": 10.0}),
    }
    return {
        name: replace(cells[start], method=replace(cells[start].method, **change))
        for name, (start, change) in changes.items()
    }


RSNA, COVID, SEGMENTED = "RSNA classification", "Covid classification", "RSNA segmentation"


def downstream(size: Size) -> measures.Alignment:
    """The heads of the main tables: on RSNA and COVIDx, or in the demo on films of other people than any cohort's."""
    shares = (0.01, 0.1)
    if not size.demo:
        rsna, covid, most = source(size, "rsna"), source(size, "covidx"), _most(size)
        return measures.Alignment(
            (
                Downstream(RSNA, rsna, shares, ("Pneumonia",), steps=most),
                Downstream(COVID, covid, shares, steps=most),
                Downstream(SEGMENTED, rsna, shares, structure="Pneumonia", steps=most),
            )
        )
    films, steps = _others(size)
    return measures.Alignment(
        (
            Downstream(RSNA, films, shares, ("Pneumonia",), solver=LBFGS),
            Downstream(COVID, films, shares, ("Edema", "Consolidation", "Pneumothorax"), solver=LBFGS),
            Downstream(SEGMENTED, films, shares, structure="Pneumonia", steps=steps),
        )
    )


def _most(size: Size) -> int | None:
    """On the paper's data: at most so many steps of training a head; None: as many as the protocol has."""
    return 1 if size.quick else None


def _others(size: Size) -> tuple[SyntheticCohort, int]:
    """Records of other people, for heads, and at most so many steps of training a decoder."""
    if size.quick:
        return SyntheticCohort(sites=1, size=60, image_size=36, seed=2000), 1
    return SyntheticCohort(sites=1, size=2000, image_size=72, beta=1000.0, seed=2000), 60


STAND_IN = (
    "Other drawn films stand in for RSNA (Pneumonia against the rest; its masks) and for COVIDx (Edema, Consolidation, "
    "Pneumothorax). Probes are solved exactly: with so few films the papers' AdamW takes a step an epoch, so heads "
    "say what is most frequent."
)
ALIGNMENT = Study("alignment", "alignment", alignment, lambda size: measures.Alignment(), sources=("mimic_cxr",))
HEADS = Study(
    "alignment-heads", "alignment", alignment, downstream, sources=("mimic_cxr", "rsna", "covidx"), stands_in=STAND_IN
)
"""The same runs, and heads on their image towers, which take longer than a table of recalls should."""


def elsewhere(size: Size) -> measures.Outside:
    """Retrieval outside the training sites: EHRXQA, or in the demo films of other people than any cohort's."""
    if not size.demo:
        return measures.Outside(source(size, "ehrxqa"))
    return measures.Outside(_strangers(size, 2000))


def _strangers(size: Size, seed: int) -> SyntheticCohort:
    """Films of other people with enough of them in the test split for batches of 32; ``seed`` differs from a run's."""
    if size.quick:
        return SyntheticCohort(sites=1, size=80, image_size=36, seed=seed, test_rows=32)
    return SyntheticCohort(sites=1, size=1200, image_size=72, beta=1000.0, seed=seed)


ELSEWHERE = Study(
    "alignment-elsewhere",
    "alignment",
    alignment,
    elsewhere,
    sources=("mimic_cxr", "ehrxqa"),
    stands_in="Drawn films of other people, with their reports, stand in for EHRXQA's films, whose texts are questions "
    "with their answers. They are drawn as those of the sites are, so little of what makes EHRXQA unlike is in them.",
)
"""The same runs, and recall on records of no site."""


def _distortion(size: Size) -> measures.Retrained:
    return measures.Retrained("distortion", 1 if size.quick else None)


def _shallow(size: Size) -> measures.Retrained:
    return measures.Retrained("shallow", {PAPER: 500, DEMO: 40, SMALLEST: 1}[size.name])


DISTORTION = Study("distortion", "alignment", alignment, _distortion, sources=("mimic_cxr",))
SHALLOW = Study("shallow", "alignment", alignment, _shallow, sources=("mimic_cxr",))


STAND_INS = ("Edema", "Pleural Effusion")
"""Findings on drawn films, in the demo, for the two of the retina."""


def retina(size: Size, seed: int) -> Mapping[str, Experiment]:
    """FedDRA's table 4: two sites."""
    if size.demo:
        base, local, of_feddra = alignment_base(size, seed, 2), LOCAL[size.name], CHEST
        assert isinstance(base.data, SyntheticCohort)
        base = replace(base, data=replace(base.data, captions=STAND_INS))
    else:
        base, local, of_feddra = _eyes(size, seed), 1 if size.quick else 20, EYES
    cells = compared(size, base, local, of_feddra)
    for name in ("fedmae", "fedx", "fedu"):
        preset = presets.get(name)
        method = replace(preset.method, local_steps=local, weighting="uniform")
        cells[name] = replace(base, method=method, objective=preset.objective)
    return cells


def _eyes(size: Size, seed: int) -> Experiment:
    """MESSIDOR and BRSET, a site each, with the schedule of the retina (spec 4.4). Captions of the grades are texts."""
    paper = presets.get("feddra-paper")
    training = replace(paper.training, batch_size=100, lr=1e-5)
    data = SiteSources(tuple((name, source(size, name)) for name in ("messidor", "brset")))
    rounds = replace(paper.rounds, rounds=20)
    return on_data(size, replace(paper, data=data, training=training, rounds=rounds), seed)


def retina_heads(size: Size) -> measures.Alignment:
    """Two findings, at three shares of the training records."""
    names = ("DR", "macular edema")
    records: Any = source(size, "mbrset") if not size.demo else None
    solved: dict[str, Any] = {"solver": LBFGS} if size.demo else {"steps": _most(size)}
    findings = EYE_FINDINGS
    if size.demo:
        (records, _), findings = _others(size), STAND_INS
    return measures.Alignment(
        tuple(
            Downstream(name, records, (0.1, 0.2, 1.0), (finding,), **solved)
            for name, finding in zip(names, findings, strict=True)
        )
    )


RETINA = Study(
    "retina",
    "retina",
    retina,
    retina_heads,
    sources=("messidor", "brset", "mbrset"),
    differs="Photographs are read in grey.",
    stands_in=(
        "Drawn chest films of two sites stand in for MESSIDOR and BRSET, captions that grade two of their findings for "
        "those of diabetic retinopathy and macular edema: the procedure, and nothing about eyes."
    ),
)


def counts(size: Size, seed: int) -> Figures:
    """Records of each site, and of those with each finding, as the alignment tables deal them; no run is needed."""
    if size.demo:
        return counted(SyntheticCohort(image_size=72, seed=seed).build(), SITES)
    texts = mimic_texts(size, FINDINGS)
    base = replace(alignment_base(size, seed), data=Given(texts), partition=Partition(sites=len(SITES)))
    return counted(Assembly(base).cohort, SITES)


@dataclass(frozen=True)
class Given:
    """Records that have been read, as a data set."""

    cohort: Cohort

    def build(self) -> Cohort:
        """The records."""
        return self.cohort


def counted(cohort: Cohort, sites: Sequence[str], split: str = "") -> Figures:
    """How many records of a ``split`` ("": of all) each site has, and how many of them have each finding."""
    owner = np.asarray(cohort.sites)
    asked = np.asarray(cohort.splits) == split if split else np.ones(len(cohort), dtype=bool)
    figures: Figures = {}
    for site in sites:
        here = (owner == site) & asked
        figures[dealt(site)] = float(here.sum())
        for index, name in enumerate(cohort.label_names):
            figures[dealt(site, name)] = float((cohort.labels[here, index] == 1).sum())
    return figures


def dealt(site: str, finding: str = "") -> str:
    """Name of the number of a site's records, of all or of those with a finding."""
    return f"{finding or 'records'} at {site}"


COUNTS = Study(
    "counts",
    "counts",
    lambda size, seed: {},
    lambda size: measures.server,
    drawn=counts,
    sources=("mimic_cxr",),
    differs="A study's films stay together, and the paper's split is another draw (docs/methods.md, 12.1).",
)


# CreamFL


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
        cells[f"{name}-large"] = _public(cells[name], 0.4, 100_000)
    for name in ("creamfl", "reamfl-iot"):
        cells[f"{name}-small"] = _public(cells[name], 0.15, 25_000)
    return cells


def _public(experiment: Experiment, share: float, captions: int = 0) -> Experiment:
    """With a ``share`` of the built-in patients in the public set, or so many of COCO's ``captions``."""
    data: Any = experiment.data
    if isinstance(data, CreamFLSource):
        return replace(experiment, data=replace(data, captions=captions))
    return replace(experiment, partition=replace(experiment.partition, public=share))


LADDER = ("aggregation", "inter", "intra")
"""What tells the steps from plain averaging to CreamFL apart."""

EPOCHS_IN_STEPS = 378
"""Five epochs of a site with a fifteenth of Flickr30k's 145,000 pairs in batches of 128, for FedIoT."""


def _on_collections(size: Size, name: str, seed: int) -> Experiment:
    """The method of a preset, with the towers, sites and schedule of CreamFL's paper preset."""
    assert size.root is not None
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
    "AdamW for AdamP, one rate at all sites, no PIE attention, no GloVe vectors. FedAvg and FedIoT average models, so "
    "their sites have the server's; they take as many steps as five epochs of a mean site with pairs. They train all "
    "sites in every round, also where the others train ten of 35, as in the paper."
)
REPRESENTATIONS = Study(
    "representations",
    "representations",
    representations,
    lambda size: measures.server if size.demo else measures.coco,
    sources=COLLECTIONS,
    differs=NO_PIE,
    stands_in="The public set of the built-in cohort stands in for COCO, its test split for the "
    "1K test set; 2, 2 and 1 sites for 15, 10 and 10.",
)


def questions(size: Size) -> measures.Answers:
    """VQA v2, or in the demo questions about films of other people than any cohort's."""
    if not size.demo:
        return measures.Answers(source(size, "vqa_v2", colour=True), _most(size))
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


# PMS-FM

FOUR = ("chexpert", "mimic_cxr", "nih_cxr14", "candid_ptx")
COMPETITION = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
"""CheXpert's five classes, which the paper tells apart."""


def unlike_sites(size: Size, seed: int) -> Mapping[str, Experiment]:
    """Four unlike sites, MedCLIP's loss, and the methods of the main table; the selector's embeddings and fusions."""
    base = _small_unlike(size, seed) if size.demo else _four_data_sets(size, seed)
    local = base.method.local_steps
    plain = replace(base, extra=None, objective=MedCLIPConfig())
    wide = replace(base.training, batch_size=base.training.batch_size * (4 if size.demo else 1))
    cells: Cells = {
        "pms-fm": base,
        "fedavg": replace(plain, method=FedAvg(local_steps=local)),
        "centralized": replace(plain, method=Centralized(local_steps=local), training=wide),
    }
    for name in ("fedprox", "fedmoon"):
        cells[name] = replace(plain, method=replace(presets.get(name).method, local_steps=local))
    for name in ("fedsm", "fedfed"):
        preset = presets.get(name)
        few: dict[str, Any] = {"distil_phases": 1, "distil_steps": 2} if name == "fedfed" and size.quick else {}
        cells[name] = replace(base, method=replace(preset.method, local_steps=local, **few), extra=preset.extra)
    mgca = MGCAConfig(prototypes=16 if size.quick else 500)
    cells |= {f"{name}-mgca": replace(cells[name], objective=mgca) for name in ("fedavg", "pms-fm")}
    return cells | _selectors(base)


def _four_data_sets(size: Size, seed: int) -> Experiment:
    """PMS-FM's paper preset with a data set a site, named so that their order is the paper's.

    A tenth of the patients with reports is public, and its reports are retrieved for CheXpert and NIH, which have none.
    """
    paper, findings = presets.get("pms-fm-paper"), tuple(PROMPTS)  # CANDID's only label is among these
    sites = tuple(
        (f"site-{number}-{name}", source(size, name, labels=findings)) for number, name in enumerate(FOUR, start=1)
    )
    templates = tuple(prompts(name, 3, seed=100) for name in findings)
    selector: Any = paper.extra
    method = replace(paper.method, local_steps=1) if size.quick else paper.method
    base = replace(
        paper,
        data=SiteSources(sites),
        partition=Partition(sites=len(sites), public=0.1, retrieve=True),
        extra=replace(selector, classes=findings, templates=templates),
        method=method,
    )
    return on_data(size, base, seed)


SELECTORS = {
    "image": ("image",),
    "image-report": ("image", "report"),
    "triple": ("image", "report", "token"),
    "image-token": ("image", "token"),
}


def _selectors(base: Experiment) -> Cells:
    """PMS-FM with other inputs of the selector, fused by its MLP and by its cross attention; "pms-fm" is the triple."""
    preset: Any = base.extra
    assert isinstance(preset, SelectorConfig)
    return {
        f"selector-{name}-{fusion}": replace(base, extra=replace(preset, embeddings=embeddings, fusion=fusion))
        for name, embeddings in SELECTORS.items()
        for fusion in ("mlp", "attention")
        if (name, fusion) not in (("image", "attention"), ("triple", "mlp"))
    }


def _small_unlike(size: Size, seed: int) -> Experiment:
    preset = seeded(presets.get("pms-fm"), seed)
    model, data, training, method = replace(preset.model, init="tiny-pool"), preset.data, preset.training, preset.method
    if size.name == SMALLEST:
        model, data = MODEL, SyntheticCohort(sites=4, size=200, image_size=36, seed=seed, hard_site="site-2")
        training, method = replace(training, batch_size=8), replace(method, local_steps=1)
    else:
        method = replace(method, local_steps=20)
    rounds = replace(preset.rounds, rounds=4 if size.name == DEMO else 1, evaluate_every=0)
    return replace(preset, model=model, data=data, training=training, method=method, rounds=rounds)


def _told(size: Size) -> measures.ZeroShot:
    return measures.ZeroShot(selectors=not size.quick, classes=() if size.demo else COMPETITION)


LABELS = "CANDID is labelled with Pneumothorax alone, so it has no accuracy, and the mean is over the three others."
UNLIKE_SITES = Study(
    "unlike-sites",
    "unlike-sites",
    unlike_sites,
    _told,
    sources=FOUR,
    stands_in="Four unlike sites of the built-in cohort stand in for CheXpert, MIMIC, NIH and CANDID, in this order.",
    differs=LABELS,
)


def external(size: Size) -> measures.ElsewhereTold:
    """Two collections of no site, two classes each; the demo's are films of other people."""
    if not size.demo:
        rsna, covid = source(size, "rsna"), source(size, "covid_radiography")
        return measures.ElsewhereTold(
            (("RSNA", rsna, ("Pneumonia", "No Finding")), ("COVID", covid, ("COVID-19", "No Finding")))
        )
    return measures.ElsewhereTold(
        (
            ("RSNA", _strangers(size, 2000), ("Pneumonia", "Pneumothorax")),
            ("COVID", _strangers(size, 2001), ("Edema", "Consolidation")),
        )
    )


EXTERNAL = Study(
    "unlike-sites-external",
    "unlike-sites",
    unlike_sites,
    external,
    sources=(*FOUR, "rsna", "covid_radiography"),
    stands_in="Four unlike sites of the built-in cohort stand in for CheXpert, MIMIC, NIH and CANDID. Drawn films of "
    "other people stand in for RSNA and COVID, and two findings for a disease and its absence: Pneumonia or "
    "Pneumothorax for Pneumonia or normal, Edema or Consolidation for COVID-19 or normal.",
    differs="RSNA: Pneumonia or normal, without films that are neither; the drawn 15 % test split. COVID: COVID-19 or "
    "normal of the COVID-19 Radiography Database, which the paper cites; the drawn 20 % test split.",
)
"""The same runs, and zero-shot on records of no site."""


# CAR-MFL

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
    nobody_lacks = replace(public.partition, image_only=0)
    return cells | {
        "lower": replace(public, method=replace(public.method, private=False)),
        "upper": replace(public, partition=nobody_lacks),
    }


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
    method = replace(presets.get(name).method, local_steps=1 if size.quick else paper.method.local_steps)
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
    others = PatientSites(
        (
            (source(size, "mimic_cxr"), ((PUBLIC, _patients(size, 1000)),)),
            (source(size, "openi"), tuple((site, 0) for site in TEN[:PAIRED])),
            (source(size, "chexpert"), tuple((site, _patients(size, 900)) for site in TEN[PAIRED:])),
        ),
        data.seed,
    )
    return replace(scarce, data=others)


def _fewer(size: Size, experiment: Experiment, percent: int) -> Experiment:
    """The same with a smaller public set, of the patients that ``FEWER`` has for so many percent of the demo's."""
    data: Any = experiment.data
    if size.demo:
        return _public(experiment, percent / 100)
    wanted = _patients(size, FEWER[percent])
    collections = tuple(
        (records, tuple((site, wanted if site == PUBLIC else count) for site, count in shares))
        for records, shares in data.collections
    )
    return replace(experiment, data=replace(data, collections=collections))


DRAWN_ANEW = (
    "The authors' lists of patients are not among our sources: patients of MIMIC's training split are drawn anew with "
    "each seed, and its validation and test splits choose the round and judge."
)
MISSING = Study(
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
MISSING_UNLIKE = replace(
    MISSING,
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
    texts = mimic_texts(size, CHEXPERT)
    figures: Figures = {}
    for number in PUBLIC_SIZES:
        dealt_to = deal(texts, _of_mimic(size, number), seed)
        of_size = counted(texts.with_sites(dealt_to.tolist()), (*TEN, PUBLIC), "train")
        figures |= {public_of(number): of_size[dealt(PUBLIC)]}
        if number == PUBLIC_SIZES[0]:
            figures |= of_size
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
