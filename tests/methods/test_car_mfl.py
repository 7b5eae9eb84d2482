"""CAR-MFL: what is retrieved and from where, how towers are weighed, and its identities with mFedAvgP and FedAvg."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy import Fuse, Pairs, World, aggregate, forked, same_bytes
from support.toy_multimodal import aggregated, labelled, mixed, paired, world

from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, MODALITIES, Batch, Broadcast, State, Update, modality
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.site import Site
from fedvlp.methods.car_mfl import CARMFL, COMPLETE, MET, PARTNERS, ROUNDS, SHOWN, distinct, features, noted
from fedvlp.methods.mfedavg import MFedAvg

LINEAR = CARMFL(local_steps=2, renorm="linear")
SOFTMAX = CARMFL(local_steps=2)
THREE = {"a": (1.0, 8), "b": (2.0, 12), "c": (4.0, 16)}


def sent(place: World, site: str) -> Broadcast:
    """The message of round 0 to a site."""
    server = place.server()
    server.phase = "train"
    place.method.prepare(server)
    return place.method.broadcast(server, site)


def partners(method: CARMFL, site: str = "b", place: World | None = None) -> torch.Tensor:
    """The public items that a site retrieves in round 0."""
    place = place or world(method)
    client = place.client(site)
    method.receive(client, sent(place, site))
    return client.memory[PARTNERS][-1]


# Retrieval


def test_the_query_in_the_pool_retrieves_itself() -> None:
    """Distance 0 and, as its labels are its own, Jaccard 1."""
    public = labelled(99, 10)
    own = labelled(99, 10, ("image",))
    for k in (1, 5, 10):
        found = partners(replace(LINEAR, k=k), place=world(LINEAR, {"a": labelled(0, 8), "b": own}, public=public))
        assert found.tolist() == list(range(10))


def test_one_neighbour_is_the_plain_nearest() -> None:
    place = world(LINEAR)
    client = place.client("b")
    client.load(place.server().state)
    mine, pool = (features(client, data, "image")[0] for data in (client.data, place.public))
    nearest = (mine[:, None] - pool[None]).square().sum(2).argmin(1)
    assert partners(replace(LINEAR, k=1), place=place).tolist() == nearest.tolist()


def test_all_neighbours_is_the_best_label_match_and_then_the_nearest() -> None:
    place = world(LINEAR)
    client = place.client("c")
    client.load(place.server().state)
    (mine, labels), (pool, theirs) = (features(client, data, "text") for data in (client.data, place.public))
    expected = []
    for row in range(len(mine)):
        distance = (pool - mine[row]).square().sum(1)
        union = (labels[row] | theirs).sum(1)
        alike = torch.where(union == 0, 1.0, (labels[row] & theirs).sum(1) / union.clamp(min=1))
        best = (alike == alike.max()).nonzero()[:, 0]
        expected.append(int(best[distance[best].argmin()]))
    assert partners(replace(LINEAR, k=1000), "c", place).tolist() == expected, "k beyond the pool is the whole pool"


def test_uncertain_and_blank_labels_are_no_findings() -> None:
    """Z9: -1 and nan count as absent, at the site and in the public set. Every public item is a candidate.

    The pool's findings are {0 1 2}, {0}, {2} (written nan -1 1) and {1 2}. Record 0 says 1 -1 nan, so it has {0}: the
    most alike is item 1, while item 0 is nearest and would win if -1 or nan were findings. Record 1 has {2}: the most
    alike is item 2; if its -1 or nan were findings, item 3, the nearest, would be as much alike (1/2) and win.
    """
    nan = math.nan
    public, own = labelled(99, 4), labelled(1, 2, ("image",))
    public.labels = torch.tensor([[1.0, 1, 1], [1, 0, 0], [nan, -1, 1], [0, 1, 1]])
    own.labels = torch.tensor([[1.0, -1, nan], [0, 0, 1]])
    own.content = {"train": (public.content["train"][0][[0, 3]], own.content["train"][1])}
    place = world(LINEAR, {"a": labelled(0, 8), "b": own}, public=public)
    client = place.client("b")
    assert features(client, own, "image")[1].tolist() == [[True, False, False], [False, False, True]]
    assert partners(replace(LINEAR, k=1), place=place).tolist() == [0, 3], "the nearest items"
    assert partners(replace(LINEAR, k=4), place=place).tolist() == [1, 2]


def test_the_other_modality_of_the_partner_is_lent_and_nothing_else_changes() -> None:
    place = world(LINEAR)
    for site, own, lent in (("b", "image", "text"), ("c", "text", "image")):
        client, message = place.client(site), sent(place, site)
        LINEAR.receive(client, message)
        batch = {key: t[[3, 0, 3]] for key, t in next(client.data.batches("train", 99, drop_last=False)).items()}
        full = LINEAR.complete(client, batch, message)
        donors = client.memory[PARTNERS][-1][[3, 0, 3]]
        assert torch.equal(full[lent], place.public.content["train"][MODALITIES.index(lent)][donors])
        assert torch.equal(full[own], batch[own])
        assert torch.equal(full["labels"], batch["labels"]), "a partner lends its modality, not its labels"
        older = (client.memory[PARTNERS][-1:] + 1) % 10
        client.memory[PARTNERS] = torch.cat([older, client.memory[PARTNERS]])
        assert torch.equal(LINEAR.complete(client, batch, message)[lent], full[lent]), "this round's partners"
        one = LINEAR.complete(client, {key: t[:1] for key, t in batch.items()}, message)
        assert len(one[lent]) == 1, "bug M2: a last batch of one record"
        kept = {f"{own}_tokens" if key == own else key: tensor for key, tensor in batch.items()}
        full = LINEAR.complete(client, kept, message)
        assert lent in full
        assert own not in full, "what is there as tokens alone (training.cache_features) is not lacking"


def test_a_paired_site_retrieves_nothing() -> None:
    place = world(LINEAR)
    message = sent(place, "a")
    assert message.aux == {}
    client = place.client("a")
    LINEAR.receive(client, message)
    assert client.memory == {}
    batch = next(client.data.batches("train", 4, drop_last=False))
    assert LINEAR.complete(client, batch, message) is batch


class OfBoth(Pairs):
    """Records that stand alone beside pairs: the first four images, the next three pairs, the rest reports."""

    FIRST, LAST = 4, 7

    def having(self, split: str, modalities: Sequence[str] = MODALITIES) -> torch.Tensor:
        of = {("image",): range(self.FIRST), MODALITIES: range(self.FIRST, self.LAST)}
        rows = of.get(tuple(modalities), range(self.LAST, self.num_train))
        return torch.tensor(rows if split == "train" else ())

    def batches(
        self, split: str, batch_size: int, *, drop_last: bool, rows: torch.Tensor | None = None
    ) -> Iterator[Batch]:
        """One of each kind, as of the rows that are asked for."""
        rows = torch.arange(self.num_train) if rows is None else rows
        for held in (("image",), MODALITIES, ("text",)):
            chosen = rows[torch.isin(rows, self.having(split, held))]
            if len(chosen):
                batch = self._batch(split, chosen)
                yield {name: t for name, t in batch.items() if name not in MODALITIES or name in held}


def test_at_a_hospital_of_both_kinds_each_record_is_lent_what_it_alone_lacks() -> None:
    """As at sites that have nothing but such records: they are sent features, this one makes the same itself."""
    whole = labelled(3, 12)
    both = OfBoth(*whole.content["train"])
    both.labels = whole.labels
    place = world(LINEAR, {"a": both, "b": labelled(1, 8, ("image",))})
    found = partners(LINEAR, "a", place)
    assert sent(place, "a").aux == {}, "it is a site with both modalities"
    for held, rows in (("image", slice(0, 4)), ("text", slice(7, None))):
        alone = Pairs(*(half[rows] for half in whole.content["train"]))
        alone.labels, alone.modalities = whole.labels[rows], (held,)
        expected = partners(LINEAR, "a", world(LINEAR, {"a": alone, "b": labelled(1, 8, ("image",))}))
        assert found[rows].tolist() == expected.tolist()
    assert found[4:7].tolist() == [COMPLETE] * 3
    client = place.client("a")
    LINEAR.receive(client, sent(place, "a"))
    for batch in client.data.batches("train", 12, drop_last=False):
        full = LINEAR.complete(client, batch, sent(place, "a"))
        assert {*MODALITIES} <= full.keys()
    assert LINEAR.figures(client, sent(place, "a")) == {"distinct_partners": 1.0}, "pairs have had none"


def test_features_travel_only_where_records_are_completed() -> None:
    """Paired sites need none, so the server keeps none; a site that only evaluates is sent none."""
    place = world(LINEAR, paired(8, 12))
    server = place.server()
    LINEAR.prepare(server)
    assert not {*MODALITIES, "labels"} & server.memory.keys()
    place = world(LINEAR)
    server = place.server()
    LINEAR.prepare(server)
    server.phase = EVALUATE
    message = LINEAR.broadcast(server, "b")
    assert message.aux == {}
    client = place.client("b")
    LINEAR.receive(client, message)
    assert client.memory == {}
    batch = next(client.data.batches("train", 4, drop_last=False))
    client.public = None
    assert LINEAR.complete(client, batch, message) is batch, "nothing is lent without a public set"


def test_a_server_that_does_not_know_the_sites_yet_gives_the_same_bytes() -> None:
    """As at real sites: what a site holds is known from its first reply on; until then it is sent both features."""
    known, unknown = world(LINEAR), world(LINEAR)

    class Blind(World):
        def equip(self, server: Server) -> Server:
            server = super().equip(server)
            server.modalities = {}
            return server

    unknown.__class__ = Blind
    assert set(sent(unknown, "b").aux) == {"image", "text", "labels"}
    same_bytes(unknown.run().state, known.run().state)


def test_only_the_public_set_is_searched() -> None:
    """Whatever the other hospitals hold, b retrieves and imputes the same; every imputed row is a public one.

    What b is sent is the model and the public features and findings, and b's client knows no other hospital's data.
    """
    place, other = world(LINEAR), world(LINEAR)
    other.data = {**mixed(), "a": labelled(7, 40), "c": labelled(8, 40, ("text",))}
    message, unaffected = sent(place, "b"), sent(other, "b")
    same_bytes(message.aux, unaffected.aux)
    assert {name: len(t) for name, t in message.aux.items()} == {"image": 10, "labels": 10}
    assert torch.equal(partners(LINEAR, "b", place), partners(LINEAR, "b", other))
    theirs = {tuple(row) for row in place.public.content["train"][1].tolist()}
    hospitals = {tuple(row) for data in place.data.values() for row in data.content["train"][1].tolist()}
    client = place.client("b")
    LINEAR.receive(client, message)
    full = LINEAR.complete(client, next(client.data.batches("train", 99, drop_last=False)), message)
    imputed = {tuple(row) for row in full["text"].tolist()}
    assert imputed <= theirs
    assert not imputed & hospitals


def test_features_are_the_received_models_in_eval_mode() -> None:
    """With dropout on, two passes would differ."""
    place = world(LINEAR)
    client = place.client("b")
    client.load(place.server().state)
    client.model.image_encoder.append(torch.nn.Dropout(0.5))
    client.model.train()
    once, again = (features(client, client.data, "image")[0] for _ in range(2))
    assert torch.equal(once, again)
    assert not once.requires_grad
    assert torch.allclose(once.norm(dim=1), torch.ones(len(once)))


def test_public_features_are_those_of_the_weights_that_are_sent() -> None:
    """After a round they are new, for the server and the sites alike."""
    place = world(LINEAR)
    before = sent(place, "b")
    server = place.run()
    LINEAR.prepare(server)
    server.phase = "train"
    after = LINEAR.broadcast(server, "b")
    assert not torch.equal(after.aux["image"], before.aux["image"])
    client = place.client("b")
    client.load(after.state)
    assert torch.equal(after.aux["image"], features(client, place.public, "image")[0])


def test_memory_has_a_row_a_round_and_the_probe_counts_distinct_items() -> None:
    """Partners 5 5 6 / 1 1 1 / 2 3 2 of three records over three rounds: 2, 1 and 2 different ones."""
    assert distinct(torch.tensor([[5, 1, 2], [5, 1, 3], [6, 1, 2]])).tolist() == [2, 1, 2]
    place = world(LINEAR, rounds=replace(world(LINEAR).rounds, rounds=3))
    sites = {name: place.site(name) for name in place.data}
    history = place.run(SequentialExchange(sites.__getitem__)).history
    memory = sites["b"].client.memory
    assert memory[PARTNERS].shape == (3, 12)
    assert memory[ROUNDS].tolist() == [0, 1, 2]
    assert history[0]["sites"]["b"]["probe/distinct_partners"] == 1.0
    expected = float(distinct(memory[PARTNERS]).double().mean())
    assert history[2]["sites"]["b"]["probe/distinct_partners"] == expected
    assert "probe/distinct_partners" not in history[0]["sites"]["a"]


def test_the_memory_keeps_the_last_rounds_and_of_the_rest_each_item_once() -> None:
    """Eight rounds of three records; before the last six they had 5 5, 1 2 and 3 3: one, two and one item."""
    history = torch.tensor([[5, 1, 3], [5, 2, 3], [1, 1, 3], [2, 1, 3], [3, 1, 3], [4, 1, 3], [5, 1, 3], [6, 7, 3]])
    memory: State = {}
    for round, items in enumerate(history):
        memory = noted(memory, items, round)
        whole = torch.cat([memory[name] for name in (MET, PARTNERS) if name in memory])
        assert torch.equal(distinct(whole), distinct(history[: round + 1]))
    assert torch.equal(memory[PARTNERS], history[-SHOWN:])
    assert memory[ROUNDS].tolist() == [2, 3, 4, 5, 6, 7]
    assert memory[MET].tolist() == [[5, 1, 3], [5, 2, 3]]
    for round in range(8, 100):
        memory = noted(memory, history[round % 8], round)
    assert memory[PARTNERS].shape == (SHOWN, 3)
    assert memory[MET].sort(dim=0).values.tolist() == [[1, 1, 3], [2, 1, 3], [3, 1, 3], [4, 1, 3], [5, 2, 3], [6, 7, 3]]


def test_a_memory_with_a_row_for_every_round_goes_on() -> None:
    old = {PARTNERS: torch.arange(20).view(10, 2).to(torch.int32), ROUNDS: torch.arange(10)}
    memory = noted(old, torch.tensor([0, 50], dtype=torch.int32), 10)
    assert torch.equal(memory[PARTNERS], torch.cat([old[PARTNERS][5:], torch.tensor([[0, 50]])]))
    assert memory[MET].tolist() == old[PARTNERS][:5].tolist()


def test_a_site_whose_records_become_more_begins_its_list_anew() -> None:
    data = mixed()
    place = world(LINEAR, data, rounds=replace(world(LINEAR).rounds, rounds=3, quorum=3))
    sites = {name: place.site(name) for name in place.data}
    inner = SequentialExchange(sites.__getitem__)

    def growing(messages: Any) -> Any:
        if next(iter(messages.values())).round == 1:
            more = labelled(1, 14, ("image",))
            data["b"].content, data["b"].labels = more.content, more.labels
        yield from inner(messages)

    history = place.run(growing).history
    assert all(not record["dropped"] for record in history)
    assert sites["b"].client.memory[PARTNERS].shape == (2, 14)


# Weights


def means(method: CARMFL, part: str) -> torch.Tensor:
    """Shares (a, b, c, public) in the mean of a part, read off an aggregation of unit updates, one site at a time."""
    shares = []
    for site in "abc":
        state, _ = aggregated(method, mixed(), {s: (float(s == site), n) for s, (_, n) in THREE.items()})
        zero, _ = aggregated(method, mixed(), {s: (0.0, n) for s, (_, n) in THREE.items()})
        name = next(n for n in state if modality(n) == part)
        shares.append(float((state[name] - zero[name]).mean()))
    return torch.tensor([*shares, 1 - sum(shares)])


def test_linear_weights_by_hand() -> None:
    """n = 8, 12, 16 and 10 public; the text of b and the image of c are imputed and count 0.3 n."""
    torch.testing.assert_close(means(LINEAR, "image"), torch.tensor([8, 12, 4.8, 10]) / 34.8)
    torch.testing.assert_close(means(LINEAR, "text"), torch.tensor([8, 3.6, 16, 10]) / 37.6)
    torch.testing.assert_close(means(LINEAR, ""), torch.tensor([8.0, 12, 16, 10]) / 46)


def test_softmax_weights_by_hand() -> None:
    """softmax(alpha n_k / n) per tower; the classifier keeps n_k / n."""
    n = torch.tensor([8.0, 12, 16, 10]) / 46
    torch.testing.assert_close(means(SOFTMAX, "image"), (n * torch.tensor([1, 1, 0.3, 1])).softmax(0))
    torch.testing.assert_close(means(SOFTMAX, "text"), (n * torch.tensor([1, 0.3, 1, 1])).softmax(0))
    torch.testing.assert_close(means(SOFTMAX, ""), n)


def test_the_softmax_is_almost_a_no_op() -> None:
    """Spec 8.3: text-tower share of 8 image-only sites beside 2 paired ones and the public set, in percent.

    Sizes are the published ones: 10 sites of about 2,300 training records (spec 12.2) and 2,701 public records.
    """
    for renorm, alpha, expected in [
        ("softmax", 1.0, 72.6), ("softmax", 0.3, 71.3), ("softmax", 0.0, 70.8),
        ("linear", 1.0, 71.5), ("linear", 0.3, 42.9), ("linear", 0.0, 0.0),
    ]:  # fmt: skip
        held = {f"s{i}": ("image",) if i < 8 else MODALITIES for i in range(10)}
        server = Server(tuple(held), {"text_encoder.w": torch.zeros(1)}, modalities=held)
        method = CARMFL(renorm=renorm, alpha=alpha)
        aggregate(method, server, replies(held), "train")
        assert 100 * server.state["text_encoder.w"].item() == pytest.approx(expected, abs=0.3)


def replies(held: dict[str, tuple[str, ...]]) -> Iterator[Update]:
    """Sites without reports send 1, the others and the public set 0: the mean is the share of the former."""
    for site, modalities in {**held, "server": MODALITIES}.items():
        value = torch.full((1,), float(modalities == ("image",)))
        yield Update(site, 0, "train", 2701 if site == "server" else 2300, {"text_encoder.w": value})


@pytest.mark.parametrize("method", [LINEAR, SOFTMAX])
def test_the_classifier_does_not_depend_on_alpha(method: CARMFL) -> None:
    one, other = (aggregated(replace(method, alpha=alpha), mixed(), THREE)[0] for alpha in (0.0, 1.0))
    for name in one:
        assert torch.equal(one[name], other[name]) == (modality(name) == ""), name


def test_linear_with_alpha_0_leaves_imputed_inputs_out() -> None:
    """Image-only sites and the public set: the text tower is the n-weighted mean of the paired site and the public."""
    data = {"a": labelled(0, 8), "b": labelled(1, 12, ("image",)), "c": labelled(2, 16, ("image",))}
    state, own = aggregated(replace(LINEAR, alpha=0.0), data, THREE)
    for name in state:
        if modality(name) == "text":
            torch.testing.assert_close(state[name], (8 * 1.0 + 10 * own[name]) / 18)


def test_linear_with_alpha_1_is_fedavg_over_all_and_the_public_set() -> None:
    state, own = aggregated(replace(LINEAR, alpha=1.0), mixed(), THREE)
    for name in state:
        torch.testing.assert_close(state[name], (8 * 1.0 + 12 * 2.0 + 16 * 4.0 + 10 * own[name]) / 46)


def test_softmax_with_alpha_1_is_fedavg_only_for_equal_sizes() -> None:
    """Equal n_k (10, as the public set): the plain mean. Unequal: not the n-weighted mean."""
    equal = {"a": (1.0, 10), "b": (2.0, 10), "c": (4.0, 10)}
    method = replace(SOFTMAX, alpha=1.0)
    state, own = aggregated(method, mixed(), equal)
    for name in state:
        torch.testing.assert_close(state[name], (7.0 + own[name]) / 4)
    state, own = aggregated(method, mixed(), THREE)
    tower = next(n for n in state if modality(n) == "text")
    assert not torch.allclose(state[tower], (96 + 10 * own[tower]) / 46, rtol=1e-3)


def test_a_site_without_samples_has_no_weight_under_softmax() -> None:
    """exp(0) = 1 would let an empty site have its say."""
    results = [aggregated(SOFTMAX, mixed(), {"a": (1.0, 8), "b": (b, 0), "c": (1.0, 8)})[0] for b in (314.0, -7.0)]
    same_bytes(*results)
    assert all(t.max() < 3 for t in results[0].values())


# Runs


def test_with_paired_sites_only_it_is_mfedavgp_bit_for_bit() -> None:
    """mFedAvgP-NM: nothing to impute, whatever alpha and k are."""
    data = paired(8, 12, 16)
    expected = world(MFedAvg(local_steps=2, public=True), data).run().state
    same_bytes(world(replace(LINEAR, alpha=0.1, k=3), data).run().state, expected)


def test_imputation_reaches_every_weight_of_a_uni_modal_site() -> None:
    place = world(LINEAR)
    update = place.site("b").handle(sent(place, "b"))
    start = place.server().state
    assert update.state.keys() == start.keys()
    assert all(not torch.equal(t, start[n]) for n, t in update.state.items() if n.endswith("weight"))


@pytest.mark.parametrize(("method", "at"), [(LINEAR, 7), (SOFTMAX, 13), (MFedAvg(local_steps=2, public=True), 7)])
def test_killed_and_resumed_gives_the_same_bytes(method: MFedAvg, at: int, tmp_path: Path) -> None:
    """SIGKILL before the at-th training batch of a site, in the first and the second of three rounds."""
    rounds = replace(world(method).rounds, rounds=3)
    expected = world(method, folder=tmp_path / "whole", rounds=rounds).run()
    folder = tmp_path / "killed"
    assert forked(lambda: world(method, mixed(Fuse(at)), folder=folder, rounds=rounds).run()) == -9
    resumed = world(method, folder=folder, rounds=rounds).run()
    same_bytes(resumed.state, expected.state)
    same_bytes(resumed.memory, expected.memory)
    memories = sorted((tmp_path / "whole" / "sites").rglob("*.safetensors"))
    assert len(memories) == len(list((folder / "sites").rglob("*.safetensors")))
    for memory in memories:
        assert (folder / memory.relative_to(tmp_path / "whole")).read_bytes() == memory.read_bytes()


def test_updates_are_held_as_copies_under_softmax() -> None:
    """The sites of one process share their modules, so that live tensors would all be the last site's."""
    shared, apart = world(SOFTMAX), world(SOFTMAX)

    def renewed(name: str) -> Site:
        apart._modules = None
        return apart.site(name)

    same_bytes(shared.run().state, apart.run(SequentialExchange(renewed)).state)


def test_updates_wait_as_copies_where_nothing_bounds_them_either() -> None:
    """Bounding an update copies it, so that with the default rounds the test above holds for live tensors as well."""
    rounds = replace(world(SOFTMAX).rounds, clip_to_median=0.0, max_share=1.0)
    shared, apart = world(SOFTMAX, rounds=rounds), world(SOFTMAX, rounds=rounds)

    def renewed(name: str) -> Site:
        apart._modules = None
        return apart.site(name)

    same_bytes(shared.run().state, apart.run(SequentialExchange(renewed)).state)


def test_the_best_round_is_noted_as_mfedavg_does() -> None:
    """Spec 8.4 holds for CAR-MFL too; without the note the model would silently be that of the last round."""
    server = world(SOFTMAX).server()
    server.round, server.metrics = 1, {SOFTMAX.best_by: 0.75}
    SOFTMAX.prepare(server)
    assert server.memory["best_figure"] == 0.75
