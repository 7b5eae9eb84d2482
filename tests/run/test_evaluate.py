"""Downstream evaluations by command: of a run on its own records, and of a model folder on a table of images."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import cases
from support.finished import finished
from support.presets import SMALL
from support.probing import MODEL, SIZE, model
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.core.client import TARGET
from fedvlp.core.method import Method
from fedvlp.data.cohort import Cohort
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.evaluation import intervals
from fedvlp.evaluation.linear_probe import LinearProbe
from fedvlp.evaluation.segmentation import Segmentation
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.load import input_size, load_encoders
from fedvlp.run import audit as audits
from fedvlp.run import beside, recalls, zero_shot_areas
from fedvlp.run.assembly import Assembly
from fedvlp.run.compare import FinishedRun
from fedvlp.run.evaluate import EVALUATIONS, READ_BY, Choices, last_server, trained_state
from fedvlp.run.experiment import Experiment, Partition, Source
from fedvlp.run.folder import RunFolder
from fedvlp.run.model_use import decoded_size
from fedvlp.training.settings import Training
from studies.protocols.distortion import Retrained, distort
from studies.rivals import BYOLConfig, FedEMA, FedU

Image = pytest.importorskip("PIL.Image")


def films(folder: Path) -> str:
    """A table of 60 films, half of them with a bright half and a mask of it."""
    rng, rows = np.random.default_rng(0), []
    for number in range(60):
        film, mask = rng.integers(0, 90, (24, 24), dtype=np.uint8), np.zeros((24, 24), np.uint8)
        if number % 2:
            film[:, :12] += 120
            mask[:, :12] = 255
        Image.fromarray(film).save(folder / f"f{number}.png")
        Image.fromarray(mask).save(folder / f"m{number}.png")
        split = ("train", "val", "test")[number // 20]
        rows.append([f"f{number}.png", f"m{number}.png", ("normal", "opacity")[number % 2], split])
    with (folder / "films.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "opacity mask", "finding", "split"], *rows])
    return f"table:{folder / 'films.csv'}"


def evaluate(*words: Any) -> Any:
    return CliRunner().invoke(app, ["evaluate", *map(str, words)])


PLAIN = ("--set", "data.report_column=", "--set", "data.min_report_words=0", "--set", "data.burned_in=header")
PROBE = ("--set", "data.label_columns=finding", "--set", "probe.solver=lbfgs", "--set", "probe.seeds=[0]")


def test_a_model_folder_is_probed_on_a_table_and_compared(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("other", 1)):
        model(seed).save(tmp_path / name)
    before = (tmp_path / "one" / "model.safetensors").read_bytes()
    data, out = films(tmp_path), tmp_path / "out"
    done = evaluate(
        tmp_path / "one", "--what", "linear-probe", "--data", data, *PLAIN, *PROBE,
        "--set", "probe.fractions=[1.0]", "--against", tmp_path / "other", "--out", out,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (table,) = out.glob("linear-probe-????????.csv")
    (row,) = csv.DictReader(table.open())
    assert (row["train_records"], row["test_records"], row["macro_auc"]) == ("20", "20", "1.0")
    against = list(csv.DictReader((out / f"{table.stem}-against.csv").open()))
    assert {line["against"] for line in against} == {str(tmp_path / "other")}
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == before


def test_a_model_of_another_input_size_is_not_compared(tmp_path: Path) -> None:
    """Records are decoded for the first model: a smaller one would see the centre of each image, without a word."""
    model().save(tmp_path / "one")
    for size in (SIZE // 2, 2 * SIZE):
        replace(MODEL, image_size=size).build(1).save(tmp_path / str(size))
        choices = Choices(against=(tmp_path / str(size),), data=SyntheticCohort(sites=2, size=40, image_size=32))
        with pytest.raises(ValueError, match=f"sees images of {size} pixels, and .*one those of {SIZE}; expected the"):
            EVALUATIONS["linear-probe"](RunFolder(tmp_path / "one"), choices)


def test_masks_of_a_table_are_segmented(tmp_path: Path) -> None:
    model().save(tmp_path / "one")
    done = evaluate(
        tmp_path / "one", "--what", "segmentation", "--data", films(tmp_path), *PLAIN,
        "--set", "data.mask_columns=opacity mask", "--set", "segmentation.structure=opacity mask",
        "--set", "segmentation.fractions=[1.0]", "--set", "segmentation.lr=0.01", "--steps", 30,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (table,) = (tmp_path / "one" / "evaluation").glob("segmentation-*.csv")
    (row,) = csv.DictReader(table.open())
    assert float(row["empty_share"]) == 50
    assert float(row["dice_positives"]) > 80


def test_a_model_alone_has_no_records(tmp_path: Path) -> None:
    model().save(tmp_path)
    for what in ("linear-probe", "segmentation", "retrieval"):
        with pytest.raises(ValueError, match="is a model and no run, so it has no records of its own; give --data"):
            EVALUATIONS[what](RunFolder(tmp_path), Choices())


def test_what_compares_nothing_refuses_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for what in ("segmentation", "retrieval"):
        with pytest.raises(ValueError, match="--against compares linear probes"):
            EVALUATIONS[what](RunFolder(tmp_path), Choices(against=(tmp_path,)))


SMALL_COHORT = SyntheticCohort(sites=2, size=80, image_size=32)


def small_run(folder: Path, config: ModelConfig = MODEL, data: Source = SMALL_COHORT, **settings: Any) -> RunFolder:
    """Two sites, one round of one step."""
    experiment = Experiment(
        "small", FedAvg(local_steps=1), config, data=data,
        training=Training(batch_size=8), rounds=Rounds(rounds=1, evaluate_every=0), **settings,
    )  # fmt: skip
    return finished(folder, experiment)


def test_every_choice_says_who_reads_it() -> None:
    """So that an option of the command line is refused, and not ignored, where nobody reads it."""
    assert READ_BY.keys() == {field.name for field in fields(Choices)}
    assert set().union(*READ_BY.values()) <= EVALUATIONS.keys()


def test_films_of_other_records_are_decoded_as_the_models_were(tmp_path: Path) -> None:
    """With one table for both, the figures are those of the run's own records: its films have 48 pixels, and not 36."""
    write(SyntheticCohort(sites=2, size=120, image_size=64), tmp_path)
    data = f"table:{tmp_path / 'pairs.csv'}"
    run = small_run(
        tmp_path / "run",
        replace(MODEL, image_size=32),
        TableSource(path=data.removeprefix("table:"), image_size=48, burned_in="header"),
    )
    assert evaluate(run.path, "--what", "retrieval").exit_code == 0
    done = evaluate(run.path, "--what", "retrieval", "--data", data, "--set", "data.burned_in=header")
    assert done.exit_code == 0, done.output
    own, other = sorted((run.path / "evaluation").glob("retrieval*.csv"))
    assert own.read_text() == other.read_text()
    assert decoded_size(run.path) == 48
    model().save(tmp_path / "alone")
    assert decoded_size(tmp_path / "alone") == SIZE * 9 // 8


def test_zero_shot_of_other_records_than_the_sites(tmp_path: Path) -> None:
    """Every test film of the other cohort, judged by the run's model; the file is named after those records.

    With one cohort for both, the accuracy is that at the sites, weighted by their films of one class.
    """
    run = small_run(tmp_path / "run", replace(MODEL, image_size=32))
    classes = ("Edema", "Pneumonia")
    (at_sites, *_), (elsewhere, *_) = (
        EVALUATIONS["zero-shot"](run, Choices(data=data, classes=classes)) for data in (None, run.experiment().data)
    )
    assert re.fullmatch(r"zero-shot-[0-9a-f]{8}\.csv", elsewhere.name)
    rows = [row for row in csv.DictReader(at_sites.open()) if row["site"] != "mean"]
    other, mean = csv.DictReader(elsewhere.open())
    assert (other["model"], other["site"], mean["accuracy"]) == ("global", "other records", other["accuracy"])
    for count in ("records", "single"):
        assert int(other[count]) == sum(int(row[count]) for row in rows) > 0
    right = sum(float(row["accuracy"]) * int(row["single"]) for row in rows)
    assert float(other["accuracy"]) == pytest.approx(right / int(other["single"]))
    words = ("--what", "zero-shot", "--data", "synthetic", "--set", "data.size=60", "--out", tmp_path / "out")
    done = evaluate(run.path, *words)
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "out").glob("zero-shot-????????.csv"))) == 1


@dataclass(frozen=True)
class WithoutFilms:
    """The built-in cohort, in which every third record has no film, and no test record of the first site has one."""

    data: SyntheticCohort

    def build(self) -> Cohort:
        cohort = self.data.build()
        lost = np.arange(len(cohort)) % 3 == 0
        lost[cohort.rows("test", "site-1")] = True
        return cohort.without(np.zeros(len(cohort), dtype=bool), lost)


def test_zero_shot_is_of_films_and_of_no_record_without_one(tmp_path: Path) -> None:
    """A record without an image was served as a black one, and judged."""
    data = WithoutFilms(SyntheticCohort(sites=2, size=80, image_size=32))
    run = small_run(tmp_path, replace(MODEL, image_size=32), data=data)
    cohort = data.build()
    films = int(cohort.has_image()[cohort.rows("test", "site-2")].sum())
    table = EVALUATIONS["zero-shot"](run, Choices(classes=("Edema", "Pneumonia")))[0]
    rows = {row["site"]: row["records"] for row in csv.DictReader(table.open())}
    assert rows == {"site-2": str(films), "mean": ""}
    assert 0 < films < len(cohort.rows("test", "site-2"))


@dataclass(frozen=True)
class WithViews:
    """The built-in cohort, in which every third film is "AP", every other "PA", and the view of the last is unknown."""

    data: SyntheticCohort

    def build(self) -> Cohort:
        cohort = self.data.build()
        views = np.where(np.arange(len(cohort)) % 3 == 0, "AP", "PA")
        views[-1] = ""
        return replace(cohort, subgroups=views[:, None], subgroup_names=("view",))


@dataclass(frozen=True)
class Unlabelled:
    """``WithViews``, with blank labels at its first site, as of a data set that has none, or without that site."""

    data: SyntheticCohort
    first_site: bool

    def build(self) -> Cohort:
        cohort = WithViews(self.data).build()
        first = np.asarray(cohort.sites) == "site-1"
        if not self.first_site:
            return cohort.take(np.flatnonzero(~first))
        return replace(cohort, labels=np.where(first[:, None], np.float32(np.nan), cohort.labels))


def test_a_data_set_without_a_label_supplies_no_negatives(tmp_path: Path) -> None:
    """Areas in all records and in subgroups are those of the site that has the labels, with or without the other."""
    data = SyntheticCohort(sites=2, size=80, image_size=32)
    run = small_run(tmp_path / "run", replace(MODEL, image_size=32), data=data)
    areas = []
    for first_site in (True, False):
        source, out = Unlabelled(data, first_site), tmp_path / str(first_site)
        (whole, *_, table) = EVALUATIONS["zero-shot"](
            run, Choices(data=source, classes=("Edema", "Pneumonia"), out=out)
        )
        rows = [next(csv.DictReader(whole.open())), *csv.DictReader(table.open())]
        areas.append([float(row["macro_auc"]) for row in rows])
    assert areas[0] == pytest.approx(areas[1])
    assert len(areas[0]) == 3


def test_zero_shot_and_probe_write_a_table_of_subgroups(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", replace(MODEL, image_size=32))
    data = WithViews(run.experiment().data)
    choices = Choices(data=data, classes=("Edema", "Pneumonia"), probe=LinearProbe(fractions=(1.0,), seeds=(0,)))
    cohort = data.build()
    views = cohort.subgroup("view")[cohort.rows("test")].tolist()
    (whole, *_, table), (_, *_, probed) = (
        EVALUATIONS[name](run, choices) for name in ("zero-shot", "linear-probe")
    )  # fmt: skip
    rows = list(csv.DictReader(table.open()))
    assert [(row["subgroup"], int(row["records"])) for row in rows] == [
        ("view: AP", views.count("AP")), ("view: PA", views.count("PA")),
    ]  # fmt: skip
    everyone = next(csv.DictReader(whole.open()))
    right = sum(float(row["accuracy"]) * int(row["single"]) for row in rows)
    assert right <= float(everyone["accuracy"]) * int(everyone["single"]) <= right + 100.01
    lines = list(csv.DictReader(probed.open()))
    assert [(line["by"], line["subgroup"], int(line["test_records"])) for line in lines] == [
        ("view", "AP", views.count("AP")), ("view", "PA", views.count("PA")),
    ]  # fmt: skip
    assert all(float(line["macro_auc_low"]) <= float(line["macro_auc"]) <= 1 for line in lines)


def test_the_runs_own_records_are_read_otherwise_without_being_named_again(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", replace(MODEL, image_size=32))
    done = evaluate(run.path, "--what", "retrieval", "--set", "data.size=50")
    assert done.exit_code == 0, done.exception
    assert list((run.path / "evaluation").glob("retrieval-*.csv"))


def test_zero_shot_of_other_records_by_command(tmp_path: Path) -> None:
    """Classes are chosen with --set. What is no label, and sites that keep their normalisation, are refused."""
    with_statistics = replace(MODEL, image_size=32, head_norm="batch")
    run = small_run(tmp_path / "run", with_statistics, norm_statistics="site")
    words = (run.path, "--what", "zero-shot", "--data", "synthetic", "--set", "data.size=40")
    refused = evaluate(*words, "--set", 'classes=["Edema","Fracture"]')
    assert "classes Fracture are no labels of these records; there are: Edema" in str(refused.exception)
    refused = evaluate(*words, "--set", 'classes=["Edema","Edema"]')
    assert "zero-shot: classes Edema named twice; name each once" in str(refused.exception)
    refused = evaluate(*words, "--set", 'classes=["Edema","Pneumonia"]')
    assert "every site of this run keeps its normalisation" in str(refused.exception)
    refused = evaluate(*words, "--against", tmp_path)
    assert "--against is read by --what linear-probe; leave it out" in str(refused.exception)


def test_a_run_is_evaluated_on_its_own_records(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    choices = Choices(1, probe=LinearProbe(seeds=(0,)), segmentation=Segmentation(fractions=(0.1,)))
    downstream = ("linear-probe", "segmentation", "retrieval")
    found = {what: EVALUATIONS[what](folder, choices) for what in downstream}
    names = [file.name for files in found.values() for file in files]
    assert names == ["linear-probe.csv", "linear-probe-reliability.csv", "linear-probe-sites.csv", "segmentation.csv",
                     "retrieval.csv"]  # fmt: skip
    cohort = folder.experiment().data.build()
    first = next(csv.DictReader((folder.path / "evaluation" / "retrieval.csv").open()))
    assert int(first["queries"]) == len(cohort.rows("test"))
    other = Choices(1, data=SyntheticCohort(sites=2, size=60, image_size=32, seed=5), out=tmp_path / "there")
    (file,) = EVALUATIONS["retrieval"](folder, other)
    assert file.parent == tmp_path / "there"
    assert file.stem != "retrieval"


def test_shipped_encoders_are_a_model_to_probe_and_none_to_retrieve_with() -> None:
    from fedvlp.models.initial import load_initial

    pool, expected = load_encoders("tiny-pool"), load_encoders("tiny-pool").config.build(0)
    load_initial(expected, "tiny-pool")
    assert all(torch.equal(t, expected.state_dict()[n]) for n, t in pool.state_dict().items() if "encoder" in n)
    assert input_size("tiny-pool") == 64
    with pytest.raises(ValueError, match="holds no trained model"):
        input_size("no-such-folder")
    with pytest.raises(ValueError, match="holds no trained model"):
        EVALUATIONS["retrieval"](RunFolder(Path("tiny-pool")), Choices(data=SyntheticCohort(sites=2, size=40)))


def test_a_model_folder_gives_its_input_size(tmp_path: Path) -> None:
    model().save(tmp_path / "model")
    assert input_size(tmp_path) == input_size(tmp_path / "model") == SIZE
    assert torch.equal(load_encoders(tmp_path).image_head[0].weight, model().image_head[0].weight)  # type: ignore[index, union-attr]


@dataclass(frozen=True)
class WithoutSite:
    """A cohort that never held the records of one site."""

    data: SyntheticCohort
    site: str

    def build(self) -> Cohort:
        cohort = self.data.build()
        return cohort.take(np.flatnonzero(np.asarray(cohort.sites) != self.site))


@pytest.mark.parametrize("statistics", cases(("averaged", "site"), often=("averaged",), seconds=5))
def test_a_site_that_is_left_out_teaches_nothing_and_is_evaluated_on(tmp_path: Path, statistics: str) -> None:
    """Leave one site out: the model's bytes are those of a run whose cohort never had the site."""
    config = replace(MODEL, image_size=32, head_norm="batch")
    data = SyntheticCohort(sites=3, size=120, image_size=32)
    experiment = Experiment(
        "small", FedAvg(local_steps=2), config, data=data, partition=Partition(left_out="site-2", public=0.2),
        training=Training(batch_size=8), rounds=Rounds(rounds=1, evaluate_every=1), norm_statistics=statistics,
    )  # fmt: skip
    absent = replace(experiment, data=WithoutSite(data, "site-2"), partition=Partition())
    runs = []
    for name, one in (("out", replace(experiment, partition=Partition(left_out="site-2"))), ("absent", absent)):
        runs.append(finished(tmp_path / name, one))
    run, other = runs
    assert {name: tensor.tolist() for name, tensor in last_server(run).state.items()} == {
        name: tensor.tolist() for name, tensor in last_server(other).state.items()
    }
    assert all(record["members"] == ["site-1", "site-3"] for record in run.history())
    films = len(data.build().rows("test", "site-2"))
    choices = Choices(classes=("Edema", "Pneumonia"))
    accuracies, *_ = EVALUATIONS["zero-shot"](run, choices)
    at_site = [int(row["records"]) for row in csv.DictReader(accuracies.open()) if row["site"] == "site-2"]
    assert at_site == [films]
    if statistics == "averaged":
        (recalls,) = EVALUATIONS["retrieval"](run, choices)
        within = [int(row["queries"]) for row in csv.DictReader(recalls.open()) if row["scope"] == "within site-2"]
        assert within == [films] * 3
    cohort = Assembly(experiment).cohort
    assert len(cohort.rows("train", "public")) > 0
    whole = data.build()
    assert cohort.rows("train", "site-2").tolist() == whole.rows("train", "site-2").tolist()


def test_only_sites_that_are_there_can_be_left_out() -> None:
    for left_out, sentence in [
        ("site-7, site-1", "names site-7, which is no site; the sites are site-1, site-2"),
        ("site-1,site-2", "names every site"),
    ]:
        data = SyntheticCohort(sites=2, size=40, image_size=32)
        with pytest.raises(ValueError, match=sentence):
            _ = Assembly(Experiment("small", FedAvg(), MODEL, data=data, partition=Partition(left_out=left_out))).cohort


@pytest.mark.parametrize(
    ("method", "audited"),
    [(FedEMA(local_steps=2), False), pytest.param(FedU(local_steps=2), True, marks=pytest.mark.slow(seconds=5))],
    ids=["fedema", "fedu"],
)
def test_a_run_whose_target_networks_stay_at_its_sites_is_evaluated(
    tmp_path: Path, method: Method, audited: bool
) -> None:
    """The server has no target network: it is filled in for whoever loads the trained model, as at a new site."""
    cohort = SyntheticCohort(sites=2, size=160, image_size=36, test_rows=36)
    experiment = replace(SMALL, method=method, objective=BYOLConfig(hidden=16, dim=8), data=cohort)
    folder = finished(tmp_path, experiment)
    assembly, server = Assembly(experiment, folder.path), last_server(folder)
    state, client = trained_state(assembly, server), assembly.client("a", None)
    assert not any(name.startswith(TARGET) for name in server.state)
    client.load(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in server.state.items())
    assert torch.equal(state[TARGET + "encoder.stem.0.weight"], server.state["image_encoder.stem.0.weight"])
    assert EVALUATIONS["zero-shot"](folder, Choices())[0].name == "zero-shot.csv"
    assert distort(folder, Retrained(steps=1))[0].name == "distortion.csv"
    assert recalls.measure(folder).exists()
    assert not audited or audits.measure(folder, resamples=20).rows


# Whom the intervals are over


@dataclass(frozen=True)
class Pairwise:
    """The built-in cohort with two records of every patient, of the same split and site."""

    data: SyntheticCohort

    def build(self) -> Cohort:
        cohort = self.data.build()
        patients = list(cohort.patients)
        for split in ("train", "val", "test"):
            for site in sorted(set(cohort.sites or ())):
                for number, row in enumerate(cohort.rows(split, site)):
                    patients[row] = f"{split} {site} {number // 2}"
        return replace(cohort, patients=tuple(patients))


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    data = Pairwise(SyntheticCohort(sites=2, size=160, image_size=36, test_rows=40))
    experiment = replace(SMALL, data=data, method=FedAvg(local_steps=1), rounds=Rounds(rounds=1))
    return finished(tmp_path_factory.mktemp("pairs"), experiment)


MEASURED: dict[str, Callable[[RunFolder, Choices], Any]] = {
    **EVALUATIONS,
    "recalls": lambda folder, _: [recalls.measure(folder)],
    "areas": lambda folder, _: [zero_shot_areas.measure(folder)],
    "tower": lambda folder, _: [beside.measure_tower(folder, FinishedRun(folder, "pairs"))],
}


@pytest.mark.parametrize("what", MEASURED)
def test_every_interval_is_over_patients(what: str, of_pairs: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drawn again is a patient of the test split, with both records: half as many as there are records.

    (A subset may hold one record of a few.) A table with bounds of an interval has drawn somebody.
    """
    drawn: list[list[Any]] = []
    resampled = intervals.resampled

    def noted(patients: Any, resamples: int, seed: int) -> Any:
        drawn.append(list(patients))
        return resampled(patients, min(resamples, 20), seed)

    monkeypatch.setattr(intervals, "resampled", noted)
    quick = Choices(
        steps=1, probe=LinearProbe(fractions=(1.0,), seeds=(0,)), segmentation=Segmentation(fractions=(1.0,)),
    )  # fmt: skip
    files = MEASURED[what](of_pairs, quick)
    heads = [file.read_text().partition("\n")[0] for file in files if file.suffix == ".csv"]
    assert heads
    assert bool(drawn) == any(re.search(r"low\b", head) for head in heads)
    known = {patient for patient in of_pairs.experiment().data.build().patients if patient.startswith("test")}
    for patients in drawn:
        assert set(patients) <= known
        assert len(set(patients)) <= 0.75 * len(patients)
