"""Batches of one site: every record once per epoch, the same by seed, trimmed, and lazily read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedvlp.data import loader
from fedvlp.data.cohort import Cohort
from fedvlp.data.loader import SiteData
from fedvlp.models.tiny import HashTokenizer

WIDTH = 12


def tokenize(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """[CLS] = 1, then one id per word, its length + 10; padded to a fixed width."""
    ids = torch.zeros(len(texts), WIDTH, dtype=torch.int64)
    for row, text in enumerate(texts):
        words = [1, *(10 + len(word) for word in text.split())][:WIDTH]
        ids[row, : len(words)] = torch.tensor(words)
    return ids, ids > 0


def cohort(
    n: int, size: int = 12, reports: Sequence[str] | None = None, studies: Sequence[str] | None = None
) -> Cohort:
    """Image of row i is filled with i; report of row i has 1 + i % 5 words; label is i % 2."""
    read: list[int] = []

    def images(rows: np.ndarray) -> np.ndarray:
        read.extend(rows.tolist())
        return np.repeat((rows % 256).astype(np.uint8), size * size).reshape(-1, size, size)

    names = tuple(str(i) for i in range(n))
    made = Cohort(
        ids=names,
        patients=names,
        studies=tuple(studies or names),
        reports=tuple(reports or [" ".join(["word"] * (1 + i % 5)) + f" r{i}" for i in range(n)]),
        labels=(np.arange(n, dtype=np.float32) % 2)[:, None],
        label_names=("odd",),
        splits=np.array(["train"] * n, dtype="<U5"),
        sites=None,
        images=images,
        fingerprint="x",
    )
    object.__setattr__(made, "read", read)
    return made


def site(train: Sequence[int], val: Sequence[int] = (), n: int = 40, **options) -> SiteData:
    rows = {"train": np.array(train, dtype=np.int64), "val": np.array(val, dtype=np.int64)}
    return SiteData(cohort(n, **options), rows, tokenize, 8)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def value(batch: dict[str, Tensor]) -> list[int]:
    """The cohort row of each image, read back from its pixels."""
    return ((batch["image"][:, 0, 0, 0] / 2 + 0.5) * 255).round().long().tolist()


def test_an_epoch_visits_every_record_once_and_image_text_and_label_agree() -> None:
    train = list(range(5, 29))  # 24 records: 3 batches of 8
    batches = list(site(train).train_batches(6, 8, generator(0)))
    assert len(batches) == 6
    for epoch in (batches[:3], batches[3:]):
        assert sorted(row for batch in epoch for row in value(batch)) == train
    assert [value(b) for b in batches[:3]] != [value(b) for b in batches[3:]]
    for batch in batches:
        rows = value(batch)
        assert batch["row"].tolist() == [row - 5 for row in rows], "positions within the split"
        assert batch["labels"][:, 0].tolist() == [row % 2 for row in rows]
        assert batch["text_mask"].sum(1).tolist() == [3 + row % 5 for row in rows]  # [CLS], words, the last
        assert batch["image"].shape == (8, 1, 8, 8)
        assert batch["image"].dtype == torch.float32
        assert batch["text"].dtype == torch.int64
        assert batch["text_mask"].dtype == torch.bool


def test_the_smaller_rest_of_an_epoch_is_dropped_and_a_small_split_is_one_batch() -> None:
    batches = list(site(range(11)).train_batches(4, 4, generator(0)))
    assert [len(batch["row"]) for batch in batches] == [4] * 4
    assert len({row for batch in batches[:2] for row in value(batch)}) == 8
    small = list(site(range(3)).train_batches(2, 8, generator(0)))
    assert [sorted(value(batch)) for batch in small] == [[0, 1, 2]] * 2


def test_train_batches_are_the_same_by_seed_and_by_nothing_else() -> None:
    def stream(data: SiteData, seed: int) -> list[dict[str, Tensor]]:
        torch.rand(3)
        return list(data.train_batches(7, 8, generator(seed)))

    data = site(range(30))
    first, again, other = stream(data, 1), stream(site(range(30)), 1), stream(data, 2)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(first, again, strict=True) for key in a)
    assert any(not torch.equal(a["row"], b["row"]) for a, b in zip(first, other, strict=True))
    state = torch.random.get_rng_state()
    list(data.train_batches(3, 8, generator(1)))
    assert torch.equal(torch.random.get_rng_state(), state), "the global stream is untouched"


def test_too_few_records_are_refused_before_the_first_batch() -> None:
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"this site has {count}"):
            site(range(count)).train_batches(1, 8, generator(0))
    with pytest.raises(ValueError, match="batch_size >= 2"):
        site(range(8)).train_batches(1, 1, generator(0))
    assert list(site(range(8)).train_batches(0, 4, generator(0))) == []


def test_batches_keep_the_order_and_may_drop_the_last() -> None:
    data = site(range(4), val=[9, 3, 20, 7, 11])
    kept = list(data.batches("val", 2, drop_last=False))
    assert [value(batch) for batch in kept] == [[9, 3], [20, 7], [11]]
    assert [batch["row"].tolist() for batch in kept] == [[0, 1], [2, 3], [4]]
    assert [value(batch) for batch in data.batches("val", 2, drop_last=True)] == [[9, 3], [20, 7]]
    chosen = data.batches("val", 8, drop_last=False, rows=torch.tensor([4, 0]))
    assert [value(batch) for batch in chosen] == [[11, 9]]
    assert list(data.batches("val", 8, drop_last=False, rows=torch.tensor([], dtype=torch.int64))) == []
    assert list(data.batches("test", 8, drop_last=False)) == []
    assert list(site(range(4)).batches("val", 8, drop_last=False)) == []
    assert data.sizes == {"train": 4, "val": 5}
    assert data.num_train == 4


def test_padding_is_trimmed_to_the_longest_report_of_the_batch() -> None:
    data = site([], val=[0, 5, 4])
    two, one = data.batches("val", 2, drop_last=False)
    assert two["text"].shape == two["text_mask"].shape == (2, 3)
    assert one["text"].shape == (1, 7)
    assert two["text"].tolist() == tokenize(["word r0", "word r5"])[0][:, :3].tolist()


def test_a_missing_modality_is_a_missing_key() -> None:
    """A site without a single report, and one without a single image (whose images are never read)."""
    images_only = site([0, 1], n=3, reports=["", "", "word"])
    assert images_only.modalities == ("image",)
    (batch,) = images_only.train_batches(1, 2, generator(0))
    assert batch.keys() == {"image", "row", "labels"}
    lost = np.array([True, True, False])
    whole = cohort(3)
    records = whole.without(reports=np.zeros(3, dtype=bool), images=lost)
    texts_only = SiteData(records, {"train": np.arange(2)}, tokenize, 8)
    assert texts_only.modalities == ("text",)
    (batch,) = texts_only.train_batches(1, 2, generator(0))
    assert batch.keys() == {"text", "text_mask", "row", "labels"}
    assert whole.read == []  # type: ignore[attr-defined]


def mixed(kinds: str) -> SiteData:
    """Records with both halves, an image or a report alone, by their letters b, i, r; the image of row n is all n."""
    lost = [np.array([kind == other for kind in kinds]) for other in "ir"]
    records = cohort(len(kinds)).without(reports=lost[0], images=lost[1])
    return SiteData(records, {"train": np.arange(len(kinds))}, tokenize, 8)


def test_a_batch_ends_where_records_have_other_halves() -> None:
    """So that no tower sees a black image or an empty report in the place of one that is not there."""
    data = mixed("bbrib")
    assert data.modalities == ("image", "text")
    batches = list(data.batches("train", 4, drop_last=False))
    assert [batch["row"].tolist() for batch in batches] == [[0, 1], [2], [3], [4]]
    assert [sorted(batch.keys() & {"image", "text"}) for batch in batches] == [
        ["image", "text"], ["text"], ["image"], ["image", "text"]
    ]  # fmt: skip
    assert batches[2]["image"].flatten().unique().tolist() == pytest.approx([3 / 127.5 - 1])
    for held, rows in (((), []), (("image",), [3]), (("text",), [2]), (("image", "text"), [0, 1, 4])):
        assert data.having("train", held).tolist() == rows


def test_an_epoch_of_training_has_each_kind_of_record_in_batches_of_its_own() -> None:
    """Six pairs, three images and one report: three batches of pairs and one of images; one report is no batch."""
    data = mixed("bibibibbbr")
    batches = list(data.train_batches(8, 2, generator(1)))
    for epoch in (batches[:4], batches[4:]):
        rows = {"image text": [], "image": []}
        for batch in epoch:
            rows[" ".join(sorted(batch.keys() & {"image", "text"}))] += batch["row"].tolist()
        assert sorted(rows["image text"]) == [0, 2, 4, 6, 7, 8]
        assert len(set(rows["image"])) == 2
        assert set(rows["image"]) <= {1, 3, 5}
    assert len({tuple(batch["row"].tolist()) for batch in batches}) > 5, "epochs are drawn anew"


def test_images_in_colour_have_three_channels_and_the_crops_of_grey_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red is what the grey image was, green half of it; a row without its image has none; so read batch by batch."""
    grey = cohort(4)

    def images(rows: np.ndarray) -> np.ndarray:
        red = 20 * grey.images(rows) + np.arange(12, dtype=np.uint8)  # no two columns are alike
        return np.stack([red, red // 2, 0 * red], axis=3)

    coloured = replace(grey, images=images, channels=3, imaged=np.array([True, True, True, False]))
    plain = replace(coloured, images=lambda rows: images(rows)[..., 0], channels=1)
    rows = {"train": np.arange(4)}
    for memory in (loader.IN_MEMORY, 4 * 8 * 8):  # as many bytes as the grey images take
        monkeypatch.setattr(loader, "IN_MEMORY", memory)
        data, same = (SiteData(of, rows, tokenize, 8) for of in (coloured, plain))
        (one,), (other,) = data.train_batches(1, 4, generator(3)), same.train_batches(1, 4, generator(3))
        assert one["image"].shape == (3, 3, 8, 8)
        assert torch.equal(one["image"][:, :1], other["image"])
        whole, bare = data.batches("train", 4, drop_last=False)
        assert (whole["image"][:, 0] > whole["image"][:, 1]).all()
        assert (whole["image"][:, 2] == -1).all()
        assert "image" not in bare


def test_a_report_without_a_known_word_has_its_first_token() -> None:
    data = site([0, 1], [2], n=3, reports=["", "word", ""])
    empty, worded = data.batches("train", 2, drop_last=False)
    assert "text" not in empty
    assert "text" in worded
    assert data.modalities_in("val") == ("image",)
    assert "text" not in next(data.batches("val", 1, drop_last=False)), "a split without reports is no split of pairs"

    def blank(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(texts), 4, dtype=torch.int64), torch.zeros(len(texts), 4, dtype=torch.bool)

    data = SiteData(cohort(2), {"train": np.arange(2)}, blank, 8)
    (batch,) = data.train_batches(1, 2, generator(0))
    assert batch["text_mask"].tolist() == [[True], [True]]


def test_a_split_larger_than_memory_is_read_batch_by_batch_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 records of 8 x 8 pixels against a bound of 11: only the rows of each batch are read."""
    kept = list(site(range(5, 17)).train_batches(5, 4, generator(0)))
    monkeypatch.setattr("fedvlp.data.loader.IN_MEMORY", 11 * 64)
    source = cohort(40)
    data = SiteData(source, {"train": np.arange(5, 17)}, tokenize, 8)
    read = list(data.train_batches(5, 4, generator(0)))
    assert [len(batch) for batch in read] == [len(batch) for batch in kept]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(kept, read, strict=True) for name in a)
    assert source.read == [5 + row for batch in read for row in batch["row"].tolist()]  # type: ignore[attr-defined]
    first, owner = data.shared_images("train")
    assert first.tolist() == owner.tolist() == list(range(12))


def test_a_split_is_read_when_it_is_first_asked_for_and_once() -> None:
    source = cohort(20)
    tokenized: list[int] = []

    def counting(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        tokenized.append(len(texts))
        return tokenize(texts)

    data = SiteData(source, {"train": np.arange(8), "test": np.arange(8, 20)}, counting, 8)
    data.study_groups("test")
    assert source.read == []  # type: ignore[attr-defined]
    list(data.train_batches(3, 4, generator(0)))
    list(data.batches("train", 4, drop_last=False))
    assert source.read == list(range(8))  # type: ignore[attr-defined]
    assert tokenized == [8]
    list(data.batches("test", 4, drop_last=False))
    assert tokenized == [8, 12]


def test_a_tokenizer_of_another_shape_is_refused_without_text() -> None:
    data = SiteData(cohort(4), {"train": np.arange(4)}, lambda texts: (torch.zeros(3, 5), torch.zeros(3, 5)), 8)
    with pytest.raises(ValueError, match=r"\[3, 5\].*\[4, T\]") as caught:
        next(data.train_batches(1, 2, generator(0)))
    assert "word" not in str(caught.value)


def test_reports_that_are_cut_are_counted_once_a_split(caplog: pytest.LogCaptureFixture) -> None:
    """[CLS] and three words fit into four positions; of reports with 2, 3, 4, 5 and 6 words three are cut."""
    data = SiteData(cohort(5), {"train": np.arange(5)}, HashTokenizer(64, 4), 8)
    with caplog.at_level("INFO"):
        list(data.train_batches(2, 2, generator(0)))
        list(data.train_batches(2, 2, generator(1)))
    assert [record.getMessage() for record in caplog.records] == ["train: 3 of 5 reports are cut at 4 tokens"]


def test_labels_are_absent_where_the_cohort_has_none() -> None:
    source = cohort(4)
    object.__setattr__(source, "labels", np.zeros((4, 0), dtype=np.float32))
    object.__setattr__(source, "label_names", ())
    data = SiteData(source, {"train": np.arange(4)}, tokenize, 8)
    assert set(next(data.train_batches(1, 2, generator(0)))) == {"image", "text", "text_mask", "row"}


def test_study_groups_join_equal_studies_and_equal_reports() -> None:
    """Rows 0, 1 share a study; 1, 4 a report, so 0, 1, 4 are one; empty reports alone join nothing."""
    reports = ["a b c", "d e f", "", "", "d e f", "g h i"]
    data = site(range(6), val=[5, 3], n=6, reports=reports, studies=["s", "s", "t", "u", "v", "w"])
    groups = data.study_groups("train").tolist()
    assert groups[0] == groups[1] == groups[4]
    assert len(set(groups)) == 4
    assert data.study_groups("val").tolist() in ([0, 1], [1, 0])
    assert data.study_groups("train").dtype == torch.int64
    assert data.study_groups("test").shape == (0,)


def test_a_batch_costs_little() -> None:
    """About 0.4 ms for 32 crops of 64 from 72 pixels; of processor time, which a busy machine does not change."""
    data = SiteData(cohort(500, size=72), {"train": np.arange(500)}, tokenize, 64)
    next(data.train_batches(1, 32, generator(0)))
    times = []
    stream = data.train_batches(200, 32, generator(0))
    for _ in range(200):
        start = time.process_time()
        next(stream)
        times.append(time.process_time() - start)
    assert sorted(times)[100] < 5e-3


def several() -> SiteData:
    """Record 0 has three reports of 2, 3 and 4 words, record 1 one of 2 words, record 2 two of 3 and 1."""
    reports = ["a b", "a b", "a b c"]
    made = replace(cohort(3, reports=reports), more_reports=(("a b c", "a b c d"), (), ("a",)))
    return SiteData(made, {"train": np.arange(3), "val": np.arange(1)}, tokenize, 8)


def test_a_step_draws_one_of_a_records_reports() -> None:
    """Over 300 steps each of record 0's three about equally, and the batch says which of all six it is."""
    seen: dict[tuple[int, int], int] = {}
    words = [2, 3, 4, 2, 3, 1]
    for batch in several().train_batches(300, 3, torch.Generator().manual_seed(0)):
        assert "text_labels" not in batch
        for row, number, mask in zip(batch["row"].tolist(), batch["report"].tolist(), batch["text_mask"], strict=True):
            assert int(mask.sum()) == 1 + words[number], "its first token and its words"
            seen[row, number] = seen.get((row, number), 0) + 1
    assert set(seen) == {(0, 0), (0, 1), (0, 2), (1, 3), (2, 4), (2, 5)}
    assert all(70 < seen[0, number] < 130 for number in range(3))
    assert seen[1, 3] == 300


def test_all_reports_are_read_once_each_with_its_record() -> None:
    batches = list(several().report_batches(4) or ())
    assert [batch["row"].tolist() for batch in batches] == [[0, 0, 0, 1], [2, 2]]
    assert [batch["report"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]
    assert [(batch["text_mask"].sum(1) - 1).tolist() for batch in batches] == [[2, 3, 4, 2], [3, 1]]


def test_records_with_one_report_draw_nothing() -> None:
    """So that a run with one report each has the bytes that it always had."""
    data = site(range(6))
    assert data.report_batches(4) is None
    (batch,) = data.train_batches(1, 6, torch.Generator())
    assert "report" not in batch
