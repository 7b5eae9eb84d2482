"""What clipping and noise at the sites cost in recall: FedAvg's demo preset, and the epsilon that each setting spends.

    python studies/programs/privacy.py [--rounds 2] [--quick]     # about 5 minutes of one core

Each row clips every site's update to ``clip`` and adds noise of ``noise_multiplier * clip`` to each value. Epsilon is
that of one site's whole data set at delta 1e-5 after all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from common import command_line, machine, say, table

from fedvlp.core.privacy import clip_and_noise
from fedvlp.core.types import Broadcast, Update
from fedvlp.evaluation import metric_names
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation
from fedvlp.federation.site import Site
from fedvlp.flare.privacy_budget import epsilon
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.metrics import summary

SETTINGS = [(None, 0.0), (2.5, 0.0003), (2.5, 0.003), (2.5, 8.0)]


@dataclass
class Behind:
    """A site behind its filter; ``norms`` collects how far its updates went."""

    site: Site
    clip: float | None
    noise: float
    norms: list[float]

    def handle(self, message: Broadcast, should_stop: Callable[[], bool] = lambda: False) -> Update:
        update = self.site.handle(message, should_stop)
        if not update.state:
            return update
        squares = [float((t.double() - message.state[n].double()).square().sum()) for n, t in update.state.items()]
        self.norms.append(math.sqrt(sum(squares)))
        if self.clip is None:
            return update
        return replace(update, state=clip_and_noise(update.state, message.state, self.clip, self.noise))


def run(experiment: Experiment, clip: float | None, noise: float) -> list[object]:
    """One federation; the row of the table."""
    assembly, norms = Assembly(experiment), list[float]()
    server = assembly.server(assembly.sites())
    exchange = SequentialExchange(lambda name: Behind(assembly.site(name), clip, noise, norms))
    Federation(experiment.method, server, experiment.rounds, exchange).run()
    measured = summary(server.history)["trained"]
    spent = epsilon({noise: experiment.rounds.rounds}, 1e-5) if noise else math.inf
    recall = metric_names.recall("test", 1)
    recalls = [measured[metric_names.over_sites(recall, kind)] for kind in (metric_names.AVERAGE, metric_names.WORST)]
    say({"clip": clip, "noise": noise, "epsilon": spent, "largest norm": max(norms), "r1": recalls})
    return [clip or "none", noise, f"{spent:.3g}", f"{max(norms):.2f}", *(f"{recall:.1f}" for recall in recalls)]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two steps per round on a small cohort")
    given = parser.parse_args()
    torch.set_num_threads(1)
    experiment = override(presets.get("fedavg"), "rounds.rounds", str(given.rounds))
    experiment = override(experiment, "rounds.evaluate_every", str(max(1, given.rounds)))
    experiment = override(experiment, "model.head_norm", "layer")  # noise covers no batch statistics
    if given.quick:
        experiment = override(override(experiment, "method.local_steps", "2"), "data.size", "1000")
    say(machine())
    header = ["clip", "noise multiplier", "epsilon", "largest norm", "test R@1 mean", "R@1 worst site"]
    print(table(header, [run(experiment, clip, noise) for clip, noise in SETTINGS]))
    say(machine())


if __name__ == "__main__":
    main()
