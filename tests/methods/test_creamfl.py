"""CreamFL: its losses and ensemble by hand, what follows from them, and what crosses the wire (spec 6.7)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.toy import ADAMW, SGD, Pairs, Toy, World, aggregate, differs, pairs, same_bytes

from fedvlp.core.client import Client
from fedvlp.core.metric_keys import TIMES
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, Broadcast, Reply, State, Update, VLOutput
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.methods import CreamFL
from fedvlp.methods.ensemble import GLOBAL, PREVIOUS, PUBLIC, SAMPLE, PublicEnsemble
from fedvlp.methods.math.contrast import contrast_scores, representations, sampled_contrast
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from fedvlp.training.settings import Training

SMALL = CreamFL(local_steps=2, local_epochs=2, server_steps=2, distil_steps=2)
ALONE = replace(SMALL, kd_weight=0.0, inter=False, intra=False)


def lone(seed: int, count: int, modality: str) -> Pairs:
    """Records of one modality, with one label of three each."""
    data = pairs(seed, count)
    data.modalities = (modality,)
    data.labels = torch.eye(3)[torch.arange(count) % 3]
    return data


def five_sites() -> dict[str, Pairs]:
    """Two paired sites, two with images, one with texts."""
    return {
        "a": pairs(0, 8), "b": pairs(1, 12), "c": lone(2, 9, "image"), "d": lone(3, 10, "image"),
        "e": lone(4, 11, "text"),
    }  # fmt: skip


def world(method: CreamFL | PublicEnsemble = SMALL, **options: Any) -> World:
    options = {"data": five_sites(), "public": pairs(99, 10), "rounds": Rounds(rounds=2, evaluate_every=0), **options}
    return World(method, objective=CreamFLTaskConfig(classes=4, dim=4).build, **options)


def prepared(made: World) -> Server:
    """The server of ``made`` after the first half of round 0."""
    server = made.server()
    made.method.start(server)
    server.phase = "train"
    made.method.prepare(server)
    return server


def sent(name: str, image: torch.Tensor | None = None, text: torch.Tensor | None = None, samples: int = 1) -> Update:
    state = {n: t for n, t in (("image", image), ("text", text)) if t is not None}
    return Update(name, 0, "train", samples, state, modalities=tuple(state))


def targets_of(made: World, updates: list[Update], memory: State | None = None) -> State:
    """What the server distils when it receives ``updates``."""
    server = prepared(made)
    server.memory |= memory or {}
    seen: dict[str, State] = {}

    class Noting(type(made.method)):  # type: ignore[misc]
        def train_server(self, server: Server, phase: str, aux: State | None = None) -> None:
            seen[phase] = aux or {}

    aggregate(Noting(**vars(made.method)), server, updates, "train")
    return seen.get("distil", {})


def units(seed: int, count: int = 10) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, 4, generator=generator), dim=1)


# The ensemble (Eq. 4 to 6)


def test_one_supplier_is_distilled_exactly() -> None:
    image, text = units(1), units(2)
    targets = targets_of(world(), [sent("a", image, text)])
    assert torch.equal(targets["image"], image)
    assert torch.equal(targets["text"], text)


@pytest.mark.parametrize("aggregation", ["gca", "mean", "avg", "iot"])
def test_identical_suppliers_give_their_common_representation(aggregation: str) -> None:
    image = units(1)
    updates = [sent(name, image, samples=count) for name, count in (("a", 3), ("c", 40), ("d", 7))]
    targets = targets_of(world(replace(SMALL, aggregation=aggregation)), updates)
    assert torch.allclose(targets["image"], image, atol=1e-6)
    assert targets.keys() == {"image"}


def test_permuting_the_sites_permutes_the_weights() -> None:
    one, two, three = units(1), units(2), units(3)
    first = targets_of(world(), [sent("a", one), sent("b", two), sent("c", three)])
    second = targets_of(world(), [sent("a", three), sent("b", one), sent("c", two)])
    assert torch.allclose(first["image"], second["image"], atol=1e-6)


def test_gca_by_hand() -> None:
    """Weights are softmax over sites of Eq. 4 against the server's texts; a matching site beats an opposite one."""
    made = world()
    text = prepared(made).memory[GLOBAL + "text"]
    targets = targets_of(made, [sent("a", text), sent("b", -text)])
    scores = torch.stack([contrast_scores(text, text), contrast_scores(-text, text)])
    weights = scores.softmax(0)
    assert (weights[0] > weights[1]).all()
    assert torch.allclose(targets["image"], (weights[0] - weights[1])[:, None] * text, atol=1e-6)


def test_a_shift_orthogonal_to_all_texts_leaves_the_weights() -> None:
    flat = torch.cat([units(5)[:, :3], torch.zeros(10, 1)], dim=1)  # texts without the fourth direction
    shift = torch.tensor([0.0, 0.0, 0.0, 7.0])
    one, two = units(1), units(2)
    plain = targets_of(world(), [sent("a", one), sent("b", two)], {GLOBAL + "text": flat})["image"]
    moved = targets_of(world(), [sent("a", one + shift), sent("b", two + shift)], {GLOBAL + "text": flat})["image"]
    assert torch.allclose(moved, plain + shift, atol=1e-5)


def test_a_single_public_pair_is_averaged_uniformly() -> None:
    """|P| = 1: the denominator of Eq. 4 is empty, the score is 0 for everybody."""
    one, two = units(1, 1), units(2, 1)
    targets = targets_of(world(public=pairs(99, 2)), [sent("a", one), sent("b", two)], {GLOBAL + "text": units(3, 1)})
    assert torch.allclose(targets["image"], (one + two) / 2, atol=1e-6)


def test_avg_and_iot_by_hand() -> None:
    """Samples 1 and 3: (a + 3 b) / 4; with alpha 100 the multimodal first counts 100: (100 a + 3 b) / 103."""
    image, text, other = units(1), units(2), units(3)
    updates = [sent("a", image, text, samples=1), sent("c", other, samples=3)]
    avg = targets_of(world(replace(SMALL, aggregation="avg")), updates)["image"]
    assert torch.allclose(avg, (image + 3 * other) / 4, atol=1e-6)
    iot = targets_of(world(replace(SMALL, aggregation="iot")), updates)["image"]
    assert torch.allclose(iot, (100 * image + 3 * other) / 103, atol=1e-6)
    equal = targets_of(world(replace(SMALL, aggregation="iot", iot_alpha=1.0)), updates)["image"]
    assert torch.allclose(equal, avg, atol=1e-6)


def test_scores_of_a_sample_are_of_the_same_items_for_every_supplier_of_a_round() -> None:
    """With 4 of 10 items every round has its own; with all of them, or more, the scores are those without a sample."""
    server, image = prepared(world()), units(1)

    def scores(count: int, site: str = "a") -> torch.Tensor:
        return replace(SMALL, gca_sample=count).log_weights(server, sent(site, image), "image", image)

    whole, first = scores(0), scores(4)
    assert torch.equal(scores(10), whole)
    assert torch.equal(scores(11), whole)
    assert torch.equal(scores(4, "b"), first)
    assert not torch.allclose(first, whole, atol=1e-3)
    server.round = 1
    assert not torch.equal(scores(4), first)
    assert torch.equal(scores(0), whole)


# The sites' losses


def contrast(method: CreamFL, modalities: tuple[str, ...]) -> dict[str, float]:
    """LCR of two public items: r = (1,0),(0,1) in both modalities, g the same for images, else swapped, T = 0.5."""
    eye = torch.eye(2)
    made = world(method)
    client = made.client("a")
    client.data.modalities = modalities  # type: ignore[misc]
    client.memory = {PREVIOUS + name: eye.flip(0) for name in ("image", "text")}
    message = Broadcast(0, "train", {}, {"image": eye, "text": eye.flip(0)})
    losses = method.public_losses(client, VLOutput(eye, eye), {"row": torch.tensor([0, 1])}, message)
    return {name: term.item() for name, term in losses.items()}


def test_lcr_by_hand() -> None:
    """Images: r . text_k = 0, r . text_j = 1, so inter = log(1 + e^2); r . image_k = 1, r . p = 0, so intra =

    log(1 + e^-2). Texts: inter = log(1 + e^-2) against the images, and r . text_k = r . p = 0, so intra = log 2.
    Paired sites have the sum of both inter and the mean of both intra; gamma is 0.5.
    """
    low, high = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert contrast(SMALL, ("image",)) == pytest.approx({"inter": 0.5 * high, "intra": 0.5 * low})
    assert contrast(SMALL, ("text",)) == pytest.approx({"inter": 0.5 * low, "intra": 0.5 * math.log(2)})
    both = {"inter": 0.5 * (high + low), "intra": 0.5 * (low + math.log(2)) / 2}
    assert contrast(SMALL, ("image", "text")) == pytest.approx(both)


@pytest.mark.parametrize("term", ["inter", "intra"])
def test_gamma_weighs_a_term_that_is_alone(term: str) -> None:
    """C5: the released code forgets gamma where only one of the terms is on."""
    one = replace(SMALL, inter=term == "inter", intra=term == "intra")
    assert contrast(one, ("image",)) == pytest.approx({term: contrast(SMALL, ("image",))[term]})
    assert contrast(replace(one, gamma=2.0), ("image",))[term] == pytest.approx(4 * contrast(one, ("image",))[term])


def test_the_previous_representations_are_those_of_the_model_that_the_round_starts_from() -> None:
    """At first the initial model's; then those that were sent last."""
    made = world()
    server, client = prepared(made), made.client("a")
    message = made.method.broadcast(server, "a")
    made.method.receive(client, message)
    assert client.initial is not None
    expected = representations(client, ("image", "text"))
    same_bytes({name: client.memory[PREVIOUS + name] for name in expected}, expected)
    site = made.site("a")
    first = site.handle(message)
    assert differs(first.state, expected)
    same_bytes({name: site.client.memory[PREVIOUS + name] for name in expected}, first.state)
    made.method.receive(site.client, message)
    same_bytes(representations(site.client, ("image", "text")), first.state)


def test_batches_alternate_private_steps_and_passes_over_the_public_set() -> None:
    """Two epochs of two private steps and of 10 // 4 public batches; joint: every step has both."""
    made = world(training=SGD)
    client, message = made.client("c"), Broadcast(0, "train", {}, {"image": units(1), "text": units(2)})

    def kinds(method: PublicEnsemble, message: Broadcast = message) -> list[str]:
        batches = list(method.batches(client, message, SGD.batch_size, torch.Generator().manual_seed(0)))
        for batch in batches:
            assert not any(name.startswith(("text", PUBLIC + "text")) for name in batch), "an image-only site"
        return [("p" if "row" in b else "") + ("P" if PUBLIC + "row" in b else "") for b in batches]

    assert kinds(SMALL) == ["p", "p", "P", "P"] * 2
    assert kinds(replace(SMALL, joint=True)) == ["pP"] * 4
    assert kinds(replace(SMALL, local_steps=0)) == ["p", "p", "P", "P"] * 2, "9 // 4 private batches are one pass"
    assert kinds(SMALL, Broadcast(0, "train", {})) == ["p"] * 4


def test_a_pass_over_the_public_set_sees_every_item_once() -> None:
    client = world(public=pairs(99, 8)).client("a")
    message = Broadcast(0, "train", {}, {"image": units(1, 8), "text": units(2, 8)})
    batches = SMALL.batches(client, message, SGD.batch_size, torch.Generator().manual_seed(0))
    rows = [batch[PUBLIC + "row"].tolist() for batch in batches if PUBLIC + "row" in batch]
    assert [sorted(rows[i] + rows[i + 1]) for i in (0, 2)] == [list(range(8))] * 2
    assert rows[:2] != rows[2:], "another order every time"


SAMPLED = replace(SMALL, contrast_sample=6)


@pytest.mark.parametrize(("accumulation", "micro", "seen"), [("cached", 0, [8]), ("plain", 2, [3, 5])])
def test_a_site_of_five_records_contrasts_whole_public_batches(
    accumulation: str, micro: int, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joint step has two parts of their own lengths, 5 records and 8 items; a micro-batch has a share of both."""
    counts: list[int] = []
    losses = CreamFL.public_losses

    def counted(self: CreamFL, client: Client, output: Any, batch: Batch, message: Broadcast) -> Any:
        counts.append(len(batch["row"]))
        return losses(self, client, output, batch, message)

    monkeypatch.setattr(CreamFL, "public_losses", counted)
    training = replace(ADAMW, batch_size=8, accumulation=accumulation, micro_batch=micro)
    made = world(replace(SMALL, joint=True), data={"a": lone(2, 5, "image")}, training=training)
    made.rounds = replace(made.rounds, rounds=1)
    made.run()
    assert counts == seen * 4


@pytest.mark.parametrize("joint", [False, True])
def test_every_public_batch_has_a_sample_of_its_own(joint: bool) -> None:
    """Of 10 items 6 for 4 rows: 2 beside each row, all distinct; none where the sum of inter is not asked for."""
    client = world(training=SGD).client("c")
    message = Broadcast(0, "train", {}, {"image": units(1), "text": units(2)})

    def samples(method: CreamFL, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        batches = method.batches(client, message, SGD.batch_size, generator)
        return [batch[PUBLIC + "others"] for batch in batches if PUBLIC + "others" in batch]

    method = replace(SAMPLED, joint=joint)
    drawn = samples(method)
    assert [tuple(sample.shape) for sample in drawn] == [(4, 2)] * 4
    for sample in drawn:
        assert len(set(sample.flatten().tolist())) == 8
        assert set(sample.flatten().tolist()) <= set(range(10))
    assert len({tuple(sample.flatten().tolist()) for sample in drawn}) == 4
    assert [sample.tolist() for sample in samples(method)] == [sample.tolist() for sample in drawn]
    assert [sample.tolist() for sample in samples(method, 1)] != [sample.tolist() for sample in drawn]
    assert samples(replace(method, inter=False)) == []
    assert samples(replace(method, contrast_sample=9))[0].shape == (4, 2), "3 beside each row would be more than 10"


def test_a_sampled_contrast_is_that_of_the_items_beside_all_rows() -> None:
    """Of 10 items those numbered 7, 2, 1 and 0 beside two rows, whatever row they are beside."""
    client = world().client("a")
    client.data.modalities = ("image",)  # type: ignore[misc]
    client.memory = {PREVIOUS + "image": units(4)}
    own, message = units(3, 2), Broadcast(0, "train", {}, {"image": units(1), "text": units(2)})
    batch = {"row": torch.tensor([5, 2]), "others": torch.tensor([[7, 2], [1, 0]])}
    seen = SMALL.public_losses(client, VLOutput(image=own), batch, message)["inter"]
    expected = sampled_contrast(own, units(2), batch["row"], torch.tensor([0, 1, 2, 7]), 0.5).mean()
    assert seen.item() == pytest.approx(0.5 * expected.item())
    whole = SMALL.public_losses(client, VLOutput(image=own), {"row": batch["row"]}, message)["inter"]
    assert whole.item() != pytest.approx(seen.item(), rel=1e-3)


@pytest.mark.parametrize("joint", [False, True])
def test_a_sample_of_all_items_trains_the_same_bytes_as_none(joint: bool) -> None:
    """From the number of items on nothing is drawn. With fewer the run is another one, and the same again."""
    method = replace(SMALL, joint=joint)
    whole = world(method).run()
    for count in (10, 11):
        same_bytes(world(replace(method, contrast_sample=count)).run().state, whole.state)
    sampled = world(replace(method, contrast_sample=6)).run().state
    assert differs(sampled, whole.state)
    same_bytes(world(replace(method, contrast_sample=6)).run().state, sampled)


def test_micro_batches_have_their_part_of_the_sample() -> None:
    """Two rows of four, with two items each: finite terms at every site."""
    history = world(SAMPLED, training=replace(SGD, micro_batch=2, accumulation="plain")).run().history
    for record in history:
        assert record["dropped"] == {}
        assert all(math.isfinite(figures["loss/inter"]) for figures in record["sites"].values())


# The server


def test_distillation_counts_each_modality_once_by_hand() -> None:
    """C6: kd_weight 0.3 times the mean square of the difference; squared: d times that; l2: the mean norm."""
    made = world()
    client = made.client("server")
    batch = next(iter(client.public.batches("train", 4, drop_last=False)))
    output = client.model(batch)
    aux = {"image": units(1), "text": units(2)}
    message = Broadcast(0, "distil", {}, aux)
    losses = made.method.losses(client, batch, message)
    for name in aux:
        difference = getattr(output, name) - aux[name][:4]
        assert losses[name].item() == pytest.approx(0.3 * difference.square().mean().item())
        squared = replace(SMALL, kd_norm="squared").losses(client, batch, message)[name].item()
        assert squared == pytest.approx(0.3 * 4 * difference.square().mean().item())
        norm = replace(SMALL, kd_norm="l2").losses(client, batch, message)[name].item()
        assert norm == pytest.approx(0.3 * difference.norm(dim=1).mean().item())
    assert losses.keys() == aux.keys()


def test_without_distillation_and_contrast_the_server_trains_on_the_public_set_alone() -> None:
    """kd_weight 0 and LCR off: no site has any influence, bit for bit; with either on there is one."""
    other = {name: pairs(50 + index, 9) for index, name in enumerate("abcde")}
    alone = world(ALONE).run()
    same_bytes(alone.state, world(ALONE, data=other).run().state)
    assert not any("distil" in name for record in alone.history for name in record["server"])
    assert differs(world().run().state, world(data=other).run().state)
    assert differs(world(replace(ALONE, kd_weight=0.3)).run().state, world(ALONE).run().state)


def test_the_order_of_the_released_code_and_of_the_paper() -> None:
    """Released: the representations that are sent are of the trained model; paper: of the model as it was."""
    released, paper = world(), world(replace(SMALL, order="paper"))
    initial = representations(released.client("server"), ("image", "text"))
    assert differs({n: prepared(released).memory[GLOBAL + n] for n in initial}, initial)
    same_bytes({n: prepared(paper).memory[GLOBAL + n] for n in initial}, initial)
    assert differs(paper.run().state, released.run().state)
    same_bytes(world(replace(ALONE, order="paper")).run().state, world(ALONE).run().state)


def test_the_cosine_schedule_ends_at_zero() -> None:
    """server_rounds 2: full rate in round 0, half in round 1, none in round 2 and after."""
    made = world(replace(ALONE, server_rounds=2), rounds=Rounds(rounds=4, evaluate_every=0))
    states: list[State] = []
    inner = SequentialExchange(made.site)
    federation, _ = made.federation(inner, report=lambda record: states.append(federation.server.state))
    federation.run()
    assert differs(states[0], states[1])
    same_bytes(states[1], states[2])
    same_bytes(states[2], states[3])
    constant = world(ALONE, rounds=Rounds(rounds=1, evaluate_every=0)).run().state
    same_bytes(constant, states[0])


def test_sites_are_drawn_anew_every_round() -> None:
    method = replace(SMALL, sites_per_round=2)
    history = world(method, rounds=Rounds(rounds=6, quorum=1, evaluate_every=0)).run().history
    drawn = [tuple(record["sites"]) for record in history]
    assert all(len(sites) == 2 for sites in drawn)
    assert len(set(drawn)) > 1
    again = world(method, rounds=Rounds(rounds=6, quorum=1, evaluate_every=0)).run().history
    assert [tuple(record["sites"]) for record in again] == drawn
    other = world(method, rounds=Rounds(rounds=6, quorum=1, evaluate_every=0, seed=1)).run().history
    assert [tuple(record["sites"]) for record in other] != drawn


# What crosses the wire, and what is refused

Tamper = Callable[[str, Update], Reply | None]


def tampered(made: World, change: Tamper) -> Any:
    """An exchange in which ``change`` has the last word about every reply; None is no reply."""
    inner = SequentialExchange(made.site)

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in inner(messages):
            assert isinstance(reply, Update), reply
            changed = change(site, reply)
            if changed is not None:
                yield site, changed

    return exchange


def test_nothing_but_representations_of_the_public_set_leaves_a_site() -> None:
    """Everything that is sent: [P, d] of the site's modalities. With a learning rate of 0, when the model does not

    depend on the records, it is the same bytes for any private records: no tensor is made of them.
    """

    def everything(data: dict[str, Pairs], training: Training) -> list[Update]:
        made, sent = world(data=data, training=training), []

        def note(site: str, reply: Update) -> Update:
            sent.append(replace(reply, state=dict(reply.state)))
            return reply

        made.run(tampered(made, note))
        return sent

    frozen = replace(SGD, lr=0.0)
    other = {
        "a": pairs(20, 8), "b": pairs(21, 12), "c": lone(22, 9, "image"), "d": lone(23, 10, "image"),
        "e": lone(24, 11, "text"),
    }  # fmt: skip
    for one, two in zip(everything(five_sites(), frozen), everything(other, frozen), strict=True):
        assert one.site == two.site
        same_bytes(one.state, two.state)
        assert one.aux == two.aux == {}
        assert one.state.keys() == set(five_sites()[one.site].modalities)
        assert all(tensor.shape == (10, 4) for tensor in one.state.values())
        assert all(isinstance(value, float) for value in one.metrics.values())
        assert all(name in TIMES or name.startswith("loss/") for name in one.metrics)
    trained = everything(five_sites(), ADAMW)
    assert differs(trained[0].state, everything(other, ADAMW)[0].state), "what the test compares can differ"


def test_the_server_sends_representations_of_the_public_set_and_no_weight() -> None:
    server = prepared(world())
    for site in server.sites:
        message = SMALL.broadcast(server, site)
        assert message.state == {}
        assert {name: tuple(t.shape) for name, t in message.aux.items()} == {"image": (10, 4), "text": (10, 4)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda u: replace(u, state={"image": u.state["image"][:-1]}), r"image is \(9, 4\).*expected \(10, 4\)"),
        (lambda u: replace(u, state={"image": torch.cat([u.state["image"]] * 2)}), r"image is \(20, 4\)"),
        (lambda u: replace(u, state=u.state | {"text": u.state["image"]}), r"1 unexpected tensor\(s\), e.g. text"),
        (lambda u: replace(u, state={}), r"1 missing tensor\(s\), e.g. image"),
        (lambda u: replace(u, aux={"private": u.state["image"]}), r"1 unexpected tensor\(s\), e.g. private"),
        (lambda u: replace(u, state={"image": u.state["image"] * torch.nan}), "NaN"),
        (lambda u: replace(u, public_id=7), "another list of public records"),
    ],
    ids=["too few rows", "too many", "a modality it has not", "nothing", "more", "nan", "other records or order"],
)
def test_a_wrong_reply_is_dropped_and_named(change: Callable[[Update], Update], reason: str) -> None:
    made = world()
    server = made.run(tampered(made, lambda site, reply: change(reply) if site == "c" else reply))
    for record in server.history:
        assert list(record["dropped"]) == ["c"]
        assert re.search(reason, record["dropped"]["c"])
    without = world(data={name: data for name, data in five_sites().items() if name != "c"})
    same_bytes(server.state, without.run().state)


@pytest.mark.parametrize("missing", ["abcd", "abe"], ids=["no images", "no texts"])
def test_a_round_without_suppliers_of_a_modality_completes(missing: str) -> None:
    """C8: only what was supplied is distilled."""
    made = world(rounds=Rounds(rounds=2, quorum=1, evaluate_every=0))
    server = made.run(tampered(made, lambda site, reply: None if site in missing else reply))
    supplied = "text" if missing == "abcd" else "image"
    for record in server.history:
        distilled = {name for name in record["server"] if name.startswith("loss/distil/")}
        assert distilled == {f"loss/distil/{supplied}"}
        assert set(record["dropped"]) == set(missing)


def test_the_server_keeps_a_sample_for_the_report_and_no_more() -> None:
    memory = world(public=pairs(99, 120)).run().memory
    expected = {f"{SAMPLE}image/{s}" for s in "abcd"} | {f"{SAMPLE}text/{s}" for s in "abe"}
    assert memory.keys() == expected
    assert all(tensor.shape == (100, 4) for tensor in memory.values())


def test_models_may_differ_and_the_server_may_be_larger() -> None:
    """Towers of another width at site a; all that must agree is d."""

    class Mixed(World):
        def client(self, name: str) -> Any:
            client = super().client(name)
            if name == "a":
                client.model = Toy(5, norm=True)
                initial = {n: t.clone() for n, t in client.state().items()}
                client.initial = lambda: initial
            return client

    made = Mixed(SMALL, five_sites(), public=pairs(99, 10), objective=CreamFLTaskConfig(classes=4, dim=4).build)
    history = made.run().history
    assert all(record["dropped"] == {} for record in history)


def test_one_optimiser_serves_all_that_the_server_trains() -> None:
    """Else AdamW's first steps would be full-sized whatever ``kd_weight``. Two rounds of 8 and 2 steps are 20."""
    server = world(replace(SMALL, server_steps=8), training=replace(ADAMW, lr=1e-3)).run()
    steps = {name: int(t) for name, t in server.memory.items() if name.endswith("/step")}
    assert steps["optimizer/image_encoder.0.weight/step"] == 20
    assert set(steps.values()) <= {20, 16}, "the class weights are no part of the distillation"
