"""Learning sanity (spec 15 L): on pairs x = A s + noise, y = B s + noise, the methods rank as they should."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from support.toy import Pairs, Toy, World
from torch import Tensor

from fedvlp.core.method import Method
from fedvlp.core.types import State
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation import metric_names as names
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.methods import PMSFM, SCAFFOLD, Centralized, CreamFL, FedAvg, FedDRA, Local
from fedvlp.run import presets
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import summary
from fedvlp.run.simulate import simulate
from fedvlp.training.settings import Training

SITES = "abcd"
SHARED, WIDTH, DIM, CLUSTERS = 12, 32, 16, 8


def linear_towers() -> Toy:
    return Toy(image=WIDTH, text=WIDTH, dim=DIM)


class Source:
    """Pairs that share s [n, 12]; s is drawn around the centre of its cluster. Everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.image_map, self.text_map = self.normal(SHARED, WIDTH), self.normal(SHARED, WIDTH)
        self.centres = 1.5 * self.normal(CLUSTERS, SHARED)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def pairs(self, clusters: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        shared = self.centres[clusters] + self.normal(len(clusters), SHARED)
        image, text = (shared @ m + noise * self.normal(len(clusters), WIDTH) for m in (self.image_map, self.text_map))
        return image, text

    def clusters(self, count: int, concentration: float) -> Tensor:
        """Cluster ids [count] of a site, skewed: Dirichlet by way of gamma variates."""
        shape = torch.full((CLUSTERS,), concentration)
        share = torch._standard_gamma(shape, generator=self.generator)
        return torch.multinomial(share, count, replacement=True, generator=self.generator)


@cache
def cohort(seed: int, count: int, hard: str = "") -> dict[str, Pairs]:
    """Four sites with ``count`` training and 200 test pairs each; the scanner of ``hard`` has another image map."""
    source, other, sites = Source(seed), Source(seed + 1000), {}
    usual = source.image_map
    for site in SITES:
        clusters = source.clusters(count + 200, 0.5)
        source.image_map = other.image_map if site == hard else usual
        image, text = source.pairs(clusters, 1.0)
        sites[site] = Pairs(image[:count], text[:count], test=(image[count:], text[count:]))
    return sites


def pooled(data: dict[str, Pairs]) -> dict[str, Pairs]:
    images, texts = zip(*(one.content["train"] for one in data.values()), strict=True)
    return {"pooled": Pairs(torch.cat(images), torch.cat(texts))}


def recall(state: State, data: Pairs) -> float:
    """Recall@1 in percent, mean of both directions, among a site's 200 test pairs."""
    model = linear_towers()
    model.load_state_dict(state)
    image, text = data.content["test"]
    with torch.no_grad():
        output = model({"image": image, "text": text})
    scores = output.image @ output.text.T
    target = torch.arange(len(scores))
    return 50 * sum((s.argmax(1) == target).float().mean().item() for s in (scores, scores.T))


def recalls(state: State, data: dict[str, Pairs]) -> list[float]:
    return [recall(state, one) for one in data.values()]


SEEDS = [0, pytest.param(1, marks=pytest.mark.slow(seconds=5))]


def world(method: Method, data: dict[str, Pairs], batch: int = 16) -> World:
    training = Training(batch_size=batch, lr=3e-3, weight_decay=0.0)
    return World(method, data, training, Rounds(rounds=8, evaluate_every=0, clip_to_median=0), model=linear_towers)


@pytest.mark.parametrize("seed", SEEDS)
def test_centralized_beats_fedavg_beats_local(seed: int) -> None:
    """8 rounds of 20 steps on 48 pairs a site; the pooled batch is as large as the sites' together.

    Seeds 0-3: centralized 97, 94, 95, 93; FedAvg 92, 89, 90, 88; Local 71, 59, 65, 65 (spec 9: the mean over local
    models of their mean over all sites). With the batch of a single site, so a quarter of the records, centralized
    comes out below FedAvg.
    """
    data = cohort(seed, 48)
    central = fmean(recalls(world(Centralized(local_steps=20), pooled(data), 64).run().state, data))
    average = fmean(recalls(world(FedAvg(local_steps=20), data).run().state, data))
    alone, sites = world(Local(local_steps=20), data), {}
    alone.run(SequentialExchange(lambda name: sites.setdefault(name, alone.site(name))))
    local = fmean(fmean(recalls(site.memory.newest(), data)) for site in sites.values())
    untrained = fmean(recalls(alone.server().state, data))
    assert central > average + 2 > local + 10
    assert local > untrained + 30


HARD: dict[str, Any] = {"dro_batch": 16, "dro_fraction": 1.0}


@cache
def on_the_hard_case(method: Method, seed: int) -> tuple[float, float, float]:
    """Recall of the worst site, of the average one, and the final weight of the hard site."""
    data = cohort(seed, 64, hard="d")
    server = world(method, data).run()
    found = recalls(server.state, data)
    return min(found), fmean(found), float(server.memory.get("dro_weights", torch.full((4,), 0.25))[3])


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rho", "margin"), [(0.1, 3.0), (1.0, 10.0)])
def test_robust_weights_alone_help_the_worst_site(seed: int, rho: float, margin: float) -> None:
    """Everything else as in FedAvg. Worst site, seeds 0-3: FedAvg 11, 16, 17, 20; rho 0.1: 19, 25, 22, 28; 1: 31-35.

    The price: the average falls from 61 to 58 and 36.
    """
    worst, _, weight = on_the_hard_case(FedDRA(local_steps=20, align_steps=0, mu=0.0, rho=rho, **HARD), seed)
    plain, _, _ = on_the_hard_case(FedAvg(local_steps=20, weighting="uniform"), seed)
    assert worst > plain + margin
    assert weight > 0.4


@pytest.mark.parametrize("seed", SEEDS)
def test_feddra_is_better_than_fedavg_at_the_worst_site(seed: int) -> None:
    """Both phases, constraint and weights, 20 steps a round as FedAvg has; mu and rho within the paper's ablation.

    Worst site, seeds 0-3, mu 1 and rho 1: 34, 36, 37, 41 against 11, 16, 17, 20. With mu 5 and rho 0.1 it is a draw
    (13, 17, 17, 22): a strong constraint slows learning in so short a run.
    """
    method = FedDRA(local_steps=15, align_steps=5, mu=1.0, rho=1.0, **HARD)
    worst, _, _ = on_the_hard_case(method, seed)
    plain, _, _ = on_the_hard_case(FedAvg(local_steps=20, weighting="uniform"), seed)
    assert worst > plain + 10


LEARNED: dict[str, tuple[Method, tuple[float, ...]]] = {
    "fedavg": (FedAvg(local_steps=20), (81.2, 91.5, 95.2, 91.7, 93.1)),
    "feddra": (FedDRA(local_steps=15, align_steps=5, mu=1.0, rho=1.0, **HARD), (85.4, 91.2, 96.0, 89.4, 92.9)),
    "creamfl": (CreamFL(local_steps=20, local_epochs=1, server_steps=20, distil_steps=20),
                (62.7, 63.4, 68.3, 73.8, 74.9, 66.4, 70.8, 60.2, 72.6, 55.8)),
    "pms-fm": (PMSFM(local_steps=20), (79.0, 88.4, 94.4, 84.9, 89.4)),
    "scaffold": (SCAFFOLD(local_steps=20), (76.2, 88.1, 91.4, 87.0, 89.7)),
}  # fmt: skip
"""A method of each kind (``support.cases.KINDS``), and the mean recall that its model had with seeds 100 to 104.

Of CreamFL, which varies most, with 100 to 109. Seeds 0 to 4 then had 89.8, 90.4, 52.6, 86.0 and 82.3 on average.
"""


def learned(method: Method, seed: int) -> float:
    """Mean recall over sites of the server's model after 8 rounds, or of each site's own where the server has these."""
    data = cohort(seed, 48)
    made = world(method, data)
    made.public = Pairs(*Source(seed).pairs(torch.arange(48) % CLUSTERS, 1.0))
    server = made.run()
    states = {site: method.personal(server, site) if isinstance(method, PMSFM) else server.state for site in data}
    return fmean(recall(dict(state), data[site]) for site, state in states.items())


@pytest.mark.nightly
@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize("name", LEARNED)
def test_a_method_of_each_kind_learns_what_it_learned(name: str) -> None:
    """The mean of five other seeds lies within 3 deviations of that of the five: t(0.995, 4) sqrt(1/5 + 1/5) = 2.9.

    Without training it is below 1.
    """
    method, before = LEARNED[name]
    now = fmean(learned(method, seed) for seed in range(5))
    assert abs(now - fmean(before)) < 3 * stdev(before), f"{now:.1f}, and {fmean(before):.1f} with seeds from 100 on"


@pytest.mark.nightly
@pytest.mark.slow(seconds=60)
def test_the_preset_for_real_films_learns(tmp_path: Path) -> None:
    """``feddra-real`` for 3 rounds, on the encoders that ship with fedvlp, frozen, and 400 drawn films.

    Seeds 100 and 101: test R@1 from 2.7 and 4.4 to 19.8 and 25.4.
    """
    real, tower = presets.get("feddra-real"), presets.get("feddra").model
    model = replace(tower, alignment=False, adapters="lora", adapter_rank=0)
    data = SyntheticCohort(size=400, sites=3, image_size=72)
    experiment = replace(real, name="tiny", model=model, data=data, rounds=replace(real.rounds, rounds=3))
    figures = summary(simulate(experiment, RunFolder(tmp_path / "run"), workers=1))
    average = names.over_sites(names.recall("test", 1, names.WHOLE_SET), names.AVERAGE)
    assert figures["trained"][average] > 2.5 * figures["initial"][average]
