"""Every attack of `fedvlp audit` and `fedvlp attack` on whole runs: what the methods give away, side by side.

    python studies/programs/audits.py [--presets fedavg,feddra,...] [--seeds 0] [--invert 60] [--quick]
    python studies/programs/audits.py --presets feddra-real --seeds 0-4 [--data ../shared/data/real-cxr]

Runs each preset (one that has finished under --runs with the same settings is taken as it is), audits it, and prints a
table for each kind of attack. Membership: area under the ROC curve in percent with its 95 % interval, of the strongest
attack of that kind at all sites together; beside it the model before training, and a leak that was planted. Canaries:
mean exposure in bits.
Over several seeds the areas of each attack are also given by their mean, with its 95 % interval (Student's t).
Stopped and started again, it resumes with the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from common import command_line, machine, say, table
from real_towers import experiments

from fedvlp.cli.overrides import seeds_of
from fedvlp.evaluation.audit.gradients import GRADIENT
from fedvlp.evaluation.audit.membership import Membership
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.run import audit as audits
from fedvlp.run import presets
from fedvlp.run.audit import SENT, Audit
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from studies.attacks import measured
from studies.attacks.canaries import MEMORISED, PLANTED, UNSEEN
from studies.attacks.measured import Attacks
from studies.claims.ledger import seeded

ROOT = Path(__file__).parents[2]
PRESETS = "fedavg,feddra,car-mfl,creamfl,pms-fm"
REAL = "-real"
NOT_RUN = "-"


def experiment(name: str, seed: int, data: Path, quick: bool) -> Experiment:
    """The whole preset ``name``, or with ``quick`` one round of it."""
    if name.endswith(REAL):
        return experiments(data, quick, seed)[name]
    chosen: Any = seeded(presets.get(name), seed)
    return replace(chosen, rounds=replace(chosen.rounds, rounds=1)) if quick else chosen


@dataclass(frozen=True)
class Found:
    """The audit and the attacks of one run."""

    audit: Audit
    attacks: Attacks


def audited(root: Path, chosen: Experiment, invert: float) -> Found:
    """The audit of the run of ``chosen`` below ``root`` and its attacks; it is run first where it has not finished.

    It is attacked anew where films are wanted and it has none, unless sites send no weights to draw them from: such a
    run has no canaries either.
    """
    folder = RunFolder.newest(root, chosen) or RunFolder.create(root, chosen)
    if not folder.model.exists():
        simulate(chosen, folder, accept_phi_risk=True)
    there = measured.read(folder)
    if there is None or (invert and there.canaries and not there.inversion):
        there = measured.measure(folder, invert=invert)
    return Found(audits.read(folder) or audits.measure(folder), there)


def strongest(rows: Iterable[Membership]) -> str:
    """The attack with the largest area, and its area."""
    found = max(rows, key=lambda row: row.area.value, default=None)
    return f"{found.area.unsigned()} {found.attack}" if found else NOT_RUN


def membership(one: Found) -> list[str]:
    """Cells of a line: before training; scores of the model, its gradients, representations; the planted leak."""
    found = one.audit
    model = found.of(audits.TRAINED) + found.of(audits.OWN)
    by_gradient = [row for row in model if row.attack.startswith(GRADIENT)]
    most = found.strongest()
    return [
        f"{most.members:,}, {most.others:,}",
        strongest(found.of(audits.UNTRAINED)),
        strongest(row for row in model if row not in by_gradient),
        strongest(by_gradient),
        strongest(found.of(SENT)),
        strongest(one.attacks.leak),
    ]


def canaries(found: Found) -> list[str]:
    """Cells of a line: mean exposure of canaries that were not planted, among the records, and alone."""
    of = {row.canaries: row for row in found.attacks.canaries}
    return [of[name].mean.unsigned(2) if name in of else NOT_RUN for name in (UNSEEN, PLANTED, MEMORISED)]


STATES = {audits.UNTRAINED: "before training", audits.TRAINED: "trained", audits.OWN: "sites' own"}
"""The models of a run, and the heads of their columns."""


def over_runs(found: Sequence[Audit]) -> list[list[str]]:
    """Lines (attack, and each of ``STATES``): mean areas of one preset's runs of several seeds, with intervals.

    A run has one area for each state, so that every seed counts once.
    """
    lines = []
    for attack in dict.fromkeys(row.attack for row in found[0].of(audits.UNTRAINED)):
        areas = [[row.area.value for one in found for row in one.of(state) if row.attack == attack] for state in STATES]
        lines.append([attack, *(over_seeds(values).unsigned() if values else NOT_RUN for values in areas)])
    return lines


def updates(found: Found) -> list[str]:
    """Cells of a line: words of a step on few reports, whose update it is, films drawn from a gradient."""
    few = [row.recovered for row in found.attacks.words if row.steps == 1]
    words = f"{sum(few) / len(few):.0f}" if few else NOT_RUN
    sites = [f"{row.area.unsigned()}, {row.right:.0f} ({row.guess:.0f})" for row in found.attacks.sites]
    films = [f"{row.cosine:.2f} ({row.other:.2f}), {row.matched} of {row.records}" for row in found.attacks.inversion]
    return [words, *(sites or [NOT_RUN]), *(films or [NOT_RUN])]


TABLES: tuple[tuple[str, tuple[str, ...], Callable[[Found], list[str]]], ...] = (
    (
        "Membership, area in percent",
        ("records, others", "before training", "loss, cosine", "gradient", "representations sent", "planted leak"),
        membership,
    ),
    ("Canaries, exposure in bits of 10", ("never trained on", "among the records", "trained on alone"), canaries),
    (
        "One update",
        (
            "words of a step on eight reports, %",
            "whose: area %, right % (by guessing)",
            "film: cosine (another), found",
        ),
        updates,
    ),
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--presets", default=PRESETS)
    parser.add_argument("--seeds", default="0", help="FIRST-LAST, or one")
    parser.add_argument("--invert", type=float, default=60.0, help="seconds for drawing films from a gradient")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "real-cxr")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "audits", help="where the runs are kept")
    parser.add_argument("--quick", action="store_true", help="one round: does everything run?")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    seeds = seeds_of(options.seeds)
    found: dict[tuple[str, int], Found] = {}
    for name, seed in product(options.presets.split(","), seeds):
        root = options.runs / f"{'quick-' * options.quick}seed-{seed}"
        chosen = experiment(name, seed, options.data, options.quick)
        found[name, seed] = audited(root, chosen, options.invert)
        for sentence in found[name, seed].audit.controls() + found[name, seed].attacks.sentences():
            say({"run": name, "seed": seed, "control": sentence})
    for title, head, cells in TABLES:
        lines = [[f"{name} {seed}", *cells(one)] for (name, seed), one in found.items()]
        print(f"\n{title}\n\n{table(['run', *head], lines)}")
    for name in options.presets.split(",") if len(seeds) > 1 else ():
        lines = over_runs([found[name, seed].audit for seed in seeds])
        print(f"\n{name}, over seeds\n\n{table(['attack', *STATES.values()], lines)}")
    say(machine())


if __name__ == "__main__":
    main()
