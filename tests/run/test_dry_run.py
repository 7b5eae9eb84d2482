"""What a run will take is said before it: records, steps and bytes exactly, seconds and memory roughly."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from support.presets import SMALL
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.cli.tables import dry_run_lines
from fedvlp.data.deid import PHIError
from fedvlp.data.screening import rows_used, screen_all
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.federation.loop import Rounds
from fedvlp.methods import Centralized, FedAvg, FedDRA
from fedvlp.run import presets
from fedvlp.run.cautions import train_sizes
from fedvlp.run.dry_run import PROBED, DryRun, Phase, dry_run
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

STEPS = PROBED + 4


def small(method: object) -> Experiment:
    """Three rounds of this method."""
    return replace(SMALL, method=method, rounds=Rounds(rounds=3, seed=7))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [FedAvg(local_steps=STEPS), FedDRA(local_steps=STEPS, align_steps=1)])
def test_it_says_what_the_run_then_takes(method: object, tmp_path: Path) -> None:
    """The bytes on the wire, the phases and their steps, the records of the sites."""
    experiment = small(method)
    told = dry_run(experiment)
    folder = RunFolder.create(tmp_path, experiment)
    history = simulate(experiment, folder)
    assert told.bytes == sum(sum(record["bytes"].values()) for record in history)
    assert told.rounds == 3
    assert [phase.name for phase in told.phases] == [*dict.fromkeys(record["phase"] for record in history)]
    expected = {"align": 1, "joint": STEPS, "train": STEPS, "evaluate": 0}
    assert [phase.steps for phase in told.phases] == [expected[phase.name] for phase in told.phases]
    assert {site: splits["train"] for site, splits in told.records.items()} == train_sizes(experiment.data.build())


def test_rows_that_are_left_out_are_counted_before_it_trains_and_after_a_dry_run(tmp_path: Path) -> None:
    """Of a table and of a site's own beside it: sums over both, as `prepare` counts them."""
    write(SyntheticCohort(sites=2, size=80, image_size=72), tmp_path)
    with (tmp_path / "pairs.csv").open(encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    rows[0][header.index("report")] = "Normal."
    rows[1][header.index("image")] = "absent.png"
    with (tmp_path / "own.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    source = TableSource(str(tmp_path / "own.csv"), image_size=72, burned_in="header")
    said: list[str] = []
    experiment = replace(small(FedAvg(local_steps=1)), data=source, rounds=Rounds(rounds=1, seed=7))
    simulate(experiment, RunFolder.create(tmp_path / "runs", experiment), say=said.append)
    expected = "data: 78 of 80 rows are used; left out: missing image 1, report too short 1"
    assert said == [expected]
    assert dry_run_lines(dry_run(experiment), 1)[0] == expected
    whole = screen_all([source, replace(source, path=str(tmp_path / "pairs.csv"))], lambda both: both[0])
    assert rows_used(whole.prepare()[1]).startswith("158 of 160 rows are used; left out: missing image 1, ")


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dry_run(small(FedAvg(local_steps=STEPS)))
    assert list(tmp_path.iterdir()) == []


def test_decoded_images_are_kept_where_a_cache_is_named_and_the_help_says_so(tmp_path: Path) -> None:
    write(SyntheticCohort(sites=2, size=80, image_size=72), tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    source = TableSource(str(tmp_path / "pairs.csv"), image_size=72, cache=str(tmp_path / "cache"))
    dry_run(replace(small(FedAvg(local_steps=STEPS)), data=source))
    assert {path.name for path in tmp_path.iterdir()} - before == {"cache"}
    said = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "300"}).output
    assert "leaves nothing but the cache" in said


def test_what_frozen_towers_made_is_kept_for_the_run(tmp_path: Path) -> None:
    """Without --cache too, beside the runs: it is minutes of processor. Other towers leave nothing."""
    write(SyntheticCohort(sites=2, size=80, image_size=72), tmp_path)
    words = ["simulate", "fedavg", "--data", f"table:{tmp_path / 'pairs.csv'}", "--runs", str(tmp_path / "runs")]
    frozen = ["adapters=lora", "adapter_rank=0", "alignment=false"]
    settings = ["training.cache_features=true", *(f"model.{one}" for one in frozen)]
    assert CliRunner().invoke(app, [*words, "--dry-run"]).exit_code == 0
    assert not (tmp_path / "runs").exists()
    done = CliRunner().invoke(app, [*words, "--dry-run", *(word for one in settings for word in ("--set", one))])
    assert done.exit_code == 0, done.output
    assert list((tmp_path / "runs" / "cache").glob("features-*"))
    assert "interval of about +- " in " ".join(done.output.split())


def test_the_width_of_the_interval_is_told_beforehand() -> None:
    """Of 100 patients at one site 1.96 sqrt(10 * 90 / 100) = 5.88; of two sites with 100 each that over sqrt(2)."""
    told = DryRun({"a": {}, "b": {}}, "a", 1, (), 0, 0)
    assert replace(told, test_patients={"a": 100}).reach == pytest.approx(5.88)
    both = replace(told, test_patients={"a": 100, "b": 100, "c": 0})
    assert both.reach == pytest.approx(5.88 / 2**0.5)
    assert dry_run_lines(both, 1)[-1].startswith("precision: with 200 test patients an R@1 of 10 % will have a 95 % ")


def test_steps_of_a_warm_up_that_is_made_up_are_counted() -> None:
    experiment = small(FedAvg(local_steps=STEPS))
    longer = replace(experiment.training, warmup_steps=5, make_up_warmup=True)
    assert dry_run(replace(experiment, training=longer)).phases[0].steps == STEPS + longer.made_up(STEPS) > STEPS


def test_steps_that_depend_on_the_records_are_counted_by_their_batches() -> None:
    """CreamFL's sites go over all their records, and its server trains on the public set."""
    preset = presets.get("creamfl")
    data = replace(preset.data, size=400, image_size=36)  # type: ignore[type-var]
    training = replace(preset.training, batch_size=4)
    told = dry_run(replace(preset, data=data, training=training, rounds=Rounds(rounds=2)))
    train = told.phases[0]
    assert train.steps >= told.records[told.probed]["train"] // 4 > PROBED
    assert train.server_seconds > 0


def test_time_and_bytes_are_of_the_sites_that_train() -> None:
    """Pooled records train at one site, whatever number of sites they are of; a drawn site in three trains a third.

    Both evaluate at the end: the pooled site alone, and all of the three.
    """
    pooled = dry_run(replace(small(Centralized(local_steps=STEPS)), rounds=Rounds(rounds=3, seed=7)))
    assert len(pooled.records) == 3
    train, evaluate = pooled.phases
    by_hand = 3 * (train.site_seconds + train.server_seconds) + evaluate.site_seconds + evaluate.server_seconds
    by_hand += pooled.measuring
    assert pooled.seconds(1) == pooled.seconds(2) == pytest.approx(by_hand)
    assert [phase.sites for phase in pooled.phases] == [1, 1]
    preset = presets.get("creamfl")
    data = replace(preset.data, size=400, image_size=36)  # type: ignore[type-var]
    drawn = replace(preset.method, sites_per_round=1)  # type: ignore[call-arg]
    asked = dry_run(replace(preset, data=data, method=drawn, rounds=Rounds(rounds=2)))
    assert [phase.sites for phase in asked.phases] == [1, len(asked.records)]


def test_time_is_of_all_rounds_and_of_sites_in_turn() -> None:
    """Five sites on two workers are three turns; the evaluation comes once."""
    told = DryRun(
        {f"site-{number}": {} for number in range(5)},
        "site-1",
        10,
        (Phase("train", 7, 5, 2.0, 0.5), Phase("evaluate", 0, 5, 1.0, 0.0)),
        10**6,
        2**30,
    )
    assert told.seconds(1) == 10 * (5 * 2.0 + 0.5) + 5
    assert told.seconds(2) == 10 * (3 * 2.0 + 0.5) + 3
    assert told.seconds(99) == told.seconds(5) == 10 * 2.5 + 1
    measured = replace(told, measuring=40.0)
    assert measured.seconds(2) == told.seconds(2) + 40
    assert "of these about 40 s to measure the test records" in dry_run_lines(measured, 2)
    assert dry_run_lines(told, 2) == [
        "steps: 10 rounds, at each site train 7",
        "traffic: 1.0 MB of tensors to and from all sites",
        "memory: 1.0 GiB at the peak of one process; up to 2 train side by side",
        "time: about 68 s, if every site takes as long as site-1, of which a few steps were timed",
    ]


def test_reports_that_name_people_are_refused_as_by_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedvlp.run.assembly import Assembly

    def refused(self: Assembly) -> None:
        raise PHIError("identifiers")

    monkeypatch.setattr(Assembly, "gate", refused)
    with pytest.raises(PHIError):
        dry_run(small(FedAvg()))
