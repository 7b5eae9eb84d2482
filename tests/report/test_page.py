"""The report page: what it shows of a run with and without each part, and that nothing of a run becomes markup."""

from __future__ import annotations

import base64
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.report_pages import NAN, SITES, Page, page_of, recalls, record, robust, run_of

from fedvlp.core.server_state import Server
from fedvlp.data.sources.table import TableSource
from fedvlp.report.html import ABSENT, number, shown
from fedvlp.report.sections import MOST_TERMS, losses
from fedvlp.run import presets
from fedvlp.run.folder import RunFolder
from fedvlp.run.site_sources import SiteSources


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(run_of(tmp_path_factory.mktemp("runs"), robust()))


def test_the_figures_of_a_robust_run_are_the_records(page: Page) -> None:
    align = page.tables["align: contrastive"]
    assert align[0] == ["round", "average", "site-1", "site-2", "site-10"]  # site-2 before site-10
    assert align[1:] == [["0", "7", "6", "7", "8"], ["1", "6", "5", "6", "7"]]
    assert page.tables["joint: constraint"][1:] == [["0", *["0.25"] * 4], ["1", *["0.25"] * 4]]
    weights = page.tables["DRO weight w, at the end of the round; dashed line: uniform 0.33333"]
    assert weights == [["round", *SITES], ["0", *["0.3333"] * 3], ["1", "0.5", "0.375", "0.125"]]
    losses = page.tables["Loss v that moves the weights, at the end of the round"]
    columns = ["round", *SITES, "standard error, site-1", "standard error, site-2"]
    assert losses == [columns, ["1", "4.25", "3", "2.5", "0.25", "0.125"]]  # round 0 has none
    curve = page.tables["R@1 over rounds, val, in batches of 32 (%); dashed line: chance 3.125"]
    assert curve[0] == ["rounds completed", "average", "worst site", *SITES]
    assert curve[1:] == [[*"043345"], [*"154456"], [*"28668", "10"]]
    assert "R@5 over rounds, val, in batches of 32 (%); dashed line: chance 15.625" in page.tables


def test_initial_and_trained_with_the_spread_over_sites(page: Page) -> None:
    """Initial 3, 4, 5: mean 4, population std sqrt(2/3) = 0.816; trained 6, 8, 10: mean 8, sqrt(8/3) = 1.633."""
    table = page.tables["Test split: initial → trained, 2 rounds"]
    assert table[0] == ["", "average", "worst site", "disparity (population SD)", "chance"]
    assert table[1] == ["R@1, in batches of 32", "4.00 → 8.00", "3.00 → 6.00", "0.82 → 1.63", "3.125"]
    assert table[3] == ["R@1, whole set", "4.00 → 8.00", "3.00 → 6.00", "0.82 → 1.63", ABSENT]
    assert [row[0] for row in table[1:]][1::2] == ["R@5, in batches of 32", "R@5, whole set"]
    bars = page.tables["R@1 by site, test, in batches of 32 (%); dashed line: chance 3.125"]
    assert bars[0] == ["site", "initial", "trained, 2 rounds"]
    assert bars[1:] == [["site-1", "3", "6"], ["site-2", "4", "8"], ["site-10", "5", "10"]]


def test_costs_sites_and_settings(page: Page) -> None:
    assert page.tables["Megabytes per round, all sites"][1:] == [["0", "6", "4"], ["1", "6", "4"], ["2", "3", "0"]]
    seconds = page.tables["Seconds per round"]
    assert seconds[0] == ["round", "align", "joint", "evaluate"]
    assert seconds[3] == ["2", ABSENT, ABSENT, "1.5"]
    assert "Tensors: 15.0 MB to sites, 8.0 MB from sites. Phases: 7.5 s." in page.text
    assert page.tables["Sites"][2] == ["site-2", "1,200", "75.0 %", "5 of 5"]
    for said in ("constraint_reduction", "ConVIRT", "versions", torch.__version__.partition("+")[0]):
        assert said in page.text
    assert "in progress or interrupted" in page.text


def test_a_site_that_was_absent_looks_absent(tmp_path: Path) -> None:
    """Five phases: site-1 answers all, site-10 misses one that it was asked in, site-2 is asked in three of them.

    Shares are of all samples: 100, 1200 and 300 of 1600. site-4 was asked once, and never said how many it has.
    """
    history = robust()
    del history[1]["sites"]["site-10"]
    for one in history[2:4]:
        one["members"] = ["site-1", "site-10"]
        del one["sites"]["site-2"]
    history[4]["members"] = [*SITES, "site-4"]
    table = page_of(run_of(tmp_path, history)).tables["Sites"]
    assert table == [
        ["site", "training samples", "share", "phases answered"],
        ["site-1", "100", "6.2 %", "5 of 5"],
        ["site-2", "1,200", "75.0 %", "3 of 3"],
        ["site-4", "0", ABSENT, "0 of 1"],
        ["site-10", "300", "18.8 %", "4 of 5"],
    ]


def test_the_average_loss_is_over_the_sites_that_have_it() -> None:
    metrics: dict[str, dict[str, float]] = {"a": {"loss/x": 1.0}, "b": {"loss/x": 3.0}, "c": {}}
    run: Any = SimpleNamespace(
        training=[({"round": 0, "phase": "train"}, metrics)], sites=list(metrics), style=lambda site: {}
    )
    assert "<td>0</td><td>2</td><td>1</td><td>3</td>" in losses(run)


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    evil = 'site-<img src=x onerror="y">$a_'
    history = robust()
    for one in history:
        one["members"] = [evil if site == "site-2" else site for site in one["members"]]
        one["sites"] = {evil if site == "site-2" else site: of for site, of in one["sites"].items()}
    history[1]["sites"][evil]["loss/</script><b>"] = 1.0
    history[1]["dropped"] = {"site-10": "ValueError: <script>alert(1)</script> $x^ \ud800"}
    del history[1]["sites"]["site-10"]
    folder = run_of(tmp_path, history)
    (folder.path / "run_status.json").write_text(json.dumps({"status": "<i>failed", "reason": "<script>2</script>"}))
    page = page_of(folder, drawn=True)
    known = "html head meta title style body h1 h2 h3 p span dl dt dd div table thead tbody tr th td figure img"
    assert {tag for tag, _ in page.tags} == {*known.split(), "details", "summary"}
    assert page.source.count("<script") == 0
    assert page.source.count("<img") == len(page.alts())
    assert page.tables["Dropped updates"][1] == ["0", "joint", "site-10", "ValueError: <script>alert(1)</script> $x^ ?"]
    assert "<i>failed" in page.text
    assert page.tables["Sites"][-1][0] == evil
    assert "joint: </script><b>" in page.alts()


def test_the_page_needs_nothing_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    monkeypatch.chdir(tmp_path)  # commands name the run as it is seen from here
    folder = run_of(tmp_path, robust())
    page = page_of(folder, drawn=True)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    for tag, attrs in page.tags:
        assert "href" not in attrs
        if tag == "img":
            kind, _, data = (attrs["src"] or "").partition("base64,")
            assert kind == "data:image/svg+xml;"
            assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert dict(matplotlib.rcParams) == before
    assert page_of(folder, drawn=True).source == page.source  # the same run, the same page
    assert str(tmp_path) not in page.source


def headings(page: Page) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", page.source)


def test_chapters_are_those_with_content(page: Page) -> None:
    """No classifier, no public set, no change on record, no update dropped."""
    assert headings(page) == [
        "Retrieval", "Sites", "Loss", "Site weights", "Bytes and seconds", "All settings and versions",
    ]  # fmt: skip


def test_the_chance_line_is_drawn(tmp_path: Path) -> None:
    """The dashed stroke is there with a chance level and not without: a set smaller than a batch has none."""

    def dashed(page: Page, start: str) -> int:
        sources = [attrs["src"] or "" for _, attrs in page.tags if (attrs.get("alt") or "").startswith(start)]
        drawing = base64.b64decode(sources[0].partition(",")[2]).decode()
        return len(re.findall("stroke-dasharray", drawing))

    page = page_of(run_of(tmp_path / "a", robust()), drawn=True)
    assert dashed(page, "R@1 by site") == 1
    small = [record(0, "train", {s: recalls(20 + i, "val", scopes=("all/",)) for i, s in enumerate(SITES)})]
    page = page_of(run_of(tmp_path / "b", small, "fedavg"), drawn=True)
    assert dashed(page, "R@1 by site") == 0
    assert page.tables["R@1 by site, val, whole set (%)"][1:] == [["site-1", "20"], ["site-2", "21"], ["site-10", "22"]]
    assert page.tables["Val split: initial"][1] == ["R@1, whole set", "21.00", "20.00", "0.82", ABSENT]
    assert "Only one evaluation so far (initial)." in page.text


def test_the_length_of_every_change_is_drawn_by_phase(tmp_path: Path) -> None:
    """One site far above the others is what to look for."""
    history = robust()
    for index, entry in enumerate(history[:4]):
        norms = {"update_norm/site-1": 1.5 + index, "update_norm/site-10": 900.0, "update_norm/site-2": 1.25}
        entry["server"] = norms if index != 2 else {"update_norm/site-1": 2.0}
    page = page_of(run_of(tmp_path, history))
    assert page.tables["align: L2 norm of the change, as sent"] == [
        ["round", *SITES], ["0", "1.5", "1.25", "900"], ["1", "2", ABSENT, ABSENT],
    ]  # fmt: skip
    assert page.tables["joint: L2 norm of the change, as sent"][2] == ["1", "4.5", "1.25", "900"]
    assert not any("evaluate:" in title for title in page.tables)


def test_a_run_without_records(tmp_path: Path) -> None:
    page = page_of(RunFolder.create(tmp_path, presets.get("fedavg")))
    assert "not trained yet" in page.text
    assert "No evaluation so far." in page.text
    assert headings(page) == ["All settings and versions"]
    assert not page.alts()
    (tmp_path / "bare").mkdir()
    assert "no config.json" in page_of(RunFolder(tmp_path / "bare")).text


def test_a_run_without_evaluation(tmp_path: Path) -> None:
    experiment = presets.get("fedavg")
    experiment = replace(experiment, rounds=replace(experiment.rounds, evaluate_every=0))
    folder = RunFolder.create(tmp_path, experiment)
    history = [record(0, "train", {"site-1": {"loss/contrastive": 2.0}}, members=["site-1"])]
    del history[0]["bytes"]
    Server(("site-1",), {}, history=history).save(folder.checkpoint, 0)
    page = page_of(folder)
    assert "No evaluation: rounds.evaluate_every is 0." in page.text
    assert page.tables["train: contrastive"] == [["round", "site-1"], ["0", "2"]]  # one site needs no average


def test_pooled_and_local_runs_say_what_was_measured(tmp_path: Path) -> None:
    pooled = {f"{site}:{name}": value for i, site in enumerate(SITES) for name, value in recalls(5 + i, "val").items()}
    history = [record(0, "train", {"pooled": {"loss/contrastive": 3.0, **pooled}}, members=["pooled"])]
    page = page_of(run_of(tmp_path, history, "centralized", sites=("pooled",), samples={"pooled": 1600}))
    assert "All studies train at one place (pooled)" in page.text
    assert page.tables["Sites"][1:] == [["pooled", "1,600", "100.0 %", "1 of 1"]]
    assert page.tables["train: contrastive"] == [["round", "pooled"], ["0", "3"]]
    bars = page.tables["R@1 by site, val, in batches of 32 (%); dashed line: chance 3.125"]
    assert bars[1:] == [["site-1", "5"], ["site-2", "6"], ["site-10", "7"]]

    history = [record(0, "train", {s: recalls(5, "val") for s in SITES}, bytes={"bytes_down": 4, "bytes_up": 0})]
    assert "each was measured with the model that it trained alone" in page_of(run_of(tmp_path, history, "local")).text


def test_sites_that_miss_an_end_and_absurd_metrics_are_named(tmp_path: Path) -> None:
    history = robust()
    del history[-1]["sites"]["site-2"]
    history[-1]["sites"]["site-1"]["val/all/mean/r5"] = 1e200  # its square is beyond a float
    page = page_of(run_of(tmp_path, history), drawn=True)
    assert "Not the same sites were measured at both ends (site-2)" in page.text
    assert "Left out, as no model has such metrics: 1 recalls or AUCs out of their range." in page.text
    assert page.tables["R@1 by site, test, in batches of 32 (%); dashed line: chance 3.125"][2] == [
        "site-2",
        "4",
        ABSENT,
    ]
    many = [record(0, "train", {"site-1": {f"loss/{i:03}": 1e300 for i in range(MOST_TERMS + 5)}})]
    page = page_of(run_of(tmp_path, many), drawn=True)
    assert "train: 5 more terms are in metrics.csv." in page.text


@pytest.mark.parametrize("last", [("align", 1), ("joint", 1)])
def test_status_of_this_and_of_an_earlier_attempt(tmp_path: Path, last: tuple[str, int]) -> None:
    folder = run_of(tmp_path, robust()[:4])  # ends with round 1 joint
    status = {"status": "stopped", "reason": "1 valid updates, 2 needed", "round": last[1], "phase": last[0]}
    (folder.path / "run_status.json").write_text(json.dumps(status))
    text = page_of(folder).text
    older = last != ("joint", 1)
    assert ("An earlier attempt ended with: 1 valid updates" in text) == older
    assert ("in progress or interrupted" in text) == older
    folder.model.parent.mkdir()
    folder.model.touch()
    assert "finished" in page_of(folder).text


def test_paths_of_the_machine_stay_out(tmp_path: Path) -> None:
    experiment = replace(presets.get("fedavg"), data=TableSource(path="/srv/records/chest.csv"))
    page = page_of(RunFolder.create(tmp_path, experiment))
    assert "chest.csv" in page.text
    assert "/srv/records" not in page.source


def test_paths_in_lists_and_relative_ones_stay_out(tmp_path: Path) -> None:
    """``--site north=table:PATH`` is in a list; files and folders of data and weights are paths, however they begin."""
    north = TableSource(path="/srv/records/north.csv", root="/srv/films", cache="~/decoded/cache")
    south = TableSource(path="exports/south.csv", root="~/south", sentence_table="exports/labels/sentences.csv")
    preset = presets.get("fedavg")
    model = replace(
        preset.model, init=f"weights/mine@{64 * 'a'}", image_tower="weights/of/tower", text_tower="hub/name"
    )
    experiment = replace(preset, data=SiteSources((("north", north), ("south", south))), model=model)
    page = page_of(RunFolder.create(tmp_path, experiment))
    for name in ("north.csv", "south.csv", "sentences.csv", "mine", "hub/name"):
        assert name in page.text
    for folder in ("srv", "exports", "decoded", "~", "weights", "of/tower"):
        assert folder not in page.source.replace("Site weights", "")


def test_settings_as_text() -> None:
    source = {"path": "fedvlp.TableSource", "args": {"path": "a/b.csv", "image_size": 72}}
    assert shown([["north", source], "/srv/x.csv", 1, None]) == (
        "[[north, TableSource(path=b.csv, image_size=72)], x.csv, 1, null]"
    )
    assert [shown(value) for value in ("a/b", "a", "", ".", True)] == ["a/b", "a", "", ".", "true"]
    assert shown(["c/d"], "root") == "[d]"


def test_number() -> None:
    assert [number(value) for value in (None, NAN, math.inf)] == [ABSENT] * 3
    assert [number(value) for value in (0.33333, 12345.6, 3.0, 1e200)] == ["0.3333", "12,346", "3", "1e+200"]
