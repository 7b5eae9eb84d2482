"""The terms of a comparison, by hand: steps of each group of parameters, at the full rate, schedule, weighting."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.presets import SMALL

from fedvlp.core.method import Method
from fedvlp.federation.loop import Rounds
from fedvlp.methods import CreamFL, FedAvg, FedDRA, FedRGB, Local
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.run.terms import Terms, like, processor_seconds, terms


def spent(method: Method, rounds: int = 2, **training: Any) -> Terms:
    one: Experiment = replace(SMALL, method=method, training=replace(SMALL.training, **training))
    return terms(replace(one, rounds=Rounds(rounds=rounds)))


DRA = FedDRA(align_steps=10, local_steps=40)


def test_feddra_and_fedavg_by_hand() -> None:
    """A warm-up of 10 takes 4.5 steps away in every phase: 35.5 against 45.5 are 22 % fewer encoder steps."""
    dra, avg = spent(DRA, warmup_steps=10), spent(FedAvg(local_steps=50), warmup_steps=10)
    assert dra.steps == {"encoder": 40, "alignment": 50, "head": 50}
    assert dra.full_rate == {"encoder": 35.5, "alignment": 41.0, "head": 41.0}
    assert (dra.total, dra.total_full_rate) == (50, 41.0)
    assert avg.steps == {"encoder": 50, "alignment": 50, "head": 50}
    assert avg.full_rate == {"encoder": 45.5, "alignment": 45.5, "head": 45.5}
    assert (dra.axes, avg.axes) == ((35.5, 50), (45.5, 50))


@pytest.mark.parametrize("make_up", [False, True])
def test_a_baseline_on_the_terms_of_a_run(make_up: bool) -> None:
    """All that the run has, its steps in all phases and its weighting; the name and the method are the preset's."""
    training = replace(SMALL.training, warmup_steps=10, make_up_warmup=make_up)
    run = replace(SMALL, name="run", method=replace(DRA, weighting="uniform"), training=training)
    preset = presets.get("fedavg")
    made = like(preset, run)
    assert (made.name, made.method) == ("fedavg", FedAvg(local_steps=55 if make_up else 50, weighting="uniform"))
    assert replace(made, name=run.name, method=run.method) == run
    spent, wanted = terms(made), terms(run)
    assert (spent.total, spent.schedule, spent.batch_size) == (wanted.total, wanted.schedule, wanted.batch_size)
    assert spent.weighting == wanted.weighting == "uniform"


def test_a_baseline_has_its_own_part_beside_the_model_and_not_the_other_runs() -> None:
    """An adapter beside the pair is its preset's, in either direction."""
    adapting, plain = presets.get("clip-adapter"), presets.get("fedavg")
    assert adapting.extra is not None
    assert like(plain, adapting).extra is None
    assert like(adapting, plain).extra == adapting.extra


def test_a_run_without_steps_lends_none(tmp_path: Path) -> None:
    """A closed form, and a run of no round; the line to type trains on the same records."""
    local, folder = presets.get("local-real"), tmp_path / "one-round-cca-real" / "001"
    closed = replace(presets.get("one-round-cca-real"), rounds=Rounds(rounds=1, seed=4))
    with pytest.raises(ValueError, match="one-round-cca-real takes no optimiser step") as refused:
        like(local, closed, folder)
    assert str(refused.value).endswith(f": fedvlp simulate local-real --data run:{folder} --set rounds.seed=4")
    with pytest.raises(ValueError, match="fedavg takes no optimiser step"):
        like(local, replace(presets.get("fedavg"), rounds=Rounds(rounds=0)), folder)
    assert closed.takes_steps is False
    later = replace(closed, method=replace(closed.method, local_steps=3), rounds=Rounds(rounds=2))
    assert later.takes_steps is True
    assert replace(closed, training=replace(closed.training, local_epochs=1)).takes_steps is True


def test_a_method_of_several_phases_is_refused_with_what_to_type(tmp_path: Path) -> None:
    """FedDRA's 10 and 40 of 50 steps become 3 and 11 of 14."""
    preset = replace(presets.get("feddra"), method=DRA)
    run = replace(presets.get("fedavg"), method=FedAvg(local_steps=14))
    run = replace(run, training=replace(run.training, make_up_warmup=False))
    with pytest.raises(ValueError, match="14 steps a round between its phases align, joint") as refused:
        like(preset, run, tmp_path)
    steps = "--set method.local_steps=11 --set method.align_steps=3"
    rounds = f"--set rounds.rounds={run.rounds.rounds}"
    assert str(refused.value).endswith(f"fedvlp simulate feddra --data run:{tmp_path} {rounds} {steps}")


def test_a_baseline_makes_up_for_one_warm_up_where_moments_are_kept() -> None:
    """FedDRA's two warm-ups come once in four rounds: 50 + 10 / 4; FedAvg's one takes 51 + 5 / 4, nearer than 50."""
    training = replace(SMALL.training, warmup_steps=10, make_up_warmup=True, optimizer_state="keep")
    run = replace(SMALL, method=DRA, training=training, rounds=replace(SMALL.rounds, rounds=4))
    made = like(presets.get("fedavg"), run)
    assert (terms(run).total, terms(made).total) == (52.5, 52.25)


def test_without_a_warm_up_every_step_counts_whole() -> None:
    assert spent(DRA).full_rate == spent(DRA).steps
    assert spent(DRA).axes == (40, 50)


def test_steps_made_up_count_as_they_are_taken() -> None:
    """Five steps more in each of both phases: 45 are worth 40.5 and 15 are worth 10.5."""
    made_up = spent(DRA, warmup_steps=10, make_up_warmup=True)
    assert made_up.steps == {"encoder": 45, "alignment": 60, "head": 60}
    assert made_up.full_rate == {"encoder": 40.5, "alignment": 51.0, "head": 51.0}


def test_kept_moments_pay_for_one_warm_up_in_the_whole_run() -> None:
    """Of FedDRA's, ``align`` warms up once, and ``joint`` once, as the encoders have no moments before it."""
    kept = spent(DRA, rounds=4, warmup_steps=10, optimizer_state="keep")
    assert kept.full_rate["encoder"] == pytest.approx(40 - 4.5 / 4)
    assert kept.full_rate["head"] == pytest.approx(50 - 9 / 4)
    plain = spent(FedAvg(local_steps=50), rounds=4, warmup_steps=10, optimizer_state="keep")
    assert plain.total_full_rate == pytest.approx(50 - 4.5 / 4)


def test_each_model_warms_up_by_itself_where_moments_are_kept() -> None:
    """FedRGB's ``local`` once in four rounds, ``aligner`` in each, as its copy of the encoders is new in each."""
    rgb = spent(FedRGB(local_steps=40, aligner_steps=30), rounds=4, warmup_steps=10, optimizer_state="keep")
    assert rgb.full_rate == {"encoder": 40 - 4.5 / 4, "alignment": 30 - 4.5, "head": 30 - 4.5}


def test_a_phase_that_comes_every_other_round_counts_half() -> None:
    assert spent(replace(DRA, align_every=2)).steps == {"encoder": 40, "alignment": 45, "head": 45}


def test_what_is_thrown_away_after_its_phase_is_no_step() -> None:
    """FedRGB trains copies of the encoders in ``aligner``, and aligners of the site's own in ``local``."""
    rgb = spent(FedRGB(local_steps=40, aligner_steps=30))
    assert rgb.steps == {"encoder": 40, "alignment": 30, "head": 30}
    assert rgb.total == 70


def test_what_stays_at_the_site_is_a_step() -> None:
    assert spent(Local(local_steps=7)).steps == {"encoder": 7, "alignment": 7, "head": 7}


def test_schedule_and_weighting_are_told() -> None:
    one = spent(FedAvg(weighting="uniform"), lr=1e-3, warmup_steps=3, batch_size=8)
    assert one.schedule == ("adamw", 1e-3, 3, False, "reset")
    assert (one.weighting, one.batch_size) == ("uniform", 8)
    assert spent(FedAvg()).weighting == "samples"


def test_steps_that_depend_on_records_are_not_guessed() -> None:
    with pytest.raises(ValueError, match="the steps of CreamFL depend on a site's records"):
        spent(CreamFL())


def test_processor_time_by_hand() -> None:
    """Site a: 2 + 1 and 3 s in its rounds; site b: 6 s in the one that it answered. The mean of 3, 3 and 6."""
    history = [
        {"round": 0, "phase": "align", "sites": {"a": {"processor_seconds": 2.0}, "b": {"processor_seconds": 6.0}}},
        {"round": 0, "phase": "joint", "sites": {"a": {"processor_seconds": 1.0}}},
        {"round": 1, "phase": "joint", "sites": {"a": {"processor_seconds": 3.0}, "b": {"seconds": 9.0}}},
        {"round": 2, "phase": "evaluate", "sites": {"a": {"processor_seconds": 50.0}}},
    ]
    assert processor_seconds(history) == 4.0
    assert math.isnan(processor_seconds([]))


def test_a_run_notes_its_processor_time(tmp_path: Any) -> None:
    """Of tasks that train: the last evaluation has none."""
    experiment = replace(SMALL, rounds=Rounds(rounds=1, evaluate_every=1))
    trained, evaluated = simulate(experiment, RunFolder.create(tmp_path, experiment))
    assert [site for site, metrics in trained["sites"].items() if metrics["processor_seconds"] > 0] == [
        "site-1", "site-2", "site-3",
    ]  # fmt: skip
    assert all("processor_seconds" not in metrics for metrics in evaluated["sites"].values())
    assert processor_seconds([trained, evaluated]) > 0
