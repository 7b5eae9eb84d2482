"""What frozen towers make of records, computed once: the same training, without the towers' cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.towers import frozen_batch_norm

from fedvlp.core.types import IMAGE_TOKENS, TEXT_TOKENS
from fedvlp.data import loader
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.methods import FedDRA, FedFed
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives import MedCLIPConfig, MGCAConfig, NTXentConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import summary
from fedvlp.run.presets import get
from fedvlp.run.simulate import simulate
from fedvlp.training.frozen_features import FrozenFeatures, refuse

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
    with pytest.raises(ValueError, match=r"cache_features: the towers are trained.*adapter_rank=0"):
        refuse(replace(FROZEN, adapter_rank=4).build(), torch.nn.Module())
    with pytest.raises(ValueError, match="cache_features: the towers are trained"):
        refuse(replace(FROZEN, adapters="").build(), torch.nn.Module())
    for objective in (NTXentConfig(), MedCLIPConfig(sentences=True)):
        with pytest.raises(ValueError, match="draws another film or sentence"):
            refuse(frozen, objective.build(frozen, 0))
    mgca = MGCAConfig()
    refuse(frozen, mgca.build(frozen, 0))
    bare = replace(FROZEN, alignment=False).build()
    with pytest.raises(ValueError, match="attention"):
        refuse(bare, mgca.build(bare, 0))


def test_the_refusal_comes_with_the_settings() -> None:
    with pytest.raises(ValueError, match="cache_features: the towers are trained"):
        replace(experiment(cache_features=True), model=replace(FROZEN, adapter_rank=2))
    with pytest.raises(ValueError, match="FedFed reads the films themselves"):
        replace(experiment(cache_features=True), method=FedFed())
    assert get("feddra-real").training.cache_features
