"""Whose figures a model's card shows: those of the weights beside it, or it says whose they are."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.presets import SMALL

from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.methods import CARMFL, CreamFL, FedAvg, Local
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run.config import fingerprint
from fedvlp.run.evaluate import DOWNSTREAM, EVALUATIONS, Choices
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from studies.rivals import FedEMA, FedU

Image = pytest.importorskip("PIL.Image")

LABELS = ("Edema", "Pneumonia")
CLASSIFIER = MultimodalConfig(
    embedding_dim=16, image_size=32, max_tokens=16, vocabulary=256, text_layers=1, labels=LABELS
)


def figures(value: float, scope: str = "all/") -> dict[str, float]:
    return {f"test/{scope}mean/r{k}": value + k for k in (1, 5, 10)}


def ends(before: Any, after: Any, key: str = "sites") -> list[Any]:
    """Two evaluations: of the initial model and of the trained one, at two sites or the server."""
    history = []
    for round, value in enumerate((before, after)):
        of_sites = dict.fromkeys(("a", "b"), value) if key == "sites" else {"a": {}, "b": {}}
        server = value if key == "server" else {}
        history.append({"round": round, "phase": "evaluate" if round else "train", "sites": of_sites, "server": server})
    return history


def finished(root: Path, method: Method, history: list[Any], **changes: Any) -> RunFolder:
    """A run with made-up figures."""
    experiment: Experiment = replace(SMALL, method=method, **changes)
    folder = RunFolder.create(root, experiment)
    state = dict(experiment.model.build(0).state_dict())
    Server(("a", "b"), state, history=history).save(folder.checkpoint, 0)
    folder.finish(experiment, state, history)
    return folder


def card_of(folder: RunFolder) -> str:
    return (folder.model.parent / "README.md").read_text(encoding="utf-8")


def test_a_review_board_finds_what_it_signs(tmp_path: Path) -> None:
    folder = finished(tmp_path, FedAvg(), ends(figures(10), figures(20)))
    card = card_of(folder)
    headings = ["Training records", "Results", "Privacy", "Intended use", "Known limits", "Review", "Licence"]
    assert [name for name in re.findall("^## (.*)$", card, re.MULTILINE) if name in headings] == headings
    for said in ("no medical device", f"`{fingerprint(folder.experiment())}`", "| data protection officer | | | |"):
        assert said in card


def test_an_average_has_the_figures_of_the_sites_and_no_more_to_say(tmp_path: Path) -> None:
    """FedU's sites too measure the server's towers: only a predictor, which retrieves nothing, may be their own."""
    for method in (FedAvg(), FedU(), FedEMA(tau=0.0)):
        card = card_of(finished(tmp_path, method, ends(figures(10), figures(20))))
        assert "| trained | 21.0 | 21.0 | 25.0 | 25.0 |" in card
        assert "of these weights" not in card
        assert "initial ones" not in card


def test_of_sites_alone_the_weights_are_the_initial_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card says so, and so does whoever measures the file as if it had been trained."""
    folder = finished(tmp_path, Local(), ends(figures(10), figures(20)))
    card = card_of(folder)
    assert "The weights are the initial ones: no site sent any, and each has the model that it trained alone." in card
    assert "not of these weights: each site measured the model that it trained alone.\nRecall on the sites'" in card
    for what in DOWNSTREAM - {"zero-shot"}:
        (said,) = warnings_of(what, folder, caplog, monkeypatch)
        assert said.endswith("the model that it trained alone; what is measured now is of no trained model"), what
    (said,) = warnings_of("zero-shot", folder, caplog, monkeypatch)
    assert said.endswith("alone; what is measured as the global model is of no trained model"), "the sites' own are"


def warnings_of(
    what: str, folder: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What a downstream evaluation warns of before it reads a record."""

    def stop(*_: object) -> None:
        raise InterruptedError

    for reads in ("records_for", "Assembly"):
        monkeypatch.setattr(f"fedvlp.run.evaluate.{reads}", stop)
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(InterruptedError):
        EVALUATIONS[what](folder, Choices())
    return list(caplog.messages)


def test_a_model_that_was_trained_is_measured_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An average, what a server trained itself, and a model without its run."""
    for method in (FedAvg(), CreamFL()):
        folder = finished(tmp_path, method, ends(figures(10), figures(20)))
        for path in (folder.path, folder.model.parent):
            assert warnings_of("retrieval", RunFolder(path), caplog, monkeypatch) == []
        assert warnings_of("zero-shot", folder, caplog, monkeypatch) == []


def test_of_an_ensemble_the_servers_figures_come_first(tmp_path: Path) -> None:
    """The file is the server's model; the sites measure models of their own."""
    history = ends(figures(10), figures(20))
    for record, value in zip(history, (1.0, 2.0), strict=True):
        record["server"] = figures(value)
    card = card_of(finished(tmp_path, CreamFL(), history))
    server, _, sites = card.partition("The next figures are not of these weights: each site measured its own model.")
    assert "Recall of these weights among all test records of the public set" in server
    assert "| model | R@1 | R@5 | R@10 |" in server
    assert "| initial | 2.0 | 6.0 | 11.0 |\n| trained | 3.0 | 7.0 | 12.0 |" in server
    assert "| trained | 21.0 | 21.0 | 25.0 | 25.0 |" in sites
    assert "initial ones" not in card


def test_of_fedema_the_sites_measure_what_they_merge(tmp_path: Path) -> None:
    card = card_of(finished(tmp_path, FedEMA(), ends(figures(10), figures(20))))
    assert "not of these weights: each site measured a mixture of its own model and the server's." in card


@pytest.mark.parametrize(
    ("method", "key", "whose"),
    [(CARMFL(), "server", "on the public set"), (FedAvg(), "sites", "mean over the sites' records")],
)
def test_a_classifier_has_areas_and_is_used_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method, key: str, whose: str
) -> None:
    """No recall, no encode_image; the lines under "Use" run, and give a logit for each finding."""
    history = ends(*({"test/auc/macro": a, "val/auc/macro": a + 0.125} for a in (0.5, 0.75)), key=key)
    folder = finished(tmp_path / "runs", method, history, model=CLASSIFIER)
    card = card_of(folder)
    assert card.startswith("# small: a classifier of images and reports trained with fedvlp\n")
    assert f"Area under the ROC curve, {whose}, mean over findings (macro), 0 to 1; chance is 0.5:" in card
    assert "| model | test | val |\n|---|---|---|\n| initial | 0.500 | 0.625 |\n| trained | 0.750 | 0.875 |" in card
    assert "It gives a logit for each of: Edema, Pneumonia." in card
    for word in ("recall", "encode_image", "image-text"):
        assert word not in card.lower()
    use = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert use is not None
    for name in ("one.png", "other.png"):
        Image.fromarray(np.arange(1600, dtype=np.uint8).reshape(40, 40)).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    exec(use[1].replace("FOLDER", str(folder.model.parent)).replace("one.dcm", "one.png"), known)
    assert torch.is_tensor(known["logits"])
    assert known["logits"].shape == (2, 2)
