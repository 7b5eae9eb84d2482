"""The folder of a trained model is all that its user needs: vectors are those of the run's own pipeline."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.film_files import write_films
from support.presets import SMALL

from fedvlp import load_model
from fedvlp.data.cohort import Cohort
from fedvlp.data.loader import SiteData
from fedvlp.data.preprocessing import AS_WRITTEN, CLEANED, Preprocessing
from fedvlp.data.sources.table import TableSource
from fedvlp.data.sources.tabular import NIHSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.deploy.named_data import NamedData
from fedvlp.evaluation.retrieval import embed
from fedvlp.evaluation.zero_shot import PROMPTS
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from fedvlp.models import DualEncoder, ModelConfig, MultimodalConfig
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.model_use import class_prompts, preprocessing
from fedvlp.run.simulate import simulate
from fedvlp.run.site_sources import SiteSources

TINY = ModelConfig(init="tiny-pool")
"""The towers and sizes of the demos."""

REPORTS = (
    "FINDINGS: Small LEFT pleural effusion. Normal. No pneumothorax.",
    "1. Moderate edema.\n2. The heart is enlarged!",
    "The lungs are clear, without focal consolidation.",
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("canary-films")
    names = write_films(folder)
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "report", "Edema", "site"])
        rows.writerows([name, REPORTS[index % 3], index % 2, "north"] for index, name in enumerate(names))
    return folder / "pairs.csv"


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run on the table, of one round without steps: the towers are those that ship."""
    source = TableSource(str(table), image_size=72, label_columns="Edema", val_fraction=0.1, test_fraction=0.1)
    experiment = Experiment(
        "films", FedAvg(local_steps=1), TINY, data=source, rounds=Rounds(rounds=1, evaluate_every=0)
    )
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), experiment)
    simulate(experiment, folder)
    return folder


def by_the_pipeline(run: RunFolder, model: DualEncoder) -> tuple[Cohort, torch.Tensor, torch.Tensor]:
    """Vectors of every row of the run's records, by the loader that its evaluation uses."""
    cohort = run.experiment().data.build()
    rows = np.arange(len(cohort))
    data = SiteData(cohort, {"test": rows}, model.tokenizer, model.config.image_size)
    with torch.no_grad():
        return cohort, *embed(model, data.batches("test", 4, drop_last=False))


def test_a_film_has_the_vector_that_the_runs_pipeline_gives_it(run: RunFolder, table: Path) -> None:
    model = load_model(run.path)
    cohort, image, text = by_the_pipeline(run, model)
    files = sorted(path for path in table.parent.iterdir() if path.name != "pairs.csv")
    assert len(files) == len(cohort) == 9
    vectors = model.encode_image(files)
    assert (vectors - image).abs().max() <= 1e-5
    for file, row in zip(files, image, strict=True):
        assert (model.encode_image(file) - row).abs().max() <= 1e-5, file.name
    said = model.encode_text([REPORTS[index % 3] for index in range(9)])
    assert (said - text).abs().max() <= 1e-5, "reports are cleaned as the run's were"
    others = image @ image.T - torch.eye(9)
    assert others.max() < 1 - 1e-4, "films of which none is another would be equal to anything"


def test_the_folder_says_all_of_its_use_and_nothing_of_its_owner(run: RunFolder, table: Path) -> None:
    folder = run.model.parent
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "SHA256SUMS", "config.json", "model.safetensors"
    ]  # fmt: skip
    said = json.loads((folder / "config.json").read_text())
    assert said["preprocessing"] == Preprocessing(72, 64, CLEANED).described()
    assert list(said["prompts"]) == ["Edema"]
    assert len(said["prompts"]["Edema"]) == 10
    card = (folder / "README.md").read_text()
    assert "| north | 7 |" in card
    assert "`fedvlp.methods.FedAvg`, 1 round, seed 0. Start: `tiny-pool`" in card
    assert "Read by `fedvlp.data.TableSource`." in card
    assert "No site reported differential privacy" in card
    assert "## Licence" in card
    for path in folder.iterdir():
        content = path.read_bytes()
        assert b"canary" not in content
        assert str(run.path.parent.parent).encode() not in content


def test_zero_shot_has_the_records_own_classes(run: RunFolder, table: Path) -> None:
    model = load_model(run.path)
    scores = model.zero_shot([table.parent / "a.png", table.parent / "g.dcm"])
    assert [list(of) for of in scores] == [["Edema"], ["Edema"]]
    assert scores[0] != scores[1]
    assert all(-1 <= of["Edema"] <= 1 for of in scores)


def test_a_folder_that_does_not_say_how_films_are_prepared_is_refused(
    run: RunFolder, table: Path, tmp_path: Path
) -> None:
    """Nothing is guessed."""
    said = json.loads((run.model.parent / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(run.model.read_bytes())
    without = {key: value for key, value in said.items() if key not in ("preprocessing", "prompts")}
    (tmp_path / "config.json").write_text(json.dumps(without))
    with pytest.raises(ValueError, match="does not say how images are prepared"):
        load_model(tmp_path).encode_image(table.parent / "h.dcm")


def test_a_model_of_another_decoding_says_so_when_it_is_loaded(
    run: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(run.path)
    assert not caplog.messages
    (tmp_path / "model.safetensors").write_bytes(run.model.read_bytes())
    said = json.loads((run.model.parent / "config.json").read_text())
    said["preprocessing"]["decoding"] = "radiograph-5"
    (tmp_path / "config.json").write_text(json.dumps(said))
    load_model(tmp_path)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("this model's images were decoded by 'radiograph-5', and")


def test_a_damaged_model_is_refused(run: RunFolder, tmp_path: Path) -> None:
    for path in run.model.parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    load_model(tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"crop"', '"Crop"'))
    with pytest.raises(ValueError, match=r"config\.json is not as it was saved"):
        load_model(tmp_path)


def test_a_drawn_cohorts_run_in_the_engine(tmp_path: Path) -> None:
    """Its classes are the drawn findings, its reports are read as they are written."""
    experiment = replace(SMALL, data=replace(SMALL.data, sites=2, size=48), rounds=Rounds(rounds=1, evaluate_every=1))
    folder = RunFolder.create(tmp_path, experiment)
    simulate(experiment, folder)
    model = load_model(folder.path)
    assert model.preprocessing["reports"] == AS_WRITTEN
    assert set(model.prompts) == {"Edema", "Pleural Effusion", "Consolidation", "Pneumothorax", "Pneumonia"}
    cohort, image, text = by_the_pipeline(folder, model)
    films = list(cohort.images(np.arange(5)))
    # A film in memory gets the levels of one from a file; those of a drawing stay.
    assert (model.encode_image(films) * image[:5]).sum(dim=1).min() > 0.9
    assert (model.encode_text(cohort.reports[:5]) - text[:5]).abs().max() <= 1e-5
    card = (folder.model.parent / "README.md").read_text()
    assert "no patient's image or report is among them" in card
    counts = [len(cohort.rows("train", site)) for site in ("site-1", "site-2")]
    assert "Recall on the sites' test records, among all of a site, mean of both directions, percent:" in card
    assert re.search(r"^\| trained \| \d+\.\d \| \d+\.\d \| \d+\.\d \| \d+\.\d \|$", card, re.MULTILINE)
    assert f"| site-1 | {counts[0]} |\n| site-2 | {counts[1]} |\n| all | {sum(counts)} |" in card


def test_the_preparation_follows_from_the_experiment() -> None:
    for source, expected in [
        (SyntheticCohort(image_size=72), Preprocessing(72, 64, AS_WRITTEN)),
        (NamedData("pretrain", 80), Preprocessing(80, 64, CLEANED)),
        (NIHSource("root", image_size=70), Preprocessing(70, 64, AS_WRITTEN)),
        (SiteSources((("a", TableSource("x.csv")), ("b", TableSource("y.csv")))), Preprocessing(72, 64, CLEANED)),
        (SiteSources((("a", TableSource("x.csv")), ("b", TableSource("y.csv", image_size=80)))), None),
        (SyntheticCohort(image_size=48), None),
        (object(), None),
    ]:
        assert preprocessing(Experiment("x", FedAvg(), ModelConfig(), data=source)) == expected


def test_classes_are_labels_that_there_are_sentences_for() -> None:
    def classes(source: Any, labels: tuple[str, ...] | None = None, model: ModelConfig = TINY) -> set[str]:
        return set(class_prompts(Experiment("x", FedAvg(), model, data=source), labels))

    assert classes(NamedData("pretrain")) == set(PROMPTS)
    assert classes(NamedData("pretrain"), ("Edema", "Fracture")) == {"Edema"}
    assert classes(TableSource("x.csv"), ()) == set(PROMPTS)
    own = ("COVID-19", "No Finding", "Pneumonia", "viral")
    assert classes(TableSource("x.csv"), own) == set(own), "all classes of a table count"
    assert classes(SiteSources((("a", TableSource("x.csv")),)), own) == set(own)
    assert classes(NamedData("retina"), ("Diabetic Retinopathy",)) == set()
    assert "Cardiomegaly" not in classes(SyntheticCohort())
    assert classes(SyntheticCohort(), None, MultimodalConfig(labels=("Edema",))) == set()


def test_what_sites_report_of_privacy_stands_in_the_card(tmp_path: Path) -> None:
    """Of several reports the last, which is the largest: a budget only grows."""
    experiment = Experiment("x", FedAvg(), ModelConfig(image_size=16, text_layers=1))
    record = {"round": 0, "phase": "train", "sites": {"north": {"privacy/epsilon": 1.5}, "south": {}}}
    later = {**record, "sites": {"north": {"privacy/epsilon": 2.25}}}
    folder = RunFolder.create(tmp_path, experiment)
    folder.finish(experiment, experiment.model.build(0).state_dict(), [record, later])  # type: ignore[list-item]
    card = (folder.model.parent / "README.md").read_text()
    assert (
        "Epsilon that sites reported: north 2.25, at the delta of each site's own policy. The unit is a site's" in card
    )
