"""What frozen towers make of records, computed once: the same training, without the towers' cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.towers import client, encoder, frozen_batch_norm
from support.toy import SGD, clone, same_bytes

from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.types import IMAGE_TOKENS, TEXT_TOKENS, Broadcast, Update
from fedvlp.data import loader
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import FedAvg, FedDRA, FedMOON, FedRGB
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives import MedCLIPConfig, MGCAConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import summary
from fedvlp.run.presets import get
from fedvlp.run.simulate import simulate
from fedvlp.training import frozen_features
from fedvlp.training.frozen_features import FixedFeatures, FrozenFeatures, refuse_objective
from fedvlp.training.local_training import Aborted
from studies.rivals import FedFed, NTXentConfig

FROZEN = ModelConfig(init="tiny-pool", head_hidden=32, head_norm="layer", adapters="lora", adapter_rank=0)


def experiment(crop: int = 64, **training: Any) -> Experiment:
    """Two sites; films as large as the model sees them, so that there is nothing to crop."""
    demo = get("feddra")
    return replace(
        demo,
        method=FedDRA(align_steps=2, local_steps=3, mu=5.0, rho=0.1),
        model=FROZEN,
        data=SyntheticCohort(size=120, sites=2, image_size=crop, seed=3),
        partition=replace(demo.partition, sites=2),
        training=replace(demo.training, batch_size=8, **training),
        rounds=replace(demo.rounds, rounds=2),
    )


def runs_of_towers(model: Any, counts: list[int]) -> None:
    model.image_encoder.register_forward_hook(lambda module, inputs, output: counts.append(len(output)))


def assert_same(tensor: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Ten steps of SGD at 0.01 move weights by some 1e-2, and what is rounded elsewhere moves them by some 1e-6.

    5e-6 was the most on processors with SSE4, AVX2 and AVX-512; the limit is four times that.
    """
    torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=2e-5, msg=lambda said: f"{name}: {said}")


@pytest.mark.parametrize(
    "normalised", [pytest.param(False, marks=pytest.mark.slow(seconds=5)), True], ids=["tiny", "batch norm"]
)
def test_training_is_the_same(normalised: bool, tmp_path: Path) -> None:
    """A whole run of two rounds with anchors, evaluation and both phases, to the last digits of float32.

    Also of a tower that normalises by the batch, beside heads whose statistics each site has its own of. By SGD: a bias
    before a normalisation, or of an attention's keys, has no gradient but rounding, which AdamW would divide by itself.
    """
    changes: dict[str, Any] = {}
    sgd = {"optimizer": "sgd", "lr": 0.01}
    if normalised:
        model = replace(frozen_batch_norm(tmp_path / "init"), adapter_rank=0, alignment=True)
        changes = {"model": model, "norm_statistics": "site"}
    models = []
    for name, cached in (("plain", False), ("cached", True)):
        folder = RunFolder.create(tmp_path / name, replace(experiment(cache_features=cached, **sgd), **changes))
        simulate(folder.experiment(), folder)
        server, _ = folder.server() or pytest.fail("no server")
        models.append((server.state, summary(folder.history())["trained"]))
    (plain, figures), (cached, same_figures) = models
    assert plain.keys() == cached.keys()
    assert not any(name.startswith("image_encoder") for name in plain)
    for name, tensor in plain.items():
        assert_same(cached[name], tensor, name)
    assert figures.keys() == same_figures.keys()
    assert figures == pytest.approx(same_figures, abs=2.0), "a query more or less"


def test_the_towers_see_each_record_once() -> None:
    assembly = Assembly(experiment(cache_features=True))
    data, (model, _) = assembly.data("site-1"), assembly.modules("site-1")
    counts: list[int] = []
    runs_of_towers(model, counts)
    for seed in range(3):
        for batch in data.train_batches(20, 8, torch.Generator().manual_seed(seed)):
            assert "image" not in batch
            model.encode(batch)
    assert sum(counts) == data.num_train
    list(data.batches("test", 8, drop_last=False))
    assert sum(counts) == data.num_train + data.sizes["test"]


def test_a_batch_has_the_tokens_of_its_own_records() -> None:
    """Of its films cropped at the centre, in the order of the batch, though the towers saw others beside them."""
    plain, cached = (Assembly(experiment(crop=72, cache_features=on)).data("site-1") for on in (False, True))
    model, _ = Assembly(experiment(crop=72)).modules("site-1")
    model.eval()
    (batch,) = cached.train_batches(1, 8, torch.Generator().manual_seed(5))
    (own,) = plain.batches("train", 8, drop_last=False, rows=batch["row"])
    with torch.no_grad():
        encoded = model.towers(own)
    torch.testing.assert_close(batch[IMAGE_TOKENS], encoded.image, rtol=1e-5, atol=1e-5)
    real = own["text_mask"]
    torch.testing.assert_close(batch[TEXT_TOKENS][real], encoded.text[real], rtol=1e-5, atol=1e-5)
    assert len(set(batch["row"].tolist())) == 8
    assert batch["row"].tolist() != list(range(8))


@pytest.mark.parametrize("crop", [64, 72])
def test_of_a_training_batch_one_film_is_read_and_the_same_records_are_drawn(
    crop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where films are cropped: corners are drawn for all of them. Whoever shares images finds none to share."""
    plain, cached = (Assembly(experiment(crop=crop, cache_features=on)).data("site-1") for on in (False, True))
    next(cached.train_batches(1, 8, torch.Generator()))  # the tokens of all records
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    read: list[int] = []
    corners = loader.random_corners

    def counted(images: torch.Tensor, *others: Any) -> Any:
        read.append(len(images))
        return corners(images, *others)

    monkeypatch.setattr(loader, "random_corners", counted)
    cached.share_images(None)
    drawn = zip(plain.train_batches(20, 8, generators[0]), cached.train_batches(20, 8, generators[1]), strict=True)
    for own, other in drawn:
        assert torch.equal(own["row"], other["row"])
        assert torch.equal(own["text"], other["text"])
    assert read == 20 * [8, 1]
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


def retrieving(cached: bool) -> Experiment:
    """The second of two sites has three retrieved reports a record."""
    plain = experiment(cache_features=cached)
    return replace(plain, partition=replace(plain.partition, image_only=1, public=0.2, retrieve=3))


def test_a_drawn_report_has_its_own_tokens() -> None:
    """Of records with three reports each, a step's text tokens are those of the one that was drawn; so are all."""
    plain, cached = (Assembly(retrieving(on)).data("site-2") for on in (False, True))
    model, _ = Assembly(retrieving(False)).modules("site-2")
    model.eval()
    drawn, own = (next(data.train_batches(1, 8, torch.Generator().manual_seed(5))) for data in (cached, plain))
    assert torch.equal(drawn["report"], own["report"])
    assert not torch.equal(drawn["report"], 3 * drawn["row"]), "always the first one"
    for seen, expected in ((drawn, own), *zip(cached.report_batches(50), plain.report_batches(50), strict=True)):
        with torch.no_grad():
            encoded = model.towers({name: tensor for name, tensor in expected.items() if name != "image"})
        assert torch.equal(seen["row"], expected["row"])
        real = expected["text_mask"]
        torch.testing.assert_close(seen[TEXT_TOKENS][real], encoded.text[real], rtol=1e-5, atol=1e-5)


def test_towers_that_train_read_a_drawn_report_anew() -> None:
    """Tokens are kept by record, and would be another report's."""
    assembly = Assembly(retrieving(False))
    site = assembly.client("site-2", assembly.data("site-2"), "site-2")
    site.fixed = FixedFeatures()
    (batch,) = site.data.train_batches(1, 4, torch.Generator().manual_seed(1))
    state = {name: tensor.clone() for name, tensor in site.state().items()}
    assert site.fixed.encoded(site, batch, state, None) is batch
    assert site.fixed.pooled(site, batch, state, None) is None
    one_each = {name: tensor for name, tensor in batch.items() if name != "report"}
    assert TEXT_TOKENS in site.fixed.encoded(site, one_each, state, None)


def test_in_a_folder_they_outlast_the_process(tmp_path: Path) -> None:
    """Another process reads them; other towers, or other films, have others."""
    assembly = Assembly(experiment())
    data, (model, _) = assembly.data("site-1"), assembly.modules("site-1")
    counts: list[int] = []
    runs_of_towers(model, counts)
    (first,) = FrozenFeatures(data, model, tmp_path).batches("val", 100, drop_last=False)
    seen = len(counts)
    assert seen
    (again,) = FrozenFeatures(data, model, tmp_path).batches("val", 100, drop_last=False)
    assert len(counts) == seen
    assert torch.equal(first[IMAGE_TOKENS], again[IMAGE_TOKENS])
    assert torch.equal(first[TEXT_TOKENS], again[TEXT_TOKENS])
    list(FrozenFeatures(assembly.data("site-2"), model, tmp_path).batches("val", 100, drop_last=False))
    assert len(counts) > seen, "another site's films"
    seen = len(counts)
    next(model.image_encoder.parameters()).data.mul_(1.5)
    (other,) = FrozenFeatures(data, model, tmp_path).batches("val", 100, drop_last=False)
    assert len(counts) > seen
    assert not torch.equal(first[IMAGE_TOKENS], other[IMAGE_TOKENS])
    assert all(path.name.startswith("features-") for path in tmp_path.iterdir()), "a draft is left"


def test_computing_leaves_the_modes_of_the_towers() -> None:
    assembly = Assembly(experiment())
    data, (model, _) = assembly.data("site-1"), assembly.modules("site-1")
    model.train()
    list(FrozenFeatures(data, model).batches("val", 8, drop_last=False))
    assert model.image_encoder.training
    assert model.text_encoder.training


def test_what_changes_from_step_to_step_is_refused() -> None:
    frozen = FROZEN.build()
    for objective in (NTXentConfig(), MedCLIPConfig(sentences=True)):
        with pytest.raises(ValueError, match="draws another image or sentence"):
            refuse_objective(FROZEN, objective.build(frozen, 0))
    mgca = MGCAConfig()
    refuse_objective(FROZEN, mgca.build(frozen, 0))
    bare = replace(FROZEN, alignment=False)
    with pytest.raises(ValueError, match="attention"):
        refuse_objective(bare, mgca.build(bare.build(), 0))


def test_the_refusal_comes_with_the_settings() -> None:
    for changes in ({"adapter_rank": 2}, {"adapters": ""}):
        with pytest.raises(ValueError, match=r"cache_features: the towers are trained.*adapter_rank=0"):
            replace(experiment(cache_features=True), method=FedAvg(), model=replace(FROZEN, **changes))
    with pytest.raises(ValueError, match="FedFed reads the images themselves"):
        replace(experiment(cache_features=True), method=FedFed())
    assert get("feddra-real").training.cache_features


# Towers that are trained, while they are fixed

DRA = FedDRA(align_steps=4, local_steps=4, dro_batch=8)
FIXING = (DRA, FedRGB(local_steps=3, aligner_steps=4, dro_batch=8), FedMOON(local_steps=4))


class Forgetful(FixedFeatures):
    """Computes everything anew whenever it is asked, as a process does that has just started."""

    def _tokens_by(self, *asked: Any) -> Any:
        self._tokens = {}
        return super()._tokens_by(*asked)

    def pooled(self, *asked: Any) -> Any:
        self._pooled = {}
        return super().pooled(*asked)


def two_rounds(method: Method, one: Client) -> list[Update]:
    """A site's answers; the server's model of the next phase is what the site has uploaded."""
    state, answers = clone(one.state()), []
    site = Site(one, method, replace(SGD, batch_size=8, lr=0.01), SiteMemory(None))
    for round in range(2):
        for phase in method.phases(round):
            answers.append(site.handle(Broadcast(round, phase, clone(state))))
            state |= clone(answers[-1].state)
    return answers


@pytest.mark.parametrize("method", FIXING, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("head_norm", ["batch", "layer"])
def test_what_fixed_towers_make_is_kept_and_nothing_else_changes(method: Method, head_norm: str) -> None:
    """The same bytes as by who computes all of it at every step; and what is trained without, to float32's digits."""
    kept, forgetful, plain = (
        two_rounds(method, client(encoder(head_norm=head_norm), fixed=fixed))
        for fixed in (FixedFeatures(), Forgetful(), None)
    )
    for one, other, third in zip(kept, forgetful, plain, strict=True):
        same_bytes(one.state, other.state)
        assert one.scalars == other.scalars
        assert one.scalars == pytest.approx(third.scalars, rel=1e-5)
        for name, tensor in third.state.items():
            assert_same(one.state[name], tensor, name)


def test_a_round_of_feddra_has_one_pass_for_all_three() -> None:
    """v_i, stage 1 and the anchors of both phases: 40 records once, beside the steps that train the towers."""
    one, counts = client(fixed=FixedFeatures()), [0]
    for model in (one.model, one.anchor(one.state())):
        model.image_encoder.register_forward_hook(lambda module, inputs, made: counts.append(len(made)))
    two_rounds(DRA, one)
    assert sum(counts) == 2 * (one.data.num_train + 4 * 8)
    assert not one.fixed._tokens, "the towers have moved"  # type: ignore[union-attr]


@pytest.mark.parametrize("phase", ["align", "joint"])
def test_a_site_that_is_killed_goes_on_to_the_same_bytes(phase: str, tmp_path: Path) -> None:
    training = replace(SGD, batch_size=8, lr=0.01, checkpoint_steps=1)
    message = Broadcast(1, phase, clone(client().state()))
    whole = Site(client(fixed=FixedFeatures()), DRA, training, SiteMemory(None)).handle(message)
    asked = iter([False, False, True])
    with pytest.raises(Aborted):
        Site(client(fixed=FixedFeatures()), DRA, training, SiteMemory(tmp_path)).handle(message, lambda: next(asked))
    again = Site(client(fixed=FixedFeatures()), DRA, training, SiteMemory(tmp_path)).handle(message)
    same_bytes(again.state, whole.state)


def test_too_many_tokens_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 records' take 40 (5 + 6) 128 float32: with a byte less, towers run at every step as if nothing were asked."""
    asked = FixedFeatures()
    one = client(fixed=asked)
    monkeypatch.setattr(frozen_features, "IN_MEMORY", 40 * 11 * 128 * 4)
    batch = next(one.data.batches("train", 8, drop_last=True))
    assert IMAGE_TOKENS in one.encoded(batch, one.state())
    monkeypatch.setattr(frozen_features, "IN_MEMORY", 40 * 11 * 128 * 4 - 1)
    for mine, other in zip(two_rounds(DRA, client(fixed=FixedFeatures())), two_rounds(DRA, client()), strict=True):
        same_bytes(mine.state, other.state)


def test_towers_that_normalise_by_the_batch_are_run_at_every_step() -> None:
    """In an anchor beside towers that are trained; where they are frozen they normalise by what was received."""
    one = client(ModelConfig(image_tower="test_resnet", image_size=16, max_tokens=6, vocabulary=50).build(0))
    one.fixed = FixedFeatures()
    batch = next(one.data.batches("train", 8, drop_last=True))
    for phase, is_kept in (("align", True), ("joint", False)):
        one.set_trainable(lambda name, phase=phase: DRA.trains(name, phase))
        assert (IMAGE_TOKENS in one.encoded(batch, one.state())) is is_kept


def test_only_what_fixes_towers_may_have_them_trained() -> None:
    """The records of the others, and those of a loss that draws another image at every step, have no fixed tokens."""
    trained = replace(experiment(cache_features=True), model=replace(FROZEN, adapters=""))
    assert isinstance(Assembly(trained).site("site-1").client.fixed, FixedFeatures)
    assert Assembly(experiment(cache_features=True)).site("site-1").client.fixed is None, "they are the data's"
    assert not trained.crops_centres
    with pytest.raises(ValueError, match="draws another image"):
        Assembly(replace(trained, objective=NTXentConfig())).site("site-1")
