"""Cells are run once, several at a time, and resumed; the page says what was found, and ranks nothing invalid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedvlp.claims import cells, ledger
from fedvlp.claims.cells import finished, measured, methods_of
from fedvlp.claims.page import INVALID, as_page, judge
from fedvlp.claims.scenario import HOLDS, Claim, Precondition, Scenario, Table
from fedvlp.cli import app
from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.methods import FedAvg, Local
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment

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


def test_cells_run_once_and_a_stopped_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a second call are those of the first, and no run begins anew; another setting does."""
    said: list[tuple[str, int, bool]] = []

    def say(method: str, seed: int, known: bool) -> None:
        said.append((method, seed, known))

    first = measured(scenario(), ["fedavg", "local"], [0, 1], tmp_path, 2, say)
    assert sorted(said) == sorted((method, seed, False) for method in ("fedavg", "local") for seed in (0, 1))
    assert first.values("fedavg", FIGURE) != [0.0, 0.0]
    stopped = finished(tmp_path / "tiny" / "1", replace(tiny(1)["local"], name="local"))
    assert stopped is not None
    stopped.model.unlink()  # as if it had been killed while it wrote the model
    said.clear()
    again = measured(scenario(), ["fedavg", "local"], [0, 1], tmp_path, 1, say)
    assert sorted(said) == [("fedavg", 0, True), ("fedavg", 1, True), ("local", 0, True), ("local", 1, False)]
    assert again.cells == first.cells
    assert len(list((tmp_path / "tiny" / "1" / "local").iterdir())) == 1, "it went on in its folder"
    other = replace(tiny(1)["local"], name="local", method=Local(local_steps=2))
    assert finished(tmp_path / "tiny" / "1", other) is None


def test_a_run_that_fails_is_an_error_and_not_a_missing_row(tmp_path: Path) -> None:
    broken = replace(scenario(), experiments=lambda seed: {"fedavg": replace(
        tiny(seed)["fedavg"], training=replace(tiny(seed)["fedavg"].training, batch_size=1000),
        data=SyntheticCohort(sites=2, size=8, image_size=36),
    )})  # fmt: skip
    with pytest.raises(Exception, match=r"\w"):
        measured(broken, ["fedavg"], [0], tmp_path, 1, lambda *said: None)


def by_hand(fedavg: float) -> Table:
    return Table({(name, seed): {FIGURE: value + seed / 100} for seed in (0, 1, 2)
                  for name, value in (("fedavg", fedavg + (seed == 1) / 10), ("local", 10.0))})  # fmt: skip


def test_the_page_says_all_and_escapes_it() -> None:
    results = judge(scenario(), by_hand(12.0), ["fedavg"])
    page = as_page([results])
    assert results.outcomes[0].verdict == HOLDS
    for part in ("+9.9", "+2.0", "Two sites.", "it is so", "[0, 1, 2]", "&lt;b&gt;training", "fedavg", "10.01"):
        assert part in page
    assert "<b>" not in page


def test_without_its_preconditions_nothing_is_ranked() -> None:
    results = judge(scenario(valid=False), by_hand(12.0), ["fedavg"])
    assert [one.verdict for one in results.outcomes] == [INVALID]
    assert "NO" in as_page([results])


def test_only_the_papers_that_were_asked_for() -> None:
    assert judge(scenario(), by_hand(12.0), ["feddra"]).outcomes == ()
    assert methods_of(scenario(), ["feddra"]) == []
    assert methods_of(scenario(), ["fedavg", "feddra"]) == ["fedavg", "local"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SCENARIOS", {"tiny": scenario()})
    monkeypatch.setattr(ledger, "PAPERS", ("fedavg",))
    monkeypatch.setattr(cells, "measured", lambda *asked: by_hand(12.0))
    done = CliRunner().invoke(app, ["claims", "--seeds", "0-2", "--runs", str(tmp_path)], catch_exceptions=False)
    assert "holds: it is so" in done.output
    assert "+2.0 [+1.9, +2.2]" in done.output
    assert "FedAvg is ahead" in (tmp_path / "claims.html").read_text()
    listed: Any = CliRunner().invoke(app, ["claims", "--list"], catch_exceptions=False)
    assert "tiny" in listed.output
    for wrong, said in ((["fedvag"], "unknown paper 'fedvag'"), (["--seeds", "a"], "--seeds is 'a'")):
        with pytest.raises(ValueError, match=said):
            CliRunner().invoke(app, ["claims", *wrong], catch_exceptions=False)
