"""PMS-FM, FedSM and what they share (spec 7.6 and 15.E): SoftPull, the selector's step, and what a site is sent."""

from __future__ import annotations

import os
import random
import signal
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy import (
    ADAMW,
    TEXT,
    Fuse,
    Pairs,
    Recorder,
    Toy,
    World,
    aggregate,
    clone,
    differs,
    forked,
    pairs,
    same_bytes,
)
from torch import Tensor, nn

from fedvlp.core import server_state, tensor_file
from fedvlp.core.aggregation import Averaging
from fedvlp.core.checkpoint import CheckpointError, load_tensors
from fedvlp.core.client import EXTRA, named_state
from fedvlp.core.server_state import Server
from fedvlp.core.snapshots import Snapshots
from fedvlp.core.types import GRADIENT, Broadcast, Reply, State, Update
from fedvlp.federation.loop import QuorumLostError, Rounds
from fedvlp.methods import PMSFM, FedAvg, FedSM
from fedvlp.methods.selection import FIRST, FUSION, SECOND
from fedvlp.methods.softpull import soft_pull
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.selector import SelectorConfig
from fedvlp.objectives.medclip import MedCLIP
from fedvlp.training.settings import Training

SITES = "abc"
ROUNDS = Rounds(rounds=3, evaluate_every=0)
SELECTOR = SelectorConfig(sites=3, classes=("Edema", "Pneumonia"), hidden=8)
METHOD = PMSFM(local_steps=2, selector_lr=0.01)


class Spoken(Toy):
    """A toy that reads words: each has its own random features."""

    def tokenizer(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        streams = [torch.Generator().manual_seed(zlib.crc32(text.encode())) for text in texts]
        return torch.stack([torch.randn(TEXT, generator=g) for g in streams]), torch.ones(len(texts), 1).bool()


def objective(config: SelectorConfig = SELECTOR) -> nn.Module:
    made = MedCLIP()
    made.add_module("extra", config.build(ModelConfig(embedding_dim=4), 0))
    return made


def labelled(seed: int, count: int, tick: Callable[[], None] = lambda: None) -> Pairs:
    made = pairs(seed, count)
    made.labels = torch.randint(-1, 2, (count, 2), generator=torch.Generator().manual_seed(seed)).float()
    made.tick = tick
    return made


def sites(tick: Callable[[], None] = lambda: None) -> dict[str, Pairs]:
    """Sites a, b and c with 8, 12 and 16 records."""
    return {name: labelled(index, 8 + 4 * index, tick) for index, name in enumerate(SITES)}


def world(
    method: Any = METHOD, data: Mapping[str, Any] | None = None, training: Training = ADAMW, **settings: Any
) -> World:
    chosen = {"rounds": ROUNDS, "model": Spoken, "objective": objective, **settings}
    return World(method, sites() if data is None else data, training, **chosen)


def without_selector(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not name.startswith(EXTRA)}


# SoftPull


def models(count: int, seed: int = 0) -> dict[str, State]:
    generator = torch.Generator().manual_seed(seed)
    return {
        str(site): {"w": torch.randn(3, 2, generator=generator), "count": torch.tensor(site)} for site in range(count)
    }


def test_soft_pull_by_hand() -> None:
    """K = 3, lambda = 1/2, w = (4, 0, 8): each keeps half and takes a quarter of the two others: (4, 3, 5)."""
    pulled = soft_pull(
        {"a": {"w": torch.tensor(4.0)}, "b": {"w": torch.tensor(0.0)}, "c": {"w": torch.tensor(8.0)}}, 0.5
    )
    assert [own["w"].item() for own in pulled.values()] == [4.0, 3.0, 5.0]


def test_the_sum_over_sites_does_not_change() -> None:
    for count in [2, 3, 7]:
        for keep in [0.01, 0.3, 0.65, 1.0]:
            before = models(count)
            after = soft_pull(before, keep)
            totals = [sum(own["w"].double() for own in one.values()) for one in (before, after)]
            torch.testing.assert_close(totals[1], totals[0], rtol=0, atol=1e-6)
            assert differs(before["0"], after["0"], ["w"]) == (keep != 1.0)
            assert [own["count"].item() for own in after.values()] == list(range(count)), (
                "integers stay each model's own"
            )


def test_lambda_one_over_k_is_the_uniform_average_after_one_pull() -> None:
    for count in [2, 3, 7]:
        before = models(count)
        mean = torch.stack([own["w"] for own in before.values()]).mean(dim=0)
        for own in soft_pull(before, 1 / count).values():
            torch.testing.assert_close(own["w"], mean, rtol=0, atol=1e-6)


def test_lambda_one_and_a_single_site_change_nothing() -> None:
    before = models(3)
    for site, own in soft_pull(before, 1.0).items():
        same_bytes(own, before[site])
    one = models(1)
    same_bytes(soft_pull(one, 0.65)["0"], one["0"])


def test_a_threshold_and_a_rate_of_0_are_taken() -> None:
    assert (PMSFM(threshold=0.0).threshold, PMSFM(selector_lr=0.0).selector_lr) == (0.0, 0.0)


def test_the_selectors_step_leaves_the_tensors_of_before_alone() -> None:
    """Who keeps model and memory of before a phase, to go back to them, must find them unchanged."""
    server = world().server()
    METHOD.start(server)
    before = {**server.state, **server.memory}
    kept = clone(before)
    assert not shares_storage(server.state, server.memory), "nor is the memory the model itself"
    METHOD.step(server, {GRADIENT + n: torch.ones_like(t) for n, t in server.state.items() if n.startswith(EXTRA)})
    same_bytes(before, kept)
    assert differs(server.state, kept, [name for name in server.state if name.startswith(EXTRA)])
    assert differs(server.memory, kept, list(server.memory))
    assert not any(tensor.requires_grad for tensor in (*server.state.values(), *server.memory.values()))


@pytest.mark.parametrize("kind", [PMSFM, FedSM])
def test_one_huge_gradient_does_not_stop_the_selector_for_good(kind: type[PMSFM]) -> None:
    """It is shortened as changes of the model are; squared as it came it would fill Adam's second moment with inf."""

    def hostile(site: str, message: Broadcast, reply: Any) -> Any:
        if (site, message.phase, message.round) != ("b", "train", 0):
            return reply
        state = {n: torch.full_like(t, 1e38) if n.startswith(GRADIENT) else t for n, t in reply.state.items()}
        return replace(reply, state=state)

    honest, seen = world(kind(local_steps=1)), world(kind(local_steps=1))
    servers = [honest.run(Recorder(honest)), seen.run(Recorder(seen, hostile))]
    longest = [
        max(float(t.abs().max()) for n, t in server.memory.items() if n.startswith(SECOND)) for server in servers
    ]
    assert longest[1] < 100 * longest[0]


def shares_storage(left: State, right: State) -> bool:
    """Whether a tensor of one is the very memory of a tensor of the other."""
    addresses = [{t.data_ptr() for t in state.values() if t.numel()} for state in (left, right)]
    return not addresses[0].isdisjoint(addresses[1])


# Global and personalised models


@pytest.mark.parametrize(("kind", "weighting"), [(PMSFM, "samples"), (FedSM, "uniform")])
def test_the_global_model_is_fedavgs_bit_for_bit(kind: type[PMSFM], weighting: str) -> None:
    seen = world(kind(local_steps=2, weighting=weighting)).run()
    expected = world(FedAvg(local_steps=2, weighting=weighting)).run()
    same_bytes(without_selector(seen.state), without_selector(expected.state))


def test_lambda_one_trains_every_site_alone() -> None:
    """Each personalised model is the one of a run in which no other site exists."""
    method = replace(METHOD, softpull=1.0)
    together = world(method).run()
    for site in SITES:
        alone = world(method, {site: sites()[site]}).run()
        same_bytes(method.personal(together, site), method.personal(alone, site))


class Apart(PMSFM):
    """The model of site c begins far from the global one, as after many rounds; the scale has a range that it keeps."""

    def start(self, server: Server) -> None:
        super().start(server)
        far = {n: t + 10 for n, t in server.memory.items() if n.startswith("personal/c/") and "logit_scale" not in n}
        server.memory |= far


def test_a_personalised_models_change_is_measured_from_that_model() -> None:
    """So bounding changes leaves it alone, however far it is from the global model."""
    method = Apart(local_steps=2, softpull=1.0)
    free, bound = (
        world(method, rounds=Rounds(rounds=1, evaluate_every=0, clip_to_median=times)).run() for times in (0, 2)
    )
    for site in SITES:
        same_bytes(method.personal(bound, site), method.personal(free, site))
    lengths = next(record["server"] for record in bound.history if record["phase"] == "personal").values()
    assert max(lengths) < 2 * min(lengths)


def test_the_cosine_schedule_ends_at_zero() -> None:
    """cosine_rounds 1: full rate in round 0, none after; the selector's rate is its own."""
    method, training = replace(METHOD, softpull=1.0), replace(ADAMW, cosine_rounds=1)
    once, twice = (
        world(method, training=training, rounds=Rounds(rounds=number, evaluate_every=0)).run() for number in (1, 2)
    )
    same_bytes(without_selector(twice.state), without_selector(once.state))
    assert differs(twice.state, once.state)
    constant = world(method, rounds=Rounds(rounds=1, evaluate_every=0)).run()
    same_bytes(constant.state, once.state)
    for site in SITES:
        personal = [without_selector(method.personal(server, site)) for server in (once, twice)]
        same_bytes(*personal)


def test_a_pull_in_a_run_is_soft_pull_of_the_uploads() -> None:
    one = world(rounds=Rounds(rounds=1, evaluate_every=0))
    spy = Recorder(one)
    server = one.run(spy)
    uploads = {site: reply.state for site, reply in spy.replies if reply.phase == "personal"}
    expected = soft_pull(uploads, METHOD.softpull)
    for site in SITES:
        same_bytes(METHOD.personal(server, site), expected[site])


def test_a_site_that_is_away_takes_part_with_the_model_it_was_sent() -> None:
    def away(site: str, message: Broadcast, reply: Reply) -> Reply:
        return ConnectionError("away") if site == "b" and message.phase == "personal" else reply

    one = world(rounds=Rounds(rounds=1, evaluate_every=0))
    spy = Recorder(one, away)
    server = one.run(spy)
    uploads = {site: reply.state for site, reply in spy.replies if reply.phase == "personal"}
    initial = named_state(one.model(), one.objective())
    kept = {name: initial[name] for name in uploads["a"]}
    expected = soft_pull({"a": uploads["a"], "b": kept, "c": uploads["c"]}, METHOD.softpull)
    for site in SITES:
        same_bytes(METHOD.personal(server, site), expected[site])


@pytest.mark.parametrize(("sent", "pulled"), [((4, 0, 800), (4, 2, 402)), ((4, 0), (3, 1)), ((4,), (4,))])
def test_the_pull_towards_a_median_by_hand(sent: tuple[float, ...], pulled: tuple[float, ...]) -> None:
    """Lambda 1/2, so everybody goes half way to the median of all: 4, of two sites 2; one alone stays."""
    method = replace(METHOD, softpull=0.5)
    server = Server(tuple(SITES[: len(sent)]), {"w": torch.zeros(())})
    server.averaging = Averaging("median")
    own = zip(server.sites, sent, strict=True)
    aggregate(method, server, [Update(s, 0, "personal", 1, {"w": torch.tensor(float(w))}) for s, w in own], "personal")
    assert tuple(server.memory[f"personal/{site}/w"].item() for site in server.sites) == pulled


def test_a_sites_model_waits_as_a_copy() -> None:
    """In one process the next site trains in the same tensors; bounding, the default, would have copied them before."""
    method, live = replace(METHOD, softpull=1.0), torch.tensor(0.0)
    server = Server(("a", "b"), {"w": torch.zeros(())})
    pull = method.aggregator(server, "personal")
    for value, site in enumerate(server.sites, 1):
        live.fill_(value)
        pull.add(Update(site, 0, "personal", 1, {"w": live}))
    pull.commit()
    assert [server.memory[f"personal/{site}/w"].item() for site in server.sites] == [1, 2]


def test_only_the_personal_phase_trains_the_models_of_the_sites() -> None:
    """Whose normalisation statistics are not those of the global model."""
    assert [METHOD.trainee(phase) for phase in METHOD.phases(0)] == ["model", "personal"]


# What a site is sent


def sent(method: PMSFM) -> Recorder:
    one = world(method)
    spy = Recorder(one)
    one.run(spy)
    return spy


@pytest.mark.parametrize("keep", [0.65, 1.0])
def test_a_site_is_never_sent_another_sites_model(keep: float) -> None:
    """Of all uploads of personalised weights, the only one that a message may hold unmixed is the site's own."""
    spy = sent(replace(METHOD, softpull=keep))
    uploads = [(site, reply.state) for site, reply in spy.replies if reply.phase == "personal"]
    assert len(uploads) == 9
    for receiver, message in spy.sent:
        assert message.aux == {}
        assert message.scalars.keys() == {"site"}
        assert message.scalars["site"] == SITES.index(receiver)
        for owner, state in uploads:
            held = [name for name, t in state.items() if t.numel() > 1 and torch.equal(t, message.state[name])]
            assert not held or (owner == receiver and keep == 1.0), (owner, receiver, message.round, message.phase)


def test_everybody_is_sent_the_same_global_model_and_each_its_own_personalised_one() -> None:
    spy = sent(METHOD)
    for round in range(ROUNDS.rounds):
        by_phase = {
            phase: [m.state for _, m in spy.sent if (m.round, m.phase) == (round, phase)]
            for phase in ("train", "personal")
        }
        for state in by_phase["train"][1:]:
            same_bytes(state, by_phase["train"][0])
        if round:
            first, second, third = by_phase["personal"]
            assert differs(first, second)
            assert differs(second, third)


def test_no_gradient_or_upload_names_another_tensor() -> None:
    spy = sent(METHOD)
    for _, reply in spy.replies:
        selector = {name for name in reply.state if name.startswith(GRADIENT)}
        assert bool(selector) == (reply.phase == "train")
        extra = {name for name in reply.state if name.startswith(EXTRA)}
        assert all(name.startswith(FUSION) for name in extra), "the selector's weights stay at the server"
        assert bool(extra) == (reply.phase == "personal"), "but for the site's own fusion"


def test_every_site_has_a_text_fusion_of_its_own() -> None:
    """M^TF_k is trained at site k alone (softpull 1), towards its own reports; towers get no gradient of it."""
    method = replace(METHOD, softpull=1.0)
    server = world(method).run()
    names = [name for name in server.state if name.startswith(FUSION)]
    assert names
    own = {site: method.personal(server, site) for site in SITES}
    assert differs(own["a"], own["b"], names)
    assert differs(own["a"], server.state, names)
    image_alone = partial(objective, SelectorConfig(sites=3, classes=SELECTOR.classes, embeddings=("image",), hidden=8))
    without = world(method, objective=image_alone).run()
    for site in SITES:
        same_bytes(without_selector(own[site]), method.personal(without, site))


def test_the_fusion_learns_its_sites_reports() -> None:
    """L_emb falls at every site, and no term of it is there in ``train`` or without a fusion."""
    spy = sent(replace(METHOD, local_steps=8))
    terms: dict[str, list[float]] = {site: [] for site in SITES}
    for site, reply in spy.replies:
        assert ("loss/fusion" in reply.metrics) == (reply.phase == "personal")
        if reply.phase == "personal":
            terms[site].append(reply.metrics["loss/fusion"])
    assert all(values[-1] < values[0] for values in terms.values())


def test_a_run_from_before_personal_fusions_goes_on() -> None:
    server = world().server()
    METHOD.start(server)
    server.memory = {name: t for name, t in server.memory.items() if f"/{FUSION}" not in name}
    own = METHOD.personal(server, "a")
    assert {name: own[name] for name in own if name.startswith(FUSION)} == {
        name: tensor for name, tensor in server.state.items() if name.startswith(FUSION)
    }


# The selector

TEMPLATES = replace(SELECTOR, templates=(("mild edema", "edema on the right"), ("pneumonia",)))


def test_with_templates_it_is_trained_on_what_inference_shows_it() -> None:
    """Every image with every sentence, each naming one finding: not the study's report, not its labels."""
    gradients = []
    for change in (0, 1):
        data = sites()
        for one in data.values():
            image, text = one.content["train"]
            one.content = {"train": (image, text + change)}
            one.labels = one.labels.roll(change, dims=0)
        first = world(replace(METHOD, local_steps=0), data, objective=partial(objective, TEMPLATES))
        spy = Recorder(first)
        first.run(spy)
        gradients.append({n: t for n, t in spy.replies[0][1].state.items() if n.startswith(GRADIENT)})
    same_bytes(*gradients)


def test_the_templates_gradient_is_that_of_the_mean_over_all_pairs() -> None:
    """By hand: for each sentence of class c, the loss of all images with it as report and c as their one finding."""
    one = world(replace(METHOD, local_steps=0), objective=partial(objective, TEMPLATES))
    spy = Recorder(one)
    one.run(spy)
    model, made = Spoken().eval(), objective(TEMPLATES)
    selector: Any = made.extra
    spoken = {text: model({"text": ids, "text_mask": ids.new_ones(1, 1).bool()}).text.detach()
              for text in (*selector.words, *selector.sentences)
              for ids in [model.tokenizer([text])[0]]}  # fmt: skip
    words = torch.cat([spoken[word] for word in selector.words])
    images = model({"image": sites()["a"].content["train"][0]}).image.detach()
    labels = {"mild edema": [1.0, 0.0], "edema on the right": [1.0, 0.0], "pneumonia": [0.0, 1.0]}
    losses = []
    for text, own in labels.items():
        report, named = spoken[text].expand(len(images), -1), torch.tensor([own]).expand(len(images), -1)
        losses.append(selector.loss(images, report, words, named, 0))
    torch.stack(losses).mean().backward()
    sent_by_a = next(reply.state for site, reply in spy.replies if site == "a")
    for name, parameter in selector.named_parameters():
        torch.testing.assert_close(sent_by_a[GRADIENT + EXTRA + name], parameter.grad, rtol=1e-4, atol=1e-6)


class Double(Spoken):
    """In float64, so that rounding stays far below what is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def tokenizer(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        ids, mask = super().tokenizer(texts)
        return ids.double(), mask


def double_sites() -> dict[str, Pairs]:
    made = sites()
    for one in made.values():
        one.content = {"train": tuple(tensor.double() for tensor in one.content["train"])}
    return made


def pooled_adam(rounds: int, lr: float, members: str = SITES) -> tuple[nn.Module, torch.optim.Adam]:
    """One selector trained on all members' records at one place: full batch, one Adam step a round, frozen encoders."""
    data = double_sites()
    model, selector = Double().eval(), objective().double().extra
    assert isinstance(selector, nn.Module)
    ids, mask = model.tokenizer(selector.words)
    words = model({"text": ids, "text_mask": mask}).text.detach()
    adam = torch.optim.Adam(selector.parameters(), lr=lr)
    total = sum(data[site].num_train for site in members)
    for _ in range(rounds):
        adam.zero_grad()
        for site in members:
            one, index = data[site], SITES.index(site)
            output = model({"image": one.content["train"][0], "text": one.content["train"][1]})
            loss = selector.loss(output.image.detach(), output.text.detach(), words, one.labels, index)  # type: ignore
            (loss * one.num_train / total).backward()
        adam.step()
    return selector, adam


def test_the_aggregated_step_is_one_centralised_full_batch_adam_step() -> None:
    """Spec 15.E (there to 1e-6): five rounds, weights and both moments; encoders stand still so that both see the same.

    In float64. In float32 Adam divides gradients that are all but zero by their own size and enlarges their rounding:
    1.6e-6 after five rounds.
    """
    method = PMSFM(local_steps=0, selector_lr=0.01)
    rounds = Rounds(rounds=5, evaluate_every=0)
    made = world(method, double_sites(), model=Double, objective=lambda: objective().double(), rounds=rounds)
    server = made.run()
    selector, adam = pooled_adam(5, 0.01)
    initial = objective().double().state_dict()
    for name, weight in selector.named_parameters():
        full = EXTRA + name
        torch.testing.assert_close(server.state[full], weight.detach(), rtol=0, atol=1e-9)
        torch.testing.assert_close(server.memory[FIRST + full], adam.state[weight]["exp_avg"], rtol=0, atol=1e-9)
        torch.testing.assert_close(server.memory[SECOND + full], adam.state[weight]["exp_avg_sq"], rtol=0, atol=1e-9)
        assert not torch.equal(server.state[full], initial[f"extra.{name}"])


def test_averaging_each_sites_own_adam_step_is_another_step() -> None:
    """Why the gradients are averaged: the n_k/n mean of the sites' own Adam steps is not that of the mean gradient."""
    together, _ = pooled_adam(1, 0.01)
    counts = {site: one.num_train for site, one in sites().items()}
    alone = {site: dict(pooled_adam(1, 0.01, site)[0].named_parameters()) for site in SITES}
    gaps = []
    for name, weight in together.named_parameters():
        mean = sum(alone[site][name] * count for site, count in counts.items()) / sum(counts.values())
        gaps.append((mean - weight).abs().max().item())
    assert max(gaps) > 1e-3


def test_the_gradient_is_taken_at_the_received_weights() -> None:
    """Local training moves the site's encoders first; the selector's gradient must not notice."""
    gradients = []
    for steps in (0, 2):
        one = world(replace(METHOD, local_steps=steps), rounds=Rounds(rounds=1, evaluate_every=0))
        spy = Recorder(one)
        one.run(spy)
        gradients.append({n: t for n, t in spy.replies[0][1].state.items() if n.startswith(GRADIENT)})
    same_bytes(*gradients)


def test_more_sites_than_the_selector_knows_is_said() -> None:
    few = replace(SELECTOR, sites=2)
    one = world(objective=lambda: objective(few))
    server = one.run(Recorder(one))
    assert {site for record in server.history for site in record["dropped"]} == {"c"}
    assert "this is site 3 of 2; set extra.sites" in server.history[0]["dropped"]["c"]


def shifted(permuted: bool) -> dict[str, Pairs]:
    """Three sites whose images and reports stand apart; ``permuted`` deals the records to the sites at random."""
    generator = torch.Generator().manual_seed(0)
    made = {name: pairs(index, 240) for index, name in enumerate(SITES)}
    image = torch.cat([one.content["train"][0] + 3 * torch.randn(1, 6, generator=generator) for one in made.values()])
    text = torch.cat([one.content["train"][1] for one in made.values()])
    order = torch.randperm(720, generator=generator) if permuted else torch.arange(720)
    for index, one in enumerate(made.values()):
        rows = order[240 * index : 240 * (index + 1)]
        one.content = {"train": (image[rows[:120]], text[rows[:120]]), "test": (image[rows[120:]], text[rows[120:]])}
        one.labels = torch.zeros(120, 2)
    return made


@pytest.mark.parametrize(("permuted", "least", "most"), [(False, 0.8, 1.0), (True, 0.33 - 0.075, 0.33 + 0.075)])
def test_the_selector_learns_sites_and_permuted_sites_give_chance(permuted: bool, least: float, most: float) -> None:
    """Held-out accuracy on 3 x 120 studies; chance is 1/3, three sigma are 7.5 points."""
    data = shifted(permuted)
    method = PMSFM(local_steps=0, selector_lr=0.03)
    one = world(method, data, rounds=Rounds(rounds=40, evaluate_every=0))
    server = one.run()
    client = one.client("a")
    client.load(server.state)
    model, selector = client.model.eval(), client.objective.extra
    ids, mask = model.tokenizer(selector.words)  # type: ignore
    words = model({"text": ids, "text_mask": mask}).text
    right = []
    for index, name in enumerate(SITES):
        image, text = data[name].content["test"]
        output = model({"image": image, "text": text})
        present = selector.present(torch.zeros(len(image), 2))  # type: ignore
        right.append((selector(output.image, output.text, words, present).argmax(1) == index).double())  # type: ignore
    assert least <= torch.cat(right).mean() <= most


# Kill, resume, records


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as large: the sites' own are in files, which are pulled in pieces of seven values."""
    monkeypatch.setattr(server_state, "PARK_BYTES", 0)
    monkeypatch.setattr(tensor_file, "PIECE", 7)


def own_models(server: Server, method: PMSFM = METHOD) -> dict[str, State]:
    return {site: clone(method.personal(server, site)) for site in server.sites}


@pytest.mark.parametrize("averaging", ["mean", "median"])
@pytest.mark.usefixtures("apart")
def test_large_models_are_in_files_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaging: str
) -> None:
    """b is away in round 1, so its file is what the round before left."""

    def away(site: str, message: Broadcast, reply: Reply) -> Reply:
        return ConnectionError("away") if (site, message.phase, message.round) == ("b", "personal", 1) else reply

    rounds = Rounds(rounds=3, evaluate_every=0, averaging=averaging)
    runs = []
    for limit, folder in ((10**9, tmp_path / "memory"), (0, tmp_path / "files")):
        monkeypatch.setattr(server_state, "PARK_BYTES", limit)
        one = world(folder=folder, rounds=rounds)
        runs.append(one.run(Recorder(one, away)))
    expected, seen = runs
    same_bytes(seen.state, expected.state)
    for site, own in own_models(seen).items():
        same_bytes(own, METHOD.personal(expected, site))
    assert not any(name.startswith("personal/") for name in seen.memory)
    assert any(name.startswith("personal/") for name in expected.memory)
    assert not (tmp_path / "memory" / "apart").exists()


@pytest.mark.usefixtures("apart")
def test_a_phase_writes_the_models_of_the_sites_only_when_they_changed(tmp_path: Path) -> None:
    """The checkpoint holds one model; the files of the last rounds stay with their checkpoints, and no others."""
    one = world(folder=tmp_path, rounds=Rounds(rounds=8, evaluate_every=0))
    files: list[set[str]] = []
    federation, _ = one.federation()
    federation.report = lambda record: files.append({file.name for file in (tmp_path / "apart").iterdir()})
    federation.run()
    assert len(files[0]) == 1  # what all begin with, once
    assert {len(names) for names in files[-4:]} == {15}  # rounds 4 to 8 begin with three files each
    assert files[-2] == files[-3], "the phase train writes none"
    assert {name.split("-")[0] for name in files[-1]} == {f"{round:05d}" for round in range(3, 8)}
    saved = load_tensors(tmp_path / "server.safetensors")[0]
    assert {f"state/{name}" for name in federation.server.state} <= saved.keys()
    assert not [name for name in saved if "personal" in name]


@pytest.mark.usefixtures("apart")
def test_killed_while_the_files_are_written_it_resumes_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at the first and last and four more writes, syncs and renames of files."""
    expected = world(folder=tmp_path / "whole").run()
    counted = Fuse()

    def watched(fuse: Fuse) -> None:
        for target, name in ((tensor_file.TensorFile, "write"), (os, "fsync"), (os, "replace")):
            real = getattr(target, name)

            def burning(*arguments: Any, real: Callable[..., Any] = real) -> Any:
                fuse()
                return real(*arguments)

            monkeypatch.setattr(target, name, burning)

    def whole() -> int:
        watched(counted)
        world(folder=tmp_path / "counted").run()
        return counted.count

    with monkeypatch.context():
        count = in_child(whole, tmp_path / "count")
    for moment in sorted({1, count, *random.Random(0).sample(range(1, count), 4)}):
        folder = tmp_path / str(moment)

        def killed(folder: Path = folder, moment: int = moment) -> None:
            watched(Fuse(moment))
            world(folder=folder).run()

        assert forked(killed) == -signal.SIGKILL
        resumed = world(folder=folder).run()
        same_bytes(resumed.state, expected.state)
        same_bytes(resumed.memory, expected.memory)
        for site, own in own_models(resumed).items():
            same_bytes(own, METHOD.personal(expected, site))
        named = {file.name for file in (folder / "apart").iterdir()}
        assert named == {file.name for file in (tmp_path / "whole" / "apart").iterdir()}, "nothing is left behind"


def in_child(work: Callable[[], int], note: Path) -> int:
    """What ``work`` returns in a process of its own."""
    assert forked(lambda: note.write_text(str(work()), encoding="ascii") and None) == 0
    return int(note.read_text(encoding="ascii"))


@pytest.mark.usefixtures("apart")
def test_a_run_is_put_back_with_its_files(tmp_path: Path) -> None:
    """Round 2 again from the beginning of round 2; and a file that is missing, or has lost a bit, is named."""
    expected = world(folder=tmp_path).run()
    before = own_models(expected)
    snapshots = Snapshots(tmp_path / "server.safetensors")
    snapshots.restore(2)
    snapshots.tidy()
    kept = Server.load(tmp_path / "server.safetensors")[0]
    assert kept.round == 2
    assert differs(METHOD.personal(kept, "a"), before["a"], ["text_head.bias"])
    again = world(folder=tmp_path).run()
    for site, own in own_models(again).items():
        same_bytes(own, before[site])
    lost = next(name for name in again.apart.values())
    content = (tmp_path / "apart" / lost).read_bytes()
    (tmp_path / "apart" / lost).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"cannot read {lost}.*not as they were written"):
        Server.load(tmp_path / "server.safetensors")
    (tmp_path / "apart" / lost).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read {lost}"):
        Server.load(tmp_path / "server.safetensors")


@pytest.mark.usefixtures("apart")
def test_a_phase_that_loses_its_quorum_leaves_the_files_of_before(tmp_path: Path) -> None:
    def away(site: str, message: Broadcast, reply: Reply) -> Reply:
        lost = site != "a" and (message.phase, message.round) == ("personal", 1)
        return ConnectionError("away") if lost else reply

    expected = world(folder=tmp_path / "whole").run()
    one = world(folder=tmp_path / "lost")
    with pytest.raises(QuorumLostError):
        one.run(Recorder(one, away))
    resumed = world(folder=tmp_path / "lost").run()
    for site, own in own_models(resumed).items():
        same_bytes(own, METHOD.personal(expected, site))


def test_a_models_tensor_with_one_value_per_site_is_no_curve() -> None:
    """The selector's bias and its moments have as many values as there are sites; they must not look like weights."""
    assert world().run().history[0]["memory"] == {}


def test_without_a_selector_there_is_soft_pull_alone() -> None:
    server = world(objective=MedCLIP).run()
    assert differs(METHOD.personal(server, "a"), METHOD.personal(server, "b"))
    same_bytes(server.state, world(FedAvg(local_steps=2), objective=MedCLIP).run().state)
