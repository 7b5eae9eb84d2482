"""Record-level differential privacy: what one pair can change, the noise, the sampling, the account, the refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.towers import client as towers_client
from support.towers import encoder, records
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.metric_keys import RECORD_EPSILON, loss_term
from fedvlp.core.types import Broadcast
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import SCAFFOLD, FedAvg, FedDRA, FedProx, FedRGB
from fedvlp.objectives import ConVIRTConfig, GLoRIAConfig, MedCLIPConfig, MGCAConfig
from fedvlp.run.cautions import cautions, record_epsilon, train_sizes
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import largest_by_site
from fedvlp.run.presets import get
from fedvlp.run.simulate import simulate
from fedvlp.training import dp_sgd
from fedvlp.training.dp_sgd import GROUP, PrivateStepper, RecordPrivacyError
from fedvlp.training.local_training import train
from fedvlp.training.settings import Training
from studies.rivals import BYOLConfig

CLIP = 0.25
PRIVATE = Training(batch_size=16, lr=1e-3, dp_noise=1.0, dp_clip=CLIP, dp_group=4)
GROUPS = 4


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp_sgd, "gaussian", lambda count: torch.zeros(count, dtype=torch.float64))


def client(objective: Any = None, **options: Any) -> Client:
    return towers_client(encoder(head_norm="layer"), objective, **options)


def gradient(here: Client, batch: dict[str, Tensor], training: Training = PRIVATE) -> Tensor:
    """The sum of the groups' gradients and the noise, as one vector."""
    here.set_trainable(lambda name: True)
    step = PrivateStepper(here, training, Broadcast(0, "train", {}), 0)
    method = FedAvg()
    assert step._backward(batch, lambda one: method.losses(here, one, Broadcast(0, "train", {}))) == {}
    groups = training.batch_size // training.dp_group
    return torch.cat([p.grad.reshape(-1) for p in step.parameters if p.grad is not None]).double() * groups


def batch(count: int = 16) -> dict[str, Tensor]:
    (drawn,) = records().batches("train", count, drop_last=True, rows=torch.arange(count))
    return {**drawn, GROUP: torch.arange(count) % GROUPS}


HOSTILE: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "as it is": lambda one: one,
    "huge": lambda one: {**one, "image": one["image"] * 1e12},
    "tiny": lambda one: {**one, "image": one["image"] * 0},
    "infinite": lambda one: {**one, "image": one["image"] * math.inf},
    "another's film": lambda one: {**one, "image": -one["image"].flip(-1)},
    "one word": lambda one: {**one, "text": one["text"] * 0 + 7},
}


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize(
    ("hostile", "objective"),
    [
        *((one, ConVIRTConfig(temperature=0.01)) for one in HOSTILE),
        *((one, GLoRIAConfig()) for one in list(HOSTILE)[:2]),
    ],
)
def test_one_pair_changes_no_more_than_the_noise_is_made_for(hostile: str, objective: Any) -> None:
    """Whatever the pair is, added to a group of four, of one, or to an empty one, and however sharp the loss."""
    here = client()
    here.objective = objective.build(here.model, 0)
    whole = batch()
    pair = HOSTILE[hostile]({name: tensor[15:] for name, tensor in whole.items()})
    rest = {name: tensor[:15] for name, tensor in whole.items()}
    moved = []
    for others in (rest, {n: t[:8] for n, t in rest.items()}, {n: t[rest[GROUP] != 3] for n, t in rest.items()}):
        joined = {name: torch.cat([tensor, pair[name]]) for name, tensor in others.items()}
        moved.append(float((gradient(here, joined) - gradient(here, others)).norm()))
    assert max(moved) <= 2 * CLIP * (1 + 1e-5)
    if hostile == "as it is":
        assert max(moved) > 0.1 * CLIP, "the gradients are not shortened at all: the bound shows nothing"


@pytest.mark.usefixtures("no_noise")
def test_the_gradient_is_that_of_the_groups() -> None:
    """With nothing to shorten: the sum of the gradients of each group's own loss; a group of one has none."""
    here, drawn = client(), batch(9)
    drawn[GROUP] = torch.tensor([0, 1, 0, 1, 1, 3, 0, 1, 0])
    free = replace(PRIVATE, dp_clip=1e6)
    expected = torch.zeros(())
    for number in (0, 1):
        rows = drawn[GROUP] == number
        here.model.zero_grad()
        part = {name: tensor[rows] for name, tensor in drawn.items() if name != GROUP}
        sum(FedAvg().losses(here, part, Broadcast(0, "train", {})).values()).backward()  # type: ignore[union-attr]
        expected = (
            expected + torch.cat([p.grad.reshape(-1) for _, p in here.parameters() if p.grad is not None]).double()
        )
    torch.testing.assert_close(gradient(here, drawn, free), expected, rtol=1e-5, atol=1e-8)
    assert float(gradient(here, drawn).norm()) <= 2 * CLIP * (1 + 1e-6) < float(expected.norm())


def test_every_trained_number_is_noised_as_the_account_assumes() -> None:
    """Also without any record: a site that drew none must not be told from one that did."""
    here = client()
    empty = {GROUP: torch.zeros(0, dtype=torch.int64)}
    values = torch.cat([gradient(here, empty, replace(PRIVATE, dp_noise=3.0)) for _ in range(20)])
    assert abs(float(values.std()) / (3.0 * 2 * CLIP) - 1) < 0.01
    assert abs(float(values.mean())) < 0.01
    assert bool((values != 0).all())


def test_records_are_drawn_independently() -> None:
    """Poisson samples: sizes vary as a binomial's do; every record and every group as often as another."""
    training = replace(PRIVATE, batch_size=12, dp_group=3)
    here = SimpleNamespace(data=records(60))
    count = here.data.num_train
    sizes, seen, groups = [], np.zeros(count), np.zeros(4)
    for drawn in dp_sgd.batches(here, 4000, training):  # type: ignore[arg-type]
        sizes.append(len(drawn[GROUP]))
        if sizes[-1]:
            seen[drawn["row"].numpy()] += 1
            assert len(drawn["row"]) == len(drawn["image"]) == sizes[-1] == len(set(drawn["row"].tolist()))
            groups += np.bincount(drawn[GROUP].numpy(), minlength=4)
    rate = 12 / count
    assert abs(np.mean(sizes) / 12 - 1) < 0.02
    assert abs(np.var(sizes) / (count * rate * (1 - rate)) - 1) < 0.1
    assert abs(seen / 4000 - rate).max() < 5 * math.sqrt(rate * (1 - rate) / 4000)
    assert abs(groups / groups.sum() - 0.25).max() < 0.01


def test_epsilon_is_opacus() -> None:
    from opacus.accountants import RDPAccountant

    for noise, records_, steps in ((0.8, 400, 300), (1.5, 90, 40), (4.0, 16, 3)):
        theirs = RDPAccountant()
        for _ in range(steps):
            theirs.step(noise_multiplier=noise, sample_rate=min(1.0, 16 / records_))
        mine = record_epsilon(replace(PRIVATE, dp_noise=noise), records_, steps)
        assert mine == pytest.approx(theirs.get_epsilon(delta=1e-5), rel=1e-9)
        for delta in (1e-5, 1e-3):  # that of the settings, or the one that is asked for
            settings = replace(PRIVATE, dp_noise=noise, dp_delta=delta)
            told = theirs.get_epsilon(delta=delta)
            assert record_epsilon(settings, records_, steps) == pytest.approx(told, rel=1e-9)
            asked = record_epsilon(replace(settings, dp_delta=0.5), records_, steps, delta)
            assert asked == pytest.approx(told, rel=1e-9)
    assert record_epsilon(PRIVATE, 100, 0) == 0
    assert dp_sgd.steps(FedDRA(align_steps=2, local_steps=3, align_every=2), 2, 0) == (2 + 3) + 3 + 2


def test_what_reads_records_elsewhere_is_refused() -> None:
    for method in (FedAvg(), FedProx(), FedDRA(rho=0.0)):
        dp_sgd.refuse_settings(method, PRIVATE)
    for method, said in ((FedDRA(rho=0.1), "rho=0"), (FedRGB(rho=0.0), "elsewhere"), (SCAFFOLD(), "elsewhere")):
        with pytest.raises(RecordPrivacyError, match=said):
            dp_sgd.refuse_settings(method, PRIVATE)
    for name, value in (
        ("micro_batch", 4),
        ("checkpoint_steps", 2),
        ("precision", "bfloat16"),
        ("make_up_warmup", True),
    ):
        with pytest.raises(RecordPrivacyError, match=f"training.{name} is {value}"):
            dp_sgd.refuse_settings(FedAvg(), replace(PRIVATE, **{name: value}))  # type: ignore[arg-type]
    with pytest.raises(RecordPrivacyError, match="exact figures"):
        replace(get("feddra"), training=PRIVATE)


def test_a_model_that_keeps_statistics_is_refused() -> None:
    here = client()
    here.set_trainable(lambda name: True)
    dp_sgd.refuse_modules(here)
    batch_norm = towers_client(encoder(head_norm="batch"))
    batch_norm.set_trainable(lambda name: True)
    with pytest.raises(RecordPrivacyError, match="head_norm=layer"):
        dp_sgd.refuse_modules(batch_norm)
    here.objective = BYOLConfig().build(here.model, 0)
    with pytest.raises(RecordPrivacyError):
        dp_sgd.refuse_modules(here)


def test_no_term_of_the_loss_is_told_and_no_two_runs_are_alike() -> None:
    weights = []
    for _ in range(2):
        here = client()
        terms = train(FedAvg(local_steps=2), here, Broadcast(0, "train", here.state()), PRIVATE, lambda: False)
        assert terms == {}
        weights.append(torch.cat([tensor.reshape(-1) for tensor in here.state().values()]).clone())
    assert not torch.equal(*weights)


@pytest.mark.slow(seconds=8)
def test_a_run_says_what_it_costs(tmp_path: Any) -> None:
    """Before it begins and after: the same epsilon, of the largest site's least records, by every site's metric."""
    demo = get("feddra")
    experiment = replace(
        demo,
        method=FedDRA(align_steps=1, local_steps=2, mu=5.0, rho=0.0),
        data=SyntheticCohort(size=200, sites=2, image_size=72, seed=3),
        partition=replace(demo.partition, sites=2),
        training=replace(PRIVATE, dp_noise=0.9),
        rounds=replace(demo.rounds, rounds=2),
    )
    folder = RunFolder.create(tmp_path, experiment)
    simulate(experiment, folder)
    told = largest_by_site(folder.history(), RECORD_EPSILON)
    cohort = experiment.data.build()
    said = next(one for one in cautions(experiment, cohort) if "differential privacy" in one)
    worst = max(told, key=lambda site: told[site])
    assert f"epsilon {told[worst]:.3g} at delta 1e-05 after 6 steps" in said
    assert said.count(worst) == 1
    sizes = train_sizes(cohort)
    assert told == {site: pytest.approx(record_epsilon(experiment.training, sizes[site], 6)) for site in told}
    assert len(told) == 2
    names = {name for record in folder.history() for of_site in record["sites"].values() for name in of_site}
    assert not [name for name in names if loss_term(name)]
    card = (folder.model.parent / "README.md").read_text()
    assert "Epsilon of record-level training" in card
    assert "The unit is one record" in " ".join(card.split())


class First:
    """The first ``num_train`` of a site's records."""

    def __init__(self, data: Any, num_train: int) -> None:
        self._data, self.num_train = data, num_train

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def test_where_records_grow_in_the_middle_of_a_run_all_steps_cost_what_the_fewest_do(tmp_path: Any) -> None:
    """The fewer there are, the likelier each is drawn: of 24, 40, 40 once more, then 20."""
    here = client()
    whole, memory = here.data, SiteMemory(tmp_path)

    def told(round: int, count: int) -> float:
        here.data = First(whole, count)  # type: ignore[assignment]
        site = Site(here, FedAvg(local_steps=1), PRIVATE, memory, account=record_epsilon)
        return site.handle(Broadcast(round, "train", here.state())).metrics[RECORD_EPSILON]

    for round, (count, fewest) in enumerate([(24, 24), (40, 24), (40, 24), (20, 20)]):
        assert told(round, count) == record_epsilon(PRIVATE, fewest, round + 1)
    memory.clear()
    memory.after((3, 0), {"of an older version": torch.zeros(1)})
    assert told(4, 40) == record_epsilon(PRIVATE, 40, 5), "as it was: nothing is known of earlier rounds"
    plain = SiteMemory(None)
    Site(here, FedAvg(local_steps=1), replace(PRIVATE, dp_noise=0.0), plain).handle(Broadcast(0, "train", here.state()))
    assert plain.newest() == {}, "other training remembers nothing of it"


def test_a_site_without_a_modality_is_told_so() -> None:
    here = client()
    films = {name: tensor for name, tensor in batch().items() if not name.startswith("text")}
    with pytest.raises(ValueError, match=r"a: the objective has no term for a batch of .*image"):
        gradient(here, films)


def test_of_an_objective_only_what_travels_counts_and_sentences_are_refused() -> None:
    """GLoRIA has a table of the tokenizer's; MGCA counts steps; MedCLIP may ask for sentences."""
    here = client()
    for config, said in (
        (GLoRIAConfig(), ""),
        (MedCLIPConfig(), ""),
        (MGCAConfig(), "keeps more than trained weights"),
        (MedCLIPConfig(sentences=True), "set objective.sentences=false"),
    ):
        here.objective = config.build(here.model, 0)
        here.set_trainable(lambda name: True)
        if said:
            with pytest.raises(RecordPrivacyError, match=said):
                dp_sgd.refuse_modules(here)
        else:
            dp_sgd.refuse_modules(here)
