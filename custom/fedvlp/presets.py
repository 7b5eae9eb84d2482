"""Experiments by name: the one table that the CLI, the recipe and the jobs use."""

from __future__ import annotations

from fedvlp.core.method import Method, Training
from fedvlp.core.server import Rounds
from fedvlp.data.synthetic import SyntheticCohort
from fedvlp.experiment import Experiment
from fedvlp.methods import Centralized, FedAvg, FedDRA, FedProx, FedRGB, Local
from fedvlp.models.dual_encoder import ModelConfig

TINY = ModelConfig(head_hidden=256)
PAPER = ModelConfig(
    image_tower="vit_base_patch16_224", text_tower="bert-base-cased", text_layers=6, max_tokens=112,
    image_size=224, head_hidden=2048, pretrained=True,
)  # fmt: skip


def _demo(name: str, method: Method, batch_size: int = 32) -> Experiment:
    """Demo size: tiny towers on the built-in cohort, minutes on two CPU cores."""
    training = Training(batch_size=batch_size, lr=5e-4, weight_decay=0.05, warmup_steps=10)
    data = SyntheticCohort(image_size=72)  # trained on random 64-pixel crops
    return Experiment(name, method, TINY, data=data, training=training, rounds=Rounds(rounds=6))


def _paper(name: str, method: Method) -> Experiment:
    """The papers' towers and schedule (spec 4.4): 25 rounds, AdamW 2e-5, batch 388."""
    training = Training(batch_size=388, lr=2e-5, weight_decay=0.05, threads=8)
    data = SyntheticCohort(image_size=256)
    return Experiment(name, method, PAPER, data=data, training=training, rounds=Rounds(rounds=25))


PRESETS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        _demo("fedavg", FedAvg(local_steps=50)),
        _demo("fedprox", FedProx(local_steps=50)),
        _demo("local", Local(local_steps=50)),
        _demo("centralized", Centralized(local_steps=50), batch_size=5 * 32),  # as many records a step as five sites
        # mu = 5, the papers' value, holds back towers that start from random weights; theirs are pre-trained
        _demo("feddra", FedDRA(align_steps=10, local_steps=40, mu=1.0, rho=0.1)),
        _demo("fedrgb", FedRGB(local_steps=40, aligner_steps=40, rho=0.1)),
        _paper("feddra-paper", FedDRA(align_steps=20, local_steps=50, mu=5.0, rho=0.1)),
        _paper("fedrgb-paper", FedRGB(local_steps=50, aligner_steps=50, alpha=1.0, beta=2.0, gamma=1.0, rho=1.0)),
        _paper("fedavg-paper", FedAvg(local_steps=50, weighting="uniform")),
    )
}


def get(name: str) -> Experiment:
    """The preset ``name``. Raises ValueError naming the nearest one."""
    from fedvlp.config import nearest

    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{nearest(name, list(PRESETS))}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
