"""VQA v2 from a fixture in its published layout: splits, questions and answers, and files that are not as published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.published import vqa_v2

from fedvlp.data.cohort import Question
from studies.collections.captions_and_classes import CocoCaptionsSource
from studies.collections.questions_of_people import VQAv2Source

pytestmark = pytest.mark.slow(seconds=5)

QUESTIONS, ANNOTATIONS = "v2_OpenEnded_mscoco_train2014_questions.json", "v2_mscoco_train2014_annotations.json"


def source(root: Path) -> VQAv2Source:
    return VQAv2Source.at(root, image_size=32)


def test_questions_and_answers_are_as_published(tmp_path: Path) -> None:
    """Image 7 of train2014 is bright; of ten people nine write 2 and one writes "Two."."""
    vqa_v2(tmp_path)
    cohort = source(tmp_path).build()
    assert [len(cohort.rows(split)) for split in ("train", "val", "test")] == [12, 0, 6]
    assert cohort.questions is not None
    assert cohort.questions(np.array([7])) == [
        (
            Question("Is the photo bright?", ("yes",) * 10, "yes", "yes/no"),
            Question("How many?", ("Two.", *("2",) * 9), "2", "number"),
        )
    ]
    assert cohort.images(np.array([7]))[0, 16, 16] > 200
    assert cohort.take(np.array([3, 7])).questions(np.array([1])) == cohort.questions(np.array([7]))  # type: ignore[misc]


def test_the_fingerprint_tells_other_answers(tmp_path: Path) -> None:
    vqa_v2(tmp_path)
    before = source(tmp_path).build().fingerprint
    assert source(tmp_path).build().fingerprint == before
    changed(tmp_path / ANNOTATIONS, lambda rows: rows[0]["answers"][3].update(answer="maybe"))
    assert source(tmp_path).build().fingerprint != before


def test_an_image_has_one_id_here_and_among_the_captions(tmp_path: Path) -> None:
    """Whoever trains on COCO's captions can see which images VQA v2 tests on."""
    vqa_v2(tmp_path)
    sentence = {"raw": "A bright photo.", "sentid": 1, "imgid": 0, "tokens": []}
    image = {"filename": "COCO_val2014_000000000103.jpg", "filepath": "val2014", "split": "restval"}
    karpathy = tmp_path / "dataset_coco.json"
    karpathy.write_text(json.dumps({"images": [{**image, "sentences": [sentence]}]}))
    captions = CocoCaptionsSource(str(karpathy), str(tmp_path), image_size=32).build()
    asked = source(tmp_path).build()
    assert captions.patients[0] == asked.patients[12 + 3]


def changed(file: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Changes the entries of a JSON file in place."""
    content = json.loads(file.read_text())
    change(content["questions" if "questions" in content else "annotations"])
    file.write_text(json.dumps(content))


def test_what_is_not_as_published_is_counted(tmp_path: Path) -> None:
    for number, (file, change, said) in enumerate(
        [
            (QUESTIONS, lambda rows: rows.pop(), "24 annotations, 1 of them alone"),
            (ANNOTATIONS, lambda rows: rows.append(rows[0]), "24 questions and 25 annotations, 0 of them alone"),
            (
                QUESTIONS,
                lambda rows: rows[0].pop("question"),
                "1 of 24 questions in .* lack one of question_id, image_id",
            ),
            (
                QUESTIONS,
                lambda rows: rows[0].update(question_id=["canary"]),
                "1 of 24 questions .* whole number as question_id",
            ),
            (ANNOTATIONS, lambda rows: rows[1].pop("answers"), "1 of 24 annotations in .* lack one of question_id"),
            (ANNOTATIONS, lambda rows: rows[2]["answers"].pop(), "1 of 24 questions of train2014 .* not 10 answers"),
            (ANNOTATIONS, lambda rows: rows[2].update(image_id=99), "1 of 24 questions .* another image than"),
            (QUESTIONS, lambda rows: rows[0].update(image_id="0"), "1 of 24 questions .* no whole number as image"),
            (QUESTIONS, lambda rows: rows[0].update(question=["canary"]), "1 of 24 questions"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        vqa_v2(folder)
        changed(folder / file, change)
        with pytest.raises(ValueError, match=f"vqa_v2 source: .*{said}") as caught:
            source(folder).build()
        assert str(folder) not in str(caught.value)
        assert "canary" not in str(caught.value)


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    for content in ["", "[]", '{"questions": {}}']:
        vqa_v2(tmp_path)
        (tmp_path / QUESTIONS).write_text(content)
        with pytest.raises(ValueError, match=f"{QUESTIONS}"):
            source(tmp_path).build()


def test_a_question_without_answers_is_none() -> None:
    with pytest.raises(ValueError, match="question: no answer"):
        Question("Why?", (), "", "other")
