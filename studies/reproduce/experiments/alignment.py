"""FedDRA's and FedRGB's experiments: one image-text model, of films of the chest and photographs of the retina."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedvlp.core.method import Method
from fedvlp.data.cohort import Cohort
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.linear_probe import LBFGS
from fedvlp.methods import Centralized, FedAvg, FedDRA, FedRGB, Local
from fedvlp.objectives.gloria import GLoRIAConfig
from fedvlp.objectives.mgca import MGCAConfig
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.fitting import fitted
from fedvlp.run.site_sources import SiteSources
from studies.claims.cell_results import Figures
from studies.claims.heads import Downstream
from studies.claims.ledger import seeded
from studies.collections.retina import NAMES as EYE_FINDINGS
from studies.reproduce import measures
from studies.reproduce.experiments.records import (
    MODEL,
    SITES,
    Cells,
    Given,
    baseline,
    counted,
    dealt,
    films_for_heads,
    films_of_strangers,
    most_steps,
    on_data,
    source,
)
from studies.reproduce.table import DEMO, PAPER, SMALLEST, Size, Study

ROUNDS = {PAPER: 25, DEMO: 3, SMALLEST: 1}
EARLIER = {PAPER: (15, 20), DEMO: (1, 2), SMALLEST: (2, 3)}
"""Rounds after which FedRGB's table 14 measures, between none and all; two others at the smallest size, to run."""

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
    rounds = replace(demo.rounds, rounds=ROUNDS[size.name])
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
        preset = baseline(size, name)
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
    last = ROUNDS[size.name]
    of_rounds = {"fedavg-before": ("fedavg", last - 1), "fedavg-twice": ("fedavg", 2 * last), "fedrgb-0": ("fedrgb", 0)}
    of_rounds |= {
        f"fedrgb-{name}": ("fedrgb", number) for name, number in zip((15, 20), EARLIER[size.name], strict=True)
    }
    for name, (start, number) in of_rounds.items():
        cells[name] = replace(cells[start], rounds=replace(base.rounds, rounds=number))
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
        rsna, covid, most = source(size, "rsna"), source(size, "covidx"), most_steps(size)
        return measures.Alignment(
            (
                Downstream(RSNA, rsna, shares, ("Pneumonia",), steps=most),
                Downstream(COVID, covid, shares, steps=most),
                Downstream(SEGMENTED, rsna, shares, structure="Pneumonia", steps=most),
            )
        )
    films, steps = films_for_heads(size)
    return measures.Alignment(
        (
            Downstream(RSNA, films, shares, ("Pneumonia",), solver=LBFGS),
            Downstream(COVID, films, shares, ("Edema", "Consolidation", "Pneumothorax"), solver=LBFGS),
            Downstream(SEGMENTED, films, shares, structure="Pneumonia", steps=steps),
        )
    )


STAND_IN = (
    "Other drawn films stand in for RSNA (Pneumonia against the rest; its masks) and for COVIDx (Edema, Consolidation, "
    "Pneumothorax). Probes are solved exactly: with so few films the papers' AdamW takes a step an epoch, so heads "
    "say what is most frequent."
)
RECALL = Study("alignment", "alignment", alignment, lambda size: measures.Alignment(), sources=("mimic_cxr",))
HEADS = Study(
    "alignment-heads",
    "alignment",
    alignment,
    downstream,
    sources=("mimic_cxr", "rsna", "covidx"),
    stands_in=STAND_IN,
    without=RECALL,
)
"""The same runs, and heads on their image towers, which take longer than a table of recalls should."""


def elsewhere(size: Size) -> measures.Outside:
    """Retrieval outside the training sites: EHRXQA, or in the demo films of other people than any cohort's."""
    if not size.demo:
        return measures.Outside(source(size, "ehrxqa"))
    return measures.Outside(films_of_strangers(size, 2000))


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
        preset = baseline(size, name)
        method = replace(preset.method, local_steps=local, weighting="uniform")
        cells[name] = replace(base, method=method, objective=preset.objective)
    return cells


def _eyes(size: Size, seed: int) -> Experiment:
    """MESSIDOR and BRSET, a site each, with the schedule of the retina (spec 4.4). Captions of the grades are texts."""
    paper = presets.get("feddra-paper")
    training = replace(paper.training, batch_size=100, lr=1e-5)
    data = SiteSources(tuple((name, source(size, name, colour=True)) for name in ("messidor", "brset")))
    rounds = replace(paper.rounds, rounds=20)
    return fitted(on_data(size, replace(paper, data=data, training=training, rounds=rounds), seed))


def retina_heads(size: Size) -> measures.Alignment:
    """Two findings, at three shares of the training records."""
    names = ("DR", "macular edema")
    records: Any = source(size, "mbrset", colour=True) if not size.demo else None
    solved: dict[str, Any] = {"solver": LBFGS} if size.demo else {"steps": most_steps(size)}
    findings = EYE_FINDINGS
    if size.demo:
        (records, _), findings = films_for_heads(size), STAND_INS
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
    stands_in=(
        "Drawn chest films of two sites stand in for MESSIDOR and BRSET, captions that grade two of their findings for "
        "those of diabetic retinopathy and macular edema: the procedure, and nothing about eyes."
    ),
)


COMBINATIONS = tuple(tuple(bool(number >> bit & 1) for bit in range(len(FINDINGS))) for number in range(32))
"""In the order of FedRGB's table 7, the first finding changing at every row."""


def counts(size: Size, seed: int) -> Figures:
    """Records of each site with each finding and each combination of them, as they are dealt; no run is needed."""
    if size.demo:
        return _all_counted(SyntheticCohort(image_size=72, seed=seed).build())
    records = source(size, "mimic_cxr", labels=FINDINGS).undecoded()
    base = replace(alignment_base(size, seed), data=Given(records), partition=Partition(sites=len(SITES)))
    return _all_counted(Assembly(base).cohort)


def combination(held: Sequence[bool]) -> str:
    """Name of a combination of ``FINDINGS``."""
    return " + ".join(name for name, there in zip(FINDINGS, held, strict=True) if there) or "(none)"


def _all_counted(cohort: Cohort) -> Figures:
    figures, owner = counted(cohort, SITES), np.asarray(cohort.sites)
    held = cohort.labels[:, [cohort.label_names.index(name) for name in FINDINGS]] == 1
    for site in SITES:
        found = Counter(map(combination, held[owner == site]))
        figures |= {dealt(site, combination(one)): float(found[combination(one)]) for one in COMBINATIONS}
    return figures


COUNTS = Study(
    "counts",
    "counts",
    lambda size, seed: {},
    lambda size: measures.server,
    drawn=counts,
    sources=("mimic_cxr",),
    differs="A study's films stay together, and the paper's split is another draw (docs/methods/partitions.md).",
)
