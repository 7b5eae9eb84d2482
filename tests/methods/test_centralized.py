"""Centralized: one site holds all training records, and is measured on each hospital's held-out ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from support.toy import World, pairs, same_bytes

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.methods import Centralized, FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import POOLED, Experiment
from fedvlp.training.settings import Training

TINY = ModelConfig(embedding_dim=16, image_size=32, max_tokens=16, vocabulary=256, head_hidden=16, head_norm="layer",
                   text_layers=1)  # fmt: skip
EXPERIMENT = Experiment("x", Centralized(local_steps=1), TINY, data=SyntheticCohort(sites=2, size=60, image_size=36),
                        training=Training(batch_size=4), rounds=Rounds(rounds=1))  # fmt: skip


def test_centralized_is_fedavg_over_one_site() -> None:
    data = {POOLED: pairs(3, 40)}
    same_bytes(World(Centralized(local_steps=3), data).run().state, World(FedAvg(local_steps=3), data).run().state)


def test_all_records_train_at_one_place() -> None:
    pooled, apart = Assembly(EXPERIMENT), Assembly(replace(EXPERIMENT, method=FedAvg()))
    assert pooled.sites() == (POOLED,)
    assert apart.sites() == pooled.data_sites() == ("site-1", "site-2")
    everybody = sum(apart.site(name).client.data.num_train for name in apart.sites())
    assert pooled.site(POOLED).client.data.num_train == everybody == len(pooled.cohort.rows("train"))


def test_the_pooled_model_is_measured_at_each_hospital() -> None:
    assembly = Assembly(EXPERIMENT)
    site = assembly.site(POOLED)
    site.client.load(assembly.server((POOLED,)).state)
    with torch.no_grad():
        measured = site.evaluate(site.client, ("val",))  # type: ignore[misc]
    names = {name.partition(":")[0] for name in measured}
    assert names == {"site-1", "site-2"}
    assert site.client.data.num_train == len(assembly.cohort.rows("train"))  # its own data is back
    apart = Assembly(replace(EXPERIMENT, method=FedAvg()))
    for name in apart.sites():
        one = apart.site(name)
        assert one.evaluate is not None
        with torch.no_grad():
            own = one.evaluate(one.client, ("val",))
        assert {f"{name}:{metric}": value for metric, value in own.items()}.items() <= measured.items()
    assert all(np.isfinite(value) for value in measured.values())
