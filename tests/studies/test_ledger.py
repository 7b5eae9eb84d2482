"""The scenarios: every claim can be judged, terms are equal, and seeds are paired."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.probing import SIZE, cohort, model, shaded
from torch import nn

from fedvlp.core.types import Batch, VLOutput
from fedvlp.data.synthetic.drawn_cohort import COHORTS
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.run.terms import terms
from studies.claims import heads, ledger, results_page
from studies.claims.cell_results import Table
from studies.claims.ledger import (
    ALIGN,
    DRAWN_PASS,
    LADDER,
    PAPERS,
    PASS,
    SCENARIOS,
    STEPS,
    alignment,
    all_steps,
    drawn_ladder,
    ladder,
    unlike_sites,
)
from studies.claims.page import INVALID, judge
from studies.claims.scenario import HOLDS

EVERY = list(SCENARIOS.values())
Ladder = Callable[[int], Mapping[str, Experiment]]


def test_claims_name_methods_and_figures_of_their_scenario() -> None:
    for scenario in EVERY:
        methods = scenario.experiments(0)
        for claim in scenario.claims:
            assert {claim.method, claim.other} <= methods.keys()
            assert (claim.method, claim.figure) != (claim.other, claim.other_figure or claim.figure)
            assert {claim.figure, claim.other_figure or claim.figure} <= set(scenario.shown)
            assert claim.papers_value


def test_one_seed_gives_all_methods_the_same_records_and_another_seed_others() -> None:
    """The fair half of a paired comparison: same cohort, same seed, same training but for the method."""
    for scenario in EVERY:
        one: dict[str, Any] = dict(scenario.experiments(3))
        other: dict[str, Any] = dict(scenario.experiments(4))
        assert {experiment.data.seed for experiment in one.values()} == {3}
        assert {experiment.rounds.seed for experiment in one.values()} == {3}
        assert len({repr(experiment.data) for experiment in one.values()}) == 1
        assert len({repr(experiment.rounds) for experiment in one.values()}) == 1
        assert all(other[name].data == replace(experiment.data, seed=4) for name, experiment in one.items())


def test_no_two_methods_of_a_scenario_are_the_same() -> None:
    """A setting whose 0 means "all" once made the server without sites CreamFL itself."""
    for scenario in EVERY:
        distinct = {repr(replace(one, name="same")) for one in scenario.experiments(0).values()}
        assert len(distinct) == len(scenario.experiments(0))


@pytest.mark.parametrize("cohort", ["label-skew", "scanner-shift"])
def test_alignment_methods_have_equal_encoder_steps_weights_and_training(cohort: str) -> None:
    """FedAvg with as many encoder steps, with as many steps in all as FedDRA, and as FedRGB; 1/N at every one."""
    table: dict[str, Any] = dict(alignment(cohort, 0))
    pooled = table.pop("centralized")
    assert len({repr(one.training) for one in table.values()}) == 1
    assert {one.method.weighting for one in table.values()} == {"uniform"}
    spent = {name: terms(one) for name, one in table.items()}
    encoders, in_all = spent["feddra"].axes
    assert encoders >= STEPS, "what a warm-up takes away is made up"
    assert in_all >= STEPS + ALIGN[cohort]
    for paper in ("feddra", "fedrgb"):
        assert spent[all_steps(cohort, paper)].total == spent[paper].total
    spent = {name: one for name, one in spent.items() if "all-steps" not in name}
    assert {one.axes[0] for one in spent.values()} == {encoders}
    for name in ("feddra", "feddra-no-dro", "feddra-no-constraint"):
        assert spent[name].total == in_all
    assert spent["fedrgb"].full_rate["head"] == encoders, "FedRGB's aligners have as many steps as its encoders (E)"
    assert table["feddra"].method.mu == {"label-skew": 5.0, "scanner-shift": 1.0}[cohort], "of the paper's 1, 5 and 10"
    assert pooled.training.batch_size == 5 * table["fedavg"].training.batch_size
    assert {one.data for one in table.values()} == {replace(COHORTS[cohort], image_size=72)}
    norm = ("layer", "averaged") if cohort == "label-skew" else ("batch", "site")
    for one in (*table.values(), pooled):
        assert (one.model.head_norm, one.norm_statistics) == norm


def test_named_baselines_have_equal_encoder_steps_and_their_own_losses() -> None:
    """Pooled training sees all sites' records a step; FedLDAWA has MGCA's loss alone, as in FedDRA's paper."""
    table: dict[str, Any] = dict(ledger.named_baselines(0))
    pooled = table.pop("centralized")
    assert {terms(one).axes[0] for one in table.values()} == {terms(pooled).axes[0]}
    assert {replace(one.training, batch_size=48) for one in table.values()} == {pooled.training}
    assert {one.method.weighting for one in table.values()} == {"uniform"}
    assert (
        len(
            {
                repr(table[name].objective)
                for name in ("fedu", "fedx", "fedmae", "fedavg", "feddra-gloria", "fedldawa-mgca")
            }
        )
        == 6
    )
    assert (table["fedrgb"].method.rho, table["fedrgb-rho-1"].method.rho, "fedldawa" in table) == (0.1, 1.0, False)


def test_heads_are_of_the_models_of_the_named_baselines_and_beat_an_untrained_tower() -> None:
    """The same runs serve both; where heads on FedAvg's tower are no better than on a drawn one, none is ranked."""
    for scenario in ledger.DOWNSTREAM:
        table: dict[str, Any] = dict(scenario.experiments(0))
        untrained, named = table.pop("untrained"), ledger.named_baselines(0)
        assert (scenario.runs, table) == ("named-baselines", {name: named[name] for name in table})
        assert replace(untrained, training=table["fedavg"].training) == table["fedavg"]
        assert untrained.training.lr == 0
        for drawn, verdict in ((50.0, HOLDS), (70.0, INVALID)):
            worth = {"untrained": drawn, "fedavg": 60.0, "feddra": 62.0, "fedrgb": 62.0}
            figures = {
                (name, seed): dict.fromkeys(scenario.shown, value + seed / 10 * (name == "feddra"))
                for name, value in worth.items()
                for seed in range(3)
            }
            outcomes = judge(scenario, Table(figures), ["feddra"]).outcomes
            assert {one.verdict for one in outcomes} == {verdict}


@pytest.mark.slow(seconds=60)
def test_figures_of_heads_are_measured_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of a step: every figure that the scenarios show, in percent, of people whom no run knows."""
    whole: Any = ledger.with_untrained(0)["fedavg"]
    data = replace(whole.data, size=240, test_rows=0)
    method, rounds = replace(whole.method, local_steps=1), replace(whole.rounds, rounds=1, evaluate_every=0)
    small = replace(whole, data=data, method=method, rounds=rounds)
    folder = RunFolder.create(tmp_path, small)
    simulate(small, folder)
    drawn = heads._opened(folder)[1]
    assert not set(drawn.build().patients) & set(data.build().patients)
    monkeypatch.setattr(heads, "_opened", lambda folder: (opened(folder)[0], replace(drawn, size=300)))
    for scenario in ledger.DOWNSTREAM:
        figures = scenario.figures(folder)
        assert set(scenario.shown) <= figures.keys()
        assert all(0 <= figures[name] <= 100 for name in scenario.shown)


opened = heads._opened


def test_the_ablation_changes_one_thing_at_a_time() -> None:
    table: dict[str, Any] = dict(alignment("label-skew", 0))
    whole = table["feddra"].method
    assert table["feddra-no-dro"].method == replace(whole, rho=0.0)
    assert table["feddra-one-stage"].method == replace(whole, align_steps=0)
    assert table["feddra-no-constraint"].method == replace(whole, mu=0.0)


class Bright(nn.Module):
    """As sure of a finding as the image is bright in the finding's rows; without the film it knows nothing."""

    def forward(self, batch: Batch) -> VLOutput:
        if "image" not in batch:
            return VLOutput(None, None, logits=torch.zeros(len(batch["row"]), 2))
        bands = [batch["image"][:, :, start : start + 5].mean(dim=(1, 2, 3)) for start in (0, 5)]
        return VLOutput(None, None, logits=torch.stack(bands, dim=1))


def test_a_classifier_is_judged_on_test_records_with_and_without_each_modality(monkeypatch: pytest.MonkeyPatch) -> None:
    """Films are bright where a finding is; of training and validation records, where it is not."""
    labels, splits = np.arange(240).reshape(120, 2) // 3 % 2, ("train",) * 60 + ("val",) * 20 + ("test",) * 40
    shown = np.where(np.array(splits)[:, None] == "test", labels, 1 - labels)
    data = cohort(labels, ("edema", "effusion"), splits, shaded(shown, by=170))
    data = replace(data, reports=("a film",) * 120)
    bright: Any = Bright()
    bright.tokenizer = model().tokenizer
    client = SimpleNamespace(model=bright, objective=SimpleNamespace(targets=lambda given: given))
    monkeypatch.setattr(ledger, "trained_client", lambda folder: client)
    run: Any = SimpleNamespace(data=SimpleNamespace(build=lambda: data), model=SimpleNamespace(image_size=SIZE))
    folder: Any = SimpleNamespace(experiment=lambda: run)
    expected = {ledger.MACRO: 100, ledger.without("image"): 50, ledger.without("text"): 100}
    assert ledger.classified(folder) == pytest.approx(expected)


def test_every_paper_of_the_ledger_has_a_preset() -> None:
    assert all(presets.get(paper) for paper in PAPERS)


def test_pms_fms_pooled_model_sees_as_much_and_is_no_other_method() -> None:
    """As many rounds and steps, four sites' records a step, the same start; PMS-FM itself as its preset has it."""
    table: dict[str, Any] = dict(unlike_sites(100))
    one, pooled = table["pms-fm"], table["pooled"]
    assert pooled.training.batch_size == 4 * one.training.batch_size
    assert pooled.method.local_steps == one.method.local_steps
    for shared in ("model", "data", "partition", "rounds"):
        assert getattr(pooled, shared) == getattr(one, shared)
    preset: Any = presets.get("pms-fm")
    assert one.method == preset.method
    assert one.extra == preset.extra
    assert one.extra.templates, "the selector is trained on what inference shows it"
    assert (one.data.sites, one.data.hard_site, one.partition.retrieve) == (4, "site-2", True)


@pytest.mark.parametrize("rows", [ladder, drawn_ladder])
def test_the_ladders_servers_take_the_same_steps_and_no_site_moves_one_that_is_alone(rows: Ladder) -> None:
    """Same towers and heads at every row; alone once with the task's steps and once with those of distillation too."""
    table: dict[str, Any] = dict(rows(100))
    for shared in ("model", "site_models", "partition"):
        assert len({repr(getattr(one, shared)) for one in table.values()}) == 1
    untrained = table.pop("untrained-sites")
    (training,) = {one.training for one in table.values()}
    assert (untrained.server_training, untrained.training) == (training, replace(training, lr=0.0))
    assert untrained.method == table["reamfl-mean"].method
    alone, longer = table["server-alone"].method, table["server-alone-all-steps"].method
    for one in (alone, longer):
        assert (one.kd_weight, one.gamma) == (0.0, 0.0)
    taught = {name: table[name].method for name in LADDER}
    assert {one.server_steps for one in taught.values()} == {alone.server_steps}
    assert {one.server_steps + one.distil_steps for one in taught.values()} == {longer.server_steps}
    assert all(one.kd_weight > 0 for one in taught.values())
    assert {one.joint for one in taught.values()} == {True}, "a pass over P goes on with the private steps' momentum"


@pytest.mark.parametrize(("rows", "steps"), [(ladder, PASS), (drawn_ladder, DRAWN_PASS)])
def test_the_ladders_public_set_is_larger_than_any_sites_records_and_a_pass_is_one(rows: Ladder, steps: int) -> None:
    """Sites of three kinds, two of them with pairs."""
    experiment: Any = rows(100)["creamfl"]
    assembly = Assembly(experiment)
    sites = [assembly.data(site) for site in assembly.data_sites()]
    public = assembly.public(None).num_train
    assert public > max(site.num_train for site in sites)
    assert public // experiment.training.batch_size == steps
    assert sorted(site.modalities for site in sites) == [("image",)] * 2 + [("image", "text")] * 2 + [("text",)]


def test_on_drawn_vectors_nothing_is_known_before_training_and_sites_have_three_passes() -> None:
    for one in drawn_ladder(100).values():
        assert [model.init for _, model in one.site_models] + [one.model.init] == [""] * 6
        assert one.training.cache_features is False, "the words' embeddings are learned"
    table: dict[str, Any] = dict(drawn_ladder(100))
    assert {one.method.local_epochs for one in table.values() if not one.method.local_steps} == {3}


def test_a_claim_without_a_verdict_is_listed_with_the_reason_unless_another_scenario_judges_it() -> None:
    """CreamFL's ladder stands in two scenarios: one that ranks it is enough."""
    cells = {
        (name, seed): dict.fromkeys(SCENARIOS["representations"].shown, 50.0) for name in ladder(0) for seed in (0, 1)
    }
    run = judge(SCENARIOS["representations"], Table(cells), PAPERS)
    ranked = replace(run, outcomes=tuple(replace(one, verdict="holds") for one in run.outcomes))
    empty = judge(SCENARIOS["drawn-vectors"], Table({}), PAPERS)
    said = results_page.unjudged([ranked, empty])
    assert "CreamFL is ahead of FedMD (drawn-vectors) | hours" in said
    assert "CreamFL is ahead of its ensemble alone" not in said
    unranked = replace(empty, outcomes=tuple(replace(one, verdict=INVALID) for one in empty.outcomes))
    assert "(drawn-vectors) | a precondition does not hold" in results_page.unjudged([unranked])
