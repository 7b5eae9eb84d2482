"""Do two revisions of fedvlp train the same models? Short runs of presets in both, bytes compared.

    python benchmarks/revisions.py OLD [--presets feddra fedavg ...]

OLD is any revision that git knows, e.g. 7e9898b; it is checked out beside and compared with the working tree. Both run
the same command with seed 0. One Markdown table: the hash of the trained model, and whether the other revision's is the
same; exit code 1 unless all are. About 4 processor minutes for the seven presets.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import machine, say, table

ROOT = Path(__file__).parents[1]
START = "import sys; from fedvlp.cli import main; sys.exit(main())"
PRESETS = ("feddra", "fedavg", "fedrgb", "creamfl", "pms-fm", "car-mfl", "fedfed")
EVERY = {
    "data.size": "400", "rounds.rounds": "2", "rounds.evaluate_every": "1", "rounds.seed": "0",
    "training.batch_size": "16", "method.local_steps": "3",
}  # fmt: skip
ITS_OWN = {
    "feddra": {"method.align_steps": "2", "method.dro_batch": "8"},
    "fedrgb": {"method.aligner_steps": "2", "method.dro_batch": "8"},
    "creamfl": {"method.local_epochs": "1", "method.server_steps": "2", "method.distil_steps": "2"},
    "fedfed": {"method.distil_phases": "1", "method.distil_steps": "2"},
}


def trained(preset: str, package: Path, runs: Path) -> str:
    """Runs the preset with the package under ``package``; the hash of its model."""
    settings = [f"--set={key}={value}" for key, value in {**EVERY, **ITS_OWN.get(preset, {})}.items()]
    command = [sys.executable, "-c", START, "simulate", preset, *settings, "--runs", str(runs), "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{preset} with {package}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    model = runs / preset / "001" / "model" / "model.safetensors"
    return hashlib.sha256(model.read_bytes()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a revision, e.g. 7e9898b")
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    options = parser.parse_args()
    say(machine())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "old"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), options.old], check=True)
        try:
            for preset in options.presets:
                new = trained(preset, ROOT / "custom", Path(folder) / "runs-new")
                old = trained(preset, other / "custom", Path(folder) / "runs-old")
                rows.append([preset, new, "the same" if new == old else f"**{old}**"])
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    print(table(["preset", "model of this tree", f"of {options.old}"], rows))
    return int(any(row[2] != "the same" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
