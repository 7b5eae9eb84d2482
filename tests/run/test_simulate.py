"""The folder of a run: what is in it, what its tables say, and that it can be resumed after any kill."""

from __future__ import annotations

import csv
import json
import os
import signal
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.presets import SMALL
from support.toy import Fuse, forked, same_bytes, small

from fedvlp.core.checkpoint import CheckpointError, load_tensors
from fedvlp.core.metric_keys import BYTES_DOWN, TIMES
from fedvlp.core.server_state import Server
from fedvlp.federation.codec import PLAIN, Wire
from fedvlp.federation.loop import Rounds
from fedvlp.methods import METHODS, FedAvg, FedDRA, Local
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.run.config import to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder, UnreadableRunError, environment
from fedvlp.run.metrics import areas_of_sites, by_site, impossible, overall, scalars, summary
from fedvlp.run.simulate import simulate

TWO = replace(SMALL, data=replace(SMALL.data, sites=2, size=48), rounds=Rounds(rounds=2, evaluate_every=1))

RECORD = {
    "round": 3, "phase": "align", "seconds": 1.5, "dropped": {"c": "no reply"}, "members": ["a", "b", "c"],
    "sites": {"a": {"val/mean/r1": 10.0, "val/all/mean/r5": 5.0, "loss/x": 0.5, "evaluate": 1.0},
              "b": {"val/mean/r1": 30.0, "loss/x": 1.5}},
    "bytes": {"bytes_down": 30, "bytes_up": 20}, "memory": {"dro_weights": [0.2, 0.3, 0.5]},
}  # fmt: skip


def rows(folder: RunFolder) -> list[list[str]]:
    with open(folder.path / "metrics.csv", newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[dict[str, Any]], list[Any]]:
    """A run of FedDRA over two sites and two rounds."""
    experiment = replace(TWO, method=FedDRA(local_steps=1, align_steps=1, dro_batch=4))
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), experiment)
    reported: list[Any] = []
    return folder, simulate(experiment, folder, report=reported.append), reported


def test_what_is_in_the_folder(finished: Any) -> None:
    folder, history, reported = finished
    names = {str(p.relative_to(folder.path)) for p in folder.path.rglob("*") if p.is_file() and "tb" not in p.parts}
    assert {"config.json", "environment.json", "metrics.csv", "summary.json", "checkpoints/server.safetensors",
            "checkpoints/history.jsonl",
            "model/model.safetensors", "model/config.json"} <= names  # fmt: skip
    assert not any(".tmp" in name for name in names)
    assert {p.parent.name for p in folder.path.glob("tb/**/events*")} == {"server", "site-1", "site-2"}
    assert repr(reported) == repr(history)  # losses not yet known are nan, which equals nothing
    assert json.dumps(folder.history(), sort_keys=True) == json.dumps(history, sort_keys=True)
    assert [(r["round"], r["phase"]) for r in history] == [
        (0, "align"), (0, "joint"), (1, "align"), (1, "joint"), (2, "evaluate")]  # fmt: skip


def test_the_status_of_a_run_is_that_of_flare(finished: Any) -> None:
    """The same form; seconds apart, which are of this machine."""
    told = finished[0].status()
    assert (told["schema"], told["status"], told["summary"]) == (1, "finished", "completed")
    assert (told["round"], told["num_rounds"], told["phase"]) == (2, 2, "evaluate")
    assert (told["phases_done"], told["phases"], told["answered"], told["dropped"]) == (5, 5, 2, 0)
    assert {site: entry["state"] for site, entry in told["sites"].items()} == dict.fromkeys(
        ("site-1", "site-2"), "answered"
    )


def test_the_model_is_what_the_server_ended_with(finished: Any) -> None:
    folder, _, _ = finished
    model = DualEncoder.from_pretrained(folder.model.parent)
    same_bytes(dict(model.state_dict()), Server.load(folder.checkpoint)[0].state)
    assert torch.isfinite(model.text_head[0].weight).all()


def test_metrics_csv_holds_every_number(finished: Any) -> None:
    folder, history, _ = finished
    head, *body = rows(folder)
    assert head == ["round", "phase", "site", "metric", "value"]
    expected = [
        [str(record["round"]), record["phase"], site, name, str(value)]
        for record in history
        for site, values in scalars(record).items()
        for name, value in values.items()
    ]
    assert body == expected
    seen = {(site, name) for _, _, site, name, _ in body}
    assert {("site-1", "loss/contrastive"), ("site-2", "probe/loss"), ("server", "bytes_up"),
            ("server", "dro_weights/site-2"), ("server", "val/all/mean/r1/worst")} <= seen  # fmt: skip


def test_the_summary_compares_the_first_with_the_last_model(finished: Any) -> None:
    folder, history, _ = finished
    saved = json.loads((folder.path / "summary.json").read_text())
    assert saved == summary(history) == {"initial": overall(history[0]), "trained": overall(history[-1])}
    key = "test/all/mean/r10/average"
    values = [record["sites"][site]["test/all/mean/r10"] for record in (history[0], history[-1])
              for site in ("site-1", "site-2")]  # fmt: skip
    assert saved["initial"][key] == pytest.approx(sum(values[:2]) / 2)
    assert saved["trained"][key] == pytest.approx(sum(values[2:]) / 2)


def test_the_environment_says_how_to_repeat_it(finished: Any) -> None:
    folder, _, _ = finished
    noted = json.loads((folder.path / "environment.json").read_text())
    assert noted == {**environment(folder.experiment()), "id": folder.id}
    assert noted["packages"]["torch"] == version("torch")
    assert noted["seed"] == 0


def test_the_configuration_comes_back(finished: Any) -> None:
    folder, _, _ = finished
    assert to_config(folder.experiment()) == json.loads(folder.config.read_text())
    with pytest.raises(ValueError, match=r"holds no run: config\.json is missing"):
        RunFolder(folder.path.parent).experiment()


def test_no_machine_path_is_written(finished: Any) -> None:
    folder, _, _ = finished
    for file in folder.path.rglob("*"):
        if file.is_file() and file.suffix in (".json", ".csv"):
            assert str(folder.path) not in file.read_text()


# Numbers


def test_overall_by_hand() -> None:
    """Of 10 and 30: average 20, worst 10; what not all sites have is left out."""
    figures = overall(RECORD)
    assert figures["val/mean/r1/average"] == 20.0
    assert figures["val/mean/r1/worst"] == 10.0
    assert {name.rpartition("/")[0] for name in figures} == {"val/mean/r1"}
    assert overall({"sites": {"a": {"loss/x": 1.0}}}) == {}
    assert overall({"sites": {}}) == {}


def test_figures_that_cannot_be_are_in_no_average() -> None:
    """A recall of a billion, or a negative one, made the worst site of the listing and the average of the card."""
    honest = {"test/mean/r1": 20.0, "test/mean/r5": 50.0, "test/auc/macro": 0.75, "loss/x": 1e9}
    for name, value in (("test/mean/r1", 1e9), ("test/mean/r1", -1.0), ("test/auc/macro", 1.5)):
        record = {**RECORD, "sites": {"a": honest, "b": {**honest, name: value}}}
        assert by_site(record)["b"] == {kept: honest[kept] for kept in honest if kept != name}
        assert impossible(record) == 1
        assert overall(record)["test/mean/r5/average"] == 50.0
        assert overall(record).get("test/mean/r1/average", 20.0) == 20.0
        assert areas_of_sites(record) == {"test": 0.75}
        assert name not in scalars(record)["b"]
        trained = summary([record])["trained"]
        assert all(0 <= figure <= 100 for figure in trained.values())
    edges = {"test/mean/r1": 0.0, "val/mean/r1": 100.0, "test/auc/macro": 0.0, "val/auc/macro": 1.0}
    assert by_site({"sites": {"a": edges}}) == {"a": edges}


def test_a_site_without_test_pairs_does_not_take_the_others_averages_away() -> None:
    """b has no recall on test, and c none in batch: test over a and c, 40; in batch nothing; val over all three, 20."""
    a, c = ({"val/all/mean/r1": v, "test/all/mean/r1": 2 * v, "similarity": 1.0} for v in (10.0, 30.0))
    b = {"val/all/mean/r1": 20.0, "val/mean/r1": 5.0}
    figures = overall({"sites": {"a": {**a, "test/mean/r1": 7.0}, "b": b, "c": c}})
    averages = {name: value for name, value in figures.items() if name.endswith("average")}
    assert averages == {"test/all/mean/r1/average": 40.0, "val/all/mean/r1/average": 20.0}
    assert list(figures) == sorted(figures, key=lambda name: name.partition("/")[0])


def test_scalars_by_hand() -> None:
    values = scalars(RECORD)
    assert values["a"] == RECORD["sites"]["a"]  # type: ignore[index]
    own = values["server"]
    assert (own["seconds"], own["bytes_down"], own["bytes_up"]) == (1.5, 30, 20)
    assert [own[f"dro_weights/{site}"] for site in "abc"] == [0.2, 0.3, 0.5]
    assert own["val/mean/r1/worst"] == 10.0


def test_the_table_by_hand(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    few = {**RECORD, "sites": {"a": {"loss/x": 0.1 + 0.2}}, "memory": {}, "bytes": {}}
    folder.note_all([RECORD])
    folder.note_all([few])
    assert rows(folder) == [
        ["round", "phase", "site", "metric", "value"],
        ["3", "align", "server", "seconds", "1.5"],
        ["3", "align", "a", "loss/x", "0.30000000000000004"],
    ]
    folder.note({**few, "round": 4})
    assert rows(folder)[3:] == [
        ["4", "align", "server", "seconds", "1.5"],
        ["4", "align", "a", "loss/x", str(0.1 + 0.2)],
    ]


def test_a_table_that_grew_is_the_table_written_at_once(tmp_path: Path) -> None:
    grown, whole = RunFolder(tmp_path), RunFolder(tmp_path / "whole")
    awkward = {**RECORD, "sites": {"a": {'loss/"x",\u00e4': 1e-300}}}
    grown.note_all([])
    for record in (RECORD, awkward, RECORD):
        grown.note(record)
    whole.note_all([RECORD, awkward, RECORD])
    assert grown.table.read_bytes() == whole.table.read_bytes()


def test_a_table_that_cannot_grow_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write metrics\.csv in .*: No such file"):
        RunFolder(tmp_path / "gone").note(RECORD)


def test_no_figures_no_summary() -> None:
    assert summary([]) == summary([{"sites": {"a": {"loss/x": 1.0}}}]) == {}


# Which run is resumed


def test_runs_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "notes").mkdir()
    assert [RunFolder.create(tmp_path, SMALL).path.name for _ in range(3)] == ["001", "002", "003"]
    assert RunFolder.create(tmp_path, replace(SMALL, name="other")).path == tmp_path / "other" / "001"


STRANGE = (
    "../../x", "/abs/x", "..", ".", "", "a/b", "a\\b", "x\x00", "x\n", "Fed", "fed avg", "-x", "a" * 65, "a" * 100_000,
    "\ud800", "ä", 7, None, ["x"],
)  # fmt: skip


def test_a_name_that_could_lead_out_of_the_runs_is_none(tmp_path: Path) -> None:
    for name in STRANGE:
        with pytest.raises(
            ValueError, match=r"^the name of an experiment is .* it takes 1 to 64 characters"
        ) as refused:
            RunFolder.create(tmp_path / "runs", replace(SMALL, name=name))
        assert len(str(refused.value)) < 250
        assert list(tmp_path.iterdir()) == []


def test_runs_that_a_link_leads_elsewhere_are_not_begun(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "small").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="lie outside of the folder of runs"):
        RunFolder.create(tmp_path / "runs", SMALL)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_two_that_begin_at_once_get_a_folder_each(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunFolder.create(tmp_path, SMALL).path.name, range(16)))
    assert sorted(folders) == [f"{number:03d}" for number in range(1, 17)]


def test_the_unfinished_run_of_the_same_configuration_is_found(tmp_path: Path) -> None:
    assert RunFolder.latest(tmp_path, SMALL) is None
    mine = RunFolder.create(tmp_path, SMALL)
    changed = replace(SMALL, method=FedAvg(local_steps=2))
    assert RunFolder.latest(tmp_path, changed) is None
    other = RunFolder.create(tmp_path, changed)
    (tmp_path / "small" / "003").mkdir()  # no configuration: never started
    assert RunFolder.latest(tmp_path, SMALL) == mine
    assert RunFolder.latest(tmp_path, changed) == other
    other.model.parent.mkdir()
    other.model.touch()
    assert RunFolder.latest(tmp_path, changed) is None
    assert RunFolder.newest(tmp_path, changed) == other
    assert RunFolder.latest(tmp_path, SMALL) == mine
    newer = RunFolder.create(tmp_path, SMALL)
    assert RunFolder.latest(tmp_path, SMALL) == newer


def test_a_run_whose_server_has_no_model_has_finished_when_it_says_so(tmp_path: Path) -> None:
    """An encrypted run's model is at the sites alone."""
    for number, (status, finished) in enumerate(
        [('{"status": "finished"}', True), ('{"status": "stopped"}', False), ("{", False), ("[]", False)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = RunFolder.create(folder, SMALL)
        run.status_file.write_text(status)
        assert (RunFolder.latest(folder, SMALL) is None) == run.finished == finished


def test_every_run_has_an_id_of_its_own_but_older_ones(tmp_path: Path) -> None:
    first, second = RunFolder.create(tmp_path, SMALL), RunFolder.create(tmp_path, SMALL)
    assert first.id != second.id
    assert len(first.id) == 32
    first.environment.write_text("{}")
    assert first.id == ""


def test_a_run_of_another_version_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It names what this fedvlp does not have, so it is not the run of a configuration that this fedvlp has built."""
    for number, (text, said) in enumerate(
        [
            ('{"path": "fedvlp.Experiment", "args": {"gone": 1}}', "fedvlp.Experiment has no 'gone'"),
            ('{"path": "fedvlp.Gone", "args": {}}', "config names 'fedvlp.Gone'"),
            ('{"path": "fedvlp.Experiment", "args": {"name": "small"}}', "missing 1 required"),
            ('{"path": "fedvlp.Experiment", "args": [1]}', '"args" holds a list'),
            ('{"path": 5}', "config names 5"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        mine, old = RunFolder.create(folder, SMALL), RunFolder.create(folder, SMALL)
        old.config.write_text(text)
        caplog.clear()
        assert RunFolder.latest(folder, SMALL) == mine
        assert "run small/002 is passed over: " in caplog.text
        assert said in caplog.text


def test_no_run_is_begun_beside_one_that_cannot_be_read(tmp_path: Path) -> None:
    """A damaged configuration may be that of the very run to resume. Once it has finished, nothing can be lost."""
    for number, text in enumerate(["", '{"path": ', "[]", "\udcff"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        RunFolder.create(folder, SMALL)
        damaged = RunFolder.create(folder, SMALL)
        damaged.config.write_text(text, errors="surrogateescape")
        with pytest.raises(UnreadableRunError, match=r"run small/002 has not finished, .* move the folder elsewhere"):
            RunFolder.open(folder, SMALL)
        assert sorted(entry.name for entry in (folder / "small").iterdir()) == ["001", "002"]
        damaged.model.parent.mkdir()
        damaged.model.touch()
        assert RunFolder.open(folder, SMALL).path.name == "001"


def test_a_checkpoint_without_a_configuration_is_a_run_that_cannot_be_read(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, SMALL)
    run.config.unlink()
    assert RunFolder.open(tmp_path, SMALL).path.name == "002", "killed before it began"
    run.checkpoint.parent.mkdir()
    run.checkpoint.touch()
    with pytest.raises(UnreadableRunError, match=r"run small/001 .* config\.json is missing"):
        RunFolder.open(tmp_path / ".", replace(SMALL, rounds=Rounds(rounds=7)))


def test_the_thousandth_run_is_newer_than_the_999th(tmp_path: Path) -> None:
    for number in ("999", "1000"):
        folder = RunFolder(tmp_path / "small" / number)
        folder.path.mkdir(parents=True)
        folder.config.write_text(json.dumps(to_config(SMALL)))
    assert RunFolder.latest(tmp_path, SMALL).path.name == "1000"  # type: ignore[union-attr]


# Resuming


def model_of(experiment: Experiment, path: Path) -> dict[str, torch.Tensor]:
    folder = RunFolder(path)
    simulate(experiment, folder)
    return load_tensors(folder.model)[0]


def facts(folder: RunFolder, wire: Wire = PLAIN) -> list[list[str]]:
    """metrics.csv without the clock; in any order, because a resumed server has its memory sorted by name.

    Without what went down, too, where the wire codes it: what a kill interrupts is sent whole once more.
    """
    less = TIMES if wire.plain else {*TIMES, BYTES_DOWN}
    return sorted(row for row in rows(folder) if row[3] not in less)


ADAPTERS = ModelConfig(
    init="tiny-pool", head_norm="layer", adapters="lora", adapter_layers="every", adapter_private=True
)
FILMS = replace(TWO.data, image_size=72)
"""Frozen towers, and films of their size. Private adapters stay in the memories of their sites."""

UNINTERRUPTED = {
    "feddra": (replace(TWO, method=small(METHODS["feddra"])), 9),
    "local": (replace(TWO, method=small(METHODS["local"])), 10),
    "adapters": (replace(TWO, data=FILMS, model=ADAPTERS, wire=Wire("bfloat16", "int8")), 16),
}
"""An experiment, and the last of its writes."""


@pytest.mark.parametrize("name", cases(UNINTERRUPTED, seconds=12))
def test_killed_and_resumed_is_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The whole thing, towers, cohort and evaluation: SIGKILL at some writes, resumed through ``simulate``."""
    experiment, last = UNINTERRUPTED[name]
    expected = model_of(experiment, tmp_path / "whole")
    for moment in (6, last):

        def killed(moment: int = moment) -> None:
            fuse, rename = Fuse(moment), os.replace
            monkeypatch.setattr(os, "replace", lambda *a: (fuse(), rename(*a)))
            simulate(experiment, RunFolder(tmp_path / str(moment)))

        assert forked(killed) == -signal.SIGKILL
        same_bytes(model_of(experiment, tmp_path / str(moment)), expected)
        resumed, whole = (facts(RunFolder(tmp_path / name), experiment.wire) for name in (str(moment), "whole"))
        assert resumed == whole


@pytest.mark.slow(seconds=3)
def test_sites_side_by_side_give_the_same_bytes(tmp_path: Path) -> None:
    alone, aside = RunFolder(tmp_path / "alone"), RunFolder(tmp_path / "aside")
    simulate(TWO, alone, workers=1)
    simulate(TWO, aside, workers=2)
    same_bytes(load_tensors(alone.model)[0], load_tensors(aside.model)[0])
    assert facts(alone) == facts(aside)


def test_a_finished_run_can_be_asked_for_again(finished: Any) -> None:
    folder, history, _ = finished
    before = folder.model.read_bytes()
    reported: list[Any] = []
    again = simulate(folder.experiment(), folder, report=reported.append)
    assert json.dumps(again, sort_keys=True) == json.dumps(history, sort_keys=True)
    assert reported == []
    assert folder.model.read_bytes() == before


def test_killed_before_the_last_record_was_noted(tmp_path: Path) -> None:
    """The checkpoint is written first; the table must catch up when nothing is left to run."""
    folder = RunFolder(tmp_path)

    def stop(record: dict[str, Any]) -> None:
        if record["phase"] == "evaluate":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(replace(TWO, method=Local(local_steps=1)), folder, report=stop)
    assert (folder.status()["status"], folder.status()["phase"], folder.finished) == ("stopped", "evaluate", False)
    whole = rows(folder)
    folder.table.write_bytes(folder.table.read_bytes()[:-30])  # as a kill between checkpoint and table leaves it
    simulate(replace(TWO, method=Local(local_steps=1)), folder)
    assert rows(folder) == whole


def test_a_damaged_checkpoint_is_named_and_not_replaced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    simulate(TWO, folder)
    folder.checkpoint.write_bytes(folder.checkpoint.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"server\.safetensors"):
        simulate(TWO, folder)
    assert folder.checkpoint.stat().st_size == 100


def test_a_finished_run_that_is_resumed_keeps_its_model_and_card(tmp_path: Path) -> None:
    """The card asks people to write in it, and an audit writes a section: both were gone after a resumption."""
    experiment = replace(TWO, method=FedAvg(local_steps=1), rounds=Rounds(rounds=1))
    folder = RunFolder.create(tmp_path, experiment)
    simulate(experiment, folder)
    card = folder.model.parent / "README.md"
    card.write_text("Reviewed by the consortium.", encoding="utf-8")
    simulate(folder.experiment(), folder)
    assert card.read_text(encoding="utf-8") == "Reviewed by the consortium."


def test_of_a_run_that_fails_goes_what_was_made_for_it(tmp_path: Path) -> None:
    """Folders that were there before, empty or not, are somebody's own and stay."""
    for number, own in enumerate(["", "lab", "lab/runs", "lab/runs/fedavg"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / own).mkdir(parents=True, exist_ok=True)
        before = sorted(folder.rglob("*"))
        run = RunFolder.create(folder / "lab" / "runs", replace(TWO, name="fedavg"))
        with pytest.raises(ValueError, match="no such data"), run.removed_unless_begun():
            raise ValueError("no such data")
        assert sorted(folder.rglob("*")) == before


def test_a_run_whose_first_checkpoint_found_no_room_stays(tmp_path: Path) -> None:
    """The error says to free space and to resume, so there must be a run to resume."""
    experiment = replace(TWO, method=FedAvg(local_steps=1), rounds=Rounds(rounds=1))
    folder = RunFolder.create(tmp_path, experiment)
    folder.checkpoint.parent.write_text("no folder can be made here")
    with pytest.raises(CheckpointError, match="then resume the run"), folder.removed_unless_begun():
        simulate(experiment, folder)
    folder.checkpoint.parent.unlink()
    simulate(folder.experiment(), folder)
    assert folder.model.exists()
