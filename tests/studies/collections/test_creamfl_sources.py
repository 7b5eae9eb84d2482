"""COCO captions, Flickr30k, CIFAR-100 and AG News from fixtures in their published layouts, and as one federation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.published import ag_news, cifar100, karpathy

from fedvlp.data.cohort import PUBLIC
from fedvlp.data.partition import class_codes
from fedvlp.federation.loop import Rounds
from fedvlp.methods import CreamFL
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.training.settings import Training
from studies.collections.captions_and_classes import (
    TOPICS,
    AGNewsSource,
    Captions,
    Cifar100Source,
    CocoCaptionsSource,
    Flickr30kSource,
)
from studies.collections.creamfl_collections import JoinedSource

pytestmark = pytest.mark.slow(seconds=5)

SIZE = 36


def test_coco_captions(tmp_path: Path) -> None:
    cohort = CocoCaptionsSource(str(karpathy(tmp_path, "coco")), str(tmp_path), image_size=SIZE).build()
    assert len(cohort) == 30
    assert cohort.reports[6] == "A photo of thing 1. It is number 1"
    assert cohort.splits.tolist() == np.repeat(["train", "train", "train", "val", "test", "test"], 5).tolist()
    assert len(set(cohort.studies)) == 6
    assert (cohort.images(np.array([0])) == cohort.images(np.array([4]))).all(), "five captions, one image"
    assert (cohort.images(np.array([0])) != cohort.images(np.array([5]))).any()
    assert cohort.labels.shape == (30, 0)
    assert cohort.sites is None


def test_coco_in_one_merged_folder(tmp_path: Path) -> None:
    file = karpathy(tmp_path, "coco", root="allimages")
    assert len(CocoCaptionsSource(str(file), str(tmp_path), image_size=SIZE).build()) == 30


def test_a_subset_of_the_training_captions_keeps_its_order(tmp_path: Path) -> None:
    file = karpathy(tmp_path, "coco")
    whole = CocoCaptionsSource(str(file), str(tmp_path), image_size=SIZE).build()
    few = CocoCaptionsSource(str(file), str(tmp_path), image_size=SIZE, limit=4).build()
    assert (few.splits == "train").sum() == 4
    assert (few.splits != "train").sum() == 15
    places = [whole.ids.index(name) for name in few.ids]
    assert places == sorted(places)
    assert few.ids == CocoCaptionsSource(str(file), str(tmp_path), image_size=SIZE, limit=4).build().ids
    assert few.ids != CocoCaptionsSource(str(file), str(tmp_path), image_size=SIZE, limit=4, seed=1).build().ids


def test_flickr30k(tmp_path: Path) -> None:
    file = karpathy(tmp_path, "flickr30k", root="flickr30k-images")
    cohort = Flickr30kSource(str(file), str(tmp_path / "flickr30k-images"), image_size=SIZE).build()
    assert len(cohort) == 30
    assert cohort.images(np.arange(30)).shape == (30, SIZE, SIZE)
    other = CocoCaptionsSource(str(karpathy(tmp_path / "c", "coco")), str(tmp_path / "c"), image_size=SIZE).build()
    assert not set(cohort.ids) & set(other.ids), "ids name their collection"


def test_another_json_is_refused(tmp_path: Path) -> None:
    for content in ["[]", "{", '{"images": [{"split": "train"}]}', '{"images": [{"split": "x"}]}']:
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match="coco_captions source: path is not Karpathy's JSON"):
            CocoCaptionsSource(str(tmp_path / "x.json"), str(tmp_path)).build()


def test_a_name_in_the_json_cannot_leave_the_folder(tmp_path: Path) -> None:
    source = CocoCaptionsSource("x.json", str(tmp_path))
    assert source.file_of({"filename": "../../etc/passwd", "filepath": "../train2014"}) == Path("train2014/passwd")
    assert Captions("x.json", ".").file_of({"filename": "/etc/passwd"}) == Path("passwd")


def test_cifar100(tmp_path: Path) -> None:
    """Red 50 is grey 0.299 * 50 = 15."""
    cohort = Cifar100Source(str(cifar100(tmp_path / "c")), image_size=64, val_fraction=0.34).build()
    assert len(cohort) == 12
    assert cohort.labels.shape == (12, 100)
    assert cohort.labels.argmax(1).tolist() == [*range(6), *range(6)]
    assert (cohort.splits == "val").sum() == 2
    assert cohort.splits[6:].tolist() == ["test"] * 6
    image = cohort.images(np.array([5, 0]))
    assert image.shape == (2, 64, 64)
    assert image[:, 0, 0].tolist() == [15, 0]
    assert not cohort.has_report().any()
    assert cohort.has_image().all()


def test_photographs_in_colour(tmp_path: Path) -> None:
    """CIFAR's record 5 is 50 of red; grey, which stays the default, is the luminance of the colours."""
    cohort = Cifar100Source(str(cifar100(tmp_path / "c")), image_size=64, colour=True).build()
    assert cohort.channels == 3
    assert cohort.images(np.array([5, 0])).shape == (2, 64, 64, 3)
    assert cohort.images(np.array([5]))[0, 0, 0].tolist() == [50, 0, 0]
    coco = CocoCaptionsSource(str(karpathy(tmp_path, "coco")), str(tmp_path), image_size=SIZE)
    grey, coloured = coco.build(), replace(coco, colour=True).build()
    assert (grey.channels, coloured.channels) == (1, 3)
    assert grey.fingerprint != coloured.fingerprint
    rows = np.array([0, 7])
    luminance = coloured.images(rows) @ np.array([0.299, 0.587, 0.114])
    assert np.abs(luminance - grey.images(rows)).mean() < 3, "a JPEG of noise is clipped in places"


def test_the_captions_of_an_image_are_decoded_and_kept_once(tmp_path: Path) -> None:
    """Six images of 30 captions; one that cannot be read takes its five rows along."""
    file = karpathy(tmp_path, "coco")
    source = CocoCaptionsSource(str(file), str(tmp_path), image_size=SIZE, cache=str(tmp_path / "kept"), colour=True)
    whole = source.build()
    (kept,) = (tmp_path / "kept").glob("*/images-*.npy")
    assert np.load(kept).shape == (6, SIZE, SIZE, 3)
    assert (whole.images(np.array([29, 5])) == np.load(kept)[[5, 1]]).all()
    (tmp_path / "val2014" / "coco_001.jpg").write_bytes(b"no image")
    cohort, summary = source.prepare()
    assert (len(cohort), summary["skipped: unsupported image format"]) == (25, 5)
    assert (cohort.images(np.array([5])) == whole.images(np.array([10]))).all()


def test_a_damaged_or_pickled_cifar_is_refused(tmp_path: Path) -> None:
    folder = cifar100(tmp_path / "c")
    (folder / "train.bin").write_bytes(b"\x80\x02}q\x00" * 500)
    with pytest.raises(ValueError, match=r"train.bin is not made of records of 3074 bytes"):
        Cifar100Source(str(folder)).build()
    (folder / "test.bin").unlink()
    with pytest.raises(ValueError, match=r"cifar100 source: the root lacks 1 of 3 published items: test.bin"):
        Cifar100Source(str(folder)).build()


def test_ag_news(tmp_path: Path) -> None:
    cohort = AGNewsSource(str(ag_news(tmp_path / "n")), val_fraction=0.34).build()
    assert cohort.label_names == TOPICS
    assert cohort.labels.argmax(1).tolist() == [0, 1, 2, 3, 0, 1] * 2, "classes 1 to 4 are 0 to 3"
    assert cohort.reports[1] == 'Title 1, said He said "1" again'
    assert (cohort.splits == "val").sum() == 2
    assert not cohort.has_image().any()


def test_a_strange_news_table_is_refused(tmp_path: Path) -> None:
    folder = ag_news(tmp_path / "n")
    (folder / "test.csv").write_text('"5","a","b"\n"1","a"\n')
    with pytest.raises(ValueError, match=r"2 rows of test.csv are not class \(1 to 4\)"):
        AGNewsSource(str(folder)).build()


def test_more_classes_than_bits_are_told_apart() -> None:
    codes = class_codes(np.eye(100, dtype=np.float32)[[3, 99, 3, 0]], "positive")
    assert codes[0] == codes[2]
    assert len(set(codes.tolist())) == 3


@pytest.fixture
def joined(tmp_path: Path) -> JoinedSource:
    return JoinedSource(
        CocoCaptionsSource(str(karpathy(tmp_path / "c", "coco")), str(tmp_path / "c"), image_size=SIZE),
        Flickr30kSource(str(karpathy(tmp_path, "f", 24, root="i")), str(tmp_path / "i"), image_size=SIZE),
        Cifar100Source(str(cifar100(tmp_path / "cifar", 60, 20, classes=100)), image_size=SIZE),
        AGNewsSource(str(ag_news(tmp_path / "news", 60, 20)), image_size=SIZE),
        sites=(2, 2, 1), beta=100.0, shards=4,
    )  # fmt: skip


def test_four_collections_are_one_federation(joined: JoinedSource) -> None:
    """Public COCO, pairs at the first sites, then images, then texts; every label a column, blank elsewhere."""
    cohort = joined.build()
    assert set(cohort.sites or ()) == {PUBLIC, *(f"site-{index:02d}" for index in range(1, 6))}
    sites = np.asarray(cohort.sites)
    assert (sites == PUBLIC).sum() == 30
    assert cohort.labels.shape[1] == 104
    images, texts = sites == "site-03", sites == "site-05"
    assert np.isnan(cohort.labels[images][:, 100:]).all()
    assert (cohort.labels[images][:, :100] == 1).sum(1).tolist() == [1] * images.sum()
    assert np.isnan(cohort.labels[texts][:, :100]).all()
    studies = np.asarray(cohort.studies)
    assert not set(studies[sites == "site-01"]) & set(studies[sites == "site-02"])
    mixed = np.array([0, 40, len(cohort) - 1, 31])
    assert (cohort.images(mixed)[[0, 3]] == np.stack([cohort.images(mixed[i : i + 1])[0] for i in (0, 3)])).all()


@pytest.mark.slow(seconds=3)
def test_creamfl_trains_on_them(joined: JoinedSource) -> None:
    from fedvlp.federation.exchange import SequentialExchange
    from fedvlp.federation.loop import Federation

    model = ModelConfig(embedding_dim=16, image_size=32, max_tokens=16, vocabulary=256, head_hidden=16,
                        head_norm="layer", text_layers=1)  # fmt: skip
    experiment = Experiment(
        "c", CreamFL(local_steps=1, local_epochs=1, server_steps=1), model, CreamFLTaskConfig(classes=104, dim=16),
        joined, training=Training(batch_size=4), rounds=Rounds(rounds=1, evaluate_every=1),
    )  # fmt: skip
    assembly = Assembly(experiment)
    server = assembly.server(assembly.sites())
    Federation(experiment.method, server, experiment.rounds, SequentialExchange(assembly.site)).run()
    both, image, text = ("image", "text"), ("image",), ("text",)
    assert list(server.modalities.values()) == [both, both, image, image, text]
    assert server.history[0]["dropped"] == {}
    assert "test/all/mean/r1" in server.history[0]["server"]
