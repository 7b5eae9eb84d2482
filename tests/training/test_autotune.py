"""Site and server train a whole run with the precision that they chose first, whatever they would choose later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.toy import World

from fedvlp.federation import server_trainer
from fedvlp.federation import site as site_module
from fedvlp.methods.mfedavg import MFedAvg
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.training import autotune
from fedvlp.training.autotune import CHOICE, VARIANTS, fixed
from fedvlp.training.settings import Training

AUTO = Training(precision="auto", attention="auto")
CPU = torch.device("cpu")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """What the probe measures: float32 with sdpa is the fastest, until a test says otherwise."""
    seconds = {variant: float(number) for number, variant in enumerate(VARIANTS)}
    monkeypatch.setattr(autotune, "measured", lambda device, threads: seconds)
    return seconds


def test_the_first_choice_stays_in_the_run(found: dict[tuple[str, str], float], tmp_path: Path) -> None:
    first = fixed(AUTO, CPU, tmp_path / "site")
    found["bfloat16", "explicit"] = -1.0
    assert (first.precision, first.attention) == ("float32", "sdpa")
    assert fixed(AUTO, CPU, tmp_path / "site") == first
    other = fixed(AUTO, CPU, tmp_path / "another run")
    assert (other.precision, other.attention) == ("bfloat16", "explicit")


def test_what_the_settings_say_is_not_chosen(found: dict[tuple[str, str], float], tmp_path: Path) -> None:
    found["bfloat16", "sdpa"] = -1.0
    half = fixed(Training(precision="float32", attention="auto"), CPU, tmp_path)
    assert (half.precision, half.attention) == ("float32", "sdpa")
    plain = Training()
    assert fixed(plain, CPU, tmp_path / "plain") is plain
    assert not (tmp_path / "plain").exists()
    assert fixed(AUTO, CPU, None) is AUTO, "a site without a folder chooses in every process"


def test_a_sites_next_process_goes_on_with_its_choice(
    found: dict[tuple[str, str], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = presets.get("fedavg")
    settings = {"data.size": 100, "data.sites": 2, "training.precision": "auto", "training.attention": "auto"}
    for key, value in settings.items():
        experiment = override(experiment, key, str(value))
    trained: list[Training] = []
    monkeypatch.setattr(site_module, "train", lambda m, c, b, training, *rest: trained.append(training) or {})
    for explicit in (1.5, -1.0):  # the second process would choose otherwise
        found["bfloat16", "explicit"] = explicit
        assembly = Assembly(experiment, tmp_path)
        site, server = assembly.site("site-1"), assembly.server(assembly.sites())
        site.handle(experiment.method.broadcast(server, "site-1"))
    assert [(one.precision, one.attention) for one in trained] == [("float32", "sdpa")] * 2
    assert json.loads((tmp_path / "sites" / "site-1" / CHOICE).read_text()) == {
        "precision": "float32", "attention": "sdpa",
    }  # fmt: skip


def test_a_server_that_trains_goes_on_with_its_choice(
    found: dict[tuple[str, str], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(MFedAvg(local_steps=1, public=True), training=AUTO)
    trained: list[Training] = []
    monkeypatch.setattr(server_trainer, "train", lambda m, c, b, training, *rest, **k: trained.append(training) or {})
    for explicit in (1.5, -1.0):  # the server that is started again would choose otherwise
        found["bfloat16", "explicit"] = explicit
        server = world.server()
        server.folder = tmp_path
        server.trainer.trained(world.method, server, "public")
    assert [(one.precision, one.attention) for one in trained] == [("float32", "sdpa")] * 2
