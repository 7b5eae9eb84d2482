"""mFedAvg: who averages which tower, zero features, the virtual client, and its identities with FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy import ADAMW, Toy, World, clone, same_bytes
from support.toy_multimodal import LABELS, aggregated, labelled, mixed, of_training, paired, world

from fedvlp.core.client import Client
from fedvlp.core.server_state import Server
from fedvlp.core.types import MODALITIES, State, modality
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.methods.car_mfl import CARMFL
from fedvlp.methods.fedavg import FedAvg
from fedvlp.methods.mfedavg import MFedAvg, keep_best
from fedvlp.models.multimodal import fused
from fedvlp.objectives.bce import BCE

PLAIN = MFedAvg(local_steps=2)
WITH_PUBLIC = MFedAvg(local_steps=2, public=True)
EVERY_ROUND = Rounds(rounds=3, evaluate_every=1)
THREE = {"a": (1.0, 8), "b": (2.0, 12), "c": (4.0, 16)}


def values(state: dict[str, torch.Tensor], part: str) -> set[float]:
    return {round(value, 5) for n, t in state.items() if modality(n) == part for value in t.unique().tolist()}


def test_each_tower_is_averaged_over_its_owners_by_hand() -> None:
    """Image: a and b, (8 + 24) / 20; text: a and c, (8 + 64) / 24; classifier: all, (8 + 24 + 64) / 36."""
    state, _ = aggregated(PLAIN, mixed(), THREE)
    assert values(state, "image") == {1.6}
    assert values(state, "text") == {3.0}
    assert values(state, "") == {2.66667}


def test_the_virtual_client_counts_with_its_records_everywhere() -> None:
    """10 public records: (96 + 10 own) / 46 for the classifier, (72 + 10 own) / 34 for the text tower."""
    state, own = aggregated(WITH_PUBLIC, mixed(), THREE)
    for name in state:
        total, count = {"image": (32, 20), "text": (72, 24), "": (96, 36)}[modality(name)]
        torch.testing.assert_close(state[name], (total + 10 * own[name]) / (count + 10))


def test_without_a_paired_site_it_works_and_an_unowned_tower_stays() -> None:
    """Bug M4: the released code takes its key set from the first site, so that one had to be paired."""
    data = {name: labelled(i, 8, ("image",)) for i, name in enumerate("ab")}
    start = world(PLAIN, data).server().state
    state, _ = aggregated(PLAIN, data, {"a": (1.0, 8), "b": (3.0, 8)})
    assert values(state, "image") == values(state, "") == {2.0}
    for name in state:
        if modality(name) == "text":
            assert torch.equal(state[name], start[name])


def test_a_site_sends_only_what_it_owns_and_more_is_refused() -> None:
    place = world(PLAIN)
    server = place.server()
    server.phase = "train"
    for site, held in server.modalities.items():
        update = place.site(site).handle(PLAIN.broadcast(server, site))
        assert {modality(name) for name in update.state} == {*held, ""}
        assert update.state.keys() == PLAIN.expects(server, site).state.keys()

    def everything(messages: object) -> object:
        for site, reply in SequentialExchange(place.site)(messages):  # type: ignore[arg-type]
            yield site, replace(reply, state=clone(server.state)) if site == "b" else reply  # type: ignore[type-var]

    assert "unexpected" in place.run(everything).history[0]["dropped"]["b"]


@pytest.mark.parametrize("method", [PLAIN, CARMFL(local_steps=2)])
def test_a_site_is_what_its_training_records_are(method: MFedAvg) -> None:
    """That b's held-out records have reports as well trains no text tower there, and lends no record a report."""
    plain = mixed()
    theirs = {**plain, "b": of_training(1, 12)}
    expected, server = (world(method, data).run() for data in (plain, theirs))
    assert [record["dropped"] for record in server.history] == [{}, {}]
    same_bytes(server.state, expected.state)
    assert server.modalities["b"] == ("image",)


def test_zero_features_give_the_classifiers_absent_columns_no_gradient() -> None:
    """Columns 4.. of the classifier read the text feature; an image-only batch must leave them alone, bit for bit."""
    model = Toy(labels=3)
    data = labelled(0, 8, ("image",))
    (batch,) = data.batches("train", 8, drop_last=False)
    BCE()(model(batch), batch)["bce"].backward()
    gradient = model.classifier.weight.grad
    assert torch.equal(gradient[:, 4:], torch.zeros(3, 4))
    assert (gradient[:, :4] != 0).all()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if modality(name) == "text")
    place = world(replace(PLAIN, local_steps=3), {"b": data}, training=replace(world(PLAIN).training, weight_decay=0.0))
    before, after = place.server().state, place.run().state
    assert torch.equal(after["classifier.weight"][:, 4:], before["classifier.weight"][:, 4:])
    assert not torch.equal(after["classifier.weight"][:, :4], before["classifier.weight"][:, :4])


def test_the_absent_feature_is_zero_and_not_an_encoded_blank() -> None:
    image = torch.ones(2, 4)
    assert fused(image, None).tolist() == [[1.0] * 4 + [0.0] * 4] * 2
    assert fused(None, image).tolist() == [[0.0] * 4 + [1.0] * 4] * 2
    with pytest.raises(ValueError, match="neither image nor text"):
        fused(None, None)


def test_all_paired_without_public_set_is_fedavg_bit_for_bit() -> None:
    data = paired(8, 12, 16)
    same_bytes(world(PLAIN, data).run().state, world(FedAvg(local_steps=2), data).run().state)


def test_the_virtual_client_is_one_more_site() -> None:
    """FedAvg over a, b and a third site with the public records. These fit in one batch: only its order is another."""
    data, public = paired(8, 12), labelled(99, 4)
    ours = world(WITH_PUBLIC, data, public=public).run().state
    theirs = world(FedAvg(local_steps=2), {**data, "server": public}, public=public).run().state
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(ours[n], t) for n, t in world(PLAIN, data).run().state.items())


def test_the_lower_bound_is_training_on_the_public_set_alone() -> None:
    """The sites' records and numbers do not matter; the sites do not train."""
    bound = MFedAvg(local_steps=2, public=True, private=False)
    one, other = world(bound, mixed()).run(), world(bound, paired(6, 6)).run()
    same_bytes(one.state, other.state)
    assert bound.steps("train") == 0
    start = world(bound).server()
    start.phase = "train"
    assert start.trainer is not None
    first = start.trainer.trained(bound, start, "public")
    same_bytes(world(bound, rounds=replace(world(bound).rounds, rounds=1)).run().state, clone(first))


@pytest.mark.parametrize(("state", "kept"), [("keep", 6), ("reset", 0)])
def test_the_virtual_client_keeps_its_moments_where_the_sites_do(state: str, kept: int, tmp_path: Path) -> None:
    """Three rounds of two steps: the optimiser goes on, in one run and in one that was stopped after each round."""
    training = replace(ADAMW, optimizer_state=state)
    rounds = Rounds(rounds=3, evaluate_every=0)
    server = world(WITH_PUBLIC, training=training, rounds=rounds).run()
    steps = {int(t) for name, t in server.memory.items() if name.startswith("optimizer/") and name.endswith("/step")}
    assert steps == ({kept} if kept else set())
    for number in (1, 2, 3):
        again = world(WITH_PUBLIC, training=training, rounds=replace(rounds, rounds=number), folder=tmp_path).run()
    same_bytes(again.state, server.state)
    same_bytes(again.memory, server.memory)


class Judged:
    """An evaluation that gives the models it meets at the server the areas of a list, and notes these models."""

    def __init__(self, *areas: float) -> None:
        self.areas = dict(enumerate(areas))
        self.met: list[State] = []
        self.asked: list[tuple[str, ...]] = []  # the splits of the public set, one after the other

    def __call__(self, client: Client, splits: tuple[str, ...]) -> dict[str, float]:
        if client.name != "server":
            return {"test/auc/macro": float(client.state()["classifier.weight"].double().sum())}
        self.asked.append(splits)
        known = [number for number, state in enumerate(self.met) if same(state, client.state())]
        if not known:
            self.met.append(clone(client.state()))
        return {"val/auc/macro": self.areas[known[0] if known else len(self.met) - 1]}


def same(one: State, other: State) -> bool:
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize(
    ("areas", "best"), [((0.5, 0.9, 0.7, 0.8), 1), ((0.5, 0.6, 0.6, 0.9), 3), ((0.9, 0.6, 0.8, 0.8), 2)]
)
def test_the_best_round_on_the_public_set_is_the_model(areas: tuple[float, ...], best: int) -> None:
    """Spec 8.4: by the macro AUC on val, the untrained model apart; the first of equals. The last figures are of it."""
    judged = Judged(*areas)
    server = world(WITH_PUBLIC, rounds=EVERY_ROUND, evaluate=judged).run()
    same_bytes(server.state, judged.met[best])
    tested = [float(metrics["test/auc/macro"]) for metrics in server.history[-1]["sites"].values()]
    assert set(tested) == {float(judged.met[best]["classifier.weight"].double().sum())}
    assert int(server.memory["best_round"]) == best
    assert not [name for name in server.memory if name.startswith("best/")], "a second model is not kept for ever"
    last = Judged(*areas)
    same_bytes(world(replace(WITH_PUBLIC, best_by=""), rounds=EVERY_ROUND, evaluate=last).run().state, last.met[3])
    assert len(last.asked) == 4
    assert judged.asked == [*last.asked[:3], ("val",), last.asked[3]], "the last round is judged too, on val alone"


def test_the_best_round_is_noted_beside_what_else_the_server_remembers() -> None:
    """Its weights are a copy: a large model's next mean is written over those of the last round."""
    server = Server(("a",), {"w": torch.ones(2)}, {"other": torch.tensor(3.0)})
    server.round = 4
    keep_best(server, 0.25)
    server.round = 5
    keep_best(server, 0.125)
    server.state["w"].zero_()
    assert {name: tensor.tolist() for name, tensor in server.memory.items()} == {
        "other": 3.0, "best/w": [1.0, 1.0], "best_figure": 0.25, "best_round": 4,
    }  # fmt: skip


def test_a_run_that_was_stopped_remembers_its_best_round(tmp_path: Path) -> None:
    """Stopped after every phase in turn; the record of the best round is in the checkpoint."""
    whole = world(WITH_PUBLIC, rounds=EVERY_ROUND, evaluate=Judged(0.5, 0.9, 0.7, 0.8)).run()
    for stop in range(1, 4):
        folder = tmp_path / str(stop)
        folder.mkdir()
        judged = Judged(0.5, 0.9, 0.7, 0.8)
        federation, _ = world(WITH_PUBLIC, rounds=EVERY_ROUND, evaluate=judged, folder=folder).federation(
            report=stopping_after(stop)
        )
        with pytest.raises(KeyboardInterrupt):
            federation.run()
        same_bytes(world(WITH_PUBLIC, rounds=EVERY_ROUND, evaluate=judged, folder=folder).run().state, whole.state)


def stopping_after(phases: int) -> Callable[[object], None]:
    left = iter(range(phases - 1))

    def report(record: object) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return report


def test_the_best_round_is_refused_where_sites_keep_part_of_the_model() -> None:
    """The sites have what belongs to the last round alone."""
    model = partial(Toy, labels=LABELS, norm=True)
    options: dict[str, Any] = {"model": model, "objective": BCE, "public": labelled(99, 10)}
    kept = partial(World, data=mixed(), training=ADAMW, norm_statistics="site", **options)
    for method in (PLAIN, CARMFL(local_steps=2)):
        with pytest.raises(ValueError, match=r"method.best_by is val/auc/macro: the best round's model"):
            kept(method).run()
        kept(replace(method, best_by="")).run()


def test_names_of_the_parts() -> None:
    state = Toy(labels=1).state_dict()
    assert {modality(name) for name in state} == {*MODALITIES, ""}
    assert modality("objective.image.weight") == modality("images.x") == ""
