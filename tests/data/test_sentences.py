"""Sentences as units of text: which count, whose labels they have, and which one a training step draws."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedvlp.data.cohort import Cohort
from fedvlp.data.loader import SiteData
from fedvlp.data.sentences import SentenceTable, cleaned, read_sentence_table, units

NAN = math.nan
EDEMA = np.array([1, NAN], dtype=np.float32)
DENIED = np.array([0, NAN], dtype=np.float32)
TABLE = {"there is mild pulmonary edema today": EDEMA, "no edema is seen today": DENIED}
LONG = "FINDINGS: There is mild pulmonary edema today. Normal heart. The ribs are all intact."
REPORTS = (LONG, "Normal heart.", "No edema is seen today.", "")


def tokenize(texts: list[str]) -> tuple[Tensor, Tensor]:
    """One id for each word, its length; position 0 is 1."""
    ids = torch.zeros(len(texts), 16, dtype=torch.int64)
    for row, text in enumerate(texts):
        words = [1, *map(len, text.split())]
        ids[row, : len(words)] = torch.tensor(words)
    return ids, ids > 0


def cohort() -> Cohort:
    """Four training records with the reports above, as read (lower case); labels [1, 0] for all."""
    table = SentenceTable(TABLE, 2)
    reports = tuple(" ".join(cleaned(report)) for report in REPORTS)
    for report, written in zip(reports, REPORTS, strict=True):
        table.add(report, written)
    names = tuple("abcd")
    return Cohort(
        ids=names, patients=names, studies=names, reports=reports, labels=np.array([[1, 0]] * 4, dtype=np.float32),
        label_names=("Edema", "Fracture"), splits=np.array(["train"] * 4), sites=None,
        images=lambda rows: np.zeros((len(rows), 12, 12), dtype=np.uint8), fingerprint="x", sentences=table,
    )  # fmt: skip


def data(sentences: bool = True) -> SiteData:
    return SiteData(cohort(), {"train": np.arange(4), "val": np.arange(1)}, tokenize, 8, sentences)


def of(row: int) -> list[tuple[str, np.ndarray]]:
    whole = cohort()
    return units(whole, row, whole.reports[row])


def test_units_by_hand() -> None:
    """Five words are enough, two are not; a sentence that the table lacks is blank; else the report as a whole."""
    first, second = of(0)
    assert (first[0], second[0]) == ("there is mild pulmonary edema today", "the ribs are all intact")
    np.testing.assert_array_equal(first[1], EDEMA)
    assert np.isnan(second[1]).all()
    for row, text in ((1, "normal heart"), (3, "")):
        [(whole, labels)] = of(row)
        assert whole == text
        assert labels.tolist() == [1, 0], "the study's own"
    [(text, labels)] = of(2)
    np.testing.assert_array_equal(labels, DENIED)


def test_a_step_draws_one_sentence_of_each_report_with_its_labels() -> None:
    """Over 400 steps record 0 shows both of its sentences about equally often, and never its short one."""
    seen = {7: 0, 6: 0}  # tokens of the two long sentences
    for batch in data().train_batches(400, 4, torch.Generator().manual_seed(0)):
        at = batch["row"].tolist().index(0)
        tokens = int(batch["text_mask"][at].sum())
        seen[tokens] += 1
        expected = EDEMA if tokens == 7 else [NAN, NAN]
        np.testing.assert_array_equal(batch["text_labels"][at].numpy(), expected)
        assert batch["labels"][at].tolist() == [1, 0], "the image keeps the study's labels"
        assert batch["text"].shape[1] == int(batch["text_mask"].sum(dim=1).max())
    assert 160 < seen[7] < 240  # 4 standard deviations around 200


def test_the_seed_decides_and_held_out_reports_stay_whole() -> None:
    def drawn(seed: int) -> list[list[int]]:
        batches = data().train_batches(8, 4, torch.Generator().manual_seed(seed))
        return [batch["text_mask"].sum(dim=1).tolist() for batch in batches]

    assert drawn(1) == drawn(1) != drawn(2)
    [batch] = data().batches("val", 4, drop_last=False)
    assert int(batch["text_mask"].sum()) == 1 + 13
    assert "text_labels" not in batch


def test_without_the_option_nothing_changes() -> None:
    """Same order and same crops as a loader that knows of no sentences, and whole reports."""
    [batch] = data(sentences=False).train_batches(1, 4, torch.Generator().manual_seed(3))
    assert "text_labels" not in batch
    assert sorted(batch["text_mask"].sum(dim=1).tolist()) == [3, 6, 14], "an image alone is in no batch of pairs"
    [other] = data().train_batches(1, 4, torch.Generator().manual_seed(3))
    assert torch.equal(batch["row"], other["row"])


def test_data_without_labels_of_sentences_is_refused_with_the_remedy() -> None:
    without = SiteData(replace(cohort(), sentences=None), {"train": np.arange(4)}, tokenize, 8, sentences=True)
    with pytest.raises(ValueError, match=r"data\.sentence_table.*objective\.sentences=false"):
        next(iter(without.train_batches(1, 4, torch.Generator().manual_seed(0))))


def write(folder: Path, text: str) -> Path:
    path = folder / "sentences.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_is_read_by_names_and_words(tmp_path: Path) -> None:
    rows = 'Fracture,note,sentence,Edema\n,x,"No EDEMA, is seen today.",0\n1,,Rib fracture on the left,-1.0\n'
    table = read_sentence_table(write(tmp_path, rows), ("Edema", "Fracture"))
    table.add("r", "no edema is seen today. Rib fracture; on the left. Unknown sentence.")
    found = dict(table("r"))
    np.testing.assert_array_equal(found["no edema is seen today"], [0, NAN])
    np.testing.assert_array_equal(found["rib fracture on the left"], [-1, 1])
    np.testing.assert_array_equal(found["unknown sentence"], [NAN, NAN])
    assert table("another report") == []


def test_what_is_wrong_is_said_without_the_text(tmp_path: Path) -> None:
    for text, said in [
        ("sentence,Edema\n", "'Fracture'"),
        ("", "'sentence', 'Edema', 'Fracture'"),
        ("sentence,Edema,Fracture\ncanary is here,1,2\n", "row 1 is none of 1, 0, -1"),
        (
            'sentence,Edema,Fracture\n"canary is here,1,\nanother,0,\n',
            "sentence table: the row that begins in line 2",
        ),
        ('sentence,Edema,Fracture\n"canary is here,1,\nanother",0,\n', "sentence table: .* line 2 is where such"),
        ("sentence,Edema,Fracture\ncanary is here,1,\nCanary is here.,0,\n", "row 2 .*with other labels"),
    ]:
        with pytest.raises(ValueError, match=said) as caught:
            read_sentence_table(write(tmp_path, text), ("Edema", "Fracture"))
        assert "anary" not in str(caught.value)
        assert str(tmp_path) not in str(caught.value)


def test_a_missing_table_is_said_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a file") as caught:
        read_sentence_table(tmp_path / "canary.csv", ())
    assert "canary" not in str(caught.value)
