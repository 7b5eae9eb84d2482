"""Cells are run once, several at a time, and resumed; the page says what was found, and ranks nothing invalid."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plugins import PULLED, forget, fresh, pulled
from typer.testing import CliRunner

from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.methods import FedAvg, Local
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.initial import save_initial
from fedvlp.run import cells, plugins, presets
from fedvlp.run.cells import DONE, FILED, HERE, finished
from fedvlp.run.config import from_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.site_sources import SiteSources
from studies.claims import cell_results as results
from studies.claims import ledger
from studies.claims.cell_results import CellResults, Made, Table, flattened, measured, nested, origin
from studies.claims.command import app
from studies.claims.page import INVALID, MISSING, UNLIKE, as_page, corrected, judge
from studies.claims.scenario import HOLDS, UNDECIDED, Claim, Precondition, Scenario, ahead, cells_of, methods_of
from studies.reproduce import measures

FIGURE = "test/all/mean/r10/average"


def tiny(seed: int) -> Mapping[str, Experiment]:
    base = presets.get("fedavg")
    base = replace(
        base, model=ModelConfig(image_size=32, head_hidden=16, embedding_dim=16),
        data=SyntheticCohort(sites=2, size=260, image_size=36, seed=seed),
        training=replace(base.training, batch_size=8), rounds=replace(base.rounds, rounds=1, seed=seed),
    )  # fmt: skip
    return {"fedavg": replace(base, method=FedAvg(local_steps=1)), "local": replace(base, method=Local(local_steps=1))}


def scenario(valid: bool = True) -> Scenario:
    claim = Claim("fedavg", "FedAvg is ahead of <b>training alone</b>", "fedavg", "local", FIGURE, "+9.9")
    condition = Precondition("it is so", lambda table: valid)
    return Scenario("tiny", "Two sites.", tiny, ledger.trained, (condition,), (claim,), (FIGURE,))


def ask(one: Scenario, folder: Path, seeds: Sequence[int] = (0,), jobs: int = 1) -> tuple[Table, dict[Any, str]]:
    """The table, and what became of each cell."""
    said: dict[Any, str] = {}

    def say(method: str, seed: int, what: str) -> None:
        said[method, seed] = what

    every = cells_of(one, list(one.experiments(0)), seeds)
    return measured(one, every, folder / "runs", folder / "results", jobs, say), said


@pytest.mark.slow(seconds=10)
def test_cells_run_once_and_a_stopped_one_goes_on(tmp_path: Path) -> None:
    """The figures of a second call are those of the first, and no run begins anew; another setting does."""
    first, said = ask(scenario(), tmp_path, jobs=2)
    assert said == {("fedavg", 0): DONE, ("local", 0): DONE}
    assert first.values("fedavg", FIGURE) != [0.0]
    assert first.origins == {}
    shutil.rmtree(tmp_path / "results")
    runs = tmp_path / "runs" / "tiny" / "0"
    stopped = finished(runs, replace(tiny(0)["local"], name="local"))
    assert stopped is not None
    stopped.model.unlink()  # as if it had been killed while it wrote the model, before it said that it is finished
    stopped.status_file.write_text(json.dumps(stopped.status() | {"status": "running"}))
    again, said = ask(scenario(), tmp_path)
    assert said == {("fedavg", 0): HERE, ("local", 0): DONE}
    assert again.cells == first.cells
    assert len(list((runs / "local").iterdir())) == 1, "it went on in its folder"
    other = replace(tiny(0)["local"], name="local", method=Local(local_steps=2))
    assert finished(runs, other) is None


def test_a_run_is_known_again_by_the_start_that_was_named(tmp_path: Path) -> None:
    """Weights in a folder: the run's own configuration has their checksum, what is asked for only their name."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"weights")
    named = replace(tiny(0)["fedavg"], model=ModelConfig(init=str(weights)))
    folder = RunFolder.create(tmp_path, named)
    assert finished(tmp_path, named) is None
    folder.model.parent.mkdir()
    folder.model.touch()
    assert finished(tmp_path, named) == folder
    (weights / "model.safetensors").write_bytes(b"others")
    assert finished(tmp_path, named) is None


@pytest.fixture(scope="module")
def filed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Table]:
    """A folder whose runs are gone, and what they had measured."""
    folder = tmp_path_factory.mktemp("filed")
    table, _ = ask(scenario(), folder)
    shutil.rmtree(folder / "runs")
    return folder, table


def test_results_outlast_their_runs(filed: tuple[Path, Table]) -> None:
    """The very figures; where they are from is said; nothing is run."""
    folder, table = filed
    again, said = ask(scenario(), folder, jobs=0)
    assert set(said.values()) == {FILED}
    for cell, figures in again.cells.items():
        assert figures == table.cells[cell], "those that a resumed table shows are those of the first"
        assert FIGURE in figures
    assert {origin.this_code for origin in again.origins.values()} == {True}
    assert not (folder / "runs").exists()


def test_a_result_of_another_device_is_of_the_same_experiment(filed: tuple[Path, Table]) -> None:
    """Which GPU it was is said, as the processor is; a cell that is not filed trains where it was asked to."""
    folder, _ = filed
    one, experiments = scenario(), tiny(0)
    asked = cells_of(one, list(experiments), (0,), "cuda")
    assert {cell: experiment.training.device for cell, experiment in asked.items()} == dict.fromkeys(asked, "cuda")
    table = CellResults(folder / "results", "tiny")
    table.cells["local", 0]["gpu"] = "A GPU"
    assert table.load(("local", 0), asked["local", 0], one.figures)
    assert table.origins["local", 0].processor == f"{table.cells['local', 0]['processor']}, A GPU"
    other = replace(asked["local", 0], training=replace(asked["local", 0].training, lr=1.0))
    assert table.load(("local", 0), other, one.figures) is None
    trained_apart = replace(experiments["fedavg"], server_training=experiments["fedavg"].training)
    there: Any = results.on_device(trained_apart, "auto").server_training
    assert there.device == "auto"
    assert results.gpu(experiments["fedavg"]) == {}


def test_a_result_is_text_of_figures_and_settings_alone(filed: tuple[Path, Table]) -> None:
    """The figures, the rounds', the machine; no path, and no line of a report. Both cells share what they can."""
    table = CellResults(filed[0] / "results", "tiny")
    row = table.cells["fedavg", 0]
    rounds = table.by_round(("fedavg", 0))
    assert list(rounds) == [0, 1]
    last = "test/all/mean/r1/average"
    assert str(rounds[1][last]) == row[last]
    assert rounds[0].keys() == rounds[1].keys()
    assert row["processor"]
    assert float(row["seconds"]) > 0
    text = "".join(file.read_text() for file in (filed[0] / "results").glob("*.csv"))
    assert not re.search(r"(^|,)[^,]*(?<![RGBa-z0-9])/[^,]*", re.sub(r"(val|test)/[\w/]+", "", text)), "a path?"
    assert len(text) < 9_000


def test_settings_come_back_as_they_were() -> None:
    """By hand: text that JSON would read as something else, a name with a dot, no settings, the seed of the cell."""
    config = {"path": "a.B", "args": {
        "name": "one", "text": "1", "empty": "", "word": "of the cell", "none": None, "seed": 7, "nothing": {},
        "many": [{"seed": 7}], "inner": {"path": "C", "args": {"seed": 7, "other_seed": 7, "rate": 0.1}},
    }, "plugins": {"mine.own": "d"}}  # fmt: skip
    row = flattened(config, 7)
    assert row["args.inner.args.rate"] == "0.1"
    assert row["path"] == "a.B"
    assert nested(row, "one", 7) == config
    other = nested(row, "two", 8)["args"]
    assert (other["name"], other["seed"], other["inner"]["args"]["seed"]) == ("two", 8, 8)
    assert other["inner"]["args"]["other_seed"] == 7


def test_a_result_is_of_the_weights_that_it_starts_from_wherever_they_are(tmp_path: Path) -> None:
    """The folder may move, and the file has only its name; other weights in it are another experiment."""

    def started(folder: Path) -> Scenario:
        return replace(scenario(), experiments=lambda seed: {
            "fedavg": replace(tiny(seed)["fedavg"], model=replace(tiny(seed)["fedavg"].model, init=str(folder)))
        })  # fmt: skip

    here, there = tmp_path / "here" / "start", tmp_path / "there" / "start"
    digest, _ = save_initial(tiny(0)["fedavg"].model.build(seed=1), here, {})
    _, said = ask(started(here), tmp_path)
    assert said == {("fedavg", 0): DONE}
    assert settings_of(CellResults(tmp_path / "results", "tiny"), "fedavg")["args.model.args.init"] == f"start@{digest}"
    here.parent.rename(there.parent)
    assert ask(started(there), tmp_path, jobs=0)[1] == {("fedavg", 0): FILED}
    save_initial(tiny(0)["fedavg"].model.build(seed=2), there, {})
    assert ask(started(there), tmp_path, jobs=0)[1] == {}


def settings_of(table: CellResults, method: str) -> dict[str, str]:
    return table.settings[table.cells[method, 0]["settings"]]


def test_what_measures_is_code_that_decides_a_figure() -> None:
    """A function's module and an object's count beside the rooms of the package; another file would be other code."""
    ways = [*(one.figures for one in ledger.SCENARIOS.values()), measures.Alignment(), measures.server]
    digests = {way.__module__: results.code(way) for way in ways}
    assert len(set(digests.values())) == len(digests) == 6
    assert results.code(measures.server) == results.code(measures.Alignment())


def test_a_result_counts_for_its_own_experiment_alone(filed: tuple[Path, Table], tmp_path: Path) -> None:
    """Not with another setting; as before where a setting is younger than the file; of other code it is said."""
    folder = tmp_path / "copy"
    shutil.copytree(filed[0], folder)
    more = replace(scenario(), experiments=lambda seed: {
        name: replace(of, training=replace(of.training, lr=0.1)) for name, of in tiny(seed).items()
    })  # fmt: skip
    table, said = ask(more, folder, jobs=0)
    assert (table.cells, said) == ({}, {})
    filed_here = CellResults(folder / "results", "tiny")
    del settings_of(filed_here, "fedavg")["args.server_training"]
    filed_here.cells["local", 0]["code"] = "0123456789abcdef"
    filed_here.write()
    table, said = ask(scenario(), folder, jobs=0)
    assert set(said.values()) == {FILED}
    assert table.origins["fedavg", 0].this_code
    assert not table.origins["local", 0].this_code
    assert "1 run by a fedvlp with other code" in origin(table)
    settings_of(filed_here, "fedavg")["args.unheard_of"] = "1"
    filed_here.write()
    assert ("fedavg", 0) not in ask(scenario(), folder, jobs=0)[0].cells
    whole = (folder / "results" / "tiny.csv").read_text()
    for damaged in (whole[:-50], whole[:-1], whole.replace("fedavg", "fedavg,", 1)):
        (folder / "results" / "tiny.csv").write_text(damaged)
        with pytest.raises(ValueError, match=r"the results tiny\.csv are damaged"):
            ask(scenario(), folder, jobs=0)


def of_plugin(file: Path) -> Scenario:
    """The scenario with the method of a plugin alone, as the file has it now."""
    forget()
    method = plugins.use(file).module.Pulled(local_steps=1)
    return replace(scenario(), experiments=lambda seed: {"pulled": replace(tiny(seed)["fedavg"], method=method)})


def test_figures_of_an_edited_plugin_are_measured_anew(tmp_path: Path) -> None:
    """Neither its file of results nor its finished run counts, and neither stops the table: a new run begins.

    The configuration is the same to the letter; only the content of the plugin is not. The other content still counts
    for the other run.
    """
    with fresh():
        first, said = ask(of_plugin(pulled(tmp_path)), tmp_path)
        assert said == {("pulled", 0): DONE}
        assert ask(of_plugin(pulled(tmp_path)), tmp_path)[1] == {("pulled", 0): FILED}
        edited = of_plugin(
            pulled(tmp_path, text=PULLED.replace("{**terms,", "{**{name: -9 * term for name, term in terms.items()},"))
        )
        assert ask(edited, tmp_path, jobs=0)[1] == {}, "its file is of another method"
        shutil.rmtree(tmp_path / "results")
        assert ask(edited, tmp_path, jobs=0)[1] == {}, "its run is, too"
        second, said = ask(edited, tmp_path)
        assert said == {("pulled", 0): DONE}
        assert second.cells != first.cells
        shutil.rmtree(tmp_path / "results")
        again, said = ask(of_plugin(pulled(tmp_path)), tmp_path)
        assert (again.cells, said) == (first.cells, {("pulled", 0): HERE})


@pytest.mark.slow(seconds=10)
def test_figures_of_data_that_have_changed_are_measured_anew(tmp_path: Path) -> None:
    """One word of one report, which no setting says: neither the file of results nor the finished run counts.

    As before it does; a file that does not say of which records it is leaves it to the run to say so.
    """
    write(SyntheticCohort(sites=2, size=260, image_size=36), tmp_path)
    table = tmp_path / "pairs.csv"
    before = table.read_text(encoding="utf-8")
    one = replace(scenario(), experiments=lambda seed: {
        "fedavg": replace(tiny(seed)["fedavg"], data=TableSource(path=str(table), image_size=36))
    })  # fmt: skip
    assert ask(one, tmp_path)[1] == {("fedavg", 0): DONE}
    assert ask(one, tmp_path)[1] == {("fedavg", 0): FILED}
    filed = CellResults(tmp_path / "results", "tiny")
    records = filed.cells["fedavg", 0].pop("cohort")
    filed.write()
    assert ask(one, tmp_path)[1] == {("fedavg", 0): HERE}
    assert CellResults(tmp_path / "results", "tiny").cells["fedavg", 0]["cohort"] == records
    table.write_text(before.replace(" and ", " or ", 1), encoding="utf-8")
    assert table.read_text(encoding="utf-8") != before
    assert ask(one, tmp_path, jobs=0)[1] == {}, "its file is of other records"
    shutil.rmtree(tmp_path / "results")
    assert ask(one, tmp_path, jobs=0)[1] == {}, "its run is, too"
    assert ask(one, tmp_path)[1] == {("fedavg", 0): DONE}
    assert len(list((tmp_path / "runs" / "tiny" / "0" / "fedavg").iterdir())) == 2
    assert ask(one, tmp_path)[1] == {("fedavg", 0): FILED}


@pytest.mark.slow(seconds=10)
def test_a_result_of_moved_data_counts_and_names_no_folder(tmp_path: Path) -> None:
    """Where the records lie is no setting of theirs: their fingerprint says which they are, of all that are pooled."""

    def at(folder: Path) -> Scenario:
        source = TableSource(path=str(folder / "pairs.csv"), root=str(folder), image_size=36)
        both = SiteSources((("site-1", source),))
        return replace(scenario(), experiments=lambda seed: {"fedavg": replace(tiny(seed)["fedavg"], data=both)})

    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    write(SyntheticCohort(sites=2, size=260, image_size=36), here)
    assert ask(at(here), tmp_path)[1] == {("fedavg", 0): DONE}
    assert str(tmp_path) not in (tmp_path / "results" / "settings.csv").read_text()
    here.rename(there)
    assert ask(at(there), tmp_path, jobs=0)[1] == {("fedavg", 0): FILED}
    table = there / "pairs.csv"
    table.write_text(table.read_text(encoding="utf-8").replace(" and ", " or ", 1), encoding="utf-8")
    assert ask(at(there), tmp_path, jobs=0)[1] == {}, "these are other records"


def test_drawn_records_are_not_drawn_to_be_compared(filed: tuple[Path, Table], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their configuration determines them, so that a ledger of hundreds of filed cells is read in seconds."""

    def build(cohort: SyntheticCohort) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr(SyntheticCohort, "build", build)
    assert set(ask(scenario(), filed[0], jobs=0)[1].values()) == {FILED}
    assert "cohort" not in CellResults(filed[0] / "results", "tiny").cells["fedavg", 0]


@pytest.mark.slow(seconds=10)
def test_cells_of_a_plugin_run_side_by_side(tmp_path: Path) -> None:
    """Fresh interpreters know no plugin: they import it before a task names its classes, or they end there."""
    with fresh():
        one = of_plugin(pulled(tmp_path))
        assert ask(one, tmp_path, seeds=(0,), jobs=2)[1] == {("pulled", 0): DONE}


def test_a_number_of_jobs_below_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--jobs is -1; give how many runs at a time, or 0 to run nothing"):
        ask(scenario(), tmp_path, jobs=-1)


def test_what_has_not_run_is_said_and_not_ranked() -> None:
    table = Table({("fedavg", 0): {FIGURE: 1.0}})
    outcome = judge(replace(scenario(), preconditions=(ahead("fedavg", "local", FIGURE),)), table, ["fedavg"])
    assert [one.verdict for one in outcome.outcomes] == [MISSING]
    assert [held for _, held in outcome.preconditions] == [None]
    shown = as_page([outcome])
    assert "NOT RUN" in shown
    assert "not run" in shown


def test_a_run_that_fails_is_an_error_and_not_a_missing_row(tmp_path: Path) -> None:
    broken = replace(scenario(), experiments=lambda seed: {"fedavg": replace(
        tiny(seed)["fedavg"], training=replace(tiny(seed)["fedavg"].training, batch_size=1000),
        data=SyntheticCohort(sites=2, size=8, image_size=36),
    )})  # fmt: skip
    with pytest.raises(Exception, match=r"\w"):
        ask(broken, tmp_path)


@pytest.mark.slow(seconds=10)
def test_after_a_failure_no_cell_begins_and_what_was_under_way_is_filed(tmp_path: Path) -> None:
    """One broken cell and four that are whole, two at a time: all four once ran first, and what they had reached was
    lost.
    """
    whole = tiny(0)["fedavg"]
    slow = replace(whole, method=FedAvg(local_steps=20))
    broken = replace(whole, partition=replace(whole.partition, image_only=9))
    many = {"broken": broken, **{f"whole-{number}": slow for number in range(4)}}
    with pytest.raises(ValueError, match="image_only 9"):
        ask(replace(scenario(), experiments=lambda seed: many), tmp_path, jobs=2)
    begun = {folder.name for folder in (tmp_path / "runs" / "tiny" / "0").iterdir()}
    assert begun <= {"broken", "whole-0"}
    assert list(CellResults(tmp_path / "results", "tiny").cells) == [("whole-0", 0)]


def by_hand(fedavg: float) -> Table:
    return Table({(name, seed): {FIGURE: value + seed / 100} for seed in (0, 1, 2)
                  for name, value in (("fedavg", fedavg + (seed == 1) / 10), ("local", 10.0))})  # fmt: skip


def test_the_page_says_all_and_escapes_it() -> None:
    judged = judge(scenario(), by_hand(12.0), ["fedavg"])
    shown = as_page([judged])
    assert judged.outcomes[0].verdict == HOLDS
    for part in ("+9.9", "+2.0", "Two sites.", "it is so", "[0, 1, 2]", "&lt;b&gt;training", "fedavg", "10.01"):
        assert part in shown
    assert "<b>" not in shown


def test_without_its_preconditions_nothing_is_ranked() -> None:
    judged = judge(scenario(valid=False), by_hand(12.0), ["fedavg"])
    assert [one.verdict for one in judged.outcomes] == [INVALID]
    assert "DOES NOT HOLD" in as_page([judged])


def test_unlike_runs_have_no_verdict() -> None:
    """The same figures, one of the methods on another device: the page and the program have words and no number."""
    pair = by_hand(12.0)
    made = {cell: Made("cpu" if cell[0] == "local" else "NVIDIA H200", "2.15", "", {}) for cell in pair.cells}
    judged = judge(scenario(), Table(pair.cells, made=made), ["fedavg"])
    assert [(one.verdict, one.measured) for one in judged.outcomes] == [(UNLIKE, None)]
    assert "no verdict: run on unlike machines" in as_page(corrected([judged]))
    judged = judge(
        replace(scenario(), preconditions=(ahead("fedavg", "local", FIGURE),)), Table(pair.cells, made=made), []
    )
    assert [held for _, held in judged.preconditions] == [None]


def test_a_claim_that_is_not_ranked_stays_in_the_family() -> None:
    """p is 0.0003 here: of 30 claims it holds, of 300 not, whether these have run, are ranked, or neither."""
    judged = judge(scenario(), by_hand(12.0), ["fedavg"])
    unranked = replace(judged, outcomes=tuple(replace(one, verdict=INVALID, p=0.9) for one in judged.outcomes))
    assert 0.0001 < (judged.outcomes[0].p or 1) < 0.0005

    def after(every: Sequence[Any], claims: int = 0) -> str:
        return corrected(every, {"fedavg": claims})[0].outcomes[0].corrected

    assert after([judged], 30) == after([judged, *[unranked] * 29]) == HOLDS
    assert after([judged], 300) == after([judged, *[unranked] * 299]) == UNDECIDED
    assert corrected([unranked])[0].outcomes[0].corrected == "", "no verdict, so none to correct"


def test_only_the_papers_that_were_asked_for() -> None:
    assert judge(scenario(), by_hand(12.0), ["feddra"]).outcomes == ()
    assert methods_of(scenario(), ["feddra"]) == []
    assert methods_of(scenario(), ["fedavg", "feddra"]) == ["fedavg", "local"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SCENARIOS", {"tiny": scenario()})
    monkeypatch.setattr(ledger, "PAPERS", ("fedavg",))
    devices: set[str] = set()

    def taken(_: Scenario, wanted: cells.Cells, *rest: object) -> Table:
        devices.update(one.training.device for one in wanted.values())
        return by_hand(12.0)

    monkeypatch.setattr(results, "measured", taken)
    done = CliRunner().invoke(
        app,
        ["--seeds", "0-2", "--runs", str(tmp_path / "new"), "--device", "auto"],
        env={"COLUMNS": "160"},
        catch_exceptions=False,
    )
    assert devices == {"auto"}
    assert "holds: it is so" in done.output
    assert "+2.0 [+1.9, +2.2]" in done.output
    assert "FedAvg is ahead" in (tmp_path / "new" / "claims.html").read_text()
    listed: Any = CliRunner().invoke(app, ["--list"], catch_exceptions=False)
    assert "tiny" in listed.output
    for wrong, said in (
        (["fedvag"], "unknown paper 'fedvag'"),
        (["--seeds", "a"], "--seeds is 'a'"),
        (["--scenario", "none"], "unknown scenario 'none'; there are: tiny"),
    ):
        with pytest.raises(ValueError, match=said):
            CliRunner().invoke(app, wrong, catch_exceptions=False)


def test_cells_side_by_side_share_the_visible_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "_end_with", lambda parent: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    begun, given = multiprocessing.get_context("spawn").Value("i", 0), []
    for _ in range(10):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        cells._begin(os.getpid(), (), begun)
        given.append(os.environ["LOCAL_RANK"])
    assert given == [str(number % 8) for number in range(10)]
    monkeypatch.setenv("LOCAL_RANK", "5")
    cells._begin(os.getpid(), (), begun)
    assert os.environ["LOCAL_RANK"] == "5", "torchrun has chosen"


def test_every_cell_that_is_filed_can_still_be_read() -> None:
    """A setting that is renamed, goes or changes its type would have all cells run again: hours, with one line each."""
    folder = Path(results.__file__).parents[1] / "results"
    for table in sorted(folder.glob("*.csv")):
        filed = CellResults(folder, table.stem) if "method" in table.read_text().partition("\n")[0].split(",") else None
        for method, seed in filed.cells if filed else ():
            row = filed.cells[method, seed]  # type: ignore[union-attr]
            from_config(nested(filed.settings[row["settings"]], method, seed))  # type: ignore[union-attr]
