"""A site's privacy.json in real FLARE runs: what the site says holds whatever the job says, and the run shows it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedvlp.config import override
from fedvlp.experiment import Experiment
from fedvlp.flare.jobs import write_job
from fedvlp.presets import get
from fedvlp.runs import RunFolder, simulate

pytestmark = pytest.mark.slow

NVFLARE = Path(sys.executable).parent / "nvflare"
RECEIVED = {"id": "fedvlp_received", "path": "fedvlp.flare.filters.RememberReceived", "args": {}}


def small(name: str, **settings: object) -> Experiment:
    experiment = get(name)
    chosen = {"data.size": 300, "data.sites": 2, "method.local_steps": 2, "training.batch_size": 16, **settings}
    for key, value in chosen.items():
        experiment = override(experiment, key, str(value))
    return experiment


def run(folder: Path, job: Path, policy: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """`nvflare simulator` with ``policy`` as every site's privacy.json; results land in ``folder/runs``."""
    local = folder / "workspace" / "local"
    local.mkdir(parents=True)
    (local / "privacy.json").write_text(json.dumps(policy))
    environment = {key: value for key, value in os.environ.items() if key != "FEDVLP_HOME"}
    return subprocess.run(
        [NVFLARE, "simulator", job, "-w", folder / "workspace", "-t", "2"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def policy(results: list[dict[str, Any]], tasks: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    scope = {"name": "default", "properties": {}, "task_data_filters": list(tasks), "task_result_filters": results}
    return {"scopes": [scope], "default_scope": "default", "components": [RECEIVED]}


def rule(name: str, **args: Any) -> dict[str, Any]:
    return {"path": f"fedvlp.flare.{name}", "args": args}


def test_noise_budget_and_metrics_of_a_site(tmp_path: Path) -> None:
    """Noise 8 at a budget of 3 holds 7 releases; the eighth round has no update and the run stops, resumable.

    The curves of TensorBoard stem from the replies that left: a metric that the site keeps is not in them either.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fedvlp.flare.budget import epsilon

    assert epsilon({8.0: 7}, 1e-5) <= 3 < epsilon({8.0: 8}, 1e-5)
    dp = rule("filters.ClipAndNoise", clip=0.01, noise_multiplier=8.0, epsilon=3.0, delta=1e-5, dataset="chest")
    numbers = rule("filters.AllowMetrics", names=["loss/*", "privacy/epsilon"], drop=True)
    experiment = small("fedavg", **{"rounds.rounds": 9, "rounds.evaluate_every": 0, "model.head_norm": "layer"})
    done = run(tmp_path, write_job(experiment, tmp_path / "job"), policy([dp, numbers]))
    assert done.returncode == 2
    folder = RunFolder(tmp_path / "runs" / "fedavg" / "001")
    assert len(folder.history()) == 7
    with (folder.path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["site"] == "site-1"]
    spent = {int(row["round"]): float(row["value"]) for row in rows if row["metric"] == "privacy/epsilon"}
    assert spent == {n: pytest.approx(epsilon({8.0: n + 1}, 1e-5)) for n in range(7)}
    assert {row["metric"] for row in rows} == {"loss/contrastive", "privacy/epsilon"}
    status = json.loads((folder.path / "run_status.json").read_text())
    assert status["status"] == "stopped"
    assert "privacy budget of 'chest' is used up" in status["reason"]
    logs = (tmp_path / "workspace" / "site-1").rglob("log.txt")
    assert any("release 7, epsilon" in log.read_text() for log in logs)
    curves = EventAccumulator(str(folder.path / "tb" / "site-1"))
    curves.Reload()
    assert set(curves.Tags()["scalars"]) == {"loss/contrastive/train", "privacy/epsilon"}


def test_a_policy_that_changes_nothing_gives_the_same_bytes(tmp_path: Path) -> None:
    experiment = small("feddra", **{"rounds.rounds": 1, "method.align_steps": 2})
    engine = RunFolder.create(tmp_path / "engine", experiment)
    simulate(experiment, engine)
    done = run(tmp_path, write_job(experiment, tmp_path / "job"), policy([rule("filters.AllowMetrics", names=["*"])]))
    assert done.returncode == 0, done.stdout[-3000:]
    assert RunFolder(tmp_path / "runs" / "feddra" / "001").model.read_bytes() == engine.model.read_bytes()


def test_an_encrypted_run_ends_in_the_plain_model_at_the_sites_alone(tmp_path: Path) -> None:
    """The decrypted model is within 1e-4 of the engine's; the server's folder holds no trained weight."""
    pytest.importorskip("tenseal", reason="pip install 'fedvlp[he]'")
    from nvflare.lighter.impl.he import HEBuilder

    builder = HEBuilder(poly_modulus_degree=4096, coeff_mod_bit_sizes=[60, 49], scale_bits=30)
    builder.initialize(None, None)
    startup = tmp_path / "workspace" / "startup"
    startup.mkdir(parents=True)
    (startup / "server_context.tenseal").write_bytes(builder.get_serialized_context())
    (startup / "client_context.tenseal").write_bytes(builder.get_serialized_context(is_client=True))
    experiment = small("fedavg", **{"rounds.rounds": 2})
    engine = RunFolder.create(tmp_path / "engine", experiment)
    simulate(experiment, engine)
    job = write_job(experiment, tmp_path / "job", encrypted=True)
    done = run(tmp_path, job, policy([rule("encryption.Encrypt")], (rule("encryption.Decrypt"),)))
    assert done.returncode == 0, done.stdout[-3000:]
    folder = RunFolder(tmp_path / "runs" / "fedavg" / "001")
    assert not folder.model.exists()
    plain, initial = load_file(engine.model), experiment.model.build(experiment.rounds.seed).state_dict()
    kept = load_file(folder.checkpoint)
    for site in ("site-1", "site-2"):
        trained = load_file(folder.path / "sites" / site / "trained.safetensors")
        assert plain.keys() <= trained.keys()
        assert max(float((trained[name] - plain[name]).abs().max()) for name in plain) < 1e-4
        assert any(float((plain[name] - initial[name]).abs().max()) > 1e-3 for name in plain)
    assert all(torch.equal(kept[f"state/{name}"], initial[name]) for name in plain)
