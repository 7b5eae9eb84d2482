"""What a start is worth: FedAvg from random weights and from the shipped encoders, over seeds.

    python studies/programs/start.py [--preset fedavg] [--seeds 3] [--rounds 4] [--workers 2] [--quick]

The preset with nothing else changed; a seed draws cohort, new weights and batches and is the same for both starts. The
shipped encoders were pre-trained on a cohort of another seed (`make towers`). Recall of the test split before and
after training, in batches of 32, the mean of both directions, in percent (chance 3.1 and 15.6): mean over sites, and
the worst site; mean and standard deviation over seeds.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from common import command_line, machine, mean_sd, rounded, say, table

from fedvlp.evaluation import metric_names
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import summary
from fedvlp.run.simulate import simulate

STARTS = ("random", "tiny-pool")
COLUMNS = [
    metric_names.over_sites(metric_names.recall("test", k), kind)
    for k in (1, 5)
    for kind in (metric_names.AVERAGE, metric_names.WORST)
]


def measure(experiment: Experiment, workers: int) -> dict[str, float]:
    """Test recall of the initial and of the trained model."""
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-") as folder:
        found = summary(simulate(experiment, RunFolder.create(Path(folder), experiment), workers=workers))
    return {f"{model} {name}": rounded(found[model][name]) for model in ("initial", "trained") for name in COLUMNS}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--preset", default="fedavg")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2, help="sites trained side by side")
    parser.add_argument("--quick", action="store_true", help="one round of two steps: does everything run?")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for start in STARTS:
            experiment = override(presets.get(options.preset), "model.init", start)
            rounds = replace(experiment.rounds, rounds=options.rounds, evaluate_every=options.rounds, seed=seed)
            experiment = replace(experiment, rounds=rounds, data=replace(experiment.data, seed=seed))  # type: ignore
            if options.quick:
                rounds = replace(rounds, rounds=1, evaluate_every=1)
                experiment = replace(experiment, method=replace(experiment.method, local_steps=2), rounds=rounds)
            figures = measure(experiment, options.workers)
            results.setdefault(start, []).append(figures)
            say({"start": start, "seed": seed, **figures})
    header = ["start", "initial R@1", "R@1 mean", "R@1 worst site", "R@5 mean", "R@5 worst site"]
    shown = [f"initial {COLUMNS[0]}", *(f"trained {name}" for name in COLUMNS)]
    rows = [[start, *(mean_sd([run[column] for run in runs]) for column in shown)] for start, runs in results.items()]
    print("\n" + table(header, rows) + "\n")
    say(machine())


if __name__ == "__main__":
    main()
