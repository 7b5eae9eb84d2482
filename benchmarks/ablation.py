"""What each part of FedDRA is worth: FedAvg, FedDRA without one of its three parts, FedDRA, over several seeds.

    python benchmarks/ablation.py [--seeds 3] [--rounds 8] [--beta 0.5] [--workers 2] [--quick]

The built-in cohort with a hard site (noise, low contrast, bedside films, telegraphic reports) and Dirichlet label
skew. A seed draws cohort, skew, new weights and batches and is the same for every method; all have the same weighting
of sites, schedule and start. There are two axes (spec 4.4), and every row says where it is on both: the same number of
steps in a round (without two stages the steps of the align phase go to the joint phase), and the same number of full-
rate steps of the encoders ("the encoders' steps"). Processor seconds are a site's in a round.
Recall is of the test split, in batches of 32, the mean of both directions, in percent: mean over sites, and the worst
site; mean and standard deviation over seeds. Nothing is tuned per method: the settings are the presets'.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import machine, rounded, say, table

from fedvlp.evaluation import metric_names
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import summary
from fedvlp.run.simulate import simulate
from fedvlp.run.terms import Terms, processor_seconds, terms

COLUMNS = [
    metric_names.over_sites(metric_names.recall("test", k), kind)
    for k in (1, 5)
    for kind in (metric_names.AVERAGE, metric_names.WORST)
]
SECONDS = "processor seconds"


SAME_TOTAL, SAME_ENCODERS = "FedAvg, as many steps", "FedAvg, the encoders' steps"
"""FedAvg on each of the two axes of a comparison with FedDRA."""


def variants() -> dict[str, Experiment]:
    """The experiments by name. All but ``SAME_ENCODERS`` take the steps per round of FedDRA's preset."""
    full, plain = presets.get("feddra"), presets.get("fedavg")
    method: Any = full.method
    total = method.align_steps + method.local_steps
    plain = override(plain, "method.weighting", method.weighting)

    def changed(*settings: tuple[str, object]) -> Experiment:
        experiment = full
        for key, value in settings:
            experiment = override(experiment, f"method.{key}", str(value))
        return experiment

    experiments = {
        SAME_TOTAL: override(plain, "method.local_steps", str(total)),
        SAME_ENCODERS: override(plain, "method.local_steps", str(method.local_steps)),
        "FedDRA without two stages": changed(("align_steps", 0), ("local_steps", total)),
        "FedDRA without constraint": changed(("mu", 0)),
        "FedDRA without DRO": changed(("rho", 0)),
        "FedDRA": full,
    }
    refuse_unequal({name: terms(experiment) for name, experiment in experiments.items()})
    return experiments


def refuse_unequal(spent: Mapping[str, Terms]) -> None:
    """Raises SystemExit unless the variants are compared on the terms that the table says.

    One schedule, batch size and weighting for all; as many steps a round as FedDRA, or as many full-rate steps of the
    encoders.
    """
    full = spent["FedDRA"]
    wrong = []
    for name, one in spent.items():
        same = (one.schedule, one.batch_size, one.weighting) == (full.schedule, full.batch_size, full.weighting)
        axis = one.axes[0] == full.axes[0] if name == SAME_ENCODERS else one.total == full.total
        if not (same and axis):
            wrong.append(f"{name}: {one}")
    if wrong:
        raise SystemExit(f"FedDRA's terms are {full}; on other ones are {'; '.join(wrong)}")


def at_seed(experiment: Experiment, seed: int, options: argparse.Namespace) -> Experiment:
    """The experiment on this seed's cohort, with this seed's weights and batches."""
    site = f"site-{options.sites}"
    data = replace(
        experiment.data, sites=options.sites, size=options.studies, beta=options.beta, seed=seed, hard_site=site
    )  # type: ignore[type-var]
    rounds = replace(experiment.rounds, rounds=options.rounds, evaluate_every=options.rounds, seed=seed)
    return replace(experiment, data=data, rounds=rounds)


def measure(experiment: Experiment, workers: int) -> dict[str, float]:
    """Test recall of the trained model."""
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-") as folder:
        history = simulate(experiment, RunFolder.create(Path(folder), experiment), workers=workers)
    trained = summary(history)["trained"] | {SECONDS: processor_seconds(history)}
    if COLUMNS[0] not in trained:
        raise SystemExit("a site has fewer than 32 test records, so no whole batch; raise --studies or --beta")
    return {name: rounded(trained[name]) for name in (*COLUMNS, SECONDS)}


def cell(values: list[float]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=presets.get("feddra").rounds.rounds)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--studies", type=int, default=4000, help="of all sites; a fifth or so is the test split")
    parser.add_argument("--beta", type=float, default=0.5, help="Dirichlet concentration; smaller is more skewed")
    parser.add_argument("--workers", type=int, default=2, help="sites trained side by side")
    parser.add_argument("--quick", action="store_true", help="one seed, one round, few steps: does everything run?")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.rounds, options.sites, options.studies = 1, 1, 2, 500
    say({**machine(), **vars(options)})
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for name, experiment in variants().items():
            experiment = at_seed(shortened(experiment) if options.quick else experiment, seed, options)
            figures = measure(experiment, options.workers)
            results.setdefault(name, []).append(figures)
            say({"variant": name, "seed": seed, **figures})
    print("\n" + report(results, options) + "\n")
    say(machine())


def shortened(experiment: Experiment) -> Experiment:
    """A tenth of the steps, and the probe of the site weights on small batches."""
    method: Any = experiment.method
    steps = {name: getattr(method, name) // 10 for name in ("local_steps", "align_steps") if hasattr(method, name)}
    return replace(experiment, method=replace(method, **steps))


def report(results: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> str:
    """The Markdown table."""
    header = [
        "method", "R@1 mean", "R@1 worst site", "R@5 mean", "R@5 worst site", "encoder steps at the full rate", "steps",
        "processor seconds",
    ]  # fmt: skip
    rows = []
    for name, experiment in variants().items():
        encoder, total = terms(shortened(experiment) if options.quick else experiment).axes
        figures = [cell([run[column] for run in results[name]]) for column in COLUMNS]
        seconds = statistics.fmean(run[SECONDS] for run in results[name])
        rows.append([name, *figures, f"{encoder:g}", f"{total:g}", f"{seconds:.1f}"])
    said = f"{options.seeds} seeds, {options.rounds} rounds, {options.sites} sites, beta {options.beta:g}"
    return f"Test recall in batches of 32, percent; {said}.\n\n" + table(header, rows)


if __name__ == "__main__":
    main()
