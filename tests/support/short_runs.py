"""Short runs of a provisioned consortium, for tests that kill its servers and sites; tasks train in child processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fedvlp.core.types import Broadcast, Reply
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation
from fedvlp.flare.jobs import write_job
from fedvlp.flare.timeouts import Timeouts
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from support.provisioned import Consortium, connected, until

GRACE = 30.0
"""Seconds. A machine with three tests a core takes ten to start a site's child: a site at work is never dropped."""
SHORT = replace(Timeouts.of(10**7, 1000.0, training=300.0), grace=GRACE)


def experiment(rounds: int) -> Experiment:
    """Two sites, two steps a round."""
    chosen = presets.get("fedavg")
    settings = {"data.size": 300, "data.sites": 2, "rounds.rounds": rounds, "rounds.max_missed": 9,
                "method.local_steps": 2, "training.batch_size": 16}  # fmt: skip
    for key, value in settings.items():
        chosen = override(chosen, key, str(value))
    return chosen


def job(here: Consortium, chosen: Experiment, name: str) -> str:
    folder = write_job(chosen, here.folder / name, custom=False, child=True, timeouts=SHORT)
    return str(folder)


def new_run(here: Consortium) -> RunFolder:
    """The folder of the run that the server begins next."""
    made = [entry for entry in (here.runs() / "fedavg").glob("*") if entry.is_dir()]
    return RunFolder(here.runs() / "fedavg" / f"{len(made) + 1:03d}")


def phases(folder: RunFolder) -> int:
    """How many phases of the run are complete."""
    return len(folder.history())


def kill(here: Consortium, name: str) -> None:
    """Kills FLARE at the server or a site; returns when the watchdog has started it again and all are connected."""
    killed, now = here.parent(name), time.time()
    killed.kill()
    until(lambda: here.parent(name).pid != killed.pid, f"the watchdog restarts {name}")
    until(lambda: connected(here, now), "all are back by themselves")


def without(chosen: Experiment, silent: set[tuple[str, int]], tmp_path: Path) -> RunFolder:
    """The engine's run in which a site does not answer in a round."""
    folder = RunFolder.create(tmp_path / "engine", chosen)
    assembly = Assembly(chosen, folder.path)
    inner = SequentialExchange(assembly.site)

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in inner(messages):
            yield site, TimeoutError() if (site, messages[site].round) in silent else reply

    server = assembly.server(assembly.sites())
    state = Federation(chosen.method, server, chosen.rounds, exchange, checkpoint=folder.checkpoint).run()
    folder.finish(chosen, state, server.history)
    return folder
