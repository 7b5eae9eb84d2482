"""A classifier of one's own beside a model: scikit-learn's on the same vectors, kept, and used on files and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.probing import cohort, model, one_hot, shaded

from fedvlp.core.json_file import read_json
from fedvlp.models.findings import FindingHeads
from fedvlp.run import beside
from fedvlp.run.finding_probe import at_chance, features_of, files_in, fit_heads, heads_in, read_each, save_heads

NAMES = ("effusion", "edema", "mass")
SPLITS = ("train",) * 60 + ("val",) * 30 + ("test",) * 30


def records() -> Any:
    """Images of 120 patients, each of one of three findings, in shades that overlap."""
    labels = one_hot(np.random.default_rng(5).integers(0, 3, 120), 3)
    return cohort(labels, NAMES, SPLITS, shaded(labels, 1, by=4))


def test_the_heads_are_scikit_learns_on_the_same_vectors() -> None:
    """Probabilities and AUCs to 1e-3; the threshold has the sensitivity that was asked for, and no higher one has."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    data, trained, said = records(), model(), []
    heads = fit_heads(trained, data, sensitivity=0.8, say=said.append)
    assert (heads.names, said) == (NAMES, [])
    vectors = features_of(trained, data, np.arange(120)).double()
    stated = heads.probabilities(vectors.float()).numpy()
    for column, name in enumerate(NAMES):
        truth = data.labels[:, column]
        theirs = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-8, max_iter=5000))
        theirs.fit(vectors[:60].numpy(), truth[:60])
        expected = theirs.predict_proba(vectors.numpy())[:, 1]
        assert np.abs(stated[:, column] - expected).max() < 1e-3
        figures = heads.figures[name]
        assert figures["test_auc"] == pytest.approx(roc_auc_score(truth[90:], expected[90:]), abs=1e-3)
        assert figures["test_low"] <= figures["test_auc"] <= figures["test_high"]
        present = stated[60:90, column][truth[60:90] == 1]
        assert figures["sensitivity"] == pytest.approx((present >= figures["threshold"]).mean(), abs=1e-4)
        assert (present > figures["threshold"]).mean() < 0.8 <= figures["sensitivity"]
        absent = stated[60:90, column][truth[60:90] == 0]
        assert figures["specificity"] == pytest.approx((absent < figures["threshold"]).mean(), abs=1e-4)


def test_labels_that_few_images_have_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data, said = records(), []
    data.labels[:, 2] = 0
    data.labels[0, 2] = 1
    heads = fit_heads(model(), data, say=said.append)
    assert heads.names == NAMES[:2]
    assert said == ["left out, with fewer than 5 training images, or no test image, that show or lack it: mass (1)"]
    with pytest.raises(ValueError, match=r"--sensitivity is 0; give a share above 0"):
        fit_heads(model(), data, sensitivity=0)
    monkeypatch.setattr(beside, "LEAST", 1000)
    with pytest.raises(ValueError, match="no label has 5 training images"):
        fit_heads(model(), cohort(data.labels[:, 2:], ("mass",), SPLITS, shaded(data.labels, 1, by=4)))


def test_they_are_kept_beside_the_model_with_its_checksums(tmp_path: Path) -> None:
    """In the folder of a run or of a model; a model that has heads gets others, and is loaded as before."""
    trained = model()
    (tmp_path / "run").mkdir()
    trained.save(tmp_path / "run" / "model", "")
    assert heads_in(tmp_path / "run") is None
    for weight in (1.0, 2.0):
        save_heads(FindingHeads(("a",), torch.full((1, 8), weight), torch.zeros(1), "by hand"), tmp_path / "run")
        for folder in (tmp_path / "run", tmp_path / "run" / "model"):
            heads = heads_in(folder)
            assert heads is not None
            assert heads.weight.tolist() == [[weight] * 8]
    type(trained).from_pretrained(tmp_path / "run" / "model")  # whose files are as their checksums say
    sums = (tmp_path / "run" / "model" / "SHA256SUMS").read_text()
    assert sums.count("findings.safetensors") == sums.count("findings.json") == 1
    assert read_json(tmp_path / "run" / "model" / "findings.json")["origin"] == "by hand"


def test_which_findings_are_at_chance() -> None:
    """By the lower end of the interval, or the AUC where there is none; an AUC that nobody measured says nothing."""
    figures = {
        "clear": {"test_auc": 0.7, "test_low": 0.51},
        "wide": {"test_auc": 0.7, "test_low": 0.5},
        "below": {"auc": 0.4},
        "above": {"auc": 0.6},
        "unknown": {},
    }
    heads = FindingHeads(tuple(figures), torch.zeros(5, 2), torch.zeros(5), "", figures)
    assert at_chance(heads) == ["wide", "below"]


def test_folders_are_read_whole_and_a_broken_file_costs_a_line(tmp_path: Path) -> None:
    inside = tmp_path / "images" / "more"
    inside.mkdir(parents=True)
    for name in ("images/b.png", "images/more/a", "images/.hidden", "c.png"):
        (tmp_path / name).write_text(name)
    files = files_in([tmp_path / "images", tmp_path / "c.png"])
    assert [file.relative_to(tmp_path).as_posix() for file in files] == ["images/b.png", "images/more/a", "c.png"]

    class Reader:
        def preprocess(self, file: Path) -> str:
            if file.name == "a":
                raise ValueError("cut off")
            return file.name

    refused: list[tuple[str, str]] = []
    read = list(read_each(Reader(), files, lambda file, why: refused.append((file.name, why))))
    assert [image for _, image in read] == ["b.png", "c.png"]
    assert refused == [("a", "cut off")]
    (tmp_path / "empty").mkdir()
    for given, why in (("absent", "there is no such file or folder"), ("empty", "there is no file in the folders")):
        with pytest.raises(ValueError, match=why):
            files_in([tmp_path / given])
