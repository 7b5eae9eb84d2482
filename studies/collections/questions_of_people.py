"""VQA v2 (Goyal et al., 2017, https://arxiv.org/abs/1612.00837): questions about COCO's images, ten answers each."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedvlp.data.cohort import Question
from fedvlp.data.deid import scan
from fedvlp.data.report_text import clean_report
from fedvlp.data.sources.mimic_cxr import study_folder
from fedvlp.data.sources.published import Listing, Photographs, Published, require_items
from fedvlp.data.sources.table import BELOW_ROOT

VQA_SPLITS = {"train2014": "train", "val2014": "test"}
QUESTIONS, ANNOTATIONS = "v2_OpenEnded_mscoco_{}_questions.json", "v2_mscoco_{}_annotations.json"
ASKED = ("question_id", "image_id", "question")
ANSWERED = ("question_id", "image_id", "answers", "multiple_choice_answer", "answer_type")
PEOPLE = 10  # answers to each question


@dataclass(frozen=True)
class VQAv2Source(Photographs):
    """One row an image, with the questions about it and no text. Images become grey unless ``colour`` is asked for.

    train2014 is trained on. val2014 is the test split, since nobody has the answers of test2015; a validation split is
    not published. COCO's images are the people, so an image has one id here and in ``coco_captions``.
    """

    known: ClassVar[str] = "vqa_v2"
    table: ClassVar[str] = QUESTIONS.format("train2014")

    path: str = field(metadata=BELOW_ROOT)  # folder of the four JSON files
    root: str  # folder of train2014/ and val2014/

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """Questions, annotations and images in one folder."""
        require_items("vqa_v2", root, [*_files(), *VQA_SPLITS])
        return {"path": str(root), "root": str(root)}

    def listing(self) -> Listing:
        """The images that are asked about. Raises ValueError for a file that is missing or not as published."""
        require_items("vqa_v2", Path(self.path), _files())
        asked = {name: of for folder in VQA_SPLITS for name, of in self._of_images(folder).items()}
        folders = [name.partition("/")[0] for name in asked]
        return Listing(
            source="vqa_v2",
            people="coco_captions",
            keys=list(asked),
            patients=list(asked),
            studies=list(asked),
            reports=[""] * len(asked),
            labels=np.zeros((len(asked), 0), dtype=np.float32),
            names=(),
            splits=[VQA_SPLITS[folder] for folder in folders],
            files=[Path(self.root) / name for name in asked],
            questions=[tuple(of) for of in asked.values()],
        )

    def _of_images(self, folder: str) -> dict[str, list[Question]]:
        """Image file, relative to root -> its questions, in the order of the published list."""
        questions = _read(Path(self.path) / QUESTIONS.format(folder), "questions", ASKED)
        annotations = _read(Path(self.path) / ANNOTATIONS.format(folder), "annotations", ANSWERED)
        answered = {row["question_id"]: row for row in annotations}
        alone = len({row["question_id"] for row in questions} ^ answered.keys())
        if alone or not len(questions) == len(annotations) == len(answered):
            raise ValueError(
                f"vqa_v2 source: {folder} has {len(questions)} questions and {len(annotations)} annotations, {alone} "
                "of them alone and some perhaps repeated; expected one annotation a question. Give both files of one "
                "release"
            )
        asked: dict[str, list[Question]] = {}
        wrong = 0
        for row in questions:
            try:
                name = f"{folder}/COCO_{folder}_{row['image_id']:012d}.jpg"
                asked.setdefault(name, []).append(_question(row, answered[row["question_id"]]))
            except (KeyError, TypeError, ValueError):
                wrong += 1
        if wrong:
            raise ValueError(
                f"vqa_v2 source: {wrong} of {len(questions)} questions of {folder} have no whole number as image, "
                f"another image than their annotation, or not {PEOPLE} answers; give the files as published"
            )
        return asked


def _files() -> list[str]:
    """Names of the JSON files."""
    return [name.format(folder) for folder in VQA_SPLITS for name in (QUESTIONS, ANNOTATIONS)]


def _read(file: Path, entries: str, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """The list ``entries`` of a file, with ``columns``. Raises ValueError that tells counts, and nothing of them."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))[entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"vqa_v2 source: {file.name} cannot be read ({type(error).__name__}); expected a list {entries}"
        ) from None
    if not isinstance(rows, list):
        raise ValueError(f"vqa_v2 source: {entries} of {file.name} is not a list; give the file as published")
    wrong = sum(
        not isinstance(row, dict) or any(name not in row for name in columns) or not isinstance(row[columns[0]], int)
        for row in rows
    )
    if wrong:
        raise ValueError(
            f"vqa_v2 source: {wrong} of {len(rows)} {entries} in {file.name} lack one of {', '.join(columns)}, or have "
            f"no whole number as {columns[0]}; give the file as published"
        )
    return rows


def _question(asked: dict[str, Any], answered: dict[str, Any]) -> Question:
    """Raises KeyError, TypeError or ValueError where the two do not fit or are not as published."""
    # the same few thousand answers are given to every question: one copy of each is held
    answers = tuple(sys.intern(one["answer"]) for one in answered["answers"])
    if asked["image_id"] != answered["image_id"] or len(answers) != PEOPLE:
        raise ValueError
    kind = sys.intern(answered["answer_type"])
    return Question(sys.intern(asked["question"]), answers, sys.intern(answered["multiple_choice_answer"]), kind)


# EHRXQA's questions about one image: its part MIMIC-CXR-VQA (Bae et al., 2023, https://arxiv.org/abs/2310.18652).
#
# EHRXQA's other questions address patients through SQL and name no image.

EHRXQA_SPLITS = {"train": "train", "valid": "val", "test": "test"}
FIELDS = ("idx", "subject_id", "study_id", "image_id", "question", "answer")
FOLDERS = ("mimiccxrvqa/dataset", "dataset")


@dataclass(frozen=True)
class EHRXQASource(Published):
    """``train.json``, ``valid.json`` and ``test.json``, with answers: one row a question, in the published splits.

    The text is question and answer (spec 10.1); several answers are joined by "and". An image with several
    questions has several rows, of one study. The images, the patients and so the hashed ids are MIMIC-CXR's.
    """

    known: ClassVar[str] = "ehrxqa"
    table: ClassVar[str] = FOLDERS[0]
    published_as: ClassVar[Mapping[str, str]] = {"path": " or ".join(FOLDERS)}
    needs: ClassVar[tuple[str, ...]] = ("files",)  # MIMIC-CXR-JPG's
    cleans_reports: ClassVar[bool] = True  # by report_text.clean_report

    path: str = field(metadata=BELOW_ROOT)  # folder of the three files
    root: str | None = None  # folder of MIMIC-CXR-JPG's files/; None: text alone
    suffix: str = "jpg"  # of the images: jpg (MIMIC-CXR-JPG) or dcm (MIMIC-CXR)
    min_report_words: int = 3  # questions with shorter text are left out
    min_sentence_words: int = 1  # of a report; 2 drops sentences of one word ("Cardiomegaly."), as the papers do

    def listing(self) -> Listing:
        """The questions of the three splits. Raises ValueError for a file that is missing or not as published."""
        require_items("ehrxqa", Path(self.path), [f"{split}.json" for split in EHRXQA_SPLITS])
        published = [(split, row) for split in EHRXQA_SPLITS for row in self._rows(split)]
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
            splits=[EHRXQA_SPLITS[split] for _, split, _ in used],
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
        """The image of a question below MIMIC-CXR's folder."""
        return Path(self.root or "") / study_folder(row) / f"{row['image_id']}.{self.suffix}"


def _text(row: dict[str, Any]) -> str:
    """Question and answer; the answer is one text or a list of them."""
    answer = row["answer"]
    answers = answer if isinstance(answer, list) else [answer]
    return f"{row['question']} {' and '.join(str(one) for one in answers)}"
