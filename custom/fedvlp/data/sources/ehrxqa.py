"""EHRXQA's questions about one film: its part MIMIC-CXR-VQA (Bae et al., 2023, https://arxiv.org/abs/2310.18652).

EHRXQA's other questions address patients through SQL and name no film.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedvlp.data.deid import scan
from fedvlp.data.report_text import clean_report
from fedvlp.data.sources.published import Listing, Published, require_items
from fedvlp.data.sources.table import BELOW_ROOT

SPLITS = {"train": "train", "valid": "val", "test": "test"}
FIELDS = ("idx", "subject_id", "study_id", "image_id", "question", "answer")
FOLDERS = ("mimiccxrvqa/dataset", "dataset")


@dataclass(frozen=True)
class EHRXQASource(Published):
    """``train.json``, ``valid.json`` and ``test.json``, with answers: one row a question, in the published splits.

    The text is question and answer (methods.md, 10.1); several answers are joined by "and". A film with several
    questions has several rows, of one study. The films, the patients and so the hashed ids are MIMIC-CXR's.
    """

    table: ClassVar[str] = FOLDERS[0]
    published_as: ClassVar[Mapping[str, str]] = {"path": " or ".join(FOLDERS)}
    needs: ClassVar[tuple[str, ...]] = ("files",)  # MIMIC-CXR-JPG's
    cleans_reports: ClassVar[bool] = True  # by report_text.clean_report

    path: str = field(metadata=BELOW_ROOT)  # folder of the three files
    root: str | None = None  # folder of MIMIC-CXR-JPG's files/; None: text alone
    suffix: str = "jpg"  # of the films: jpg (MIMIC-CXR-JPG) or dcm (MIMIC-CXR)
    min_report_words: int = 3  # questions with shorter text are left out
    min_sentence_words: int = 1  # of a report; 2 drops sentences of one word ("Cardiomegaly."), as the papers do

    def listing(self) -> Listing:
        """The questions of the three splits. Raises ValueError for a file that is missing or not as published."""
        require_items("ehrxqa", Path(self.path), [f"{split}.json" for split in SPLITS])
        published = [(split, row) for split in SPLITS for row in self._rows(split)]
        texts = [clean_report(_text(row), self.min_report_words, self.min_sentence_words) for _, row in published]
        used = [
            (text, split, {name: str(row[name]) for name in FIELDS[:4]})
            for text, (split, row) in zip(texts, published, strict=True)
            if text
        ]
        return Listing(
            source="ehrxqa",
            people="mimic_cxr",
            keys=[f"{split}-{row['idx']}" for _, split, row in used],
            patients=[row["subject_id"] for _, _, row in used],
            studies=[row["study_id"] for _, _, row in used],
            reports=[text for text, _, _ in used],
            labels=np.zeros((len(used), 0), dtype=np.float32),
            names=(),
            splits=[SPLITS[split] for _, split, _ in used],
            files=None if self.root is None else [self._film(row) for _, _, row in used],
            left_out={"text empty or too short": len(published) - len(used)},
            phi=scan((_text(row) for _, row in published), (f"{split}-{row['idx']}" for split, row in published)),
        )

    def _rows(self, split: str) -> list[dict[str, Any]]:
        """The questions of one file. Raises ValueError that says how many are not as published, and nothing of them."""
        try:
            rows = json.loads((Path(self.path) / f"{split}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"ehrxqa source: {split}.json cannot be read ({type(error).__name__})") from None
        if not isinstance(rows, list):
            raise ValueError(f"ehrxqa source: {split}.json is not a list of questions; give the file as published")
        wrong = sum(not isinstance(row, dict) or any(name not in row for name in FIELDS) for row in rows)
        if wrong:
            raise ValueError(
                f"ehrxqa source: {wrong} of {len(rows)} questions in {split}.json lack one of {', '.join(FIELDS)}; the "
                "files named _train.json and so on have no answers: build those with answers as their authors say"
            )
        return rows

    def _film(self, row: dict[str, str]) -> Path:
        """The film of a question below MIMIC-CXR's folder."""
        patient = f"p{row['subject_id']}"
        folder = Path(self.root or "") / "files" / patient[:3] / patient / f"s{row['study_id']}"
        return folder / f"{row['image_id']}.{self.suffix}"


def _text(row: dict[str, Any]) -> str:
    """Question and answer; the answer is one text or a list of them."""
    answer = row["answer"]
    answers = answer if isinstance(answer, list) else [answer]
    return f"{row['question']} {' and '.join(str(one) for one in answers)}"
