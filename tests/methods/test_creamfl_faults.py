"""The faults C1 to C12 of CreamFL's released code, each with a test that shows that it is not here (spec 6.6).

C2 is in tests/methods/math/test_contrast.py, C5, C6 and C8 in tests/methods/test_creamfl.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.toy import Toy as ToyModel
from support.toy import World, differs, pairs, raw, same_bytes

from fedvlp.core.types import Broadcast
from fedvlp.data.cohort import Cohort
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.methods import CreamFL
from fedvlp.methods.ensemble import DISTIL, PUBLIC, PublicEnsemble
from fedvlp.methods.math.contrast import representations
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.tiny import HashTokenizer
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.presets import PRESETS
from fedvlp.training.settings import Training

MODEL = ModelConfig(embedding_dim=16, image_size=32, max_tokens=16, vocabulary=256, head_hidden=16, head_norm="layer",
                    text_layers=1)  # fmt: skip
METHOD = CreamFL(local_steps=1, local_epochs=1, server_steps=1)
SMALL = Experiment(
    "small", METHOD, MODEL, CreamFLTaskConfig(classes=6, dim=16), SyntheticCohort(sites=3, size=90, image_size=36),
    Partition(image_only=1, text_only=1, public=0.3), Training(batch_size=4), Rounds(rounds=1, evaluate_every=0),
)  # fmt: skip


def words(count: int) -> Cohort:
    """Texts only: text i has 1 + 7 i % 5 words, its label says how many."""
    lengths = [1 + 7 * index % 5 for index in range(count)]
    names = tuple(map(str, range(count)))
    return Cohort(
        ids=names, patients=names, studies=names, reports=tuple(" ".join(["word"] * n) for n in lengths),
        labels=np.eye(5, dtype=np.float32)[[n - 1 for n in lengths]], label_names=tuple("12345"),
        splits=np.array(["train"] * count), sites=("site-1",) * count, images=lambda rows: np.zeros((len(rows), 8, 8)),
        fingerprint="x", imaged=np.zeros(count, dtype=bool),
    )  # fmt: skip


def test_c1_labels_stay_with_their_texts() -> None:
    from fedvlp.data.loader import SiteData

    data = SiteData(words(40), {"train": np.arange(40)}, HashTokenizer(64, 8), 8)
    for batch in data.train_batches(8, 10, torch.Generator().manual_seed(0)):
        count = batch["text_mask"].sum(1) - 1  # without the first token
        assert torch.equal(batch["labels"].argmax(1) + 1, count)
        assert len(set(count.tolist())) > 1


def test_c2_the_servers_running_statistics_and_random_numbers_do_not_move() -> None:
    """Representing and measuring the public set is no training."""
    world = World(replace(METHOD, order="paper"), model=lambda: ToyModel(norm=True, dropout=0.5), public=pairs(9, 8))
    server = world.server()
    before, random = {n: t.clone() for n, t in server.state.items()}, torch.get_rng_state()
    world.method.prepare(server)  # in this order the server does not train here
    same_bytes(server.state, before)
    assert torch.equal(torch.get_rng_state(), random)


def test_c3_every_party_sees_the_same_public_inputs() -> None:
    assembly = Assembly(SMALL)
    host = assembly.server(assembly.sites()).trainer
    assert host is not None
    (shared,) = host.client.data.batches("train", 10_000, drop_last=False)
    for site in ("site-1", "site-2"):
        client = assembly.site(site).client
        seen = torch.full_like(shared["image"], torch.nan)
        teachers = {name: torch.zeros(len(seen), 16) for name in ("image", "text")}
        message, size = Broadcast(0, "train", {}, teachers), SMALL.training.batch_size
        for batch in METHOD.batches(client, message, size, torch.Generator()):
            if PUBLIC + "row" in batch:
                seen[batch[PUBLIC + "row"]] = batch[PUBLIC + "image"]
        known = ~seen.flatten(1).isnan().any(dim=1)
        assert known.sum() >= len(seen) - SMALL.training.batch_size
        assert torch.equal(seen[known], shared["image"][known])


def test_the_server_distils_the_inputs_that_the_sites_represented() -> None:
    """Bytes of images, and of tokens up to padding, are those of the item; with ``distil_augmented`` images are crops.

    Every item is distilled once before any is again, but for the smaller last batch of a pass.
    """
    assembly = Assembly(SMALL)
    host = assembly.server(assembly.sites()).trainer
    assert host is not None
    (represented,) = host.client.data.batches("train", 10_000, drop_last=False)
    count = len(represented["row"])
    message, size = Broadcast(0, DISTIL, {}, {}), SMALL.training.batch_size

    def distilled(**settings: Any) -> list[dict[str, torch.Tensor]]:
        method = replace(METHOD, distil_steps=2 * (count // size), **settings)
        return list(method.batches(host.client, message, size, torch.Generator().manual_seed(1)))

    plain = distilled()
    assert len(plain) == 2 * (count // size)
    for batch in plain:
        rows, length = batch["row"], batch["text"].shape[1]
        assert raw(batch["image"]) == raw(represented["image"][rows])
        assert raw(batch["text"]) == raw(represented["text"][rows][:, :length])
        assert raw(batch["text_mask"]) == raw(represented["text_mask"][rows][:, :length])
        assert not represented["text_mask"][rows][:, length:].any()
    first, second = torch.cat([batch["row"] for batch in plain]).chunk(2)
    for half in (first, second):
        assert len(half.unique()) == len(half) == count // size * size
    assert not torch.equal(first, second)
    for batch in distilled(distil_augmented=True):
        assert raw(batch["image"]) != raw(represented["image"][batch["row"]])


@pytest.mark.parametrize("size", [2, 5, 31])
def test_c4_the_public_set_has_any_size(size: int) -> None:
    world = World(METHOD, public=pairs(9, size), rounds=Rounds(rounds=2, evaluate_every=0))
    assert all(record["dropped"] == {} for record in world.run().history)


def test_c7_another_seed_is_another_run_at_every_site() -> None:
    """Of one and the same initial model."""

    def sent(seed: int) -> list[Any]:
        world = World(METHOD, rounds=Rounds(rounds=1, seed=seed, evaluate_every=0))
        server = world.server()
        server.phase = "train"
        world.method.prepare(server)
        return [world.site(name).handle(world.method.broadcast(server, name)).state for name in "abc"]

    for first, again, other in zip(sent(0), sent(0), sent(1), strict=True):
        same_bytes(first, again)
        assert differs(first, other)


def test_c9_no_round_is_chosen_by_its_test_figures() -> None:
    """The model is the last round's, however well an earlier one did on the test split."""
    rounds = Rounds(rounds=3, evaluate_every=1)
    falling = iter(range(100, 0, -1))
    judged = World(METHOD, rounds=rounds, evaluate=lambda client, splits: {"test/mean/r1": float(next(falling))})
    same_bytes(judged.run().state, World(METHOD, rounds=replace(rounds, evaluate_every=0)).run().state)


def test_c10_held_out_images_have_the_size_that_is_trained_on() -> None:
    data = Assembly(SMALL).site("site-2").client.data
    trained = next(iter(data.train_batches(1, 2, torch.Generator())))["image"]
    held_out = next(iter(data.batches("test", 2, drop_last=False)))["image"]
    assert trained.shape[1:] == held_out.shape[1:] == (1, 32, 32)


def test_c11_no_word_is_unknown() -> None:
    """The vocabulary is no list of another data set's words."""
    ids, mask = HashTokenizer(4096, 64)(["wall street bears claw back into the black reuters"])
    assert mask.sum() == 10
    known = ids[mask][1:].tolist()
    assert min(known) >= 2
    assert len(set(known)) == len(known)


VARIANTS = [name for name, preset in PRESETS.items() if isinstance(preset.method, PublicEnsemble)]


@pytest.mark.parametrize("name", VARIANTS)
def test_c12_every_variant_is_there_and_runs(name: str) -> None:
    method = replace(PRESETS[name].method, local_steps=1, local_epochs=1, server_steps=1)
    world = World(method, rounds=Rounds(rounds=2, evaluate_every=0))
    server = world.run()
    assert all(record["dropped"] == {} for record in server.history)
    assert differs(server.state, world.server().state)


def test_the_paper_preset_is_the_papers() -> None:
    """Spec 6.4: 10 of 35 sites, 30 rounds of 5 local epochs, ResNet-101 and BERT, d = 512, rate 2e-4, batch 128."""
    paper = PRESETS["creamfl-paper"]
    method = paper.method
    assert isinstance(method, CreamFL)
    assert (method.sites_per_round, method.local_epochs, method.server_rounds, paper.rounds.rounds) == (10, 5, 30, 30)
    assert (method.temperature, method.gamma, method.kd_weight, method.kd_norm) == (0.5, 0.5, 0.3, "mse")
    assert (method.order, method.joint, method.gca_exclude_positive) == ("released", False, True)
    model = paper.model
    assert (model.image_tower, model.text_tower, model.embedding_dim) == ("resnet101", "bert-base-uncased", 512)
    assert {(m.image_tower, m.text_tower, m.embedding_dim) for _, m in paper.site_models} == {("resnet18", "gru", 512)}
    assert (paper.training.lr, paper.training.batch_size) == (2e-4, 128)
    assert len(paper.site_models) == 35
    assert (paper.partition.image_only, paper.partition.text_only) == (10, 10)


def test_c12_the_variants_are_what_the_paper_calls_them() -> None:
    """Spec 6.5: (aggregation, inter, intra)."""
    expected = {
        "reamfl-mean": ("mean", False, False), "reamfl-avg": ("avg", False, False),
        "reamfl-iot": ("iot", False, False), "reamfl-gca": ("gca", False, False),
        "reamfl-inter": ("gca", True, False), "reamfl-intra": ("gca", False, True), "creamfl": ("gca", True, True),
    }  # fmt: skip
    for name, settings in expected.items():
        method = PRESETS[name].method
        assert isinstance(method, CreamFL)
        assert (method.aggregation, method.inter, method.intra) == settings


def test_representations_of_another_order_of_the_public_set_carry_another_id() -> None:
    """What a site that holds the records in another order would send is refused by its id."""
    from fedvlp.run.assembly import public_id

    assembly = Assembly(SMALL)
    rows = np.arange(len(assembly.cohort))
    reordered = assembly.cohort.take(rows[::-1])
    assert public_id(reordered) != public_id(assembly.cohort)
    reps = representations(assembly.site("site-1").client, ("image",))
    assert len(reps["image"]) == assembly.public(None).num_train
