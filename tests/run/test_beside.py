"""What a run on a user's own records is held against, and the sentence that says whether it was worth it."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.plugins import fresh, pulled
from support.presets import SMALL
from support.report_pages import page_of, undrawn
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.cli.run_commands import write_report
from fedvlp.core.checkpoint import save_json
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.evaluation.downstream import Records, Subset
from fedvlp.evaluation.intervals import Interval
from fedvlp.evaluation.linear_probe import Task
from fedvlp.federation.loop import Rounds
from fedvlp.methods import Centralized, FedAvg, Local
from fedvlp.report.opening import sentences
from fedvlp.report.run import Run
from fedvlp.run import beside, presets, recalls
from fedvlp.run.assembly import Assembly
from fedvlp.run.beside import ALONE, CHANCE, ORACLE, POOLED, START, TOWER_ALONE, Beside, verdict
from fedvlp.run.config import described
from fedvlp.run.evaluate import paired_sites
from fedvlp.run.folder import RunFolder
from fedvlp.run.recalls import GAIN, TRAINED
from fedvlp.run.simulate import PARTITION, simulate

FEDERATED, SITES_ALONE = FedAvg(local_steps=2), Local(local_steps=2)


@pytest.fixture(autouse=True)
def _undrawn() -> Iterator[None]:
    """What is drawn is looked at where pages are (report/test_page.py)."""
    with undrawn():
        yield


@pytest.fixture(scope="module", autouse=True)
def _few() -> Iterator[None]:
    """These sites have too few images for 20 of each class."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(beside, "FEW", Subset(shots=5))
        yield


@pytest.fixture(scope="module")
def runs(_few: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """A federation and the sites alone, on images and reports in files with labels."""
    root = tmp_path_factory.mktemp("own")
    write(SyntheticCohort(sites=2, size=120, image_size=36), root)
    source = TableSource(
        str(root / "pairs.csv"), image_size=36, label_columns="Edema,Pleural Effusion", burned_in="header"
    )
    folders = {}
    for name, method in (("federated", FEDERATED), ("alone", SITES_ALONE)):
        experiment = replace(SMALL, name=name, method=method, data=source, rounds=Rounds(rounds=1))
        folders[name] = RunFolder.create(root / "runs", experiment)
        simulate(experiment, folders[name])
    return folders


def test_a_run_on_own_records_says_first_what_it_is_worth(runs: dict[str, RunFolder]) -> None:
    """Unasked: in the report, in the table on the terminal and in the model card, with what is not there yet."""
    run = runs["federated"]
    write_report(run)
    write_report(runs["alone"])  # what comes later is in the report and the card that are written again
    write_report(run)
    shown = beside.rows(run)
    assert [row.other for row in shown] == [START, CHANCE, ORACLE, TOWER_ALONE, TOWER_ALONE, ALONE]
    assert shown[4].what == "few-shot probe (5 images of each class) of the labels on image vectors, macro AUC"
    said = verdict(shown)
    assert said.startswith("This run ")
    assert sentences(Run.read(run))[0] == said
    page = page_of(run)
    assert page.text.index(said) < page.text.index("finished")
    assert [row[2] for row in page.tables["What it is worth"][1:]] == [row.other for row in shown]
    terminal = CliRunner().invoke(app, ["report", str(run.path)], env={"COLUMNS": "400"}).output
    assert said in terminal
    pooled = f"not measured: {POOLED}: fedvlp simulate centralized --like {run.path}"
    assert pooled in terminal
    assert ALONE not in terminal.partition("not measured")[2]
    card = (run.model.parent / "README.md").read_text()
    assert said in card
    assert f"| {TOWER_ALONE} | {shown[3].of_other} |" in card
    assert card.index("## Results") < card.index(said) < card.index("## Normalisation statistics")
    of = {row.figure: row for row in recalls.read(run) if (row.site, row.k) == ("site-1", 1)}
    chance = f"{of[TRAINED].chance:.1f}"
    assert (
        f"| site-1 | {of[TRAINED].queries} | {of[TRAINED].recall.unsigned()} | {of[GAIN].recall} | {chance} |" in card
    )
    assert re.search(r"\| Edema \| 0\.\d\d \[[^|]+\], \d+ / \d+ \|", card), "zero-shot by finding and site"
    subgroups = "train_on,by,subgroup,test_records,accuracy,accuracy_low,accuracy_high,macro_auc,macro_auc_low"
    file = run.path / "evaluation" / "linear-probe-subgroups.csv"
    file.write_text(f"{subgroups},macro_auc_high\n100 %,sex,F,30,70,60,80,0.5,0.4,0.6\n")
    write_report(run)
    card = (run.model.parent / "README.md").read_text()
    assert "| sex: F | linear probe, 100 % | 30 | 0.500 [0.400, 0.600] | 70.0 [60.0, 80.0] |" in card
    assert card.count("<!-- beside -->") == 1
    file.unlink()


def test_the_tower_is_the_one_before_the_run_and_its_films_are_those_with_labels(runs: dict[str, RunFolder]) -> None:
    """The same area on the tower whatever the run trained; of sites with own models there is none to hold against."""
    run = runs["federated"]
    write_report(run)
    written = beside._tower_file(run).read_text()
    again = beside.FinishedRun(run, "again")
    state = {name: tensor + 1 for name, tensor in again.trained()[1].items()}
    again.trained = lambda: ({}, state)  # type: ignore[method-assign]
    beside.measure_tower(run, again)
    changed = beside._tower_file(run).read_text()
    tower = [[line for line in text.splitlines() if line.startswith("tower")] for text in (written, changed)]
    assert tower[0] == tower[1]
    assert [line.partition(",")[0] for line in tower[0]] == ["tower", "tower 5-shot"]
    assert written != changed
    assert beside.measure_tower(runs["alone"], beside.FinishedRun(runs["alone"], "alone")) is None


def test_the_commands_that_make_what_is_not_there(tmp_path: Path) -> None:
    """A closed form takes no step, so a run on its terms would take none either: it has its own on the same records."""
    alone, pooled = "fedvlp simulate local", "fedvlp simulate centralized"
    by_name = {
        "fedavg": (FEDERATED, [f"{alone} --like RUN", f"{pooled} --like RUN"]),
        "local": (SITES_ALONE, [f"{pooled} --like RUN"]),
        "centralized": (Centralized(local_steps=2), [f"{alone} --like RUN"]),
    }
    for name, (method, commands) in by_name.items():
        folder = RunFolder.create(tmp_path, replace(SMALL, name=name, method=method))
        said = [line.partition(": ")[2].replace(str(folder.path), "RUN") for line in beside.lacking(folder)]
        assert said == commands
    closed = replace(presets.get("one-round-cca-real"), rounds=Rounds(rounds=1, seed=3))
    closed = replace(closed, model=replace(closed.model, max_tokens=40))
    folder = RunFolder.create(tmp_path / "two words", closed)
    assert [line.partition(": ")[2] for line in beside.lacking(folder)] == [
        f"fedvlp simulate {name}-real --data 'run:{folder.path}' --set rounds.seed=3 --set model.max_tokens=40"
        for name in ("local", "central")
    ]


AS_FINISHED = "fedvlp.methods.FedAvg"


def written(root: Path, name: str, sha: str, r1: float, method: str = AS_FINISHED, **args: int) -> RunFolder:
    """A finished run by hand: its assignment's hash, its method, and one R@1 of the trained model in either scope."""
    folder = RunFolder(root / name / "001")
    recalls.file_of(folder).parent.mkdir(parents=True)
    folder.model.parent.mkdir()
    folder.model.write_bytes(b"")
    (folder.path / PARTITION).write_text(json.dumps({"sha256": sha}))
    groups = {"method": {"path": method, "args": {"local_steps": 5, **args}}}
    groups |= {"training": {"args": {}}, "rounds": {"args": {"rounds": 2}}}
    folder.config.write_text(json.dumps({"args": groups}))
    lines = [
        ",".join(beside.recalls.COLUMNS),
        f"trained,average,,,1,40,{r1},{r1 - 2},{r1 + 2},3.125,nan",
        f"trained,average,,all/,1,40,{r1 + 50},{r1 + 48},{r1 + 52},2.5,nan",
    ]
    recalls.file_of(folder).write_text("\n".join(lines))
    return folder


def test_a_run_is_held_against_the_newest_of_its_kind_on_its_records(tmp_path: Path) -> None:
    """All figures are unlike, in both scopes; what stands beside is of another kind, other records, or no steps.

    The trained model's R@1 is 30 [25, 36]: chance is 3.1, the start 20 with a gain of [2, 18], each site alone 34 lies
    within the interval and pooled records above it. Among all sites' records 12 [8, 17] against the oracle's 17.5.
    """
    mine = replace(SMALL, data=TableSource("pairs.csv"))
    run = RunFolder.create(tmp_path, mine)
    run.model.parent.mkdir()
    run.model.write_bytes(b"")
    (run.path / PARTITION).write_text(json.dumps({"sha256": "mine"}))
    lines = [",".join(recalls.COLUMNS)]
    for scope, more in (("all/", 40), ("", 0)):
        lines += [
            f"initial,average,,{scope},1,40,{20 + more},15,25,3.125,nan",
            f"trained,average,,{scope},1,40,{30 + more},{25 + more},{36 + more},{3.125 + more},nan",
            f"trained,average,,{scope},5,40,{55 + more},50,60,15.6,nan",
            f"trained,worst,,{scope},1,40,{11 + more},9,13,3.125,nan",
            f"trained,site,site-1,{scope},1,40,{41 + more},40,42,3.125,nan",
            f"gain,average,,{scope},1,40,{10 - more},2,18,nan,nan",
        ]
    lines.append("trained,together,,all/,1,80,12,8,17,1.25,17.5")
    recalls.file_of(run).parent.mkdir()
    recalls.file_of(run).write_text("\n".join(lines))
    # 0.9 [0.8, 0.95] against the tower's 0.85: not significant, since the interval of the gain crosses 0
    areas = ["trained,40,0.9,0.86,0.95", "tower,40,0.85,0.8,0.9", "gain,40,0.05,-0.01,0.1"]
    beside._tower_file(run).write_text("\n".join([",".join(beside.COLUMNS), *areas]))

    local, pooled = "fedvlp.methods.Local", "fedvlp.methods.Centralized"
    for age, folder in enumerate([
        written(tmp_path, "z-closed", "mine", 61, local, local_steps=0),
        written(tmp_path, "z-other-records", "other", 62, local),
        written(tmp_path, "z-plugin", "mine", 63, "my_method.Local"),
        written(tmp_path, "b-alone", "mine", 34, local),
        written(tmp_path, "y-pooled", "mine", 37, pooled),
        written(tmp_path, "z-older", "mine", 65, local),
    ]):  # fmt: skip
        os.utime(folder.path / PARTITION, (1e9 - age, 1e9 - age))
    trained, together = Interval(30, 25, 36), Interval(12, 8, 17)
    probe = "linear probe of the labels on image vectors, macro AUC"
    expected = [
        Beside("R@1", trained, START, 20, 1),
        Beside("R@1", trained, CHANCE, 3.125, 1),
        Beside("R@1 among the studies of all sites", together, ORACLE, 17.5, -1),
        Beside(probe, Interval(0.9, 0.86, 0.95), TOWER_ALONE, 0.85, 0, 3),
        Beside("R@1", trained, POOLED, 37, -1),
        Beside("R@1", trained, ALONE, 34, 0),
    ]  # fmt: skip
    assert beside.rows(run) == expected
    assert beside.lacking(run) == []

    # Whatever cannot be read is left out, in one line that names it.
    for name in ("half", "torn", "cut", "listed"):
        written(tmp_path, name, "mine", 70, local)
    (tmp_path / "half" / "001" / "config.json").unlink()
    (tmp_path / "torn" / "001" / PARTITION).write_text('{"sha')
    recalls.file_of(RunFolder(tmp_path / "cut" / "001")).write_text("figure,over\ntrained")
    (tmp_path / "listed" / "001" / "config.json").write_text('{"args": []}')
    assert beside.rows(run) == expected
    said = beside.siblings(run).said
    assert beside.lacking(run) == []
    assert said.startswith("left out, since their files cannot be read: cut/001, half/001, listed/001, torn/001; ")


def test_a_plugins_run_breaks_none_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same table, whether the plugin is not given, or has been edited since."""
    monkeypatch.chdir(tmp_path)
    write(SyntheticCohort(sites=2, size=60, image_size=36), tmp_path)
    file = pulled(tmp_path)
    small = ["--set", "rounds.rounds=1", "--set", "method.local_steps=1", "--set", "data.burned_in=header"]
    table = ["--data", "table:pairs.csv", "--workers", "1", *small]
    for plugin in (["pulled", "--plugin", str(file)], ["fedavg"], ["fedavg", "--plugin", str(file)]):
        with fresh():
            ended = CliRunner().invoke(app, ["simulate", *plugin, *table])
        assert ended.exit_code == 0, ended.output
        file.write_text(f"{file.read_text()}\n# edited\n")
    assert len(list(tmp_path.glob("runs/*/*/report.html"))) == 3


def test_labels_that_few_records_have_are_left_out_of_the_probes() -> None:
    """Of 8 training and 2 test records: a has 5 and 3 and one of each; b lacks a test record; c has 4; d lacks 1."""
    train = torch.tensor([[1, 1, 1, 1]] * 4 + [[1, 1, 0, 0]] + [[0, 0, 0, 0]] * 3)
    train[5:, 3] = 1
    test = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]])
    targets = torch.cat((train, test)).double()
    chosen = Records(np.arange(8), np.arange(0), np.arange(8, 10), 0)
    task, few = beside.frequent(Task(("a", "b", "c", "d"), targets, False), chosen, least=3)
    assert (task.names, few) == (("a", "c"), {"b": 5, "d": 7})
    assert task.targets.equal(targets[:, [0, 2]])
    task, few = beside.frequent(Task(("a", "c"), targets[:, [0, 2]], True), chosen, least=4)
    assert (task.names, few, task.exclusive) == (("c",), {"a": 5}, False)
    with pytest.raises(ValueError, match="no label has 5 training images"):
        beside.frequent(task, chosen, least=5)
    one = Task(("a",), targets[:, :1], False)
    assert beside.frequent(one, chosen, least=3) == (one, {})


def test_what_takes_long_says_when_it_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for seconds in (4.9, 5.0):
        clock = iter((10.0, 10.0 + seconds))
        monkeypatch.setattr(beside.time, "monotonic", lambda clock=clock: next(clock))
        with beside.timed(said.append, "reading"):
            said.append("work")
    assert said == ["reading ...", "work", "reading ...", "work", "reading: done in 5 s"]


def test_the_estimate_of_measuring_by_hand(runs: dict[str, RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of B records takes 1 s and a head 1 s: the recalls, zero-shot of 2 labels, the tower, and 12 heads."""
    assembly = Assembly(runs["federated"].experiment())
    data = paired_sites(assembly)
    tests = sum(len(assembly.cohort.rows("test", site)) for site in data)
    batch = min(32, len(assembly.cohort.rows("test", next(iter(data)))))
    clock = itertools.count()
    monkeypatch.setattr(beside.time, "perf_counter", lambda: float(next(clock)))
    embedded = 2 * 2 * tests + 2 * 2 * 10 * 5 + 2 * len(assembly.cohort)
    assert beside.seconds(assembly) == pytest.approx(embedded / batch + 12)
    monkeypatch.setattr(beside, "OWN", 10)
    assert beside.seconds(assembly) == 0, "more records are measured where a person asks"


def row(other: str, side: int) -> Beside:
    return Beside("R@1", Interval(9, 6, 12), other, 9.0 - 4 * side, side)


def test_the_verdict_is_of_the_strongest_reason_against() -> None:
    """All records in one place are what a federation comes near to: to be below them is no reason."""
    for sides, expected in [
            ({START: 1, CHANCE: 1, ORACLE: 1}, "worth more than what it started from: R@1 9.0 [6.0, 12.0] against 5.0"),
            ({START: 1, CHANCE: 1, TOWER_ALONE: -1}, "worth less than the untouched image tower: R@1"),
            ({START: -1, CHANCE: 0}, "worth less than what it started from: R@1 9.0 [6.0, 12.0] against 13.0."),
            ({START: 1, CHANCE: 0}, "shows no more than chance: R@1"),
            ({START: 0, CHANCE: 1}, "shows no more than what it started from: R@1"),
            ({START: 1, CHANCE: 1, ALONE: 0}, "; it does not differ significantly from each site alone: R@1"),
            ({START: 1, CHANCE: 1, POOLED: -1}, "worth more than what it started from"),
        ]:  # fmt: skip
        said = verdict([row(other, side) for other, side in sides.items()])
        assert said.startswith("This run ")
        assert expected in said


def test_an_unfavourable_verdict_has_a_way_on(tmp_path: Path) -> None:
    """40 test pairs give +-2 about 30: a difference of 1 from each site alone would take four times as many."""
    run = written(tmp_path, "mine", "mine", 30)
    run.config.unlink()
    run = RunFolder(run.path)
    save_json(run.config, described(replace(SMALL, name="mine", data=TableSource("pairs.csv"))))
    trained = Interval(30, 28, 32)
    rows = [Beside("R@1", trained, CHANCE, 3, 1), Beside("R@1", trained, ALONE, 31, 0)]
    pairs, start = beside.ways_on(run, rows)
    assert pairs == (
        "40 test pairs give an interval of +-2.0: a difference of 1.0 from each site alone would be significant with "
        "about 160"
    )
    assert start.endswith(f"fedvlp simulate mine --data run:{run.path} --start rad-dino")
    assert beside.ways_on(run, rows[:1]) == []
    assert beside.ways_on(run, [rows[0], Beside("R@1", trained, POOLED, 40, -1)]) == [], "pooled records are no reason"
    below = [Beside("linear probe", Interval(0.8, 0.7, 0.85), TOWER_ALONE, 0.9, -1, 3)]
    assert beside.ways_on(run, below) == [start]


def test_without_an_interval_there_is_no_verdict() -> None:
    assert verdict([]) == ""
    assert verdict([Beside("R@1", Interval(9, math.nan, math.nan), START, 5.0, 0)]) == ""


def test_large_sets_of_own_records_are_measured_where_one_asks(
    runs: dict[str, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs["alone"]
    recalls.file_of(run).unlink(missing_ok=True)
    with monkeypatch.context() as patched:
        patched.setattr(beside, "OWN", 10)
        write_report(run)
    assert not recalls.read(run)
    write_report(run, intervals=True)
    assert recalls.read(run)
