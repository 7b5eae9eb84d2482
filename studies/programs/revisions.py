"""Do two revisions of fedvlp train the same models, and does this one resume what the other began?

    python studies/programs/revisions.py OLD [--presets feddra fedavg ...] [--quick]

OLD is any revision that git knows, e.g. 7e9898b; it is checked out beside and compared with the working tree. Both run
the same short commands with seed 0. One Markdown table: the hash of the model, and whether it is the same when OLD

* trained it (each preset),
* began the run, was killed after its first checkpoint, and this tree went on (``RESUMED``),
* wrote the FLARE job, and FLARE's simulator ran it with this tree (``EXPORTED``).

Exit code 1 unless all are. ``--quick`` leaves the last two out. About 6 processor minutes for the seven presets.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import command_line, machine, say, table

ROOT = Path(__file__).parents[2]
START = "import sys; from fedvlp.cli import main; sys.exit(main())"
PRESETS = ("feddra", "fedavg", "fedrgb", "creamfl", "pms-fm", "car-mfl", "fedfed")
RESUMED = ("feddra", "pms-fm")
EXPORTED = "feddra"
EVERY = {
    "data.size": "400",
    "rounds.rounds": "2",
    "rounds.evaluate_every": "1",
    "rounds.seed": "0",
    "training.batch_size": "16",
    "method.local_steps": "3",
}
ITS_OWN = {
    "feddra": {"method.align_steps": "2", "method.dro_batch": "8"},
    "fedrgb": {"method.aligner_steps": "2", "method.dro_batch": "8"},
    "creamfl": {"method.local_epochs": "1", "method.server_steps": "2", "method.distil_steps": "2"},
    "fedfed": {"method.distil_phases": "1", "method.distil_steps": "2"},
}


@dataclass(frozen=True)
class Tree:
    """A revision's package, and where its runs go."""

    package: Path
    runs: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.package), "FEDVLP_HOME": str(self.runs)}

    def command(self, *arguments: str) -> list[str]:
        """``fedvlp`` with this package."""
        return [sys.executable, "-c", START, *arguments]

    def does(self, *command: str) -> None:
        """Runs a command to its end. Raises SystemExit with its last lines if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise SystemExit(f"{self.package}: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def simulate(self, preset: str) -> list[str]:
        return self.command("simulate", preset, *settings(preset), "--runs", str(self.runs), "--workers", "2")

    def model(self, preset: str) -> str:
        """The hash of the trained model of the last run."""
        newest = max((self.runs / preset).iterdir(), key=lambda run: run.name)
        return hashlib.sha256((newest / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]


def settings(preset: str) -> list[str]:
    """The short run's settings for the command line."""
    return [f"--set={key}={value}" for key, value in {**EVERY, **ITS_OWN.get(preset, {})}.items()]


def trained(tree: Tree, preset: str) -> str:
    """The preset run by this tree alone."""
    tree.does(*tree.simulate(preset))
    return tree.model(preset)


def resumed(old: Tree, new: Tree, preset: str) -> str:
    """Begun by ``old``, killed after its first checkpoint, ended by ``new``."""
    process = subprocess.Popen(old.simulate(preset), env=old.environment, stdout=subprocess.DEVNULL)
    checkpoint = old.runs / preset / "001" / "checkpoints" / "server.safetensors"
    while process.poll() is None and not checkpoint.exists():
        time.sleep(0.01)
    process.kill()
    process.wait()
    if (old.runs / preset / "001" / "model").exists():
        raise SystemExit(f"{preset}: the run ended before it could be killed; give it more rounds")
    new.does(*new.command("simulate", preset, "--resume", str(old.runs / preset / "001"), "--workers", "2"))
    return old.model(preset)


def exported(old: Tree, new: Tree, preset: str, folder: Path) -> str:
    """The job written by ``old``, run in FLARE's simulator by ``new``."""
    job = folder / "job"
    old.does(*old.command("jobs", "export", preset, str(job), *settings(preset)))
    simulator = shutil.which("nvflare", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    new.does(str(simulator), "simulator", str(job), "-t", "2", "-w", str(folder / "workspace"))
    return new.model(preset)


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """The package of another revision, in a worktree that is removed afterwards."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
    try:
        yield folder / "custom"
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("old", help="a revision, e.g. 7e9898b")
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--quick", action="store_true", help="train the presets only")
    options = parser.parse_args()
    say(machine())
    rows: list[tuple[str, str, str, str]] = []
    with tempfile.TemporaryDirectory() as place, checked_out(options.old, Path(place) / "old") as package:
        folder = Path(place)

        def trees(name: str) -> tuple[Tree, Tree]:
            """The other revision and this one, with folders of their own for one comparison."""
            return Tree(package, folder / f"{name}-old"), Tree(ROOT / "custom", folder / f"{name}-new")

        for preset in options.presets:
            old, new = trees("trained")
            reference = trained(new, preset)
            rows.append((preset, "trained", reference, trained(old, preset)))
            if preset in RESUMED and not options.quick:
                rows.append((preset, "resumed", reference, resumed(*trees("resumed"), preset)))
            if preset == EXPORTED and not options.quick:
                rows.append((preset, "job", reference, exported(*trees("job"), preset, folder)))
    shown = [(name, what, mine, "the same" if mine == other else f"**{other}**") for name, what, mine, other in rows]
    print(table(["preset", "what the other did", "model of this tree", f"with {options.old}"], shown))
    return int(any(mine != other for _, _, mine, other in rows))


if __name__ == "__main__":
    sys.exit(main())
