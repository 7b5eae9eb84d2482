"""How far a run is: every phase and step is counted, in this process and in forked ones, and never more than all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.cases import cases

from fedvlp.cli.tables import RunBar
from fedvlp.core.types import Broadcast, Failure, FailureKind
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, FedDRA
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.run.status_writer import Progress, phases_left

MODEL = ModelConfig(image_size=32, head_hidden=16, embedding_dim=16, head_norm="layer")
DATA = SyntheticCohort(sites=2, size=80, image_size=36)


def small(**rounds: int) -> Experiment:
    preset = presets.get("feddra")
    training = replace(preset.training, batch_size=8, warmup_steps=0)
    method = FedDRA(align_steps=2, local_steps=3, dro_batch=8)
    timing = replace(preset.rounds, **{"rounds": 2, "evaluate_every": 1, **rounds})
    return replace(preset, model=MODEL, data=DATA, training=training, method=method, rounds=timing)


def test_phases_that_are_left() -> None:
    """Two phases a round of FedDRA, and one that measures the trained model."""
    method = small().method
    assert phases_left(method, Rounds(rounds=3), 0, 0) == 7
    assert phases_left(method, Rounds(rounds=3), 1, 1) == 4
    assert phases_left(method, Rounds(rounds=3), 3, 0) == 1
    assert phases_left(method, Rounds(rounds=3, evaluate_every=0), 0, 0) == 6


@pytest.mark.parametrize("workers", cases((1, 2), often=(2,)))
def test_a_run_is_followed_to_its_end(workers: int, tmp_path: Path) -> None:
    """Steps of both sites in every phase, whichever process takes them; what is done grows from 0 to all."""
    seen: list[tuple[float, str, int]] = []
    held: list[Progress] = []

    @contextmanager
    def watch(progress: Progress) -> Iterator[None]:
        held.append(progress)
        yield

    def report(record: dict[str, Any]) -> None:
        seen.append((held[0].done(), held[0].phase, held[0].steps()))

    experiment = small()
    simulate(experiment, RunFolder.create(tmp_path, experiment), workers=workers, report=report, watch=watch)
    assert held[0].total == 5
    assert [done for done, *_ in seen] == [1, 2, 3, 4, 5]
    assert [rest for _, *rest in seen] == [["align", 4], ["joint", 6], ["align", 4], ["joint", 6], ["evaluate", 0]]


def test_a_site_that_trains_counts_by_its_steps() -> None:
    """Of four sites one has answered, one took half of its ten steps, one all of them, and one none."""
    method = FedAvg(local_steps=10)
    progress = Progress(method, ["a", "b", "c", "d"], 3)
    assert (progress.done(), progress.steps()) == (0, 0)
    messages = {site: Broadcast(round=0, phase="train", state={}) for site in "abcd"}
    going = progress.watched(lambda asked: iter([(site, Failure(FailureKind.FAILED, "")) for site in asked]))(messages)
    steps = {site: progress.stepped(site) for site in "abcd"}
    next(going)
    for site, times in {"b": 5, "c": 10}.items():
        for _ in range(times):
            steps[site]()
    assert progress.done() == pytest.approx((1 + 0.5 + 0.99) / 4)
    assert progress.steps() == 15
    assert (progress.answered, progress.asked) == (1, 4)
    list(going)
    assert progress.done() == 1
    next(progress.watched(lambda asked: iter([("a", Failure(FailureKind.FAILED, ""))]))(messages))
    assert progress.done() == 1.25
    assert progress.steps() == 0


def test_the_bar_is_for_terminals_and_says_where_the_run_is() -> None:
    """Round, phase, sites that answered, and the worst site of the last measure; nothing elsewhere."""
    progress = Progress(FedAvg(local_steps=2), ["a", "b"], 4)
    for terminal in (True, False):
        console = Console(file=StringIO(), force_terminal=terminal, width=120)
        bar = RunBar(console, 3)
        bar.note({"sites": {"a": {"val/mean/r1": 30.0}, "b": {"val/mean/r1": 12.5}}})
        bar.note({"sites": {"a": {"seconds": 1.0}}})
        with bar.showing(progress):
            next(progress.watched(lambda asked: iter([("a", Failure(FailureKind.FAILED, ""))]))(
                {site: Broadcast(round=1, phase="train", state={}) for site in "ab"}
            ))  # fmt: skip
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        if terminal:
            assert "round 2 of 3, train: 1 of 2 sites" in shown
            assert "worst site so far: b, R@1 12.5" in shown
        else:
            assert shown == ""
