"""VQA v2 (Goyal et al., 2017, https://arxiv.org/abs/1612.00837): questions about COCO's images, ten answers each."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedvlp.data.questions import Question
from fedvlp.data.sources.published import Listing, Photographs, require_items
from fedvlp.data.sources.table import BELOW_ROOT

SPLITS = {"train2014": "train", "val2014": "test"}
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

    table: ClassVar[str] = QUESTIONS.format("train2014")

    path: str = field(metadata=BELOW_ROOT)  # folder of the four JSON files
    root: str  # folder of train2014/ and val2014/

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """Questions, annotations and images in one folder."""
        require_items("vqa_v2", root, [*_files(), *SPLITS])
        return {"path": str(root), "root": str(root)}

    def listing(self) -> Listing:
        """The images that are asked about. Raises ValueError for a file that is missing or not as published."""
        require_items("vqa_v2", Path(self.path), _files())
        asked = {name: of for folder in SPLITS for name, of in self._of_images(folder).items()}
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
            splits=[SPLITS[folder] for folder in folders],
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
    return [name.format(folder) for folder in SPLITS for name in (QUESTIONS, ANNOTATIONS)]


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
