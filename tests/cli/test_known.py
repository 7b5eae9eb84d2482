"""What a command refuses before it imports torch, and that the names by which it does are those of the code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import known as maker

from fedvlp.cli import known
from fedvlp.run.config import override
from fedvlp.run.presets import PRESETS

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # to import it is an ImportError
from fedvlp.cli import main
from fedvlp.run import plugins
plugins.GROUP = "as at a site, where no plugin is installed"
codes = []
for line in sys.stdin:
    sys.argv = ["fedvlp", *json.loads(line)]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
    print("=", file=sys.stderr)
print(codes)
"""
REFUSED = {
    "simulate feddra --data table:missing.csv": "table source: 'missing.csv' is not there",
    "simulate feddra --data tabel:missing.csv": "unknown source of --data 'tabel'; did you mean 'table'?",
    "simulate feddra --data missing.csv": "--data is 'missing.csv'; give synthetic, label-skew",
    "simulate feddra --data openi:.,nonsense=3": "unknown setting 'nonsense'",
    "simulate feddra --data openi:. --set data.nonsense=3": "unknown setting 'nonsense'",
    "simulate feddra --site north=table:missing.csv": "table source: 'missing.csv' is not there",
    "simulate feddra --site north": "--site 'north' is not NAME=SOURCE:FOLDER",
    "simulate feddrx": "unknown preset 'feddrx'; did you mean 'feddra'?",
    "simulate feddra --set method.roh=1": "unknown setting 'roh'; did you mean 'rho'?",
    "simulate feddra --set roh=1": "unknown setting 'roh'",
    "simulate feddra --set training.lr=fast": "lr is 'fast'; Training.lr takes a number",
    "simulate feddra --set training": "--set 'training' has no '='",
    "simulate feddra --nope": "No such option: --nope",
    "simulate feddra --sites 0": "--sites is 0",
    "simulate feddra --workers -1": "--workers is -1",
    "simulate feddra --like missing": "missing holds no run: config.json is missing there",
    "simulate --resume missing": "missing holds no run",
    "simulate --config missing.toml": "--config missing.toml: No such file",
    "simulate": "no preset; name one",
    "settings feddrx": "unknown preset 'feddrx'",
    "sweep fedavg feddrx": "unknown preset 'feddrx'",
    "jobs export feddrx out": "unknown preset 'feddrx'",
    "jobs rollback missing --round 1": "missing holds no run",
    "jobs status missing": "missing holds no run_status.json",
    "prepare table:missing.csv --out out": "table source: 'missing.csv' is not there",
    "evaluate missing --what zero-shot": "missing holds no trained model",
    "evaluate missing --what linear-probe": "missing holds no trained model",
    "evaluate missing --what nothing": "unknown evaluation 'nothing'",
    "predict missing film.png": "missing holds no trained model",
    "report missing": "missing holds no run",
    "audit missing": "missing holds no run",
    "compare missing other": "missing holds no run",
    "runs missing": "no run in missing",
    "doctor --site missing": "does not exist",
}


def test_arguments_are_checked_without_torch(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(command.split()) for command in ("--help", "presets", *REFUSED))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=lines, capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.stdout.strip().endswith(str([0, 0, *[2] * len(REFUSED)])), done.stderr[-3000:]
    for (command, words), said in zip(REFUSED.items(), done.stderr.split("=\n")[2:], strict=False):
        assert words in said, command


def test_the_names_are_those_of_the_code() -> None:
    """``make docs`` writes the file anew."""
    assert maker.FILE.read_text(encoding="utf-8") == maker.content()


def test_a_stand_in_refuses_in_the_words_of_the_experiment() -> None:
    for setting in ["roh=1", "method.roh=1", "method.rho=x", "method=x", "name.x=1", "rounds.rounds=0.5"]:
        key, _, text = setting.partition("=")
        said = []
        for experiment in (PRESETS["feddra"], known.stand_in(known.index()["presets"]["feddra"])):
            with pytest.raises(ValueError, match=r".") as refused:
                override(experiment, key, text)
            said.append(str(refused.value))
        assert said[0] == said[1]


def test_what_another_group_has_is_left_to_the_experiment() -> None:
    known.refuse_experiment("feddra", settings=["objective=medclip", "objective.sentences=true"])
    with pytest.raises(ValueError, match="unknown setting 'sentences'"):
        known.refuse_experiment("feddra", settings=["objective.sentences=true"])


def test_data_that_are_known_by_name_are_taken() -> None:
    for data in ["synthetic", "label-skew", "named:chest"]:
        known.refuse_experiment("feddra", data, settings=["data.seed=3", "method.rho=0"])
