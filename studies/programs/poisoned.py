"""What one poisoned site of five does to the model, and what clipping to the sites' median leaves of it.

    python studies/programs/poisoned.py [--method fedavg] [--seeds 0] [--rounds 3] [--quick]

In every round site-1 sends the change that its training made to the weights times a factor; a negative one turns it
round. The values are finite, so that no check refuses them. ``clip_to_median`` is ``rounds.clip_to_median``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from common import command_line, machine, mean_sd, say, table

from fedvlp.core.types import Broadcast, Update, is_statistic
from fedvlp.evaluation import metric_names
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation
from fedvlp.federation.site import Site
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.metrics import summary

POISONED = "site-1"
SETTINGS = [(1.0, 0.0), (1.0, 1.0), (-10.0, 0.0), (-10.0, 1.0), (-10.0, 2.0), (1000.0, 1.0)]  # factor, clip
FIGURES = (
    metric_names.over_sites(metric_names.recall("test", 1), metric_names.AVERAGE),
    metric_names.over_sites(metric_names.recall("test", 1), metric_names.WORST),
    metric_names.over_sites(metric_names.recall("test", 5), metric_names.AVERAGE),
)


@dataclass
class Poisoned:
    """A site whose change is sent times ``factor``."""

    site: Site
    factor: float

    def handle(self, message: Broadcast, should_stop: Callable[[], bool] = lambda: False) -> Update:
        update = self.site.handle(message, should_stop)
        scaled = {
            n: t if is_statistic(n) else message.state[n] + self.factor * (t - message.state[n])
            for n, t in update.state.items()
        }
        return replace(update, state=scaled)


def run(experiment: Experiment, factor: float, clip: float) -> list[float]:
    """Held-out recalls after one federation."""
    experiment = replace(experiment, rounds=replace(experiment.rounds, clip_to_median=clip))
    assembly = Assembly(experiment)
    server = assembly.server(assembly.sites())
    exchange = SequentialExchange(lambda name: Poisoned(assembly.site(name), factor if name == POISONED else 1.0))
    Federation(experiment.method, server, experiment.rounds, exchange).run()
    measured = summary(server.history)["trained"]
    return [measured[name] for name in FIGURES]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two steps per round: does everything run?")
    given = parser.parse_args()
    torch.set_num_threads(1)
    say({**machine(), **vars(given)})
    rows = []
    for factor, clip in SETTINGS:
        found = []
        for seed in given.seeds:
            chosen = presets.get(given.method)
            method = replace(chosen.method, local_steps=2) if given.quick else chosen.method
            rounds = replace(chosen.rounds, rounds=given.rounds, evaluate_every=given.rounds, seed=seed)
            found.append(run(replace(chosen, method=method, rounds=rounds), factor, clip))
            say({"factor": factor, "clip": clip, "seed": seed, **dict(zip(FIGURES, found[-1], strict=True))})
        rows.append(
            [f"{factor:g}", clip or "never", *(mean_sd([one[i] for one in found]) for i in range(len(FIGURES)))]
        )
    header = ["site-1's change times", "clip_to_median", "test R@1 average", "R@1 worst site", "R@5 average"]
    print("\n" + table(header, rows))
    say(machine())


if __name__ == "__main__":
    main()
