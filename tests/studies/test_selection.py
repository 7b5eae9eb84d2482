"""PMS-FM's figures: read from the table of zero-shot by hand, and measured of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedvlp.evaluation.zero_shot import GLOBAL, SELECTED, Result, write_results
from fedvlp.run.assembly import Assembly
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from studies.claims import selection
from studies.claims.cell_results import Table
from studies.claims.ledger import PMS_FM, unlike_sites
from studies.claims.page import figure_rows, judge
from studies.claims.scenario import FAILS, HOLDS, above
from studies.claims.selection import OWN, accuracy, area, largest, of_run, of_table, retrieving, weighted


def result(model: str, site: str, correct: float, ranked: float) -> Result:
    return Result(model, site, 10, 5, (correct, 0.0), (ranked, 0.0))


def test_a_table_by_hand(tmp_path: Path) -> None:
    """Own: site a's model at a and b's at b, never at the other; global and selected: means over both sites."""
    results = [
        result(GLOBAL, "a", 20, 0.5), result(GLOBAL, "b", 40, 0.6), result("a", "a", 50, 0.7), result("a", "b", 0, 0.0),
        result("b", "a", 0, 0.0), result("b", "b", 30, 0.9), result(SELECTED, "a", 26, 0.6),
        result(SELECTED, "b", 28, 0.8),
    ]  # fmt: skip
    path = write_results(results, [], tmp_path / "zero-shot", "title")[0]
    assert of_table(path) == pytest.approx({
        accuracy(GLOBAL): 30, area(GLOBAL): 55, accuracy(SELECTED): 27, area(SELECTED): 70, accuracy(OWN): 40,
        area(OWN): 80,
    })  # fmt: skip


def test_shares_are_of_images_and_not_of_sites() -> None:
    """3 of 4 and 1 of 6 are 4 of 10, whatever the sites; the largest site has 6 of 10."""
    images = {"a": torch.zeros(4, 2), "b": torch.zeros(6, 2), "c": torch.zeros(0)}
    assert weighted({"a": 0.75, "b": 1 / 6}, images) == pytest.approx(40)
    assert largest(images) == 60
    assert weighted({"a": 0.75, "b": 1 / 6}, {"a": images["a"]}) == pytest.approx(75)


def cells(own: float) -> Table:
    """Three seeds; the selector beats the largest site by a point, and the pooled model reaches 45."""
    both = {accuracy(GLOBAL): 30.0, selection.TOLD: 41.0, selection.LARGEST: 40.0}
    figures = dict.fromkeys(PMS_FM.shown, 50.0) | both
    table = {("pms-fm", seed): figures | {accuracy(OWN): own + seed / 10} for seed in range(3)}
    return Table(table | {("pooled", seed): {accuracy(GLOBAL): 45.0} for seed in range(3)})


@pytest.mark.parametrize(("own", "verdict"), [(35.0, HOLDS), (25.0, FAILS)])
def test_own_models_are_compared_with_the_global_one_of_the_same_run(own: float, verdict: str) -> None:
    results = judge(PMS_FM, cells(own), ["pms-fm"])
    assert [held for _, held in results.preconditions] == [True, True]
    assert results.outcomes[0].verdict == verdict
    assert results.outcomes[0].measured.value == pytest.approx(own + 0.1 - 30)
    rows = {row[0]: row[1:] for row in figure_rows(results)}
    assert rows["pooled"][0] == "45.00 (0.00)"
    assert set(rows["pooled"][1:]) == {""}, "a run without a selector has none of its figures"


def test_a_selector_that_is_as_good_as_the_largest_site_ranks_nothing() -> None:
    one = Table({("m", 0): {"told": 40.0, "largest": 40.0, "more": 40.5}})
    assert not above("m", "told", "largest").check(one)
    assert above("m", "more", "largest").check(one)


@dataclass(frozen=True)
class Fresh:
    """A selector's settings, and the selector that they make."""

    embeddings: tuple[str, ...] = ()

    def build(self, model: Any, seed: int) -> Fresh:
        return self


def test_selectors_are_trained_on_training_images_and_judged_on_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Site a has 4 test images and b 6; of training images each has 5."""
    sizes = {"test": {"a": 4, "b": 6}, "train": {"a": 5, "b": 5}}
    images = {split: {site: torch.zeros(count, 2) for site, count in of.items()} for split, of in sizes.items()}
    asked, fitted, judged = [], [], []

    def images_of(client: Any, data: Any, split: str, most: int | None = None) -> Any:
        asked.append((split, most))
        return images[split]

    def told(selector: Any, client: Any, shown: Any, classes: Any) -> dict[str, float]:
        judged.append((selector, [split for split in images if shown is images[split]]))
        return {"a": 0.75, "b": 1 / 6} if selector == "the run's" else {"a": 1.0, "b": 0.0}

    def fit(selector: Any, client: Any, shown: Any, steps: int, rate: float) -> None:
        fitted.append((selector, [split for split in images if shown is images[split]], steps, rate))

    for name, fake in (("images_of", images_of), ("told", told), ("fit", fit)):
        monkeypatch.setattr(selection.site_selection, name, fake)
    client = SimpleNamespace(load=lambda state: None, objective=SimpleNamespace(extra="the run's"))
    assembly = SimpleNamespace(
        client=lambda name, data: client, data_sites=lambda: ("a", "b"), data=lambda site: None, config=lambda: None,
        cohort=SimpleNamespace(label_names=()),
    )  # fmt: skip
    monkeypatch.setattr(selection, "Assembly", lambda *_: assembly)
    monkeypatch.setattr(selection, "retrieving", lambda _: ["b"])
    method = SimpleNamespace(finish=lambda server: {}, selector_lr=0.5)
    experiment: Any = SimpleNamespace(method=method, rounds=SimpleNamespace(seed=0))
    folder: Any = SimpleNamespace(path=None, server=lambda: (None, 0))
    config: Any = Fresh()
    figures = selection.of_selector(folder, experiment, config)
    fresh = [Fresh(("image",)), Fresh(selection.EMBEDDINGS)]
    assert asked == [("test", None), ("train", selection.IMAGES)]
    assert fitted == [(one, ["train"], selection.STEPS, 0.5) for one in fresh]
    assert judged == [(one, ["test"]) for one in ("the run's", *fresh)]
    anew = {selection.anew(name): 40 for name in (selection.IMAGE, selection.TRIPLE)}
    assert figures == pytest.approx({selection.TOLD: 40, selection.LARGEST: 60, selection.TOLD_ELSEWHERE: 75} | anew)


@pytest.mark.slow(seconds=20)
def test_a_runs_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure that the scenario shows, of the scenario's own experiment made small."""
    monkeypatch.setattr(selection, "STEPS", 2)
    whole: Any = unlike_sites(0)["pms-fm"]
    small = replace(
        whole, data=replace(whole.data, size=400, image_size=36, test_rows=0),
        model=replace(whole.model, image_size=32, init="", head_hidden=16, embedding_dim=16),
        method=replace(whole.method, local_steps=1), training=replace(whole.training, batch_size=8),
        rounds=replace(whole.rounds, rounds=1),
    )  # fmt: skip
    assert retrieving(Assembly(small)) == ["site-4"]
    folder = RunFolder.create(tmp_path, small)
    simulate(small, folder)
    figures = of_run(folder)
    assert set(PMS_FM.shown) == figures.keys()
    assert all(0 <= value <= 100 for value in figures.values())
    counts = [len(Assembly(small).cohort.rows("test", f"site-{number}")) for number in range(1, 5)]
    assert figures[selection.LARGEST] == pytest.approx(100 * max(counts) / sum(counts))
