"""One run of `nvflare simulator` (FedDRA, two sites, two threads, one round) that many tests look at.

Its two hospitals have a table of DICOM films whose every text names somebody, and a privacy.json that changes nothing;
every process writes down what it sends. The one start of real FLARE processes in `make test`.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.planted import CANARIES, RECORDER, found, planted
from support.simulator import assert_same_metrics, simulator

from fedvlp.data.sources.table import TableSource
from fedvlp.flare.jobs import write_job
from fedvlp.flare.retrying_cell import SENT_AGAIN
from fedvlp.flare.tensor_stream import SETTING
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

pytestmark = pytest.mark.timeout(400)  # real processes, which a slow machine takes long to start

SETTINGS = {
    "rounds.rounds": 1, "method.local_steps": 1, "method.align_steps": 1, "training.batch_size": 4,
    "method.dro_batch": 4,
}  # fmt: skip
NEUTRAL = {
    "scopes": [{
        "name": "default", "properties": {}, "task_data_filters": [],
        "task_result_filters": [{"path": "fedvlp.flare.AllowMetrics", "args": {"names": ["*"]}}],
    }],
    "default_scope": "default",
    "components": [{"id": "fedvlp_received", "path": "fedvlp.flare.RememberReceived", "args": {}}],
}  # fmt: skip
"""A privacy.json whose filters see every update and let all of it pass."""


@dataclass(frozen=True)
class Smoke:
    """``out`` holds all that the run left: the job, FLARE's workspace, what was sent, its output, the results."""

    out: Path
    data: Path
    flare: RunFolder
    engine: RunFolder
    done: subprocess.CompletedProcess[str]


def in_small_pieces(job: Path) -> None:
    """Both sides send 16 KB at a time: 128 pieces of the words, whose order counts, and 12 of an attention."""
    for side in ("server", "client"):
        file = job / "app" / "config" / f"config_fed_{side}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), SETTING: 1 << 14}))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    folder = tmp_path_factory.mktemp("smoke")
    table = planted(folder / "data")
    experiment = replace(presets.get("feddra"), data=TableSource(str(table), image_size=72))
    for key, value in SETTINGS.items():
        experiment = override(experiment, key, str(value))
    engine = RunFolder.create(folder / "engine", experiment)
    simulate(experiment, engine, accept_phi_risk=True)

    out, code = folder / "out", folder / "code"
    local, sent = out / "workspace" / "local", out / "sent"
    for made in (local, sent, code):
        made.mkdir(parents=True)
    (local / "fedvlp.json").write_text(json.dumps({"accept_phi_risk": True}))
    (local / "privacy.json").write_text(json.dumps(NEUTRAL))
    (code / "sitecustomize.py").write_text(RECORDER)
    job = write_job(experiment, out / "job")
    in_small_pieces(job)
    packages = os.pathsep.join((str(code), os.environ.get("PYTHONPATH", "")))
    done = simulator(job, out, 2, PYTHONPATH=packages, RECORD=str(sent))
    (out / "output.txt").write_text(done.stdout + done.stderr)
    return Smoke(out, folder / "data", RunFolder(out / "runs" / "feddra" / "001"), engine, done)


def test_it_ends_well(smoke: Smoke) -> None:
    assert smoke.done.returncode == 0, smoke.done.stdout[-3000:] + smoke.done.stderr[-3000:]
    assert json.loads((smoke.flare.path / "run_status.json").read_text())["status"] == "finished"


def test_each_site_sends_again_what_is_not_acknowledged(smoke: Smoke) -> None:
    """FLARE's connection was found where it is looked for, a part of FLARE that is no interface."""
    assert (smoke.done.stdout + smoke.done.stderr).count(SENT_AGAIN) >= 2


def test_the_model_and_every_metric_are_the_engines(smoke: Smoke) -> None:
    """To the last bit, with a site's privacy policy in between that changes nothing."""
    assert smoke.flare.model.read_bytes() == smoke.engine.model.read_bytes()
    assert_same_metrics(smoke.flare, smoke.engine)


def test_metrics_csv_holds_what_the_history_holds(smoke: Smoke) -> None:
    with (smoke.flare.path / "metrics.csv").open(newline="") as file:
        rows = {(int(r["round"]), r["phase"], r["site"], r["metric"]): float(r["value"]) for r in csv.DictReader(file)}
    for record in smoke.flare.history():
        for site, metrics in record["sites"].items():
            for name, value in metrics.items():
                assert rows[record["round"], record["phase"], site, name] == pytest.approx(value)


def test_tensorboard_has_every_sites_and_the_servers_curves(smoke: Smoke) -> None:
    """The sites' curves come through FLARE's event streaming; worst site, weights and bytes from the server."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = {}
    for entry in (smoke.flare.path / "tb").iterdir():
        events = EventAccumulator(str(entry))
        events.Reload()
        curves[entry.name] = {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}
    for site in ("site-1", "site-2"):
        assert curves[site]["loss/contrastive/align"] == curves[site]["loss/contrastive/joint"] == 1
        assert curves[site]["val/all/mean/r1"] == 2, "initial and trained model"
    server = curves[next(name for name in curves if "server" in name)]
    for tag in ("val/all/mean/r1/worst", "dro_weights/site-2", "bytes_up/align", "seconds/joint"):
        assert server[tag] >= 1, tag


def test_the_search_finds_what_is_planted(smoke: Smoke) -> None:
    assert {hit.split(" in ")[0] for hit in found(smoke.data)} == set(CANARIES)


def test_nobody_is_named_in_any_file_or_byte_sent(smoke: Smoke) -> None:
    """The sites accepted the risk in their own settings, so the reports were trained on."""
    assert found(smoke.out) == []
    recorded = b"".join(path.read_bytes() for path in (smoke.out / "sent").iterdir())
    assert b"loss/contrastive" in recorded, "the recorder saw the updates"
    models = sum(path.stat().st_size for path in (smoke.out / "runs").rglob("model.safetensors"))
    assert len(recorded) > 2 * 2 * models, "two sites, there and back"
