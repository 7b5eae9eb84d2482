"""Linear probes against scikit-learn on the same features, labels as features, shuffled labels, and two models."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.probing import cohort, model, one_hot, shaded
from torch import Tensor

from fedvlp.data.cohort import Cohort
from fedvlp.evaluation import linear_probe as probes
from fedvlp.evaluation.classification import auc
from fedvlp.evaluation.linear_probe import LinearProbe, Sample, Task, compare, fit, linear_probe, task_of, write_probe

EXACT = LinearProbe(solver="lbfgs", fractions=(1.0,), seeds=(0,), resamples=50)
NAMES = ("normal", "pneumonia", "covid")


def blobs(count: int = 120, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features [N, 5] that overlap between classes, of unlike scales, and one-hot targets."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.arange(count) % classes
    centres = torch.randn(classes, 5, generator=generator)
    x = (centres[number] + 2 * torch.randn(count, 5, generator=generator)) * torch.tensor([1.0, 10, 0.1, 1, 3]) + 2
    return x, torch.nn.functional.one_hot(number, classes).double()


@pytest.mark.parametrize(("l2", "more"), [(0.1, 0), (1.0, 0), (30.0, 0), (1.0, 150)])
def test_the_exact_head_is_sklearns(l2: float, more: int) -> None:
    """With 5 features of 120 records, and with ``more`` that mean nothing, so that there are fewer records."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, targets = blobs()
    noise = torch.randn(len(x), more, generator=torch.Generator().manual_seed(3))
    x = torch.cat((x, noise), dim=1).double()  # scikit-learn stops early on float32
    for exclusive, columns in ((True, slice(None)), (False, slice(0, 1))):
        task = Task(NAMES, targets[:, columns], exclusive)
        head = fit(task, replace(EXACT, l2=l2), Sample(x, targets[:, columns]), Sample(x, targets[:, columns]), 0, None)
        theirs = make_pipeline(StandardScaler(), LogisticRegression(C=1 / l2, tol=1e-8, max_iter=5000))
        theirs.fit(x.numpy(), targets.argmax(1).numpy() if exclusive else targets[:, 0].numpy())
        with torch.no_grad():
            mine = task.probabilities(head(x.float())).numpy()
        assert np.abs(mine - theirs.predict_proba(x.numpy())[:, slice(None) if exclusive else slice(1, 2)]).max() < 1e-4


def test_figures_are_sklearns_on_the_same_probabilities() -> None:
    from sklearn.metrics import accuracy_score, roc_auc_score

    classes = np.random.default_rng(5).integers(0, 3, 120)
    labels = one_hot(classes, 3)
    data = cohort(labels, NAMES, ("train",) * 60 + ("val",) * 20 + ("test",) * 40, shaded(labels, 1, by=4))
    found = linear_probe(EXACT, model(), data)
    probabilities = found.probabilities["100 %"][0].numpy()
    truth = classes[80:]
    assert found.results[0].accuracy.value == pytest.approx(100 * accuracy_score(truth, probabilities.argmax(1)))
    expected = roc_auc_score(truth, probabilities, multi_class="ovr", average="macro")
    assert found.results[0].auc is not None
    assert found.results[0].auc.value == pytest.approx(expected)
    assert 0.5 < expected < 1, "the figure tells something"


def test_findings_are_judged_one_by_one_and_uncertain_ones_not_at_all() -> None:
    """Blank is absent, -1 is left out: the areas are those of ``auc`` on such targets."""
    rng = np.random.default_rng(2)
    labels = rng.choice([1.0, 0.0, -1.0, np.nan], (160, 2), p=[0.4, 0.3, 0.1, 0.2])
    data = cohort(labels, ("edema", "effusion"), ("train",) * 80 + ("val",) * 20 + ("test",) * 60, shaded(labels))
    found = linear_probe(replace(EXACT, l2=30.0), model(), data)
    assert not found.task.exclusive
    targets = torch.tensor(np.where(labels == -1, np.nan, labels == 1))[100:]
    expected = auc(found.probabilities["100 %"][0], targets, found.task.names)
    assert found.results[0].auc is not None
    assert found.results[0].auc.value == pytest.approx(expected.macro())
    hits = ((found.probabilities["100 %"][0] >= 0.5) == (targets == 1))[~targets.isnan()]
    assert found.results[0].accuracy.value == pytest.approx(100 * float(hits.double().mean()))
    unknown = task_of(data, LinearProbe(blank="unknown")).targets.numpy()
    assert np.array_equal(np.isnan(unknown), np.isnan(labels) | (labels == -1))


def of_collections(*parts: tuple[str, np.ndarray, tuple[str, ...]]) -> Cohort:
    """Sites of a collection each: (name, labels [n, l], the names of these)."""
    cohorts = []
    for site, labels, names in parts:
        splits = [("train", "val", "test")[row // 2 % 3] for row in range(len(labels))]
        one = replace(cohort(labels, names, splits), sites=(site,) * len(labels))
        cohorts.append(one.named_by(site))
    return Cohort.concat(cohorts)


def test_a_label_that_no_record_has_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """Such as NIH's 4 of the 14 names of CheXpert: "absent" was right throughout, and the accuracy flattered."""
    nan = math.nan
    labels = np.array([[1, nan, -1], [0, nan, nan], [nan, nan, 1]] * 8)
    task = task_of(cohort(labels, NAMES, _thirds(24)), LinearProbe())
    assert task.names == ("normal", "covid")
    assert task.targets[:3].nan_to_num(9).tolist() == [[1, 9], [0, 0], [0, 1]]
    assert "linear probe: left out, since no record has such a label: pneumonia" in caplog.text
    with pytest.raises(ValueError, match=r"no record has a label pneumonia; choose others with probe\.classes"):
        task_of(cohort(labels, NAMES, _thirds(24)), LinearProbe(classes="normal,pneumonia"))
    with pytest.raises(ValueError, match="no record has a label normal, pneumonia, covid"):
        task_of(cohort(np.full((6, 3), nan), NAMES, _thirds(6)), LinearProbe())


def test_classes_stay_classes_beside_a_label_that_no_record_has() -> None:
    labels = np.insert(one_hot(np.arange(24) % 2, 2), 1, math.nan, axis=1)
    task = task_of(cohort(labels, NAMES, _thirds(24)), LinearProbe())
    assert (task.names, task.exclusive) == (("normal", "covid"), True)


def test_another_collections_films_are_no_negatives() -> None:
    """One collection knows pneumonia and the other edema: a score that tells them apart had an area of 0.833."""
    known = (np.arange(24) % 2)[:, None].astype(float)
    data = of_collections(("mimic", known, ("pneumonia",)), ("rsna", known, ("edema",)))
    scores = torch.tensor([[0.9, 0.1]] * 24 + [[0.1, 0.9]] * 24).double()
    for blank in ("absent", "unknown"):
        task = task_of(data, LinearProbe(blank=blank))
        assert task.names == ("pneumonia", "edema")
        assert task.targets.isnan().tolist() == [[False, True]] * 24 + [[True, False]] * 24
        assert auc(scores, task.targets, task.names).macro() == 0.5


def test_a_head_that_diverged_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = one_hot(np.arange(30) % 2, 2)
    monkeypatch.setattr(Task, "probabilities", lambda self, logits: logits.double() * math.nan)
    with pytest.raises(ValueError, match="linear probe: 20 of 20 scores are nan"):
        linear_probe(EXACT, model(), cohort(labels, NAMES[:2], _thirds(30)))


def given(monkeypatch: pytest.MonkeyPatch, of: Callable[[Cohort], Tensor]) -> None:
    """Features [N, W] of a cohort, in the place of those of the tower."""
    monkeypatch.setattr(probes, "features", lambda _, data, rows, aligned: of(data)[rows])


@pytest.mark.parametrize("solver", ["adamw", "lbfgs"])
def test_labels_as_features_give_100(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW: 100 steps of 0.05."""
    given(monkeypatch, lambda data: torch.from_numpy(data.labels))
    data = cohort(one_hot(np.arange(120) % 3, 3), NAMES, ("train",) * 60 + ("val",) * 20 + ("test",) * 40)
    (result,) = linear_probe(replace(EXACT, solver=solver, lr=0.05), model(), data, 100).results
    assert (result.accuracy.value, result.accuracy.low) == (100.0, 100.0)
    assert result.auc is not None
    assert result.auc.value == 1.0


@pytest.mark.parametrize("solver", ["adamw", "lbfgs"])
def test_shuffled_labels_give_the_majority_rate(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five are of one class, features are of the true labels, but the heads see labels that were shuffled."""
    rng = np.random.default_rng(7)
    truth = one_hot((rng.random(1200) < 0.2).astype(int), 2)
    splits = ("train",) * 600 + ("val",) * 200 + ("test",) * 400
    shuffled = truth[rng.permutation(1200)]
    given(monkeypatch, lambda data: torch.from_numpy(truth) + 0.1 * torch.randn(1200, 2))
    right = linear_probe(replace(EXACT, solver=solver, lr=0.01), model(), cohort(truth, NAMES[:2], splits), 200)
    wrong = linear_probe(replace(EXACT, solver=solver, lr=0.01), model(), cohort(shuffled, NAMES[:2], splits), 200)
    assert right.results[0].accuracy.value > 99
    result = wrong.results[0]
    rate = 100 * float((shuffled[800:, 0] == 1).mean())
    assert result.majority == pytest.approx(rate)
    assert result.accuracy.value == pytest.approx(rate, abs=1.0)
    assert result.auc is not None
    assert abs(result.auc.value - 0.5) < 0.12


def test_a_planted_test_record_changes_nothing() -> None:
    """The first training film becomes a copy of a test film with a wrong label: as if it were not there."""
    labels = one_hot(np.arange(60) % 2, 2)
    splits = ("train",) * 30 + ("val",) * 10 + ("test",) * 20
    pixels = shaded(labels)
    pixels[0] = pixels[41]
    planted = linear_probe(EXACT, model(), cohort(labels, NAMES[:2], splits, pixels))
    without = linear_probe(EXACT, model(), cohort(labels, NAMES[:2], splits, pixels).take(np.arange(1, 60)))
    assert (planted.rows.left_out, without.rows.left_out) == (1, 0)
    assert torch.equal(planted.probabilities["100 %"], without.probabilities["100 %"])


def test_probing_leaves_the_models_bytes() -> None:
    probed = model().train()
    before = {name: tensor.clone() for name, tensor in probed.state_dict().items()}
    labels = one_hot(np.arange(24) % 2, 2)
    linear_probe(LinearProbe(epochs=2, seeds=(0,), resamples=10), probed, cohort(labels, NAMES[:2], _thirds(24)))
    assert probed.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in probed.state_dict().items())
    assert all(parameter.grad is None for parameter in probed.parameters())


def _thirds(count: int) -> tuple[str, ...]:
    return ("train",) * (count // 3) + ("val",) * (count // 3) + ("test",) * (count // 3)


# AdamW as the papers have it


def test_the_first_step_of_adamw_by_hand() -> None:
    """From w, AdamW's first step is w (1 - lr wd) - lr sign(g), for every weight with a gradient."""
    x, targets = blobs(30)
    task, settings = Task(NAMES, targets, True), LinearProbe(lr=0.01, weight_decay=0.1, batch_size=30)
    start = fit(task, replace(settings, lr=1e-30), Sample(x, targets), Sample(x, targets), 3, 1)
    after = fit(task, settings, Sample(x, targets), Sample(x, targets), 3, 1)
    gap = (start(x).softmax(1) - targets.float()).T @ x / 30  # gradient of the mean cross-entropy
    assert torch.allclose(after.weight, start.weight * (1 - 0.001) - 0.01 * gap.sign(), atol=1e-5)


def test_the_best_epoch_is_taken_and_training_stops_after_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation labels are the opposite: every epoch is worse than the first, so 1 + 3 are run."""
    x, targets = blobs(60, 2)
    x = (x - x.mean(0)) / x.std(0)
    task, steps = Task(NAMES[:2], targets, True), []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: (steps.append(1), step(self, *args))[1])
    settings = LinearProbe(lr=0.05, patience=3, batch_size=20)
    train, opposite = Sample(x, targets), Sample(x, 1 - targets)
    stopped = fit(task, settings, train, opposite, 0, None)
    assert len(steps) == 3 * (1 + 3)
    first = fit(task, settings, train, opposite, 0, 3)
    assert torch.equal(stopped.weight, first.weight)
    steps.clear()
    fit(task, replace(settings, epochs=6), train, train, 0, None)
    assert len(steps) == 3 * 6, "a loss that falls is not stopped"


def test_the_test_split_chooses_nothing_and_the_validation_split_does() -> None:
    """With the opposite test labels every answer is the same; with the opposite validation labels another epoch is."""
    labels = one_hot(np.arange(90) % 2, 2)
    splits, films = np.array(_thirds(90)), shaded(labels)
    settings = LinearProbe(lr=1e-3, batch_size=10, epochs=6, patience=6, fractions=(0.5, 1.0), seeds=(0, 1))

    def answers(opposite: str) -> dict[str, Tensor]:
        said = np.where((splits == opposite)[:, None], 1 - labels, labels)
        return linear_probe(settings, model(), cohort(said, NAMES[:2], _thirds(90), films)).probabilities

    plain, of_test, of_val = map(answers, ("", "test", "val"))
    for subset, found in plain.items():
        assert torch.equal(found, of_test[subset]), subset
        assert not torch.equal(found, of_val[subset]), subset


def test_adamw_comes_to_the_exact_solution() -> None:
    x, targets = blobs()
    x = (x - x.mean(0)) / x.std(0)
    task, sample = Task(NAMES, targets, True), Sample(x, targets)
    settings = LinearProbe(lr=0.05, weight_decay=0.0, epochs=150, batch_size=120)
    slow, exact = (
        fit(task, settings, sample, sample, 0, None),
        fit(task, replace(EXACT, l2=1e-6), sample, sample, 0, None),
    )
    with torch.no_grad():
        assert float((slow(x).softmax(1) - exact(x).softmax(1)).abs().max()) < 0.02


def test_seeds_and_subsets_are_told_apart() -> None:
    labels = one_hot(np.arange(120) % 2, 2)
    data = cohort(labels, NAMES[:2], ("train",) * 60 + ("val",) * 20 + ("test",) * 40, shaded(labels, by=4))
    settings = replace(EXACT, fractions=(0.1, 1.0), shots=(2,), seeds=(0, 1, 2))
    found = linear_probe(settings, model(), data)
    assert [(result.subset, result.records) for result in found.results] == [("10 %", 6), ("100 %", 60), ("2-shot", 4)]
    small, whole, _ = found.results
    assert small.accuracy_std > 0 == whole.accuracy_std
    by_seed = [
        100 * float((one.argmax(1).numpy() == np.arange(80, 120) % 2).mean()) for one in found.probabilities["10 %"]
    ]
    assert small.accuracy.value == pytest.approx(np.mean(by_seed))
    assert small.accuracy_std == pytest.approx(np.std(by_seed))
    at_site = {row.site: row for row in found.sites if row.subset == "10 %"}
    assert {row.records for row in at_site.values()} == {20}
    assert np.mean([row.accuracy for row in at_site.values()]) == pytest.approx(small.accuracy.value)


def test_each_subgroup_has_the_figures_of_its_records_alone() -> None:
    """Films of "M" say nothing, those of "F" everything; of the last four test records the sex is not known."""
    labels = one_hot(np.arange(160) % 2, 2)
    pixels = shaded(labels)
    sex = np.array(["F", "F", "M", "M"] * 40)
    pixels[(sex == "M") & (np.arange(160) >= 80)] = 0
    sex[-4:] = ""
    splits = ("train",) * 60 + ("val",) * 20 + ("test",) * 80
    data = replace(cohort(labels, NAMES[:2], splits, pixels), subgroups=sex[:, None], subgroup_names=("sex",))
    found = linear_probe(EXACT, model(), data)
    women, men = found.subgroups
    assert [(one.by, one.subgroup, one.records, one.patients) for one in (women, men)] == [
        ("sex", "F", 38, 19), ("sex", "M", 38, 19),
    ]  # fmt: skip
    assert women.auc is not None
    assert men.auc is not None
    assert (women.auc.value, women.accuracy.value) == (1.0, 100.0)
    assert (men.auc.value, men.accuracy.value) == (0.5, 50.0)
    only = linear_probe(EXACT, model(), data.take(np.r_[:80, 80 + np.flatnonzero(sex[80:] == "F")]))
    assert only.results[0].auc == women.auc


# Two models


def test_models_are_compared_on_the_same_records_with_holms_adjustment() -> None:
    labels = one_hot(np.random.default_rng(3).integers(0, 3, 150), 3)
    data = cohort(labels, NAMES, ("train",) * 50 + ("val",) * 20 + ("test",) * 80, shaded(labels, by=4))
    settings = replace(EXACT, fractions=(0.2, 1.0))
    one, other = (linear_probe(settings, model(seed), data) for seed in (0, 1))
    rows = compare(one, {"other": other, "itself": one}, 50)
    assert len(rows) == 2 * 2 * 3
    assert all(row.p == row.holm == 1.0 and row.interval.high == 0 for row in rows if row.other == "itself")
    least = min(rows, key=lambda row: row.p)
    assert least.holm == pytest.approx(min(1.0, 12 * least.p))
    for row in rows:
        assert row.interval.value == pytest.approx(row.one_auc - row.other_auc)
    fewer = linear_probe(settings, model(), data.take(np.arange(149)))
    with pytest.raises(ValueError, match="other records"):
        compare(one, {"other": fewer})


def test_intervals_are_over_patients_and_not_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten test films each of two patients: of the one all answers are right, of the other none.

    A quarter of the resamples has the one patient twice, a quarter the other. A model that is right of both is ahead by
    an area of 0 in the one and of 1 in the other.
    """
    labels = one_hot(np.arange(60) % 2, 2)
    seen = labels.copy()
    seen[50:] = 1 - seen[50:]
    data = replace(cohort(labels, NAMES[:2], _thirds(60)), subgroups=np.full((60, 1), "F"), subgroup_names=("sex",))
    data = replace(data, patients=(*data.patients[:40], *["one"] * 10, *["other"] * 10))
    given(monkeypatch, lambda _: torch.from_numpy(labels))
    right = linear_probe(EXACT, model(), data)
    given(monkeypatch, lambda _: torch.from_numpy(seen))
    half = linear_probe(EXACT, model(), data)
    for found in (half.results[0], half.subgroups[0]):
        assert (found.accuracy.value, found.accuracy.low, found.accuracy.high) == (50, 0, 100)
        assert found.auc is not None
        assert (found.auc.low, found.auc.high) == (0, 1)
    for row in compare(right, {"half": half}, 50):
        assert (row.interval.low, row.interval.high) == (0, 1)


def test_files(tmp_path: Path) -> None:
    labels = one_hot(np.arange(60) % 3, 3)
    one, other = (linear_probe(EXACT, model(s), cohort(labels, NAMES, _thirds(60), shaded(labels))) for s in (0, 1))
    files = write_probe(one, compare(one, {"b": other}, 20), tmp_path / "probe")
    assert [file.name for file in files] == [
        "probe.csv",
        "probe-reliability.csv",
        "probe-sites.csv",
        "probe-against.csv",
    ]
    (row,) = csv.DictReader(files[0].open())
    assert (row["train_on"], row["train_records"], row["test_records"], row["test_patients"]) == (
        "100 %",
        "20",
        "20",
        "10",
    )
    assert float(row["accuracy"]) == one.results[0].accuracy.value
    assert float(row["majority_accuracy"]) == pytest.approx(100 * 6 / 20), "0 leads 7 to 7 and 6 in training"
    assert [line["site"] for line in csv.DictReader(files[2].open())] == ["site-1", "site-2"]
    assert {line["label"] for line in csv.DictReader(files[3].open())} == set(NAMES)
    bins = list(csv.DictReader(files[1].open()))
    assert sum(float(line["records"]) for line in bins) == 20
    errors = [float(line["records"]) * abs(float(line["stated"]) - float(line["happened"])) for line in bins]
    assert sum(errors) / 20 == pytest.approx(one.results[0].calibration)


# Settings


def test_refuses() -> None:
    for wrong, message in [
            ({"solver": "sgd"}, "solver 'sgd'"), ({"blank": "no"}, "blank 'no'"), ({"seeds": ()}, "no seeds"),
            ({"fractions": (2.0,)}, "fractions"), ({"epochs": 0}, "epochs is 0; expected at least 1"),
            ({"batch_size": 0}, "batch_size is 0"), ({"patience": 0}, "patience is 0"), ({"lr": 0.0}, "lr is 0.0"),
            ({"lr": math.nan}, "lr is nan"), ({"lr": math.inf}, "lr is inf"), ({"resamples": -1}, "resamples is -1"),
            ({"resamples": 1}, "resamples is 1; expected at least 2, or 0 for no intervals"),
            ({"classes": "covid, normal,covid"}, "classes covid named twice"),
        ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            replace(EXACT, **wrong)


def test_classes_are_chosen_by_name() -> None:
    data = cohort(np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [np.nan] * 3]), NAMES, ("train", "val", "test", "test"))
    every = task_of(data, LinearProbe())
    assert every.exclusive
    assert every.labelled.tolist() == [True, True, True, False]
    chosen = task_of(data, LinearProbe(classes="covid, normal"))
    assert (chosen.names, chosen.exclusive) == (("covid", "normal"), False)
    assert chosen.targets.tolist() == [[0, 1], [0, 0], [1, 0], [0, 0]]
    assert not task_of(data, LinearProbe(classes=("covid",))).exclusive
    with pytest.raises(ValueError, match="labels tb asked for; the data have normal, pneumonia, covid"):
        task_of(data, LinearProbe(classes="tb"))
    assert math.isnan(float(task_of(data, LinearProbe(classes="covid", blank="unknown")).targets[3, 0]))
