"""A hostile lead's settings: honest classes with numbers that would tell something of few records.

The site is real: the executor, the envelope, the outgoing filter. The records behind its answer are counted here, from
what its data were asked for, and not by the envelope.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.signal import Signal
from torch import Generator

from fedvlp.core.method import Method
from fedvlp.core.types import Batch, Update
from fedvlp.federation.loop import Rounds
from fedvlp.flare import messages
from fedvlp.flare.privacy_filters import AllowMetrics
from fedvlp.methods import METHODS
from fedvlp.run.experiment import Experiment
from support import flare_memory
from support.flare_memory import Engine, on_toys, site_executor, toy_world
from support.hostile import Breach, refuse_words
from support.hostile_broadcasts import SiteModel, said_of
from support.toy import IMAGE, SGD, TEXT, Pairs, small

LEAST_RECORDS, LEAST_PER_FIGURE = 12, 6
RECORDS = 24

CHOICES: dict[str, tuple[Any, ...]] = {
    "local_steps": (1, 2, 3), "align_steps": (1, 2), "aligner_steps": (1, 2), "dro_batch": (2, 3, 5, 6, 24),
    "dro_fraction": (1e-9, 0.1, 0.5, 1.0), "mu": (0.0, 0.5), "rho": (0.0, 1.0),
}  # fmt: skip
BATCHES = (2, 3, 4, 6, 11, 12, 24)
HELD_OUT = (0, 2, 5, 6, 9)
NAMES = ("fedavg", "fedprox", "feddra", "fedrgb", "local")


class Counted(Pairs):
    """Records that know which of them were asked for: to be trained on, and by each reading of a split."""

    def __init__(self, held_out: int) -> None:
        generator = torch.Generator().manual_seed(held_out)
        few = {split: _pairs(held_out, generator) for split in ("val", "test")}
        super().__init__(*_pairs(RECORDS, generator), **few)
        self.trained: set[int] = set()
        self.read: list[tuple[str, set[int]]] = []

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for batch in super().train_batches(steps, batch_size, generator):
            self.trained |= set(batch["row"].tolist())
            yield batch

    def batches(self, split: str, batch_size: int, **options: Any) -> Iterator[Batch]:
        rows: set[int] = set()
        self.read.append((split, rows))
        for batch in super().batches(split, batch_size, **options):
            rows |= set(batch["row"].tolist())
            yield batch

    def fewest(self, split: str) -> int:
        """Records of the smallest reading of a split."""
        return min((len(rows) for name, rows in self.read if name == split), default=0)


def _pairs(count: int, generator: Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, IMAGE, generator=generator), torch.randn(count, TEXT, generator=generator)


def recalled(client: Any, splits: tuple[str, ...]) -> dict[str, float]:
    """An evaluation that reads the splits, which those of other toys do not."""
    figures = {}
    for split in splits:
        rows = [row for batch in client.data.batches(split, 4, drop_last=False) for row in batch["row"].tolist()]
        figures[f"{split}/mean/r1"] = float(len(rows))
    return figures


class Stage:
    """A provisioned site with the limits above, set up anew for every attack."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kit, self.monkeypatch = folder / "kit", monkeypatch
        monkeypatch.setattr(flare_memory, "measure", recalled)

    def answered(self, experiment: Experiment, data: Counted, evaluate: int) -> Update | str:
        """What leaves of the site's answer to the first task; or why nothing does."""
        shutil.rmtree(self.kit, ignore_errors=True)
        for name in ("startup", "local"):
            (self.kit / name).mkdir(parents=True)
        (self.kit / "startup" / "fed_client.json").write_text("{}")
        limits = {"least_records": LEAST_RECORDS, "least_per_figure": LEAST_PER_FIGURE}
        (self.kit / "local" / "fedvlp.json").write_text(json.dumps({"envelope": limits}))
        on_toys(self.monkeypatch, {"a": data})
        world, method = toy_world(experiment, {"a": data}), experiment.method
        server = world.server()
        method.start(server)
        server.phase = method.phases(0)[0]
        message = replace(method.broadcast(server, "a"), evaluate=evaluate)
        task = messages.send_broadcast(message, said_of(experiment))
        with Engine("a", self.kit, "job-1").new_context() as context:
            context.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
            reply = site_executor(experiment).execute(server.phase, task, context, Signal())
            reply = AllowMetrics(["loss/*", "probe/*", "val/*", "test/*", "seconds"]).process(reply, context)
        failed = messages.failure(reply)
        return failed.text if failed else messages.receive_update(reply, "a")

    def judge(self, name: str, experiment: Experiment, held_out: int, evaluate: int) -> str:
        """Plays an attack: "refused" or "harmless". Raises Breach."""
        data = Counted(held_out)
        left = self.answered(experiment, data, evaluate)
        if isinstance(left, str):
            refuse_words(name, left)
            return "refused"
        if (left.state or left.aux) and len(data.trained) < LEAST_RECORDS:
            raise Breach(f"{name}: sent an update of {len(data.trained)} records")
        behind = {"loss": len(data.trained), **{split: data.fewest(split) for split in ("val", "test")}}
        behind["probe"] = data.fewest("train")
        told = {figure.partition("/")[0] for figure in left.metrics}
        told |= {"probe"} if any(not math.isnan(value) for value in left.scalars.values()) else set()
        for kind in told & behind.keys():
            if behind[kind] < LEAST_PER_FIGURE:
                raise Breach(f"{name}: sent a {kind} of {behind[kind]} records")
        return "harmless"


def attacks(seed: int, count: int) -> Iterator[tuple[str, Experiment, int, int]]:
    """``count`` experiments, the same for the same seed; records held out of each split; what is measured."""
    random = Random(f"settings {seed}")
    for number in range(count):
        method = small(METHODS[random.choice(NAMES)])
        has = {field.name for field in fields(method)}
        chosen = {name: random.choice(values) for name, values in CHOICES.items() if name in has}
        training = {"batch_size": random.choice(BATCHES), "weight_decay": random.choice((0.0, 0.1))}
        held_out, evaluate = random.choice(HELD_OUT), random.randrange(3)
        said = f"{number}: {type(method).__name__} {chosen}, batch {training['batch_size']}, {held_out} held out"
        yield said, toy_experiment(replace(method, **chosen), **training), held_out, evaluate


def toy_experiment(method: Method, **training: Any) -> Experiment:
    """Two rounds of a method on the toys."""
    settings = replace(SGD, **training)
    return Experiment("toy", method, SiteModel(), training=settings, rounds=Rounds(rounds=2))  # type: ignore[arg-type]
