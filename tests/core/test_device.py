"""Batches on their way to a GPU, on streams that only note what is queued (support/pretend_streams.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import toy
from support.pretend_streams import QUEUED, Backend, mark, pin_memory
from torch import Tensor

from fedvlp.core import device
from fedvlp.core.device import AHEAD, moved, prefetched, to_device, to_host
from fedvlp.core.types import Batch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``GPU`` has streams."""
    monkeypatch.setattr(torch, "get_device_module", lambda _: Backend())
    device._side_stream.cache_clear()
    QUEUED.clear()
    yield
    device._side_stream.cache_clear()
    QUEUED.clear()


def numbered(count: int) -> Iterator[Batch]:
    for number in range(count):
        mark(f"draw {number}")
        yield {"row": torch.tensor([number])}


def told() -> list[str]:
    """What was queued, in words; streams and events by the order in which they are first named."""
    names: dict[int, str] = {}
    side = {entry.stream for entry in QUEUED} - {0}
    words = []
    for entry in QUEUED:
        stream = "side" if entry.stream in side else "steps"
        if entry.kind == "record":
            names[entry.event] = f"{stream} {len(names)}"
        words.append(f"{stream}: {entry.name or entry.kind + ' ' + names[entry.event]}")
    return words


def test_on_the_cpu_nothing_changes() -> None:
    batches = numbered(3)
    assert prefetched(batches, CPU) is batches
    batch = {"row": torch.tensor([1])}
    assert moved(batch, CPU) is batch
    assert to_device(batch["row"], CPU) is batch["row"]


def test_the_next_batches_are_drawn_on_the_side_while_a_step_runs(gpu: None) -> None:
    """A step waits for its own batch: event 1 is complete before batch 1 is on its way."""
    for batch in prefetched(numbered(4), GPU):
        mark(f"step {int(batch['row'])}")
    assert told() == [
        "steps: record steps 0", "side: wait steps 0",
        "side: draw 0", "side: record side 1", "steps: wait side 1", "steps: step 0", "steps: record steps 2",
        "side: draw 1", "side: record side 3", "side: draw 2", "side: record side 4",
        "steps: wait side 3", "steps: step 1", "steps: record steps 5",
        "side: draw 3", "side: record side 6",
        "steps: wait side 4", "steps: step 2", "steps: record steps 7", "side: wait steps 2",
        "steps: wait side 6", "steps: step 3", "steps: record steps 8", "side: wait steps 5",
        "steps: record steps 9", "side: wait steps 9",
    ]  # fmt: skip


def test_the_order_of_draws_is_that_of_the_batches(gpu: None) -> None:
    assert [int(batch["row"]) for batch in prefetched(numbered(7), GPU)] == list(range(7))
    assert list(prefetched(numbered(0), GPU)) == []
    assert all(not entry.waits for entry in QUEUED)


def test_a_batch_is_forgotten_only_when_the_side_stream_waits_for_its_step(gpu: None) -> None:
    """Else a later copy could take its memory while the step still reads it."""
    alive: list[Any] = []
    for number, batch in enumerate(prefetched(numbered(8), GPU)):
        alive.append(weakref.ref(batch["row"]))
        del batch
        waited = [entry for entry in QUEUED if entry.kind == "wait" and entry.stream != 0][
            1:
        ]  # the first: at the start
        gone = [one() is None for one in alive]
        assert gone == [index < len(waited) for index in range(number + 1)]
        assert sum(gone) == max(0, number - AHEAD)


def test_a_phase_that_breaks_off_leaves_nothing_for_the_next_to_overwrite(gpu: None) -> None:
    batches = prefetched(numbered(8), GPU)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert told()[-2:] == ["steps: record steps 2", "side: wait steps 2"]


def test_all_phases_share_one_side_stream(gpu: None) -> None:
    for _ in range(3):
        list(prefetched(numbered(2), GPU))
    assert len({entry.stream for entry in QUEUED}) == 2


def test_what_goes_to_a_gpu_is_pinned_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def to(tensor: Any, where: torch.device, non_blocking: bool = False) -> Tensor:
        sent.append((getattr(tensor, "is_pinned_here", False), where, non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    moved({"row": torch.arange(2), "image": torch.zeros(2, dtype=torch.uint8)}, GPU)
    assert sent == [(True, GPU, True)] * 2


def test_what_comes_from_a_gpu_is_complete_when_it_is_returned(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is here stays the same one, and nobody waits for a GPU that sends nothing."""
    here, there = torch.arange(3), torch.arange(4, device="meta")
    asked = []

    def to(tensor: Any, where: str, non_blocking: bool = False) -> Tensor:
        asked.append((tensor.device.type, where, non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "to", to)
    assert to_host({"a": here})["a"] is here
    assert QUEUED == []
    assert list(to_host({"a": here, "b": there, "c": there})) == ["a", "b", "c"]
    assert [entry.name for entry in QUEUED] == ["stream"], "once, after all were asked for"
    assert asked[-2:] == [("meta", "cpu", True)] * 2


@cache
def queued() -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """What a task of the product's own site queues on a pretended device, and its losses beside the CPU's."""
    program = Path(toy.__file__).parent / "pretend_steps.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=400, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    tasks = [index for index, entry in enumerate(told["queued"]) if entry["name"] == "task"]
    return told["queued"][tasks[0] : tasks[1]], told["losses"]


@pytest.mark.slow(seconds=20)
class TestOfASite:
    """A phase of FedDRA with its anchor and a BERT, through loader, loop, site and envelope."""

    steps, batch, film = 5, 8, 72

    def of_steps(self) -> list[dict[str, Any]]:
        """What is queued from the first step to the last."""
        entries, _ = queued()
        marks = [index for index, entry in enumerate(entries) if entry["name"] == "step"]
        assert len(marks) == self.steps
        return entries[marks[0] : marks[-1] + 1]

    def test_the_host_waits_for_nothing_from_the_first_step_to_the_last(self) -> None:
        assert [entry for entry in self.of_steps() if entry["waits"]] == []
        assert any(entry["waits"] for entry in queued()[0]), "the update is fetched in the end"

    def test_the_update_is_fetched_and_the_host_waits_for_all_of_it_once(self) -> None:
        entries, _ = queued()
        last = max(index for index, entry in enumerate(entries) if entry["name"] == "step")
        after = [entry for entry in entries[last + 1 :] if entry["kind"] in ("fetch", "sync")]
        weights = [entry for entry in after if entry["kind"] == "fetch" and entry["bytes"] > 1000]
        assert len(weights) > 20
        assert not any(entry["waits"] for entry in weights)
        behind = after[after.index(weights[-1]) :]
        assert [entry["name"] for entry in behind if entry["kind"] == "sync"] == ["stream"]

    def test_films_travel_as_bytes_pinned_and_beside_the_steps(self) -> None:
        copies = [entry for entry in self.of_steps() if entry["kind"] == "copy"]
        films = [entry for entry in copies if entry["dtype"] == "torch.uint8"]
        assert [entry["bytes"] for entry in films] == [self.batch * self.film**2] * (self.steps - 1)
        assert all(entry["pinned"] and entry["stream"] != 0 for entry in copies)
        rest = sum(entry["bytes"] for entry in copies) - sum(entry["bytes"] for entry in films)
        assert rest < 0.3 * sum(entry["bytes"] for entry in films), "nothing of a film travels twice"

    def test_the_next_copy_is_queued_before_its_step_and_no_step_waits_for_it(self) -> None:
        films = steps = waited_for = 0
        behind: dict[int, int] = {}  # event: films that are complete at it
        for entry in queued()[0]:
            if entry["kind"] == "copy" and entry["dtype"] == "torch.uint8" and entry["stream"] != 0:
                films += 1
            elif entry["kind"] == "record" and entry["stream"] != 0:
                behind[entry["event"]] = films
            elif entry["kind"] == "wait" and entry["stream"] == 0 and entry["event"] in behind:
                waited_for = behind[entry["event"]]
            elif entry["name"] == "step":
                steps += 1
                if 1 < steps < self.steps:
                    assert films > waited_for
        assert steps == self.steps

    def test_texts_are_padded_to_a_multiple_of_16(self) -> None:
        texts = [entry for entry in self.of_steps() if entry["kind"] == "copy" and entry["dtype"] == "torch.bool"]
        tokens = [entry["bytes"] // self.batch for entry in texts]
        assert all(count % 16 == 0 for count in tokens)
        assert min(tokens) < 64, "not all are as long as texts may be"

    def test_it_learns_what_the_cpu_learns(self) -> None:
        for name, (ours, cpus) in queued()[1].items():
            assert ours == pytest.approx(cpus, rel=1e-4), name
