"""The classifier of a round: kept beside the model, calibrated on validation records, with its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedvlp.core.server_state import Server
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.methods.one_round_cca import BIAS, WEIGHT
from fedvlp.models.findings import FindingHeads
from fedvlp.run import finding_heads
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import last_server, trained_state
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.folder import RunFolder
from fedvlp.run.presets import get
from fedvlp.run.simulate import simulate

KNOWN = ("Edema", "Pleural Effusion")


def experiment() -> Experiment:
    """Three sites of the built-in cohort, the last without reports of its own; Hernia is nobody's label."""
    demo = get("one-round-cca")
    return replace(
        demo,
        method=replace(demo.method, local_steps=0, findings=(*KNOWN, "Hernia"), standardised=True, image_ridge=0.05),
        model=replace(demo.model, alignment=False),
        data=SyntheticCohort(size=360, sites=3, image_size=72, seed=3),
        partition=Partition(sites=3, image_only=1, public=0.2, retrieve=4),
        rounds=replace(demo.rounds, rounds=1),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), experiment())
    simulate(folder.experiment(), folder)
    return folder


def test_a_run_keeps_its_classifier_with_what_it_is_worth(folder: RunFolder) -> None:
    heads = FindingHeads.read(folder.path / "model")
    assert heads is not None
    assert heads.names == KNOWN, "a finding that no site knows has no head"
    assert heads.origin == "ridge regression on the sums of 3 sites, one round"
    for figures in heads.figures.values():
        assert 0 < figures["positive"] < figures["records"]
        assert figures["sensitivity"] >= finding_heads.SENSITIVITY
        assert 0 <= figures["specificity"] <= 1
        assert figures["auc"] > 0.6, "the built-in images show their findings"


def test_its_figures_are_those_of_its_probabilities(folder: RunFolder) -> None:
    """The heads that are saved, on the validation records again: the same AUC, and nothing is left to calibrate."""
    heads = FindingHeads.read(folder.path / "model")
    assert heads is not None
    assembly = Assembly(folder.experiment(), folder.path)
    again = finding_heads.on_validation(heads, assembly, trained_state(assembly, last_server(folder)))
    for name in KNOWN:
        assert again.figures[name]["auc"] == heads.figures[name]["auc"]
    torch.testing.assert_close(again.weight, heads.weight, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(again.bias, heads.bias, atol=1e-3, rtol=1e-3)


def test_a_server_without_records_keeps_what_it_solved() -> None:
    """As in a federation of hospitals; a head without direction is left out, and no heads are none."""
    server = Server(("a", "b"), {})
    assert finding_heads.solved(experiment(), server) is None
    server.memory = {WEIGHT: torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]), BIAS: torch.tensor([0.5, 1.0, 0.0])}
    heads = finding_heads.solved(experiment(), server)
    assert heads is not None
    assert (heads.names, heads.bias.tolist(), heads.figures) == (("Edema",), [0.5], {})
    server.memory[WEIGHT] = torch.zeros(3, 2)
    assert finding_heads.solved(experiment(), server) is None


def test_the_folder_of_a_run_without_them_has_no_such_file(tmp_path: Path) -> None:
    plain = replace(experiment(), method=replace(experiment().method, findings=()))
    folder = RunFolder.create(tmp_path, plain)
    folder.finish(plain, Assembly(plain).initial(), [])
    assert FindingHeads.read(folder.path / "model") is None


def test_the_threshold_names_nine_in_ten_by_hand() -> None:
    """Of ten positives at 0.1, 0.2, ..., 1.0 nine are at 0.2 or above; of negatives at 0.15 and 0.25 one is not.

    Nine positives outrank the first negative, eight the second: an AUC of 17 in 20.
    """
    stated = torch.tensor([*(number / 10 for number in range(1, 11)), 0.15, 0.25]).double()
    figures = finding_heads.figures_of(stated, torch.tensor([1.0] * 10 + [0.0] * 2))
    assert figures["threshold"] == pytest.approx(0.2)
    assert (figures["sensitivity"], figures["specificity"]) == (0.9, 0.5)
    assert figures["auc"] == 0.85
