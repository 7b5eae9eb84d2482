"""How long users wait for the main job: this tree beside an older revision, in turn, on one quiet machine.

    python studies/programs/simulator.py OLD [--turns 3] [--only bare t5 engine]

OLD is any revision that git knows, e.g. 7e9898b. Both run the experiment of its ``jobs/feddra``, the older one as it
was committed, this tree in a job that it writes itself:

    bare     ``nvflare simulator JOB``
    t5       ``nvflare simulator JOB -t 5``
    engine   ``fedvlp simulate``, two workers

One turn is every variant by both, the older one first. Prints the seconds of each run as it ends, then one Markdown
table: median and range, the ratio of this tree to the older one by turn, and whether this tree's runs have one model.
A turn takes about 40 minutes on two cores, the first variant alone 20.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import command_line, machine, say, table
from revisions import ROOT, Tree, checked_out

from fedvlp.core.names import PUBLIC
from fedvlp.flare.jobs import write_job
from fedvlp.run.config import from_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder

NVFLARE = Path(sys.executable).parent / "nvflare"
VARIANTS = ("bare", "t5", "engine")
THIS = "this tree"


def experiment_of(job: Path) -> Experiment:
    """What an older job trains, as this tree reads it."""
    server = json.loads((job / "app" / "config" / "config_fed_server.json").read_text(encoding="utf-8"))
    experiment: Experiment = from_config(renamed({"path": "fedvlp.Experiment", "args": server["workflows"][0]["args"]}))
    return experiment


def renamed(value: Any) -> Any:
    """A configuration with the public name of each class in the place of the path that it once had."""
    if isinstance(value, list):
        return [renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    public = {name.rpartition(".")[2]: name for name in PUBLIC}
    return {key: public[item.rpartition(".")[2]] if key == "path" else renamed(item) for key, item in value.items()}


def command(variant: str, job: Path, tree: Tree, begun: Path | None) -> list[str]:
    """What a user types; ``begun`` is a folder for the engine's run, None: for the older tree, whose preset it is."""
    if variant == "engine":
        where = ["--runs", str(tree.runs)] if begun is None else ["--resume", str(begun)]
        return tree.command("simulate", "feddra", *where, "--workers", "2")
    threads = ["-t", "5"] if variant == "t5" else []
    return [str(NVFLARE), "simulator", str(job), *threads, "-w", str(tree.runs / "workspace")]


def timed(words: list[str], tree: Tree) -> tuple[float, str]:
    """Seconds of a run, and the hash of its model."""
    tree.runs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    done = subprocess.run(
        words, cwd=tree.runs, env=tree.environment, capture_output=True, text=True, timeout=3600, check=False
    )
    seconds = time.monotonic() - began
    run = tree.runs / "feddra" / "001"
    if done.returncode or not (run / "model").is_dir():
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds, tree.model("feddra")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("old", help="a revision, e.g. 7e9898b")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS)
    options = parser.parse_args()
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    hashes: dict[str, set[str]] = defaultdict(set)
    say(machine())
    with tempfile.TemporaryDirectory() as name, checked_out(options.old, Path(name) / "old") as package:
        folder, older = Path(name), package.parent / "jobs" / "feddra"
        experiment = experiment_of(older)
        jobs = {options.old: older, THIS: write_job(experiment, folder / "job")}
        for turn in range(options.turns):
            for variant in options.only:
                for who, code in ((options.old, package), (THIS, ROOT / "custom")):
                    tree = Tree(code, folder / f"{turn}-{variant}-{code.parent.name}")
                    mine = variant == "engine" and who == THIS
                    begun = RunFolder.create(tree.runs, experiment).path if mine else None
                    took, model = timed(command(variant, jobs[who], tree, begun), tree)
                    seconds[variant, who].append(took)
                    hashes[who].add(model)
                    load = round(os.getloadavg()[0], 2)
                    say({"turn": turn, "variant": variant, "code": who, "s": round(took), "model": model, "load": load})
    rows = []
    for variant in options.only:
        old, new = seconds[variant, options.old], seconds[variant, THIS]
        ratios = [after / before for before, after in zip(old, new, strict=True)]
        rows.append([variant, shown(old), shown(new), ", ".join(f"{ratio:.2f}" for ratio in ratios)])
    print(f"\n{table(['variant', f's, {options.old}', 's, this tree', 'ratio by turn'], rows)}\n")
    print(f"Models of this tree: {len(hashes[THIS])}; of {options.old}: {len(hashes[options.old])}.\n")
    say(machine())


def shown(values: list[float]) -> str:
    """Median and range of seconds."""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    main()
