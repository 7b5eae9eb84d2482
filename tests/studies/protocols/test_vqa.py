"""VQA: answers and scores by hand, answers as features, shuffled answers, and towers that no evaluation changes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.probing import MODEL, cohort, model, shaded
from support.published import vqa_v2
from torch import Tensor

from fedvlp.data.cohort import Cohort, HeldQuestions, Question
from fedvlp.run.folder import RunFolder
from studies.protocols import vqa as answers
from studies.protocols.vqa import EVERY, VQA, Asked, Scale, Vocabulary, answer, commonest, text_features, vqa, write_vqa

pytestmark = pytest.mark.slow(seconds=5)

QUICK = VQA(hidden=32, lr=0.02, seeds=(0,), epochs=12, resamples=40)
SPLITS = ("train",) * 120 + ("val",) * 40 + ("test",) * 80


def truth(text: str, answer: str, kind: str = "other") -> Question:
    """A question that one person, who knows, has answered."""
    return Question(text, (answer,), answer, kind)


def ten(text: str, *said: str) -> Question:
    """A question with ten answers, of which the last given is repeated and the most common."""
    return Question(text, (*said, *said[-1:] * (10 - len(said))), said[-1], "other")


def data(questions: Sequence[Sequence[Question]], splits: Sequence[str] = SPLITS) -> Cohort:
    """Random images, two of a patient, with these questions."""
    images = cohort(np.zeros((len(splits), 0)), (), splits)
    return replace(images, questions=HeldQuestions([tuple(of) for of in questions]))


def test_features_of_texts_are_pooled_as_the_model_pools_reports() -> None:
    """In order, at any batch size, cleaned as reports are; the mean leaves the padding out."""
    probed, texts = model().train(), ["Is there edema?", "Why?", "is there EDEMA"]
    found = text_features(probed, texts)
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1])
    assert torch.allclose(text_features(probed, texts, batch_size=1), found, atol=1e-6)
    ids, mask = probed.tokenizer(["is there edema"])
    with torch.no_grad():
        encoded = probed.eval().encode({"text": ids, "text_mask": mask})
        aligned = probed.align(encoded).text  # type: ignore[arg-type]
    assert torch.allclose(found[:1], encoded.text[:, 0], atol=1e-6)  # type: ignore[union-attr, index]
    assert torch.allclose(text_features(probed, texts, aligned=True)[:1], aligned, atol=1e-6)  # type: ignore[arg-type]
    mean = replace(MODEL, text_pooling="mean").build(0)
    assert torch.allclose(text_features(mean, texts)[0], encoded.text[0, :4].mean(dim=0), atol=1e-6)  # type: ignore[union-attr, index]


# By hand


def test_the_vocabulary_is_the_most_frequent_training_answers() -> None:
    """ "2" is the commonest answer of three questions, in two spellings; of red and blue, once each, blue is first."""
    train = [[ten("a", "two"), ten("b", "Two.")], [], [ten("a", "2"), ten("c", "red"), ten("c", "blue")]]
    test = [[ten("d", "green")]]
    found = Vocabulary.of(train, test, 2)
    assert found.answers == {"2": 0, "blue": 1}
    assert list(found.texts) == ["a", "b", "c", "d"]
    assert list(Vocabulary.of(train, test, 3000).answers) == ["2", "blue", "red"]


def test_targets_and_both_metrics_by_hand() -> None:
    """Of ten people seven say 2 (three of them in words), two say blue, one says what no head can: red.

    Soft scores are min(7/3, 1) and 2/3. Officially 2 gets 1, and blue (2 * 1/3 + 8 * 2/3) / 10 = 0.6. The most common
    answer of the other question is not in the vocabulary: it is not judged as a class, and 0 otherwise.
    """
    vocabulary = Vocabulary.of([[truth("a", "2"), truth("a", "2"), truth("a", "blue")]], [[truth("b", "")]], 2)
    mixed = Question("a", ("two", "2", "Two.", "blue", "2", "2", "a blue", "2", "red", "two"), "2", "number")
    targets = vocabulary.targets([[], [mixed, ten("b", "red")]])
    assert targets.image.tolist() == [1, 1]
    assert targets.text.tolist() == [0, 1]
    assert targets.common.tolist() == [0, 2]
    scores = targets.scores(torch.tensor([1, 0]), 2)
    assert scores.tolist() == [[0, 0], [1, pytest.approx(2 / 3)]]
    assert targets.official(torch.tensor([0, 0])).tolist() == pytest.approx([100, 0])
    assert targets.official(torch.tensor([1, 1])).tolist() == pytest.approx([60, 0])
    assert targets.right(torch.tensor([0, 1])).tolist() == [100, 0]


def test_the_commonest_answer_to_a_wording() -> None:
    """Answers 0 (yes, four in all), 1 (no, three), 2 (red, one). To "a" no is commoner; "b" ties, so the first."""
    train = [[truth("a", word) for word in ("no", "no", "yes")], [truth("b", word) for word in ("no", "yes")]]
    train += [[truth("c", "yes"), truth("c", "yes"), truth("e", "red")]]
    vocabulary = Vocabulary.of(train, [[truth("d", "blue")]], 2)
    assert vocabulary.answers == {"yes": 0, "no": 1}
    best = commonest(vocabulary.targets(train), len(vocabulary.texts), 2)
    assert dict(zip(vocabulary.texts, best.tolist(), strict=True)) == {"a": 1, "b": 0, "c": 0, "e": 0, "d": 0}


def test_features_are_on_the_scale_of_the_training_split() -> None:
    table = torch.tensor([[1.0, 5, 7], [3, 5, 9]])
    scale = Scale.of(table)
    assert scale(table).tolist() == [[-1, 0, -1], [1, 0, 1]]
    assert scale(torch.tensor([[5.0, 6, 8]])).tolist() == [[3, 1, 0]]


# Heads


def known(monkeypatch: pytest.MonkeyPatch, of_rows: Tensor) -> None:
    """Features of the images [N, W] in place of the tower's; wordings are numbered, one-hot."""
    monkeypatch.setattr(answers, "features", lambda _, data, rows, aligned: of_rows[rows])
    monkeypatch.setattr(answers, "text_features", lambda _, texts, aligned: torch.eye(len(texts)))


def test_a_head_needs_image_and_question_and_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Image k of four is bright in k mod 2 and large in k div 2; either question alone tells nothing of the answer."""
    kind = np.arange(240) % 4
    asked = [
        (truth("bright?", "yes" if k % 2 else "no", "light"), truth("large?", "yes" if k // 2 else "no", "size"))
        for k in kind
    ]
    known(monkeypatch, torch.eye(4)[kind])
    found = vqa(QUICK, model(), data(asked))
    whole, *by_kind = found.results
    assert (whole.kind, whole.questions, whole.known) == (EVERY, 160, 160)
    assert [one.kind for one in by_kind] == ["light", "size"]
    for one in found.results:
        assert (one.accuracy.value, one.official.value, one.official.low) == (100, 100, 100)
        assert one.majority == one.majority_official == one.by_question == 50
    assert (found.answers, found.train_questions, found.val_questions) == (2, 240, 80)
    assert [(one.site, one.official) for one in found.sites] == [("site-1", 100), ("site-2", 100)]
    assert sum(one.questions for one in found.sites) == 160


def test_shuffled_answers_give_the_majority_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five are no; features are of the true answers, but the head sees answers that were shuffled."""
    rng = np.random.default_rng(7)
    splits = ("train",) * 600 + ("val",) * 200 + ("test",) * 400
    yes = rng.random(1200) < 0.2
    known(monkeypatch, torch.from_numpy(yes[:, None].astype(np.float32)) + 0.1 * torch.randn(1200, 1))
    shuffled = rng.permutation(yes)
    right, wrong = (
        vqa(QUICK, model(), data([(truth("seen?", "yes" if one else "no"),) for one in said], splits))
        for said in (yes, shuffled)
    )
    rate = 100 * float((~shuffled[800:]).mean())
    assert right.results[0].accuracy.value > 99
    assert wrong.results[0].majority == wrong.results[0].majority_official == pytest.approx(rate)
    assert wrong.results[0].official.value == pytest.approx(rate, abs=2.0)
    assert wrong.results[0].official.low < rate < wrong.results[0].official.high


def test_what_a_head_cannot_answer_counts_0_officially_and_is_no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other test question has an answer that training never saw."""
    kind = np.arange(240) % 2
    asked = [(truth("which?", ("red", "blue")[k]),) for k in kind]
    asked[160::4] = [(truth("which?", "green"),)] * 20
    asked[162::4] = [(truth("which?", "green"),)] * 20
    known(monkeypatch, torch.eye(2)[kind])
    (result,) = vqa(QUICK, model(), data(asked)).results
    assert (result.questions, result.known) == (80, 40)
    assert (result.accuracy.value, result.official.value) == (100, 50)


def test_figures_are_means_over_seeds_and_steps_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained heads differ; the figure of two is the mean of either's."""
    kind = np.arange(240) % 3
    asked = [(truth("which?", ("red", "blue", "green")[k]),) for k in kind]
    known(monkeypatch, torch.randn(240, 4, generator=torch.Generator().manual_seed(0)))
    alone = [vqa(replace(QUICK, seeds=(seed,)), model(), data(asked), 0).results[0].official.value for seed in (1, 2)]
    both = vqa(replace(QUICK, seeds=(1, 2)), model(), data(asked), 0).results[0].official.value
    assert alone[0] != alone[1]
    assert both == pytest.approx(sum(alone) / 2)


def test_no_byte_of_the_model_changes_and_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    """With the towers' own features, and a model that came in training mode."""
    probed = model().train()
    before = {name: tensor.clone() for name, tensor in probed.state_dict().items()}
    asked = [(truth("Is it odd?", "yes" if k % 2 else "no"), ten("How many?", "two", "2")) for k in range(48)]
    questions = data(asked, ("train",) * 24 + ("val",) * 8 + ("test",) * 16)
    first, again = (vqa(replace(QUICK, epochs=2), probed, questions) for _ in range(2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in probed.state_dict().items())
    assert first.results == again.results
    files = write_vqa(first, tmp_path / "vqa")
    assert [file.name for file in files] == ["vqa.csv", "vqa-sites.csv"]
    (row,) = csv.DictReader(files[0].open())
    expected = {"kind": "all", "questions": "32", "accuracy_questions": "32", "answers": "3", "train_questions": "48",
                "test_images": "16", "test_patients": "8", "left_out_as_test_pixels": "0"}  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert float(row["official_low"]) <= float(row["official_accuracy"]) <= float(row["official_high"])
    assert {line["site"] for line in csv.DictReader(files[1].open())} == {"site-1", "site-2"}


def test_intervals_are_over_patients_and_not_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten test images each of two patients: of the one all answers are right, of the other none."""
    kind = np.arange(60) % 2
    splits = ("train",) * 30 + ("val",) * 10 + ("test",) * 20
    of_two = data([(truth("which?", ("red", "blue")[k]),) for k in kind], splits)
    of_two = replace(of_two, patients=(*of_two.patients[:40], *["one"] * 10, *["other"] * 10))
    seen = np.where(np.arange(60) < 50, kind, 1 - kind)
    known(monkeypatch, torch.eye(2)[seen])
    (result,) = vqa(QUICK, model(), of_two).results
    for found in (result.accuracy, result.official):
        assert (found.value, found.low, found.high) == (50, 0, 100)


@pytest.mark.parametrize("finetune", [False, True])
def test_the_test_split_chooses_nothing_and_the_validation_split_does(
    finetune: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the opposite test answers every prediction is the same; with the opposite validation answers another.

    The heads learn slowly: the first epoch, the best for what is the opposite, answers otherwise than the last.
    """
    predict, found = answers.predict, list[Tensor]()
    monkeypatch.setattr(answers, "predict", lambda *args: (found.append(predict(*args)), found[-1])[1])
    splits = np.array(("train",) * 60 + ("val",) * 20 + ("test",) * 40)
    images = bright()
    settings = replace(QUICK, lr=5e-4, epochs=6, patience=6, batch_size=20, finetune=finetune)
    for opposite in ("", "test", "val"):
        says = (images.labels[:, 0] == 1) ^ (splits == opposite)
        asked = HeldQuestions([(truth("bright?", "yes" if one else "no"),) for one in says])
        vqa(settings, model(), replace(images, questions=asked))
    plain, of_test, of_val = found
    assert torch.equal(plain, of_test)
    assert not torch.equal(plain, of_val)


# Encoders that train with the head


def bright() -> Cohort:
    """120 images, some brighter in a band; one question whether they are, and one that is the same for all."""
    labels = np.arange(120)[:, None] // 2 % 2
    images = cohort(labels, ("Bright",), ("train",) * 60 + ("val",) * 20 + ("test",) * 40, shaded(labels))
    about = [(truth("bright?", "yes" if label else "no"), truth("a film?", "yes")) for label in labels[:, 0]]
    return replace(images, questions=HeldQuestions(about))


def test_encoders_with_rate_0_answer_as_frozen_ones_do() -> None:
    """So what is computed anew for every batch are the features that were there, of the right image and wording."""
    still = replace(QUICK, epochs=3, encoder_lr=0.0, batch_size=7)
    frozen, tuned = (vqa(replace(still, finetune=tune), model(), bright()).results for tune in (False, True))
    assert frozen == tuned


def test_an_image_tower_that_sees_nothing_learns_to_see() -> None:
    """Every image has the same feature, so a head can only guess; tuned, the copy tells them apart, the model not."""
    blind = model()
    torch.nn.init.zeros_(blind.image_encoder.get_parameter("norm.weight"))
    before = {name: tensor.clone() for name, tensor in blind.state_dict().items()}
    settings = replace(QUICK, epochs=15, lr=0.005, encoder_lr=0.003, batch_size=20)
    frozen, tuned = (vqa(replace(settings, finetune=tune), blind, bright()).results[0] for tune in (False, True))
    assert frozen.accuracy.value <= 75 == tuned.by_question
    assert tuned.accuracy.value > 90
    assert all(torch.equal(tensor, before[name]) for name, tensor in blind.state_dict().items())


# What cannot be


def test_data_without_questions_are_refused() -> None:
    asked: list[Any] = [()] * 240
    with pytest.raises(ValueError, match="vqa: the data have no questions; expected those of the synthetic cohort"):
        vqa(QUICK, model(), replace(data(asked), questions=None))
    with pytest.raises(ValueError, match="train 0, val 0, test 0 labelled images"):
        vqa(QUICK, model(), data(asked))
    with pytest.raises(ValueError, match="1 different answers; expected at least 2"):
        vqa(QUICK, model(), data([(truth("canary?", "canary"),)] * 240))


def test_a_protocol_that_cannot_be_is_refused() -> None:
    for wrong in [{"answers": 1}, {"hidden": 0}, {"seeds": ()}, {"encoder_lr": -1.0}, {"epochs": 0}]:
        with pytest.raises(ValueError, match="vqa: "):
            VQA(**wrong)


# The command


def test_questions_of_vqa_v2_are_answered(tmp_path: Path) -> None:
    """Odd images are bright. The published split is kept; a fifth of the training images chooses the epoch."""
    (tmp_path / "vqa").mkdir()
    vqa_v2(tmp_path / "vqa")
    model().save(tmp_path / "one")
    done = evaluate(
        tmp_path / "one", "--what", "vqa", "--data", f"vqa_v2:{tmp_path / 'vqa'}",
        "--set", "vqa.lr=0.01", "--set", "vqa.hidden=64",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (table,) = (tmp_path / "one" / "evaluation").glob("vqa-????????.csv")
    every, *kinds = csv.DictReader(table.open())
    assert (every["kind"], every["questions"], every["answers"], every["test_images"]) == ("all", "12", "3", "6")
    assert float(every["official_accuracy"]) == float(every["accuracy"]) == 100
    assert [(row["kind"], float(row["majority_by_question_official"])) for row in kinds] == [
        ("number", 100), ("yes/no", 50),
    ]  # fmt: skip


def evaluate(*words: object) -> Any:
    from typer.testing import CliRunner

    from fedvlp.cli import app

    return CliRunner().invoke(app, ["evaluate", *map(str, words)])


def test_a_model_alone_has_no_questions_and_nothing_is_compared(tmp_path: Path) -> None:
    model().save(tmp_path)
    with pytest.raises(ValueError, match="is a model and no run, so it has no records of its own; give --data"):
        answer(RunFolder(tmp_path), Asked())
    with pytest.raises(ValueError, match="--against compares linear probes"):
        answer(RunFolder(tmp_path), Asked(against=(tmp_path,)))
