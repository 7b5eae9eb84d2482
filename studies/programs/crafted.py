"""How often a site would refuse an honest server: every model that honest runs of all methods send, against the check.

    python studies/programs/crafted.py [--runs 200]     # about five seconds a run on one core

Each run takes the next preset, another seed and another learning rate (up to 30 times the preset's) at the smallest
size: every model that a site is sent is checked as `flare/task_handler.py` does. Presets with a paper's towers are left
out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import command_line, machine, say

from fedvlp.core.crafted import Start, check_crafted, start_of
from fedvlp.core.types import Broadcast, Update
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, QuorumLostError
from fedvlp.federation.site import Site
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment

RATES = (1.0, 3.0, 10.0, 30.0)


@dataclass
class Checked:
    """A site that looks at what it is sent, and trains it whatever it sees."""

    site: Site
    start: Start
    seen: list[tuple[str, str | None]]

    def handle(self, message: Broadcast, should_stop: Callable[[], bool] = lambda: False) -> Update:
        self.seen.append((self.site.client.name, check_crafted(message.state, self.start)))
        return self.site.handle(message, should_stop)


def smallest(preset: str, seed: int, rate: float) -> Experiment:
    """Three rounds of few steps on a small cohort."""
    experiment: Any = presets.get(preset)
    sites = experiment.data.sites
    settings = {"rounds.rounds": 3, "rounds.evaluate_every": 0, "rounds.seed": seed, "data.size": 40 * sites,
                "training.batch_size": 8, "training.lr": experiment.training.lr * rate}  # fmt: skip
    for name, most in (("local_steps", 3), ("align_steps", 2), ("aligner_steps", 2), ("local_epochs", 0)):
        if getattr(experiment.method, name, 0):
            settings[f"method.{name}"] = most
    if "method.local_epochs" in settings:
        settings |= {"method.local_epochs": 1}
    for key, value in settings.items():
        experiment = override(experiment, key, str(value))
    return replace(experiment, model=replace(experiment.model, init="")) if seed % 2 else experiment


def run(preset: str, seed: int, rate: float) -> dict[str, Any]:
    """One honest run: how many models were sent, and why any was refused."""
    assembly = Assembly(smallest(preset, seed, rate))
    experiment = assembly.experiment
    seen: list[tuple[str, str | None]] = []

    def site(name: str) -> Checked:
        made = assembly.site(name)
        return Checked(made, start_of(assembly.initial(None if assembly.pooled else name)), seen)

    server = assembly.server(assembly.sites())
    ended = ""
    try:
        Federation(experiment.method, server, experiment.rounds, SequentialExchange(site)).run()
    except (QuorumLostError, FloatingPointError) as error:  # a rate that no training bears: what was sent counts
        ended = type(error).__name__
    refused = [why for _, why in seen if why]
    return {
        "preset": preset, "seed": seed, "rate": rate, "sent": len(seen), "refused": refused[:3], "ended": ended
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    say(machine())
    names = sorted(presets.PRESETS.keys() - set(presets.PAPERS))
    total: Counter[str] = Counter()
    for seed, (rate, name) in enumerate(itertools.islice(itertools.cycle(itertools.product(RATES, names)), given.runs)):
        row = run(name, seed, rate)
        total.update(runs=1, models=row["sent"], refused=bool(row["refused"]), ended=bool(row["ended"]))
        if row["refused"] or row["ended"]:
            say(row)
        if not total["runs"] % 20:
            say(dict(total))
    say(dict(total))


if __name__ == "__main__":
    main()
