"""The site policies of provisioning/PRIVACY.md in a provisioned system: noise with a budget, then encryption.

One start of the system serves both; a job's process reads its site's ``local/privacy.json`` when it begins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.provisioned import PROJECT, Consortium, connected, ended, until

from fedvlp.core.checkpoint import load_tensors
from fedvlp.core.server_state import Server
from fedvlp.flare.job_status import session
from fedvlp.flare.jobs import write_job
from fedvlp.flare.privacy_budget import epsilon
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

pytestmark = [
    pytest.mark.slow(seconds=65),
    pytest.mark.skipif(find_spec("opacus") is None, reason="pip install 'fedvlp[privacy]'"),
    pytest.mark.skipif(find_spec("tenseal") is None, reason="pip install 'fedvlp[he]'"),
]

POLICIES = Path(__file__).parents[2] / "provisioning" / "site"
HE = """  - path: nvflare.lighter.impl.he.HEBuilder
    args: {{poly_modulus_degree: 4096, coeff_mod_bit_sizes: [60, 49], scale_bits: 30}}
"""
CERTIFICATES = "  - path: nvflare.lighter.impl.cert.CertBuilder\n"
NOISE, DELTA = 8.0, 1e-5


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    folder = tmp_path_factory.mktemp("privacy") / "consortium"
    with Consortium(folder, project=PROJECT.replace(CERTIFICATES, CERTIFICATES + HE)) as consortium:
        until(lambda: connected(consortium), "both sites are connected")
        yield consortium


def experiment(rounds: int) -> Experiment:
    """Two sites, two steps a round, heads without batch statistics, which noise does not cover."""
    chosen = presets.get("fedavg")
    settings = {"data.size": 300, "data.sites": 2, "rounds.rounds": rounds, "method.local_steps": 2,
                "training.batch_size": 16, "model.head_norm": "layer"}  # fmt: skip
    for key, value in settings.items():
        chosen = override(chosen, key, str(value))
    return chosen


def adopt(here: Consortium, name: str, **changes: Any) -> None:
    """Every site copies a policy file over its privacy.json; ``changes`` are arguments of its first result filter."""
    policy = json.loads((POLICIES / name).read_text())
    policy["scopes"][0]["task_result_filters"][0]["args"] |= changes
    for site in here.sites:
        (here.kits / site / "local" / "privacy.json").write_text(json.dumps(policy))


def run(here: Consortium, chosen: Experiment, **packing: Any) -> tuple[RunFolder, str]:
    """The run of a job at the server, and how FLARE says that it ended."""
    made = len(list((here.runs() / "fedavg").glob("[0-9]*")))
    job = write_job(chosen, here.folder / f"job-{made}", custom=False, **packing)
    with session(here.lead) as opened:
        status = ended(opened, opened.submit_job(str(job)))
    return RunFolder(here.runs() / "fedavg" / f"{made + 1:03d}"), status


def test_every_site_adds_noise_tells_epsilon_and_stops_at_its_budget(here: Consortium, tmp_path: Path) -> None:
    """The budget is that of two releases, the job has three rounds: the third is refused and the run can go on."""
    chosen = experiment(rounds=3)
    allowed = epsilon({NOISE: 2}, DELTA)
    adopt(here, "privacy-dp.json", clip=1.0, noise_multiplier=NOISE, epsilon=allowed + 1e-6, delta=DELTA)
    folder, status = run(here, chosen)
    assert status != "FINISHED:COMPLETED"
    history = folder.history()
    assert len(history) == 2
    for count, record in enumerate(history, start=1):
        for site in here.sites:
            assert record["sites"][site].keys() <= {"privacy/epsilon", "seconds"}, "no figure without noise"
            assert record["sites"][site]["privacy/epsilon"] == pytest.approx(epsilon({NOISE: count}, DELTA), rel=1e-9)
    for site in here.sites:
        ledger = json.loads((here.kits / site / "privacy" / "ledger.json").read_text())
        assert [(entry["data"], entry["noise_multiplier"]) for entry in ledger] == [("pretrain", NOISE)] * 2
    outcome = json.loads((folder.path / "run_status.json").read_text())
    assert outcome["status"] != "finished"
    assert "budget" in json.dumps(outcome)

    engine = RunFolder.create(tmp_path / "engine", override(chosen, "rounds.rounds", "1"))
    simulate(override(chosen, "rounds.rounds", "1"), engine)
    plain, _ = load_tensors(engine.model)
    server, _ = Server.load(folder.checkpoint)
    moved = torch.cat([(server.state[name] - plain[name]).reshape(-1) for name in plain])
    counts = list(server.samples.values())
    expected = NOISE * math.sqrt(2 * sum(count**2 for count in counts)) / sum(counts)  # two rounds, weights n_k/n
    assert float(moved.std()) == pytest.approx(expected, rel=0.01), "of the mean of two sites' noise"


def test_encrypted_sites_keep_the_plain_model_and_the_server_has_none(here: Consortium, tmp_path: Path) -> None:
    chosen = experiment(rounds=2)
    adopt(here, "privacy-he.json")
    folder, status = run(here, chosen, encrypted=True)
    assert status == "FINISHED:COMPLETED"
    engine = RunFolder.create(tmp_path / "engine", chosen)
    simulate(chosen, engine)
    plain, _ = load_tensors(engine.model)
    number = folder.path.name
    for site in here.sites:
        mean, _ = load_tensors(here.runs(site) / "fedavg" / number / "sites" / site / "trained.safetensors")
        assert mean.keys() == plain.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(mean[name], tensor, rtol=0, atol=1e-4)
    assert not folder.model.exists()
