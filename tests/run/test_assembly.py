"""The toys' world (tests/support/toy.py) wires a federation as the assembly does; or tests of it say little of runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.presets import SMALL
from support.toy import World, same_bytes

from fedvlp.core.norm_statistics import SITE
from fedvlp.core.types import State
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.methods import CreamFL, Local
from fedvlp.run.assembly import Assembly, public_id
from fedvlp.run.experiment import Experiment, Partition

UNLIKE = Partition(image_only=1, text_only=1, public=0.25)
COHORT = SyntheticCohort(sites=3, size=120, image_size=36)
BATCH_NORM = replace(SMALL.model, head_norm="batch")
EXPERIMENTS = {
    "averaged": SMALL,
    "own-statistics": replace(SMALL, model=BATCH_NORM, norm_statistics=SITE),
    "local": replace(SMALL, method=Local(local_steps=1), model=BATCH_NORM, norm_statistics=SITE),
    "public-set": replace(SMALL, method=CreamFL(local_steps=1), data=COHORT, partition=UNLIKE),
}


def shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS.keys())
def test_the_toys_are_wired_as_a_run_is(experiment: Experiment) -> None:
    """What stays at the sites, what the server knows of them and trains with, where a site starts, the public set.

    A site's own model starts from weights of its own seed in a run, and from the server's among the toys. Of site-1
    held-out records alone have reports, so it trains and says that it has images.
    """
    run = Assembly(experiment)
    bare = (np.asarray(run.cohort.sites) == "site-1") & (np.asarray(run.cohort.splits) == "train")
    run._cohort = run.cohort.without(reports=bare, images=np.zeros_like(bare))
    build, seed = experiment.model.build, experiment.rounds.seed
    world = World(
        experiment.method, {site: run.data(site) for site in run.sites()}, experiment.training, experiment.rounds,
        model=lambda: build(seed), objective=lambda: experiment.objective.build(build(seed), seed),
        public=run.public(None) if run.has_public else None, norm_statistics=experiment.norm_statistics,
        public_id=public_id(run.cohort) if run.has_public else 0,
    )  # fmt: skip
    theirs, ours = run.server(run.sites()), world.server()
    assert ours.sites == theirs.sites
    same_bytes(ours.state, theirs.state)
    assert ours.modalities == theirs.modalities
    assert world.site_only() == run.site_only()
    for name in run.sites():
        one, other = world.site(name), run.site(name)
        assert (one.method, one.training) == (other.method, other.training)
        for field in ("name", "seed", "modalities", "public_id", "site_only"):
            assert getattr(one.client, field) == getattr(other.client, field), field
        assert (one.client.public is None) == (other.client.public is None)
        assert one.client.initial is not None
        assert other.client.initial is not None
        assert shapes(one.client.initial()) == shapes(other.client.initial())
    assert (ours.trainer is None) == (theirs.trainer is None)
    if ours.trainer and theirs.trainer:
        assert ours.trainer.training == theirs.trainer.training
        assert ours.trainer.memory() is ours.memory
        assert theirs.trainer.memory() is theirs.memory
        for field in ("name", "seed", "modalities", "public_id", "site_only"):
            assert getattr(ours.trainer.client, field) == getattr(theirs.trainer.client, field), field
        starts = [one.trainer.client.initial for one in (ours, theirs)]
        same_bytes(*(start() for start in starts if start))


def test_a_site_whose_name_cannot_be_a_folders_is_refused_before_the_first_round() -> None:
    """It would be dropped in every round, and the run end as if all were well."""
    for name in ["Klinik Süd", "Klinik (Süd)", "a/b", "..", ""]:
        assembly = Assembly(SMALL)
        sites = assembly.cohort.sites or ()
        assembly._cohort = assembly.cohort.with_sites([name if site == "site-1" else site for site in sites])
        with pytest.raises(ValueError, match="a site's name is also a folder's"):
            assembly.sites()
