"""Golden metrics: every figure that a short run of a committed preset measures, kept in tests/golden.

Most tests compare fedvlp with fedvlp: the engine with FLARE, a resumed run with an uninterrupted one. A change that
halves what a preset learns is the same on both sides of such a comparison. Here the other side is a file.

A short run is the preset's own method, model, objective, data and training with fewer records, steps and rounds. It is
stopped before its last training phase and resumed from its checkpoints, so what they must hold is part of the figures.
The trained model is pinned by how far each of its parts moved: not every part shows in a loss (the selector of PMS-FM
is trained by the server alone).

Tolerances: no figure can be pinned to the last bit. Processors add the terms of a sum in different orders (the width of
their vector units decides, and which kernels the libraries choose). Training amplifies the difference, most where batch
normalisation divides by a spread that is close to zero, as that of the features of random weights is. So the steps are
few, and within the preset's own warm-up. With the instruction sets none and AVX2 instead of AVX-512, on one machine,
losses moved by up to half of these tolerances and recalls by one query.

* Losses and every other continuous figure that is not named below: 5e-4 of its value.
* Lengths of a change of the model: 5e-3. AdamW divides a gradient by its own size, so a weight whose gradient is zero
  but for rounding (the bias of an attention's keys) moves as far as any other, or not at all.
* Figures that magnify the differences (``MAGNIFYING``): robust weights are exponentials of losses, CreamFL multiplies
  cosines by up to 128, FedRGB's consistency is the squared distance of two outputs that hardly differ yet, the standard
  error of a site's loss is the spread of batch losses that are almost equal.
* A mean cosine: 2e-3, a thousandth of its range; it may be 0.
* Recalls: one query. A recall counts queries; where two candidates score alike to the last bit but one, a rank moves
  by one and the recall by 100 / queries, however small the difference was.
* Areas under the ROC curve: one pair of records, 1 / (positives x negatives), for the same reason. A mean over
  findings: one pair in each of them.
* Distinct partners of a record (CAR-MFL), a mean over the training records: one record.
* Of CreamFL five times all that: its sites' models start from random weights, without the shipped encoders, and every
  figure of the server hangs on what they represent. On a processor with AVX2 alone figures moved by up to three times
  the tolerances of the others (one step of 1e-5 in a weight changes a represented feature by 1e-3).

A golden file is only rewritten by ``make golden``, in a commit that says why its figures moved.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.client import EXTRA
from fedvlp.core.metric_keys import TIMES
from fedvlp.core.server_state import Server
from fedvlp.data.cohort import PUBLIC, SPLITS
from fedvlp.evaluation.classification import RARE
from fedvlp.evaluation.metric_names import is_recall
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.flare.jobs import COMMITTED
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import SERVER, Record
from fedvlp.run.simulate import simulate

FOLDER = Path(__file__).parents[1] / "golden"
RELATIVE = 5e-4  # of a continuous figure
LENGTH = 5e-3  # of the length of a change
MAGNIFYING = {
    "dro_weights": 2e-3, "loss/classification": 2e-3, "loss/intra": 2e-3, "loss/consistency": 1e-2,
    "probe/loss_error": 5e-2,
}  # fmt: skip
COSINE = 2e-3  # of a mean cosine, absolute
WIDER = {"creamfl": 5.0}  # presets whose tolerances are so many times as wide
ROUNDING = 1e-6  # of a figure: golden files hold seven digits
SHOWN = 15  # differences in a message

REMEDY = (
    "The preset no longer learns or measures what it did. If that is meant, rewrite the file with `make golden`, in a "
    "commit that says why; a golden file is written in no other way."
)

SHORT = {"rounds.rounds": 2, "data.size": 640, "method.local_steps": 2, "training.batch_size": 16}
"""What makes a preset's run short. Two rounds: robust weights first move in the second one, and then act."""

SHORTER: dict[str, dict[str, int]] = {
    "feddra": {"method.align_steps": 2},
    "fedrgb": {"method.aligner_steps": 2},
    "creamfl": {
        "data.size": 1500, "training.batch_size": 128, "method.local_epochs": 1, "method.local_steps": 1,
        "method.server_steps": 1, "method.distil_steps": 1,
    },
    "pms-fm": {"data.size": 480},
}  # fmt: skip
"""The same for settings that only some methods have."""

Figures = dict[str, dict[str, dict[str, float]]]
"""A figure by phase ("round 1, joint"), metric and who reports it: a site or the server."""

Tolerance = Callable[[str, str, float], float]
"""How far a figure may be from its golden one: (metric, reporter, golden figure)."""

MODEL, CHANGE = "trained model", "change"


def short(name: str) -> Experiment:
    """The committed preset ``name`` as it is run here."""
    experiment = presets.get(name)
    for key, value in {**SHORT, **SHORTER.get(name, {})}.items():
        experiment = override(experiment, key, str(value))
    return experiment


# Running


class _StoppedError(Exception):
    """The run was stopped on purpose."""


def measure(name: str, folder: Path) -> Figures:
    """The figures of the short run of a preset, which is kept in ``folder``."""
    experiment, run = short(name), RunFolder(folder / name)
    with contextlib.suppress(_StoppedError):
        simulate(experiment, run, report=_stop_before_the_last_phase(experiment))
    history = simulate(experiment, run)
    return {**figures(history), MODEL: {CHANGE: change_of_model(experiment, run)}}


def _stop_before_the_last_phase(experiment: Experiment) -> Callable[[Record], None]:
    """A ``report`` that raises when all training phases but one are complete."""
    left = sum(len(experiment.method.phases(round)) for round in range(experiment.rounds.rounds)) - 1

    def report(record: Record) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise _StoppedError

    return report


def figures(history: list[Record]) -> Figures:
    """Every figure of a run's records but the seconds."""
    table: Figures = {}
    for record in history:
        phase = f"round {record['round']}, {record['phase']}"
        if record["dropped"]:
            raise AssertionError(f"{phase}: dropped {record['dropped']}")
        if phase in table:
            raise AssertionError(f"{phase}: recorded twice")
        rows = table[phase] = {}
        for reporter, metrics in {**record["sites"], SERVER: {**record["server"], **record["bytes"]}}.items():
            for metric, value in metrics.items():
                if metric not in TIMES:
                    rows.setdefault(metric, {})[reporter] = value
        for tensor, values in record["memory"].items():
            rows[tensor] = dict(zip(record["members"], values, strict=True))
    return table


def change_of_model(experiment: Experiment, run: RunFolder) -> dict[str, float]:
    """L2 norm of what training changed in each part of the server's model and objective."""
    before = Assembly(experiment).initial()
    squares: dict[str, float] = {}
    for name, after in Server.load(run.checkpoint)[0].state.items():
        if after.is_floating_point():
            part = EXTRA.rstrip(".") if name.startswith(EXTRA) else name.partition(".")[0]
            change = float((after.double() - before[name].double()).square().sum())
            squares[part] = squares.get(part, 0.0) + change
    return {part: math.sqrt(square) for part, square in squares.items()}


# Comparing


class Tolerances:
    """How far from its golden value each figure of an experiment may be; the module says why."""

    def __init__(self, experiment: Experiment) -> None:
        self.assembly = Assembly(experiment)
        owners = {site: site for site in self.assembly.data_sites()}
        if self.assembly.has_public:
            owners[SERVER] = PUBLIC
        self.times = WIDER.get(experiment.name, 1.0)
        cohort = self.assembly.cohort
        self.rows = {(who, split): cohort.rows(split, owner) for who, owner in owners.items() for split in SPLITS}

    def __call__(self, metric: str, reporter: str, golden: float) -> float:
        return self.times * self.of_one(metric, reporter, golden)

    def of_one(self, metric: str, reporter: str, golden: float) -> float:
        """The tolerance of a preset that is not in ``WIDER``."""
        split, _, rest = metric.partition("/")
        if split in SPLITS and is_recall(metric):
            return 100 / self.queries(metric, reporter)
        if split in SPLITS and rest.startswith("auc/"):
            return self.one_pair(split, rest.removeprefix("auc/").partition(" without ")[0], reporter)
        if rest == "similarity":
            return COSINE
        if metric == "probe/distinct_partners":
            return 1 / len(self.rows[reporter, "train"])
        if metric == CHANGE or metric.startswith("update_norm/"):
            return LENGTH * abs(golden)
        return MAGNIFYING.get(metric, RELATIVE) * abs(golden)

    def queries(self, metric: str, reporter: str) -> int:
        """The queries of one direction: all records, or those in full batches (``<split>/<direction>/r<k>``)."""
        split, *protocol, _, _ = metric.split("/")
        records = len(self.rows[reporter, split])
        if protocol:  # "all" records at once, or "fold" by fold
            return records
        batch = Retrieval().batch_size
        return records - records % batch

    def one_pair(self, split: str, name: str, reporter: str) -> float:
        """What one pair of records is worth in the area of a finding, or in the mean over findings ``name``."""
        chosen = []
        for finding, targets in zip(self.assembly.cohort.label_names, self.targets(split, reporter).T, strict=True):
            positives, negatives = int((targets == 1).sum()), int((targets == 0).sum())
            if not positives or not negatives:
                continue
            rare = positives < RARE * (positives + negatives)
            if name in (finding, "macro") or (name == "rare" and rare):
                chosen.append(1 / (positives * negatives))
        return fmean(chosen)

    def targets(self, split: str, reporter: str) -> Tensor:
        """[n, L] as the objective settles the labels: 1, 0 or nan."""
        labels = torch.from_numpy(self.assembly.cohort.labels[self.rows[reporter, split]])
        objective: Any = self.assembly.experiment.objective.build()
        return objective.targets(labels)


@dataclass(frozen=True)
class Move:
    """A figure that is another one now."""

    where: str
    golden: float
    seen: float
    tolerance: float

    @property
    def times(self) -> float:
        """The move in tolerances; infinite where no move is tolerated."""
        if math.isnan(self.golden) and math.isnan(self.seen):
            return 0.0
        moved = abs(self.seen - self.golden) - ROUNDING * max(abs(self.golden), abs(self.seen))
        if math.isnan(moved):
            return math.inf
        return 0.0 if moved <= 0 else moved / self.tolerance if self.tolerance else math.inf

    def __str__(self) -> str:
        return (
            f"{self.where} moved from {self.golden:.7g} to {self.seen:.7g}, by {abs(self.seen - self.golden):.3g}: "
            f"{self.times:.3g} x its tolerance of {self.tolerance:.3g}"
        )


def moves(golden: Figures, seen: Figures, tolerance: Tolerance) -> Iterator[Move]:
    """Every figure that both have, in the order of the run."""
    for phase, metrics in golden.items():
        for metric, reporters in metrics.items():
            for reporter, value in reporters.items():
                now = seen.get(phase, {}).get(metric, {}).get(reporter)
                if now is not None:
                    yield Move(f"{phase}: {metric} of {reporter}", value, now, tolerance(metric, reporter, value))


def unmatched(golden: Mapping[str, Any], seen: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """What only one of the two has: a whole phase, a metric of a phase, or a reporter of a metric."""
    for name in [*golden, *(name for name in seen if name not in golden)]:
        path = f"{where}: {name}" if where else name
        if name not in seen:
            yield f"{path} is in the golden file and was not measured"
        elif name not in golden:
            yield f"{path} was measured and is not in the golden file"
        elif isinstance(golden[name], Mapping):
            yield from unmatched(golden[name], seen[name], path)


def differences(golden: Figures, seen: Figures, tolerance: Tolerance) -> list[str]:
    """Whatever keeps ``seen`` from being the golden figures, in words; empty if nothing does."""
    far = (str(move) for move in moves(golden, seen, tolerance) if move.times > 1)
    return [*unmatched(golden, seen), *far]


def check(name: str, folder: Path) -> None:
    """Runs a preset in ``folder``. Raises AssertionError naming the figures that are not the golden ones."""
    found = differences(read(name), measure(name, folder), Tolerances(short(name)))
    if not found:
        return
    more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    title = f"{name}: {len(found)} differences from tests/golden/{name}.json"
    raise AssertionError("\n  ".join([title, *found[:SHOWN], *more]) + "\n" + REMEDY)


# Files


def path_of(name: str) -> Path:
    """The golden file of a preset."""
    return FOLDER / f"{name}.json"


def read(name: str) -> Figures:
    """The golden figures of a preset; null stands for a figure that is not known yet (nan)."""
    table = json.loads(path_of(name).read_text(encoding="utf-8"))
    return {
        phase: {
            metric: {reporter: math.nan if value is None else value for reporter, value in reporters.items()}
            for metric, reporters in metrics.items()
        }
        for phase, metrics in table.items()
    }


def as_text(table: Figures) -> str:
    """JSON with one line for each metric of a phase, sorted, and seven digits a figure."""
    phases = []
    for phase, metrics in table.items():
        rows = [
            f"    {json.dumps(metric)}: {json.dumps({who: _rounded(v) for who, v in sorted(metrics[metric].items())})}"
            for metric in sorted(metrics)
        ]
        phases.append(f"  {json.dumps(phase)}: {{\n" + ",\n".join(rows) + "\n  }")
    return "{\n" + ",\n".join(phases) + "\n}\n"


def _rounded(value: float) -> float | None:
    if math.isnan(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.7g}")


def rewrite(name: str, folder: Path) -> str:
    """Runs a preset in ``folder`` and writes its golden file if a figure is not the golden one. Says what changed.

    Where every figure is within its tolerance the file stays: small moves never add up over several commits.
    """
    seen, path = measure(name, folder), path_of(name)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(as_text(seen), encoding="utf-8")
        return f"{name}: new"
    golden, tolerance = read(name), Tolerances(short(name))
    found = differences(golden, seen, tolerance)
    if not found:
        largest = max(move.times for move in moves(golden, seen, tolerance))
        return f"{name}: unchanged (largest move {largest:.2g} x its tolerance)"
    path.write_text(as_text(seen), encoding="utf-8")
    return "\n  ".join([f"{name}: {len(found)} differences", *found])


if __name__ == "__main__":
    for preset in COMMITTED:
        with tempfile.TemporaryDirectory() as run:
            print(rewrite(preset, Path(run)), flush=True)
