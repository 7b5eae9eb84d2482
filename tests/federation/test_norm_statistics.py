"""Batch normalisation, averaged or each site's own: what travels, what a site has, what is saved (spec Z3)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import KINDS as FEW
from support.cases import cases
from support.laboratory import METHODS
from support.towers import client, encoder, records
from support.toy import (
    ADAMW,
    Pairs,
    Recorder,
    Toy,
    World,
    clone,
    differs,
    pairs,
    same_bytes,
    small,
)
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp import load_model
from fedvlp.core.client import Client
from fedvlp.core.norm_statistics import (
    INITIAL,
    OF_SERVER,
    OWN,
    PUBLIC_SET,
    NormalisationError,
    complete,
    estimate,
    normalisation,
    own,
)
from fedvlp.core.privacy import PrivacyError, clip_and_noise
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, Broadcast, Reply, State, Update
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.federation.site import Site, reason
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import FedAvg, FedDRA, FedRGB, Local, MFedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.training.local_training import Aborted
from fedvlp.training.settings import Training

KINDS = ("averaged", "site")
SMALL = {name: small(kind) for name, kind in METHODS.items() if name != "centralized"}
SMALL |= {name: replace(method, best_by="") for name, method in SMALL.items() if isinstance(method, MFedAvg)}
ALONE = {"local", "creamfl", "fedmd", "fedet", "fedgems"}  # no site sends weights
NORM = set(normalisation(Toy(norm=True).state_dict()))
TWO = Rounds(rounds=2, evaluate_every=1)


def normalised() -> nn.Module:
    return Toy(norm=True)


def world(method: Any, statistics: str = "site", **options: Any) -> World:
    """Three unlike sites, two rounds and an evaluation, models with batch normalisation in both towers."""
    data = {site: pairs(index, 8 + 4 * index, scale=1.0 + index) for index, site in enumerate("abc")}
    usual = {"data": data, "training": ADAMW, "rounds": TWO, "model": normalised}
    return World(method, norm_statistics=statistics, **usual | options)


# What it is


def test_the_normalisation_of_a_model_is_its_batch_norms_with_their_affine_weights() -> None:
    assert {
        f"{tower}_encoder.1.{name}"
        for tower in ("image", "text")
        for name in ("running_mean", "running_var", "num_batches_tracked", "weight", "bias")
    } == NORM
    heads = normalisation(encoder(head_norm="batch").state_dict())
    assert {name.rpartition(".")[0] for name in heads} == {f"{m}_head.{i}" for m in ("image", "text") for i in (1, 4)}
    assert len(heads) == 2 * (5 + 3), "the last norm of a head has no affine weights"
    assert normalisation(encoder(head_norm="layer").state_dict()) == frozenset()


# What travels


def travelled(one: World) -> tuple[set[str], set[str], Server]:
    """Names of the normalisation that were sent down and up in a run, and its server."""
    exchange = Recorder(one)
    server = one.run(exchange)
    assert all(not record["dropped"] for record in server.history)
    down = {name for _, message in exchange.sent for name in (*message.state, *message.aux)}
    up = {name for _, reply in exchange.replies for name in (*reply.state, *reply.aux)}
    return down & NORM, up & NORM, server


@pytest.mark.parametrize("name", cases(sorted(set(SMALL) - ALONE), often=(*FEW, "car-mfl"), seconds=1))
def test_it_never_leaves_the_site(name: str) -> None:
    """Nor is it at the server, in its state, memory and checkpoint; averaged it travels both ways."""
    assert travelled(world(SMALL[name], "averaged"))[:2] == (NORM, NORM)
    down, up, server = travelled(world(SMALL[name]))
    assert (down, up) == (set(), set())
    assert not NORM & server.state.keys()
    held = [tensor for tensor in server.memory if tensor.rpartition("/")[2] in NORM]
    assert all(tensor.startswith(f"{OWN}server/") for tensor in held), "but the server's own, where it trains"
    assert bool(held) == (name == "car-mfl")


@pytest.mark.parametrize("name", ["local", "creamfl"])
def test_what_a_server_has_of_methods_whose_weights_stay_at_home_is_whole(name: str) -> None:
    """Nothing of a site's model is averaged anyway; the initial model that Local sends is nobody's data."""
    averaged, site = (travelled(world(SMALL[name], kind)) for kind in KINDS)
    assert averaged[1] == site[1] == set()
    assert averaged[2].state.keys() == site[2].state.keys() > NORM
    if name == "local":
        same_bytes(averaged[2].state, site[2].state)


def test_an_update_that_carries_it_is_refused_by_name() -> None:
    one = world(FedAvg(local_steps=1), rounds=Rounds(rounds=1, evaluate_every=0))
    exchange = SequentialExchange(one.site)

    def leaking(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in exchange(messages):
            if site == "b" and isinstance(reply, Update):
                reply = replace(reply, state={**reply.state, "image_encoder.1.running_mean": torch.zeros(4)})
            yield site, reply

    dropped = one.run(leaking).history[0]["dropped"]
    assert dropped == {"b": "1 unexpected tensor(s), e.g. image_encoder.1.running_mean"}


def test_a_server_that_sends_it_is_refused_by_the_site() -> None:
    """A site takes nobody else's for its own; and what it received it might send back."""
    one = world(FedAvg(local_steps=1))
    whole = {name: tensor.clone() for name, tensor in Toy(norm=True).state_dict().items()}
    with pytest.raises(
        NormalisationError, match=r"a: the server sent 10 tensors .*, e.g. image_encoder.1.bias"
    ) as error:
        one.site("a").handle(Broadcast(0, "train", whole))
    assert "Server and site must run the same experiment" in reason(error.value), "which the server is told"


def test_what_does_not_travel_needs_no_noise() -> None:
    """Clipping and noise refuse a batch statistic: with each site's own, a model with batch norm passes."""
    updates = {}
    for kind in KINDS:
        one = world(FedAvg(local_steps=1), kind)
        received = one.server().state
        updates[kind] = clone(one.site("a").handle(Broadcast(0, "train", received)).state), received
    with pytest.raises(PrivacyError, match="is a batch statistic of this site's data"):
        clip_and_noise(*updates["averaged"], clip=1.0, noise_multiplier=1.0)
    assert clip_and_noise(*updates["site"], clip=1.0, noise_multiplier=1.0).keys() == updates["site"][0].keys()


# What it changes


@pytest.mark.parametrize("name", FEW)
def test_a_model_without_batch_norm_trains_the_same_bytes(name: str) -> None:
    averaged, site = (world(SMALL[name], kind, model=Toy).run() for kind in KINDS)
    same_bytes(averaged.state, site.state)
    same_bytes(averaged.memory, site.memory)


def test_a_single_site_trains_the_same_weights() -> None:
    """In training a layer normalises by the batch, so statistics do not act; affine weights of one site are its own."""
    averaged, site = (world(FedAvg(local_steps=2), kind, data={"a": pairs(0)}).run().state for kind in KINDS)
    same_bytes({name: averaged[name] for name in site}, site)
    assert site.keys() == averaged.keys() - NORM


@pytest.mark.parametrize("name", ["local", "centralized"])
def test_one_site_is_measured_as_the_same_model_whoever_keeps_it(name: str) -> None:
    """With one site FedAvg, Local and Centralized are one method: the same bytes at every evaluation.

    Were the statistics of one the running ones of its training, and those of another estimated, a comparison of the two
    would be one of statistics. The model is in eval mode then, so its statistics act.
    """
    seen: dict[str, list[State]] = {}
    for method in (FedAvg(local_steps=3), METHODS[name](local_steps=3)):
        found = seen.setdefault(type(method).__name__, [])

        def evaluate(site: Client, splits: tuple[str, ...], found: list[State] = found) -> dict[str, float]:
            found.append(clone(site.state()))
            return {}

        one = world(method, data={"a": pairs(0, 40)}, evaluate=evaluate)
        sites: dict[str, Site] = {}
        one.run(SequentialExchange(lambda name, one=one, sites=sites: sites.setdefault(name, one.site(name))))
    (fedavg, other) = seen.values()
    assert len(fedavg) == len(other) == 3
    for mine, its in zip(fedavg, other, strict=True):
        same_bytes(mine, its)
    assert differs(
        fedavg[0], fedavg[2], sorted(NORM - {f"{t}_encoder.1.num_batches_tracked" for t in ("image", "text")})
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["local", "creamfl"])
def test_a_model_that_never_leaves_its_site_is_measured_with_statistics_of_its_records(name: str, kind: str) -> None:
    """By hand, as above, for the model that the site has trained; averaged, they are those of its last training."""
    measured = Statistics()
    weights: dict[str, Tensor] = {}

    def evaluate(site: Client, splits: tuple[str, ...]) -> dict[str, float]:
        weights.update({k: t.clone() for k, t in site.state().items() if k.startswith("image_encoder.0.")})
        return measured(site, splits)

    one = world(SMALL[name], kind, evaluate=evaluate)
    sites: dict[str, Site] = {}
    one.run(SequentialExchange(lambda site: sites.setdefault(site, one.site(site))))
    weights.clear()
    sites["b"].handle(Broadcast(3, EVALUATE, one.server().state if name == "local" else {}, evaluate=1))
    first = F.linear(one.data["b"].content["train"][0], *weights.values())
    assert torch.allclose(measured.seen["b"][0], first.mean(dim=0), atol=1e-6) == (kind == "site")


def test_affine_weights_are_each_sites_own(tmp_path: Path) -> None:
    """Unlike after training, alike in nobody's mean; the next task begins with them."""
    one = world(FedAvg(local_steps=2), folder=tmp_path)
    one.run()
    memories = {site: SiteMemory(tmp_path / "sites" / site).newest() for site in "abc"}
    weight = {site: own(memory, "model")["text_encoder.1.weight"] for site, memory in memories.items()}
    assert len({tuple(tensor.tolist()) for tensor in weight.values()}) == 3
    seen: list[Tensor] = []

    def evaluate(site: Client, splits: tuple[str, ...]) -> dict[str, float]:
        seen.append(site.state()["text_encoder.1.weight"].clone())
        return {}

    one.evaluate = evaluate
    one.site("b").handle(Broadcast(2, EVALUATE, one.server().state, evaluate=1))
    assert torch.equal(seen[0], weight["b"])


class Statistics:
    """An evaluation that notes what the model's first normalisation of images holds, by site."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, site: Client, splits: tuple[str, ...]) -> dict[str, float]:
        layer = site.model.image_encoder[1]
        self.seen[site.name] = layer.running_mean.clone(), layer.running_var.clone()
        return {}


@pytest.mark.parametrize("trained", [False, True])
def test_a_site_measures_with_the_statistics_of_its_own_records(trained: bool, tmp_path: Path) -> None:
    """By hand: the mean, and the unbiased variance, of what enters the layer for the site's training records.

    Under the received weights, whether or not the site has trained before.
    """
    measured = Statistics()
    one = world(FedAvg(local_steps=2), evaluate=measured, folder=tmp_path)
    server = one.run() if trained else one.server()
    measured.seen.clear()
    for site, data in one.data.items():
        one.site(site).handle(Broadcast(3, EVALUATE, server.state, evaluate=1))
        first = F.linear(
            data.content["train"][0], server.state["image_encoder.0.weight"], server.state["image_encoder.0.bias"]
        )
        torch.testing.assert_close(measured.seen[site][0], first.mean(dim=0))
        torch.testing.assert_close(measured.seen[site][1], first.var(dim=0))


def test_the_anchor_of_a_site_has_its_normalisation() -> None:
    """The state that a method sees is complete: an anchor of it is the model that the site has."""
    seen = []

    class Looks(FedDRA):
        def losses(self, client: Client, batch: Any, message: Broadcast) -> dict[str, Tensor]:
            seen.append(message.state)
            return super().losses(client, batch, message)

    one = world(Looks(local_steps=1, align_steps=1, dro_batch=4, mu=1.0))
    server = one.run()
    assert all(state.keys() == {*server.state, *NORM} for state in seen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "terms"),
    [
        (FedDRA(align_steps=1, local_steps=1, dro_batch=4), {"align": "constraint", "joint": "constraint"}),
        (FedRGB(local_steps=1, aligner_steps=1, dro_batch=4), {"local": "guide", "aligner": "consistency"}),
    ],
    ids=["feddra", "fedrgb"],
)
def test_b3_through_the_site_for_both_kinds(method: Any, terms: dict[str, str], kind: str) -> None:
    """Spec 15 B3 on the real dual encoder: the received model is its own anchor at the first step of every phase.

    In round 1 a site's affine weights are its own, and not those that anybody else has.
    """
    names = encoder(head_norm="batch").state_dict()
    site_only = normalisation(names) if kind == "site" else frozenset()
    one = client(encoder(head_norm="batch"), site_only=site_only)
    one.initial = lambda: encoder(head_norm="batch").state_dict()
    site = Site(one, method, Training(batch_size=8, lr=0.01), SiteMemory(None))
    state: State = {name: t.clone() for name, t in names.items() if name not in site_only}
    for round in (0, 1):
        for phase, term in terms.items():
            update = site.handle(Broadcast(round, phase, state))
            assert update.metrics[f"loss/{term}"] == 0.0, (round, phase)
            state = state | clone(update.state)
    if kind == "site":
        mine = own(site.memory.newest(), "model")
        assert mine.keys() == site_only
        assert differs(mine, names, ["image_head.1.weight"])


def test_a_phase_that_was_broken_off_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    """At its second step, at a site that has normalisation of its own from an earlier round."""
    training = replace(ADAMW, checkpoint_steps=1)

    def second_round(folder: Path, stops: int) -> State:
        one = world(FedAvg(local_steps=4), training=training, folder=folder)
        state, asked = one.server().state, iter(range(100))
        one.site("b").handle(Broadcast(0, "train", state))
        if stops:
            with pytest.raises(Aborted):
                one.site("b").handle(Broadcast(1, "train", state), lambda: next(asked) >= stops)
            assert list((folder / "sites" / "b").glob("unfinished*"))
        update = one.site("b").handle(Broadcast(1, "train", state))
        return clone(update.state) | SiteMemory(folder / "sites" / "b").newest()

    same_bytes(second_round(tmp_path / "broken", 2), second_round(tmp_path / "whole", 0))


# Estimating


def layer_of(one: Client) -> nn.BatchNorm1d:
    layer = one.model.image_encoder[1]
    assert isinstance(layer, nn.BatchNorm1d)
    return layer


def toy_client(data: Any, **options: Any) -> Client:
    return Client("a", 0, Toy(norm=True, dropout=0.5), ConVIRT(), data, site_only=frozenset(NORM), **options)


def test_statistics_are_means_over_whole_batches_of_32() -> None:
    """70 records: two batches of 32, the last 6 left out; a fixed draw; dropout off; momentum and weights as before."""
    one = toy_client(pairs(0, 70))
    layer, before = layer_of(one), clone(one.state())
    estimate(one)
    first = clone(one.state())
    assert int(layer.num_batches_tracked or 0) == 2
    assert layer.momentum == 0.1
    assert not any(module.training for module in one.model.modules())
    torch.manual_seed(9)
    estimate(one)
    same_bytes(clone(one.state()), first)
    moved = {name for name in before if not torch.equal(before[name], first[name])}
    assert moved == {name for name in NORM if "running" in name or "num_batches" in name}


def test_a_batch_needs_two_records_and_fifty_batches_are_enough() -> None:
    for count, batches in [(0, 0), (1, 0), (2, 1), (31, 1), (33, 1), (5000, 50)]:
        one = toy_client(pairs(0, count))
        before = clone(one.state())
        estimate(one)
        assert int(layer_of(one).num_batches_tracked or 0) == batches
        if not batches:
            same_bytes(clone(one.state()), before)


@pytest.mark.parametrize("public", [None, pairs(5, 8)])
def test_a_layer_that_the_sites_records_do_not_reach_reads_the_public_set(public: Pairs | None) -> None:
    """A site without reports: its text tower has the statistics of the public reports; without a public set, none."""
    data = pairs(0, 12)
    data.modalities = ("image",)
    one = toy_client(data, public=public)
    estimate(one)
    text = one.model.text_encoder[1]
    expected = torch.zeros(4) if public is None else one.model.text_encoder[0](public.content["train"][1]).mean(dim=0)
    torch.testing.assert_close(text.running_mean, expected.detach())
    torch.testing.assert_close(
        layer_of(one).running_mean, one.model.image_encoder[0](data.content["train"][0]).mean(dim=0).detach()
    )


def test_the_objectives_normalisation_is_estimated_too() -> None:
    class Objective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, output: Any, batch: Any) -> dict[str, Tensor]:
            return {"contrastive": self.norm(output.image).square().sum()}

    own = frozenset({"objective.norm.running_mean"})
    one = Client("a", 0, Toy(), Objective(), pairs(0, 12), site_only=own)
    estimate(one)
    image = one.model(next(one.data.batches("train", 12, drop_last=True))).image
    torch.testing.assert_close(one.objective.norm.running_mean, image.mean(dim=0).detach())  # type: ignore[union-attr]


def test_statistics_that_do_not_stay_at_the_site_are_left_alone() -> None:
    """Of the image tower alone here: of a frozen tower, or where private adapters are all that stays."""
    one = toy_client(pairs(0, 12))
    one.site_only = frozenset(name for name in NORM if name.startswith("image"))
    before = clone(one.state())
    estimate(one)
    moved = {name for name in before if not torch.equal(before[name], one.state()[name])}
    assert {name.partition("_")[0] for name in moved} == {"image"}


def test_a_model_that_was_not_sent_is_not_completed() -> None:
    one = toy_client(pairs(0))
    assert complete(one, {}, {}) == {}


# What is saved

TINY = ModelConfig(image_size=16, max_tokens=6, vocabulary=50, head_hidden=16, embedding_dim=8, text_layers=1)


def finished(folder: Path, statistics: str, head_norm: str, whole: bool, method: Any = None) -> RunFolder:
    """A run's folder with a model: of a server that has all tensors (``whole``), or all but the normalisation."""
    config = replace(TINY, head_norm=head_norm)
    experiment = Experiment("x", method or FedAvg(), config, norm_statistics=statistics)
    state = {name: tensor + 1 for name, tensor in config.build(0).state_dict().items()}
    without = {name: tensor for name, tensor in state.items() if name not in normalisation(state)}
    run = RunFolder.create(folder, experiment)
    run.finish(experiment, state if whole else without, [])
    return run


@pytest.mark.parametrize(
    ("statistics", "head_norm", "whole", "method", "said"),
    [
        ("averaged", "batch", True, None, OF_SERVER), ("averaged", "layer", True, None, None),
        ("site", "batch", False, None, INITIAL), ("site", "batch", True, None, PUBLIC_SET),
        ("site", "layer", True, None, None), ("site", "batch", True, Local(), OF_SERVER),
    ],
)  # fmt: skip
def test_the_models_folder_says_whose_statistics_it_holds(
    tmp_path: Path, statistics: str, head_norm: str, whole: bool, method: Any, said: str | None
) -> None:
    run = finished(tmp_path, statistics, head_norm, whole, method)
    assert json.loads((run.model.parent / "config.json").read_text()).get("statistics") == said


def test_weights_that_are_missing_for_another_reason_are_not_made_up(tmp_path: Path) -> None:
    experiment = Experiment("x", FedAvg(), TINY, norm_statistics="site")
    state = dict(TINY.build(0).state_dict())
    del state["image_head.0.weight"]
    with pytest.raises(RuntimeError, match=r"image_head\.0\.weight"):
        RunFolder.create(tmp_path, experiment).finish(experiment, state, [])


def test_a_model_without_statistics_is_not_loaded_without_a_word(tmp_path: Path) -> None:
    run = finished(tmp_path, "site", "batch", whole=False)
    with pytest.raises(ValueError, match="each site of this run keeps the statistics of its batch normalisation"):
        load_model(run.path)
    with pytest.raises(ValueError, match="holds no normalisation of a trained model"):
        load_model(run.path, statistics="site-1")


def test_it_is_served_with_a_sites_own(tmp_path: Path) -> None:
    """By the site's name, or by its folder; the newest version counts."""
    run = finished(tmp_path, "site", "batch", whole=False)
    memory = SiteMemory(run.path / "sites" / "site-1")
    mean = "image_head.1.running_mean"
    for round in (0, 1):
        memory.after((round, 1), {f"{OWN}served/{mean}": torch.full((16,), 5.0 + round), "other": torch.zeros(1)})
    for statistics in ("site-1", run.path / "sites" / "site-1"):
        model = load_model(run.path, statistics=statistics)
        assert model.state_dict()[mean].tolist() == [6.0] * 16
        assert not model.training


def test_it_is_served_with_statistics_of_given_batches(tmp_path: Path) -> None:
    """An unseen site: the model that it then has is the one that ``estimate`` gives it."""
    run = finished(tmp_path, "site", "batch", whole=False)
    data = records(40)
    model = load_model(run.path, statistics=data.batches("train", 40, drop_last=True))
    one = Client("new", 0, replace(TINY, head_norm="batch").build(0), ConVIRT(), data)
    one.model.load_state_dict(model.state_dict())
    one.data = records(40)
    batch = next(data.batches("train", 40, drop_last=True))
    with torch.no_grad():
        aligned = one.model.align(one.model.encode(batch)).image
        assert aligned is not None
        entering = one.model.image_head[0](aligned)
    torch.testing.assert_close(model.state_dict()["image_head.1.running_mean"], entering.mean(dim=0))
    assert not model.training


def test_only_the_two_kinds_are_known() -> None:
    with pytest.raises(ValueError, match="norm_statistics is 'mean'; choose averaged or site"):
        Experiment("x", FedAvg(), norm_statistics="mean")
