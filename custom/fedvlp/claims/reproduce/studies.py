"""The experiments behind the papers' tables: every cell of a study, at each size.

Cells that the ledger knows have its names, so that its claims are judged of a table that has both of their methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedvlp.claims.ledger import seeded
from fedvlp.claims.reproduce import measures
from fedvlp.claims.reproduce.measures import Downstream
from fedvlp.claims.reproduce.table import DEMO, PAPER, SMALLEST, Size, Study
from fedvlp.claims.scenario import Figures
from fedvlp.core.method import Method
from fedvlp.data.sources import SOURCES
from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.evaluation.linear_probe import LBFGS
from fedvlp.methods import Centralized, FedAvg, FedDRA, FedRGB, Local
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.selector import SelectorConfig
from fedvlp.objectives.gloria import GLoRIAConfig
from fedvlp.objectives.medclip import MedCLIPConfig
from fedvlp.objectives.mgca import MGCAConfig
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.site_sources import SiteSources

Cells = dict[str, Experiment]
"""Name of a cell -> its experiment."""

SITES = tuple(f"site-{number}" for number in range(1, 6))
MODEL = ModelConfig(image_size=32, head_hidden=16, embedding_dim=16, head_norm="layer")
"""Of the smallest size."""


def source(size: Size, name: str, pixels: int) -> Any:
    """The data set in the folder ``name`` of the root of ``size``."""
    assert size.root is not None
    kind: Any = SOURCES[name]
    return kind.at((size.root / name).absolute(), image_size=pixels)


# FedDRA and FedRGB

LOCAL = {PAPER: 50, DEMO: 20, SMALLEST: 1}
"""Steps of the encoders a round."""

ALIGN = {PAPER: 20, DEMO: 5, SMALLEST: 1}
"""Steps of FedDRA's alignment modules before them."""


def alignment_base(size: Size, seed: int, sites: int = 5) -> Experiment:
    """Everything but the method: the records, tiny towers from the shipped encoders, or the paper's.

    The smallest size has two sites, whatever is asked for.
    """
    if size.name == PAPER:
        paper = presets.get("feddra-paper")
        one = replace(paper, data=source(size, "mimic_cxr", 256), partition=Partition(sites=sites))
        return replace(one, rounds=replace(one.rounds, seed=seed))
    demo = presets.get("fedavg")
    training, data, model = (
        replace(demo.training, warmup_steps=5),
        SyntheticCohort(sites=sites, image_size=72),
        demo.model,
    )
    if size.name == SMALLEST:
        model, data = MODEL, SyntheticCohort(sites=2, size=160, image_size=36, test_rows=32)
        training = replace(training, batch_size=8)
    rounds = replace(demo.rounds, rounds=3 if size.name == DEMO else 1)
    return seeded(replace(demo, model=model, data=data, training=training, rounds=rounds), seed)


def compared(size: Size, base: Experiment) -> Cells:
    """The methods of the papers' main comparison, ConVIRT's loss, and pooled training with as many records a step."""
    local, align = LOCAL[size.name], ALIGN[size.name]
    tenth: dict[str, Any] = presets.TENTH if size.name == PAPER else {}
    even: dict[str, Any] = {"weighting": "uniform", "local_steps": local}
    methods: dict[str, Method] = {
        "local": Local(**even),
        "fedavg": FedAvg(**even),
        "feddra": FedDRA(align_steps=align, local_steps=local, mu=5.0, rho=0.1, **tenth),
        "fedrgb": FedRGB(local_steps=local, aligner_steps=local, beta=2.0, gamma=1.0, rho=1.0, **tenth),
    }
    cells = {name: replace(base, method=method) for name, method in methods.items()}
    sites = getattr(base.data, "sites", base.partition.sites)
    wide = replace(base.training, batch_size=base.training.batch_size * (sites if size.demo else 1))
    return cells | {"centralized": replace(base, method=Centralized(local_steps=local), training=wide)}


def alignment(size: Size, seed: int) -> Mapping[str, Experiment]:
    """Every cell of FedDRA's and FedRGB's tables but those of the retina."""
    base = alignment_base(size, seed)
    cells = compared(size, base)
    # the preset's plain rounds are as many as the demo has, which would be FedAvg
    fewer: dict[str, Any] = {"fedldawa": {"plain_rounds": base.rounds.rounds // 3}} if size.demo else {}
    for name in ("fedmoon", "fedldawa", "fedema", "fedu", "fedx", "fedmae"):
        preset = presets.get(name)
        method = replace(preset.method, local_steps=LOCAL[size.name], weighting="uniform", **fewer.get(name, {}))
        cells[name] = replace(base, method=method, objective=preset.objective)
    prototypes = 16 if size.name == SMALLEST else 500
    objectives: dict[str, Any] = {"gloria": GLoRIAConfig(), "mgca": MGCAConfig(prototypes=prototypes)}
    for loss, objective in objectives.items():
        for name in ("local", "fedavg", "feddra", "fedrgb", "centralized"):
            cells[f"{name}-{loss}"] = replace(cells[name], objective=objective)
    cells["fedldawa-mgca"] = replace(cells["fedldawa"], objective=objectives["mgca"])
    for start, beta in (("fedavg", 5.0), ("feddra", 5.0), ("centralized", 5.0)):
        for loss in ("", "-gloria"):
            cells[f"{start}{loss}-beta-5"] = _skewed(cells[start + loss], beta)
    two = compared(size, alignment_base(size, seed, 2))
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
    if size.name == PAPER:
        rsna, covid = source(size, "rsna", 256), source(size, "covidx", 256)
        return measures.Alignment(
            (
                Downstream(RSNA, rsna, shares, ("Pneumonia",)),
                Downstream(COVID, covid, shares),
                Downstream(SEGMENTED, rsna, shares, structure="Pneumonia"),
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


def _others(size: Size) -> tuple[SyntheticCohort, int]:
    """Records of other people, for heads, and at most so many steps of training a decoder."""
    if size.name == SMALLEST:
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
    if size.name == PAPER:
        return measures.Outside(source(size, "ehrxqa", 256))
    return measures.Outside(_strangers(size, 2000))


def _strangers(size: Size, seed: int) -> SyntheticCohort:
    """Films of other people with enough of them in the test split for batches of 32; ``seed`` differs from a run's."""
    if size.name == SMALLEST:
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
    return measures.Retrained("distortion", 1 if size.name == SMALLEST else None)


def _shallow(size: Size) -> measures.Retrained:
    return measures.Retrained("shallow", {PAPER: 500, DEMO: 40, SMALLEST: 1}[size.name])


DISTORTION = Study("distortion", "alignment", alignment, _distortion, sources=("mimic_cxr",))
SHALLOW = Study("shallow", "alignment", alignment, _shallow, sources=("mimic_cxr",))


def retina(size: Size, seed: int) -> Mapping[str, Experiment]:
    """FedDRA's table 4: two sites."""
    base = alignment_base(size, seed, 2)
    cells = compared(size, base)
    for name in ("fedmae", "fedx", "fedu"):
        preset = presets.get(name)
        method = replace(preset.method, local_steps=LOCAL[size.name], weighting="uniform")
        cells[name] = replace(base, method=method, objective=preset.objective)
    return cells


def retina_heads(size: Size) -> measures.Alignment:
    """Two findings, at three shares of the training records."""
    films, _ = _others(size)
    return measures.Alignment(
        tuple(
            Downstream(name, films, (0.1, 0.2, 1.0), (finding,), solver=LBFGS)
            for name, finding in (("DR", "Edema"), ("macular edema", "Pleural Effusion"))
        )
    )


RETINA = Study(
    "retina",
    "retina",
    retina,
    retina_heads,
    stands_in=(
        "Drawn chest films of two sites stand in for MESSIDOR and BRSET, and two of their findings for diabetic "
        "retinopathy and macular edema of mBRSET: the procedure, and nothing about eyes."
    ),
)


def counts(seed: int) -> Figures:
    """Site -> records by code of findings, as the demo of the alignment tables deals them; no run is needed."""
    cohort = SyntheticCohort(image_size=72, seed=seed).build()
    sites = np.asarray(cohort.sites)
    figures: Figures = {}
    for site in SITES:
        here = sites == site
        figures[dealt(site)] = float(here.sum())
        for index, name in enumerate(cohort.label_names):
            figures[dealt(site, name)] = float((cohort.labels[here, index] == 1).sum())
    return figures


def dealt(site: str, finding: str = "") -> str:
    """Name of the number of a site's records, of all or of those with a finding."""
    return f"{finding or 'records'} at {site}"


COUNTS = Study("counts", "counts", lambda size, seed: {}, lambda size: measures.server, drawn=counts)


# CreamFL


def representations(size: Size, seed: int) -> Mapping[str, Experiment]:
    """The ladder, what CreamFL is compared with, larger and smaller public sets, and narrower representations."""
    names = (*presets.REAMFL, "creamfl", "fedmd", "fedet", "fedgems", "fediot")
    cells = {name: _small_ensemble(size, seeded(presets.get(name), seed)) for name in names}
    once: Any = cells["fediot"].method
    cells["fedavg"] = replace(cells["fediot"], method=replace(once, alpha=1.0))
    for name in ("fedgems", "fedet", "reamfl-avg", "reamfl-iot", "creamfl"):
        cells[f"{name}-large"] = _public(cells[name], 0.4)
    for name in ("creamfl", "reamfl-iot"):
        cells[f"{name}-small"] = _public(cells[name], 0.15)
    return cells


def _public(experiment: Experiment, share: float) -> Experiment:
    return replace(experiment, partition=replace(experiment.partition, public=share))


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


REPRESENTATIONS = Study(
    "representations",
    "representations",
    representations,
    lambda size: measures.server,
    stands_in="The public set of the built-in cohort stands in for COCO, its test split for the "
    "1K test set; 2, 2 and 1 sites for 15, 10 and 10.",
)


def questions(size: Size) -> measures.Answers:
    """Questions about films of other people than any cohort's."""
    if size.name == SMALLEST:
        return measures.Answers(SyntheticCohort(sites=1, size=60, image_size=36, seed=2000), 1)
    return measures.Answers(SyntheticCohort(sites=1, size=1200, image_size=36, beta=1000.0, seed=2000))


ANSWERS = Study(
    "representations-answers",
    "representations",
    representations,
    questions,
    stands_in="Questions about other drawn films (which finding, on which side, how severe) stand in for VQA v2, the "
    "public set of the built-in cohort for COCO; 2, 2 and 1 sites for 15, 10 and 10.",
)
"""The same runs, and heads that answer questions."""


# PMS-FM

FOUR = ("chexpert", "mimic_cxr", "nih_cxr14", "candid_ptx")


def unlike_sites(size: Size, seed: int) -> Mapping[str, Experiment]:
    """Four unlike sites, MedCLIP's loss, and the methods of the main table; the selector's embeddings and fusions."""
    if size.name == PAPER:
        base = presets.get("pms-fm-paper")
        sites = tuple((name, source(size, name, 256)) for name in FOUR)
        base = replace(base, data=SiteSources(sites), rounds=replace(base.rounds, seed=seed))
    else:
        base = _small_unlike(size, seed)
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
        few: dict[str, Any] = (
            {"distil_phases": 1, "distil_steps": 2} if name == "fedfed" and size.name == SMALLEST else {}
        )
        cells[name] = replace(base, method=replace(preset.method, local_steps=local, **few), extra=preset.extra)
    mgca = MGCAConfig(prototypes=16 if size.name == SMALLEST else 500)
    cells |= {f"{name}-mgca": replace(cells[name], objective=mgca) for name in ("fedavg", "pms-fm")}
    return cells | _selectors(base)


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


UNLIKE_SITES = Study(
    "unlike-sites",
    "unlike-sites",
    unlike_sites,
    lambda size: measures.ZeroShot(selectors=size.name != SMALLEST),
    sources=FOUR,
    stands_in="Four unlike sites of the built-in cohort stand in for CheXpert, MIMIC, NIH and CANDID, in this order.",
)


def external(size: Size) -> measures.ElsewhereTold:
    """Two collections of no site, two classes each; the demo's are films of other people."""
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
    stands_in="Four unlike sites of the built-in cohort stand in for CheXpert, MIMIC, NIH and CANDID. Drawn films of "
    "other people stand in for RSNA and COVID, and two findings for a disease and its absence: Pneumonia or "
    "Pneumothorax for Pneumonia or normal, Edema or Consolidation for COVID-19 or normal.",
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


def missing_modalities(size: Size, seed: int) -> Mapping[str, Experiment]:
    """Ten sites of which some lack a modality; bounds; other alphas; smaller public sets."""
    base = {name: _classifier(size, name, seed) for name in METHODS}
    cells: Cells = {}
    for name, one in base.items():
        for images, texts, both in MIXES:
            partition = replace(one.partition, image_only=images, text_only=texts)
            cells[name + mixed((images, texts, both))] = replace(one, partition=partition)
        scarce = cells[name]
        data: Any = scarce.data
        cells[f"{name}-hetero"] = replace(scarce, data=replace(data, shared_habits=False))
        for share, percent in ((0.08, 8), (0.04, 4)):
            cells[f"{name}-public-{percent}"] = _public(scarce, share)
            cells[f"{name}-hetero-public-{percent}"] = _public(cells[f"{name}-hetero"], share)
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
    preset = seeded(presets.get(name), seed)
    small = size.name == SMALLEST
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


MISSING = Study(
    "missing-modalities",
    "missing-modalities",
    missing_modalities,
    lambda size: measures.classified,
    stands_in="Five findings of drawn films stand in for 14 of MIMIC; 10 sites of 300 studies; reports "
    "leave out half of what the films show; sites of unlike scanners and habits stand in for CheXpert and "
    "Open-I (heterogeneous).",
)
