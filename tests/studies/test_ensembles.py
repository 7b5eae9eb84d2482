"""CreamFL's figures: which studies they are of, whose models, and what they are before anybody has trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedvlp.data.cohort import PUBLIC
from fedvlp.methods.ensemble import MODEL
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from studies.claims import ensembles
from studies.claims.ensembles import KS, RSUM, SITE_RSUM, UNTAUGHT, at, held_out, of_run, untaught
from studies.claims.ledger import CREAMFL, ladder


def small(name: str = "creamfl") -> Experiment:
    """The scenario's own, two rounds of few records."""
    whole: Any = ladder(100)[name]
    rounds = replace(whole.rounds, rounds=2)
    return replace(whole, data=replace(whole.data, size=400), rounds=rounds)


def test_figures_are_of_all_held_out_studies_with_both_modalities() -> None:
    """Those of sites that lack one too, and of the public set; none that anybody trains on."""
    assembly = Assembly(small())
    cohort, whole = assembly.cohort, assembly.experiment.data.build()
    held = held_out(assembly, None)
    rows = np.concatenate([whole.rows(split) for split in ("val", "test")])
    assert {cohort.sites[row] for row in rows} == {*assembly.data_sites(), PUBLIC}  # type: ignore[index]
    batches = [batch for split in ("val", "test") for batch in held.batches(split, 64, drop_last=False)]
    assert sum(len(batch["labels"]) for batch in batches) == len(rows)
    assert not set(rows.tolist()) & set(whole.rows("train").tolist())


def test_sites_are_apart_by_chance_until_they_represent_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 50 items that all find their own are 100 % where chance is 20, in errors of sqrt(20 * 80 / 100) = 4."""
    assembly = Assembly(small())
    assert abs(untaught(assembly)) < 3, "two sites with weights of their own"
    same = torch.eye(50)
    monkeypatch.setattr(ensembles, "representations", lambda client, names: dict.fromkeys(names, same))
    assert untaught(assembly) == pytest.approx((100 - 20) / 4)


@pytest.mark.slow(seconds=20)
def test_a_runs_figures(tmp_path: Path) -> None:
    """Of the trained server and of the sites with pairs as they are in the end, read from the run's folder."""
    experiment = small()
    folder = RunFolder.create(tmp_path, experiment)
    simulate(experiment, folder)
    figures = of_run(folder)
    assert set(CREAMFL.shown) <= figures.keys()
    assert figures[RSUM] == pytest.approx(sum(figures[at(k)] for k in KS))
    assert figures[UNTAUGHT] == pytest.approx(untaught(Assembly(experiment)))
    assembly = Assembly(experiment, folder.path)
    sums = []
    for name in ("site-1", "site-2"):
        memory = assembly.memory(name).newest()
        client = assembly.client(name, None, name)
        client.load({key.removeprefix(MODEL): value for key, value in memory.items() if key.startswith(MODEL)})
        sums.append(sum(ensembles.recalled(client.model, held_out(assembly, name))))
    assert figures[SITE_RSUM] == pytest.approx(max(sums))
    assert len(set(sums)) == 2, "the sites have models of their own"
