"""Experiments by name: the one table that the CLI, the recipe and the jobs use."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from fedvlp.core.method import Method
from fedvlp.data.labels import CHEXPERT
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.zero_shot import prompts
from fedvlp.federation.loop import Rounds
from fedvlp.methods import (
    CARMFL,
    PMSFM,
    SCAFFOLD,
    AdapterConfig,
    Centralized,
    CLIPAdapter,
    ContextConfig,
    CreamFL,
    FedAvg,
    FedDRA,
    FedMOON,
    FedNova,
    FedProx,
    FedRGB,
    FedSM,
    Local,
    MFedAvg,
    OneRoundCCA,
    PromptLearning,
)
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.models.selector import SelectorConfig
from fedvlp.objectives.bce import BCEConfig
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from fedvlp.objectives.medclip import MedCLIPConfig
from fedvlp.run import plugins
from fedvlp.run.config import choose_preset
from fedvlp.run.experiment import Experiment, Extra, Partition
from fedvlp.training.settings import Training

TINY = ModelConfig(head_hidden=256, head_norm="layer")  # unlike scanners have no batch statistics in common (spec Z3)
PAPER = ModelConfig(
    image_tower="vit_base_patch16_224",  # timm's default weights; as released: deit_base_patch16_224
    text_tower="bert-base-cased",
    text_layers=6,
    max_tokens=112,
    image_size=224,
    head_hidden=2048,
    pretrained=True,
)


REAL = ModelConfig(
    image_tower="lite0",
    text_tower="minilm",
    max_tokens=112,
    image_size=224,
    head_hidden=256,
    head_norm="layer",
    alignment=False,
    text_pooling="mean",
    pretrained=True,
    adapter_rank=0,
    adapters="lora@f1a865086cb40f48d18bc3cee106e6ac1ded4ef89fcd5c7ffd2031d5df88060a",
)
"""Published towers (`fedvlp towers fetch`), frozen, that any machine can have; their checksum is known beforehand.

The projection heads alone are trained, seconds a round: an alignment block as wide as Lite0 (1,280) takes minutes."""

AUTO: dict[str, Any] = {"precision": "auto", "attention": "auto", "device": "auto"}
"""For the papers' sizes: each site trains as fast as its machine can. Demos give the same bytes everywhere."""


POOL = SyntheticCohort(size=4000, image_size=72, beta=1000.0, seed=1000)
"""Public records for pre-training: other people, scanners and wording than in any cohort with a seed below 1000."""

TINY_POOL = Experiment(
    "tiny-pool",
    Centralized(local_steps=100),
    TINY,
    data=POOL,
    training=Training(
        batch_size=64, lr=1e-3, weight_decay=0.05, warmup_steps=20, optimizer_state="keep", checkpoint_steps=50
    ),
    rounds=Rounds(rounds=8),
)
"""Makes the encoders of this name that ship with fedvlp (`make towers`); rounds only say how it is going."""


def _demo(name: str, method: Method, batch_size: int = 32) -> Experiment:
    """A demo: tiny towers, pre-trained as the papers' are, on the synthetic cohort; minutes on two CPU cores.

    Its sites differ in what their patients have, as in the papers, and hardly in their scanners: the ledger's
    ``label-skew`` (data/synthetic/drawn_cohort.py), a sixth of its size. Where scanners and habits differ as well,
    each site alone is ahead of a shared model, unless each has its own normalisation, as in ``fedbn`` (README).
    """
    training = Training(batch_size=batch_size, lr=5e-4, weight_decay=0.05, warmup_steps=10)
    data = SyntheticCohort(image_size=72, beta=0.1, shared_habits=True, label_code="positive")  # 64-pixel crops of it
    model = replace(TINY, init=TINY_POOL.name)
    return Experiment(name, method, model, data=data, training=training, rounds=Rounds(rounds=6))


def _own_norm(name: str, method: Method) -> Experiment:
    """A demo whose heads normalise by the batch, each site by its own weights and by statistics that it estimates.

    FedBN as published has the running statistics of a site's last training, and recalls less (docs/results.md).
    """
    demo = _demo(name, method)
    return replace(demo, model=replace(demo.model, head_norm="batch"), norm_statistics="site")


def _recommended(name: str) -> Experiment:
    """FedAvg's 300 steps of a demo in short rounds: models meet before they drift apart.

    AdamW's moments stay at the sites, so that a round of 12 steps needs no warm-up. Most of its gain where findings
    differ is the batch normalisation in its heads (docs/results.md); it takes four times as many exchanges.
    """
    demo = _own_norm(name, FedAvg(local_steps=12, weighting="uniform"))
    training, rounds = replace(demo.training, optimizer_state="keep"), replace(demo.rounds, rounds=25, evaluate_every=5)
    return replace(demo, training=training, rounds=rounds)


def _paper(name: str, method: Method) -> Experiment:
    """The papers' towers and schedule (spec 4.4): 25 rounds, AdamW 2e-5, batch 388."""
    training = Training(batch_size=388, lr=2e-5, weight_decay=0.05, threads=8, **AUTO)
    data = SyntheticCohort(image_size=256)
    return Experiment(name, method, PAPER, data=data, training=training, rounds=Rounds(rounds=25))


def _real(name: str, method: Method, batch_size: int = 32) -> Experiment:
    """For the images and reports of a few hundred patients (``--data``) on a machine without a GPU.

    Four times as many steps recall no more of other patients. These steps already memorise the training records
    (studies/README.md).
    """
    training = Training(
        batch_size=batch_size, lr=5e-4, weight_decay=0.05, warmup_steps=10, threads=2, cache_features=True
    )
    data = SyntheticCohort(image_size=224)  # whole: what is computed once is not cropped at random
    return Experiment(name, method, REAL, data=data, training=training, rounds=Rounds(rounds=6))


def _closed_form(experiment: Experiment, method: OneRoundCCA, **model: Any) -> Experiment:
    """The experiment with OneRoundCCA and the linear heads that it solves for; ``model``: its other settings."""
    return replace(experiment, method=method, model=replace(experiment.model, head_hidden=None, **model))


def _of_retrieved(name: str) -> Experiment:
    """X-rays with labels and reports of other people: eight public reports for each image, found by its labels.

    Ridges are 30 and 1 for features of variance 1 (studies/programs/real_federation.py). The image head has canonical
    variables alone: the classifier for the findings reads the tower itself.
    """
    method = OneRoundCCA(
        local_steps=0, image_ridge=30 / 1280, text_ridge=1 / 384, standardised=True, findings=CHEXPERT[1:]
    )
    closed = _closed_form(_real(name, FedAvg()), method, embedding_dim=64)
    return replace(closed, partition=Partition(retrieve=8), rounds=Rounds(rounds=1))


def _beside_pair(name: str, method: Method, extra: Extra) -> Experiment:
    """The demo of a module beside a frozen pair; a pair that has learned is what `--start` gives it."""
    demo = _demo(name, FedAvg())
    training = replace(demo.training, lr=5e-3, weight_decay=0.0)
    return replace(demo, method=method, extra=extra, training=training)


def _heterogeneous(name: str, method: Method, extra: Extra) -> Experiment:
    """PMS-FM's setting at demo size: four different sites, one with poor images, one with retrieved reports only."""
    data = SyntheticCohort(sites=4, image_size=72, beta=0.5, hard_site="site-2")
    partition = Partition(sites=4, image_only=1, public=0.1, retrieve=1)
    demo = _demo(name, method)
    rounds = replace(demo.rounds, rounds=10)  # the selector takes one step in each
    demo = replace(demo, model=TINY)
    return replace(demo, data=data, partition=partition, objective=MedCLIPConfig(), extra=extra, rounds=rounds)


SELECTOR_LR = 1e-3  # in hundred steps, one a round, 1e-5 moves nothing (spec 7.4)
TEMPLATES = tuple(prompts(name, 3, seed=100) for name in FINDINGS)  # zero-shot draws others, with seeds 0 to 4
SELECTOR = SelectorConfig(sites=4, classes=FINDINGS, templates=TEMPLATES)
IMAGE_SELECTOR = SelectorConfig(sites=4, embeddings=("image",))  # FedSM's

PMS_FM_PAPER = replace(  # spec 7.4, with MedCLIP's towers; a site's own local/fedvlp.json names its data set
    _heterogeneous("pms-fm-paper", PMSFM(selector_lr=SELECTOR_LR), SELECTOR),
    model=ModelConfig(
        image_tower="swin_tiny_patch4_window7_224",
        text_tower="emilyalsentzer/Bio_ClinicalBERT",
        embedding_dim=512,
        max_tokens=77,
        image_size=224,
        head_hidden=None,
        alignment=False,
        text_pooling="mean",
        pretrained=True,
    ),
    data=SyntheticCohort(sites=4, image_size=224, beta=0.5),  # padded and scaled, as the paper's are: no crop
    training=Training(batch_size=48, lr=2e-5, weight_decay=1e-4, local_epochs=1, cosine_rounds=100, threads=8, **AUTO),
    rounds=Rounds(rounds=100),
)


def _classifier(name: str, method: Method) -> Experiment:
    """CAR-MFL's 8:0:2 (image-only, text-only, paired sites) at half its size; a finding left out is absent."""
    training = Training(batch_size=32, lr=5e-4, weight_decay=0.0, warmup_steps=10)
    return Experiment(
        name,
        method,
        MultimodalConfig(labels=FINDINGS),
        BCEConfig(blank="zeros"),
        SyntheticCohort(image_size=72),
        Partition(image_only=4, public=0.15),
        training,
        Rounds(rounds=6),
    )


CAR_MFL_PAPER = Experiment(  # spec 8.4
    "car-mfl-paper",
    CARMFL(k=10, alpha=0.3, renorm="softmax"),
    MultimodalConfig(
        image_tower="resnet50",
        text_tower="bert-base-uncased",
        max_tokens=128,
        image_size=224,
        pretrained=True,
        labels=FINDINGS,
    ),
    BCEConfig(uncertain="zeros", blank="zeros"),
    SyntheticCohort(sites=10, size=8000, image_size=256),
    Partition(image_only=8, public=0.11, unit="patient"),
    Training(batch_size=48, lr=1e-4, weight_decay=0.0, local_epochs=3, threads=8, **AUTO),
    Rounds(rounds=30),
)


PARTY = replace(TINY, image_size=32, max_tokens=32, head_norm="batch", head_hidden=512)  # the server's
SMALL = replace(PARTY, head_hidden=128, alignment=False)
SMALLEST = replace(SMALL, text_tower="gru")


def _ensemble(name: str, method: Method) -> Experiment:
    """Five sites: two with pairs, two with images, one with reports, of two architectures smaller than the server's.

    The public set is a quarter of the patients, more than any site holds. Sites differ in their findings and not in
    their habits, as the papers' sites of one modality do, which are parts of one source.
    """
    models = tuple((f"site-{index}", SMALLEST if index == 5 else SMALL) for index in range(1, 6))
    training = Training(batch_size=64, lr=1e-3, weight_decay=0.05, warmup_steps=3)
    return Experiment(
        name,
        method,
        PARTY,
        CreamFLTaskConfig(classes=len(FINDINGS) + 1, reduction="mean"),
        SyntheticCohort(size=3200, image_size=36, shared_habits=True),
        Partition(image_only=2, text_only=1, public=0.25),
        training,
        Rounds(rounds=12),
        site_models=models,
    )


# Every phase is one pass, over the private records or the public set. kd_weight is on the squared distance itself: 0.3
# on its mean over d = 128, as released, moves nothing in few steps.
STEPS: dict[str, Any] = {
    "local_epochs": 1,
    "local_steps": 0,
    "server_rounds": 12,
    "kd_norm": "squared",
    "kd_weight": 3.0,
}


def _creamfl(**settings: Any) -> CreamFL:
    """At demo size. At temperature 1 the scores of a small public set hardly differ."""
    return CreamFL(**STEPS, gca_temperature=0.1, **settings)


def _creamfl_paper() -> Experiment:
    """CreamFL's 15 sites with pairs, 10 with images, 10 with texts, and towers (spec 6.4).

    Differs: AdamW for AdamP, one rate at all sites, no PIE attention, no GloVe vectors.
    """
    server = ModelConfig(
        image_tower="resnet101",
        text_tower="bert-base-uncased",
        embedding_dim=512,
        image_size=224,
        head_hidden=None,
        alignment=False,
        pretrained=True,
    )
    site = replace(server, image_tower="resnet18", text_tower="gru")
    return Experiment(
        "creamfl-paper",
        CreamFL(local_epochs=5, server_rounds=30, sites_per_round=10),
        server,
        CreamFLTaskConfig(classes=len(FINDINGS) + 1, dim=512),
        SyntheticCohort(sites=35, size=14_000, image_size=256),
        Partition(image_only=10, text_only=10, public=0.25),
        Training(batch_size=128, lr=2e-4, weight_decay=0.0, threads=8, **AUTO),
        Rounds(rounds=30),
        site_models=tuple((f"site-{index}", site) for index in range(1, 36)),
    )


REAMFL = {
    "reamfl-mean": _creamfl(aggregation="mean", inter=False, intra=False),
    "reamfl-avg": _creamfl(aggregation="avg", inter=False, intra=False),
    "reamfl-iot": _creamfl(aggregation="iot", inter=False, intra=False),
    "reamfl-gca": _creamfl(inter=False, intra=False),
    "reamfl-inter": _creamfl(intra=False),
    "reamfl-intra": _creamfl(inter=False),
}
"""The steps from plain averaging to CreamFL (spec 6.5), each a setting of it."""

TENTH: dict[str, Any] = {"dro_fraction": 0.1}
"""Of a hospital's records for v_i, as in the released code: all of them would cost ViT-B/16 as much as training."""

PRESETS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        _demo("fedavg", FedAvg(local_steps=50)),
        _recommended("recommended"),
        _demo("fedprox", FedProx(local_steps=50)),
        _demo("scaffold", SCAFFOLD(local_steps=50)),
        _demo("fednova", FedNova(local_epochs=6)),
        _own_norm("fedbn", FedAvg(local_steps=50)),
        _demo("fedmoon", FedMOON(local_steps=50)),
        _closed_form(_demo("one-round-cca", FedAvg()), OneRoundCCA(local_steps=50)),
        _beside_pair("prompt-learning", PromptLearning(local_steps=50), ContextConfig(FINDINGS)),
        _beside_pair("clip-adapter", CLIPAdapter(local_steps=50), AdapterConfig(FINDINGS)),
        _demo("local", Local(local_steps=50)),
        _demo("centralized", Centralized(local_steps=50), batch_size=5 * 32),  # as many records a step as five sites
        _demo("feddra", FedDRA(align_steps=10, local_steps=40, mu=5.0, rho=0.1)),
        _demo("fedrgb", FedRGB(local_steps=40, aligner_steps=40, rho=0.1)),
        _classifier("mfedavg", MFedAvg(local_steps=50)),
        _classifier("mfedavg-p", MFedAvg(local_steps=50, public=True)),
        _classifier("car-mfl", CARMFL(local_steps=50)),
        CAR_MFL_PAPER,
        TINY_POOL,
        _ensemble("creamfl", _creamfl()),
        *(_ensemble(name, method) for name, method in REAMFL.items()),
        _creamfl_paper(),
        _heterogeneous("pms-fm", PMSFM(local_steps=30, selector_lr=5e-3), SELECTOR),
        _heterogeneous("fedsm", FedSM(local_steps=30, selector_lr=5e-3), IMAGE_SELECTOR),
        PMS_FM_PAPER,
        # a site with fewer training records than dro_batch has no v_i, and the smallest of our sources has 28
        _real("feddra-real", FedDRA(align_steps=2, local_steps=10, mu=5.0, rho=0.1, dro_batch=16)),
        _real("fedavg-real", FedAvg(local_steps=12)),
        replace(
            _closed_form(
                _real("one-round-cca-real", FedAvg()), OneRoundCCA(local_steps=0), embedding_dim=1280 + 1 + 128
            ),
            rounds=Rounds(rounds=1),
        ),
        _of_retrieved("one-round-reports-real"),
        _real("local-real", Local(local_steps=12)),
        _real("central-real", Centralized(local_steps=12), batch_size=4 * 32),  # as many records a step as four sites
        _paper("feddra-paper", FedDRA(align_steps=20, local_steps=50, mu=5.0, rho=0.1, **TENTH)),
        replace(
            _paper("fedrgb-paper", FedRGB(local_steps=50, aligner_steps=50, beta=2.0, gamma=1.0, rho=1.0, **TENTH)),
            rounds=Rounds(rounds=25, clip_to_median=0),  # weights as unlike as a rho of 1 allows make changes as unlike
        ),
        _paper("fedavg-paper", FedAvg(local_steps=50, weighting="uniform")),
    )
}


PAPERS = tuple(name for name in PRESETS if name.endswith("-paper"))
"""The presets with the towers of a paper. Their figures mean something on the paper's data alone (run/cautions.py)."""

GROUPS: dict[str, dict[str, str]] = {
    "one image-text model for all sites, at demo size": {
        "recommended": "FedAvg in short rounds, batch norm in the heads; sites keep it and AdamW's moments; begin here",
        "fedavg": "FedAvg (McMahan et al., 2017): the mean of the sites' weights",
        "fedprox": "FedProx (Li et al., 2020): FedAvg with a pull towards the received weights",
        "scaffold": "SCAFFOLD (Karimireddy et al., 2020): corrects every gradient for a site's drift",
        "fednova": "FedNova (Wang et al., 2020): averages directions where sites take unequal steps",
        "fedbn": "after FedBN (Li et al., 2021): sites keep their batch norm; its statistics are estimated",
        "fedmoon": "MOON (Li et al., 2021): FedAvg with a contrast between local, received and previous embeddings",
        "one-round-cca": "OneRoundCCA: linear heads from one round of second moments, then FedAvg",
        "prompt-learning": "PromptFL (Guo et al., 2023): a learned context before class names, frozen pair (--start)",
        "clip-adapter": "FedCLIP (Lu et al., 2023): an adapter on image vectors, frozen pair (--start)",
        "feddra": "FedDRA (Shuai et al., 2024): two stages with guidance, robust site weights; the main job",
        "fedrgb": "FedRGB (Shuai & Shen, 2024): a robustly trained aligner guides local training",
    },
    "bounds to compare with": {
        "local": "every site trains alone; nothing is aggregated",
        "centralized": "one model on all records pooled, in simulation alone",
        "tiny-pool": "what the encoders that ship were pre-trained with: pooled public records",
    },
    "sites that lack reports or images: classifiers": {
        "mfedavg": "mFedAvg (Poudel et al., 2024): each tower averaged over the sites that have its modality",
        "mfedavg-p": "the same with the public set as one more client",
        "car-mfl": "CAR-MFL (Poudel et al., 2024): missing reports and images retrieved from a public set",
    },
    "a model for each site, and a selector": {
        "pms-fm": "PMS-FM (Wang et al., 2025): personal models and a selector by image and text",
        "fedsm": "FedSM (Xu et al., 2022): the same with a selector by image alone",
    },
    "another architecture at each site: representations of a public set": {
        "creamfl": "CreamFL (Yu et al., 2023): contrast at the sites, weighted ensemble at the server",
        "reamfl-mean": "CreamFL without contrast, plain mean of representations",
        "reamfl-avg": "CreamFL without contrast, mean weighted by records",
        "reamfl-iot": "CreamFL without contrast, FedIoT's weights by modality",
        "reamfl-gca": "CreamFL without contrast, weights by global contrast",
        "reamfl-inter": "CreamFL with the inter-modal contrast alone",
        "reamfl-intra": "CreamFL with the intra-modal contrast alone",
    },
    "your own images and reports (--data) on frozen published towers, without a GPU": {
        "one-round-cca-real": "heads solved for in one round, in a second; keeps what the tower knows",
        "one-round-reports-real": "the same for images with labels and no reports: public reports found by labels",
        "fedavg-real": "FedAvg of the heads",
        "feddra-real": "FedDRA of the heads; a probe of it is below its own tower's, that of one-round-cca-real is not",
        "local-real": "every site's own heads, to compare with",
        "central-real": "heads on all records pooled, to compare with",
    },
    "the papers' towers and schedules": {
        "feddra-paper": "FedDRA, ViT-B/16 and BERT, 25 rounds",
        "fedrgb-paper": "FedRGB, the same",
        "fedavg-paper": "FedAvg, the same, sites weigh equally",
        "car-mfl-paper": "CAR-MFL, ResNet-50 and BERT, 30 rounds",
        "pms-fm-paper": "PMS-FM, MedCLIP's towers, an epoch a round for 100 rounds",
        "creamfl-paper": "CreamFL, 35 sites, 30 rounds",
    },
}
"""What to run, by subject: each preset and what it is, in a line that no other has."""

OF_REAL_FILMS = tuple(name for name in PRESETS if name.endswith("-real"))
"""The presets with frozen published towers, for a user's own images and reports."""


def get(name: str) -> Experiment:
    """The preset ``name``, of fedvlp or of a plugin. Raises ValueError naming the nearest one."""
    experiment: Experiment = choose_preset(name, PRESETS)
    return experiment


def of_plugins() -> list[str]:
    """The names of the presets that plugins in use have."""
    return [name for name in plugins.table("PRESETS", PRESETS, wanted=next(iter(PRESETS))) if name not in PRESETS]


def groups_of_plugins() -> dict[str, dict[str, str]]:
    """Title -> the presets of plugins in use, each with what it is; "" where its plugin does not say it."""
    groups: dict[str, dict[str, str]] = plugins.table("GROUPS", {}, wanted="")
    grouped = {name for group in groups.values() for name in group}
    return {**groups, "of plugins": {name: "" for name in of_plugins() if name not in grouped}}


def in_short(experiment: Experiment) -> tuple[str, str, str]:
    """Objective, sites and rounds, as `fedvlp presets` shows them."""
    objective = type(experiment.objective).__name__.removesuffix("Config")
    sites = getattr(experiment.data, "sites", experiment.partition.sites)  # a cohort with sites is not partitioned
    return objective, str(sites), str(experiment.rounds.rounds)


# What `--set` can change in an experiment: every setting, its value, and what its field's comment says it means.

FIELD = re.compile(r"^ {4}(\w+): [^#]*(?:  # (.+))?$")
"""A field of a dataclass, and the comment behind it."""

CONTINUED = re.compile(r"^ {4,}# {2,}(\S.*)$")
"""The next line of that comment, which is indented behind its sign."""

ABOVE = re.compile(r"^ {4}# (\S.*)$")
"""A comment on the field in the next line."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting as `--set KEY=VALUE` takes it."""

    key: str  # "method.rho"
    value: Any  # of the experiment
    default: Any  # of its class; None where there is none
    meaning: str  # with its range; "" where the field has no comment
    choices: tuple[str, ...] = ()  # of a group that can be replaced as a whole


def settings_of(experiment: Experiment) -> list[Setting]:
    """Every setting, group by group in the order of the configuration. Values that follow others are filled in."""
    return list(_settings(experiment, ""))


def _settings(group: Any, above: str) -> Iterator[Setting]:
    kind: type = type(group)
    meanings = _comments(kind)
    for field in dataclasses.fields(group):
        if not field.init or not (above or field.name != "name"):
            continue
        key, value, meaning = above + field.name, getattr(group, field.name), meanings.get(field.name, "")
        choices = tuple(field.metadata.get("choices", ()))
        if dataclasses.is_dataclass(value):
            yield Setting(key, type(value).__name__, None, meaning, choices)
            yield from _settings(value, f"{key}.")
        else:
            yield Setting(key, value, _default(field), meaning, choices)


def _default(field: dataclasses.Field[Any]) -> Any:
    return None if field.default is dataclasses.MISSING else field.default


@cache
def _comments(kind: type) -> dict[str, str]:
    """Field -> comment, of a class and of those that it has its fields from."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            meanings |= _comments_in(textwrap.dedent(inspect.getsource(base)))
    return meanings


def _comments_in(source: str) -> dict[str, str]:
    """Field -> comment: what stands behind it, with its further lines, or else above it."""
    meanings: dict[str, str] = {}
    name, above = "", ""
    for line in source.splitlines():
        if field := FIELD.match(line):
            name = field[1]
            meanings[name] = field[2] or above
        elif (continued := CONTINUED.match(line)) and name:
            meanings[name] += f" {continued[1]}"
        comment = ABOVE.match(line)
        above = f"{above} {comment[1]}".strip() if comment else ""
    return {name: meaning for name, meaning in meanings.items() if meaning}
