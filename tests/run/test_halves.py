"""Hospitals that lack images or reports, by their own table: who trains with what, and who is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from support.halves import experiment, table

from fedvlp.core.types import MODALITIES, Batch
from fedvlp.data.cohort import PUBLIC
from fedvlp.methods.car_mfl import COMPLETE, PARTNERS
from fedvlp.run.assembly import Assembly
from fedvlp.run.cautions import cautions
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate


def dropped(name: str, folder: Path, form: str = "csv", **settings: object) -> tuple[RunFolder, dict[str, str]]:
    """A run of one round on the table, and the sites whose updates did not come, with the reason."""
    chosen = experiment(name, table(folder / "data", form=form), **{"rounds.quorum": 1, **settings})
    run = RunFolder.create(folder / "runs", chosen)
    (first, *_) = simulate(chosen, run)
    return run, first["dropped"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_car_mfl_trains_at_every_hospital_and_lends_what_each_record_lacks(form: str, tmp_path: Path) -> None:
    if form == "parquet" and importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed")
    run, lost = dropped("car-mfl", tmp_path, form)
    assert lost == {}
    assembly = Assembly(run.experiment(), run.path)
    lent = {}
    for site in assembly.sites():
        partners = assembly.memory(site).newest().get(PARTNERS)
        rows = assembly.cohort.rows("train", site)
        alone = assembly.cohort.has_image()[rows] != assembly.cohort.has_report()[rows]
        lent[site] = None if partners is None else (partners[-1] != COMPLETE).tolist()
        assert lent[site] == (alone.tolist() if alone.any() else None)
    assert set(map(str, lent["mixed"] or ())) == {"True", "False"}


@pytest.mark.parametrize("name", ["creamfl", "mfedavg"])
def test_methods_of_either_half_train_at_every_hospital(name: str, tmp_path: Path) -> None:
    run, lost = dropped(name, tmp_path)
    assert lost == {}
    assembly = Assembly(run.experiment())
    assert {site: assembly.data(site).modalities for site in assembly.sites()} == {
        "images": ("image",), "mixed": MODALITIES, "paired": MODALITIES, "texts": ("text",)
    }  # fmt: skip
    assert assembly.untrained() == {}


def test_a_loss_of_pairs_takes_pairs_alone_and_says_who_has_none(tmp_path: Path) -> None:
    """Records that stand alone beside pairs are counted; a hospital without a pair is named, with what to do."""
    run, lost = dropped("fedavg", tmp_path)
    assert set(lost) == {"images", "texts"}
    assert all("partition.left_out" in why and "car-mfl" in why for why in lost.values())
    assembly = Assembly(run.experiment())
    cohort = assembly.cohort
    mixed = cohort.rows("train", "mixed")
    pairs = int((cohort.has_image() & cohort.has_report())[mixed].sum())
    assert assembly.data("mixed").num_train == pairs
    assert assembly.untrained() == {"mixed": len(mixed) - pairs}
    said = " ".join(cautions(run.experiment(), cohort, assembly.untrained()))
    assert f"mixed ({len(mixed) - pairs} records)" in said
    assert RunFolder(run.path).model.exists()


def test_images_that_were_lent_reports_train_with_them(tmp_path: Path) -> None:
    """PMS-FM's hospitals, and the closed form's; one with reports alone is left out."""
    for name in ("pms-fm", "one-round-cca"):
        settings = {"partition.retrieve": 1, "partition.left_out": "texts"}
        _, lost = dropped(name, tmp_path / name, **settings)
        assert lost == {}


def test_a_method_that_trains_on_public_pairs_refuses_public_reports(tmp_path: Path) -> None:
    """Of a public set with pairs beside them, it takes the pairs, and all that count public records agree on them."""
    chosen = experiment("car-mfl", table(tmp_path))
    paired = Assembly(chosen).cohort
    public = np.asarray(paired.sites) == PUBLIC

    def with_public(lost: np.ndarray) -> Assembly:
        built = chosen.data.build()
        assembly = Assembly(chosen)
        assembly._cohort = assembly._dealt(built.without(reports=np.zeros(len(built), bool), images=lost))
        return assembly

    ids = chosen.data.build().ids
    first = np.isin(ids, [name for name, of in zip(paired.ids, public, strict=True) if of][:3])
    some = with_public(first)
    assert int((np.asarray(some.cohort.sites) == PUBLIC).sum()) == int(public.sum()) - 3
    with pytest.raises(
        ValueError, match=r"car-mfl needs a public set of images with their reports; of .* none has both"
    ):
        with_public(np.isin(ids, [name for name, of in zip(paired.ids, public, strict=True) if of]))


def test_the_share_of_a_preset_is_not_drawn_where_the_table_has_a_public_set(tmp_path: Path) -> None:
    """No patient of a hospital becomes public unasked."""
    source = table(tmp_path)
    written = source.build()
    dealt = Assembly(experiment("mfedavg-p", source)).cohort
    assert dealt.sites == written.sites


def test_a_mixed_hospital_is_judged_on_what_each_record_has(tmp_path: Path) -> None:
    """Of the retrieval on pairs alone, and of a classifier with zeros for the half that a record lacks."""
    run, _ = dropped("mfedavg", tmp_path)
    assembly = Assembly(run.experiment())
    data = assembly.data("mixed")
    seen: list[tuple[str, ...]] = []
    site = assembly.site("mixed")
    site.client.load(site.client.initial())
    model = site.client.model
    model.register_forward_pre_hook(lambda _, given: seen.append(halves(given[0])))
    assert site.evaluate is not None
    site.evaluate(site.client, ("train",))
    assert {("image",), ("text",), ("image", "text")} == set(seen)
    assert 0 < len(data.having("train")) < data.num_train


def halves(batch: Batch) -> tuple[str, ...]:
    return tuple(name for name in MODALITIES if name in batch and isinstance(batch[name], torch.Tensor))
