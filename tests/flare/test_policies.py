"""Which committed preset runs under which policy of a site: what provisioning/PRIVACY.md says, and why not otherwise.

The filters are those of the shipped files; that such jobs end well is for test_provisioned.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.flare_memory import Engine
from support.short_jobs import committed
from torch import Tensor

from fedvlp.flare import messages
from fedvlp.flare.jobs import COMMITTED, job_files
from fedvlp.flare.messages import BEHIND
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.privacy_filters import RECEIVED
from fedvlp.flare.task_handler import TaskHandler
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import identity
from fedvlp.run.experiment import Experiment

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="pip install 'fedvlp[privacy]'")

PROVISIONING = Path(__file__).parents[2] / "provisioning"
OFTEN = cases(COMMITTED, often=("car-mfl", "creamfl", "feddra"))
"""A classifier, representations and two phases: what their updates hold is what those of the others hold too."""


def filters_of(policy: str) -> list[Any]:
    """The outgoing filters of a shipped policy."""
    entries = json.loads((PROVISIONING / "site" / policy).read_text())["scopes"][0]["task_result_filters"]
    made = []
    for entry in entries:
        module, _, name = entry["path"].rpartition(".")
        made.append(getattr(import_module(module), name)(**entry["args"]))
    return made


def answered(experiment: Experiment, policy: str, kit: Path, evaluate: int = 0) -> tuple[Any, dict[str, Tensor]]:
    """What leaves site-1 in the first phase of the run, and the state that it was sent.

    ``evaluate``: how many held-out splits are measured.
    """
    (kit / "startup").mkdir(parents=True)
    (kit / "startup" / "fed_client.json").write_text("{}")
    handler = TaskHandler(experiment, SitePaths("site-1", str(kit / "runs"), str(kit / "local")))
    assembly, method = Assembly(experiment), experiment.method
    server = assembly.server(assembly.sites())
    method.start(server)
    server.phase = method.phases(0)[0]
    method.prepare(server)
    message = replace(method.broadcast(server, "site-1"), evaluate=evaluate)
    if server.trainer:
        message = replace(message, public_id=server.trainer.client.public_id)
    run = identity(experiment, f"{experiment.name}/001")
    received = {name: tensor.clone() for name, tensor in message.state.items()}
    with Engine("site-1", kit, "job-1").new_context() as context:
        reply = messages.send_update(handler.answer(message, run, lambda: False))
        context.set_prop(BEHIND, handler.behind, private=True, sticky=False)
        context.set_prop(RECEIVED, received, private=True, sticky=False)
        for site_filter in filters_of(policy):
            reply = site_filter.process(reply, context)
    return reply, received


def sent(experiment: Experiment, policy: str, kit: Path, evaluate: int = 0) -> str:
    """ "" where an update leaves site-1 in the first phase of the run, else why there is none."""
    failed = messages.failure(answered(experiment, policy, kit, evaluate)[0])
    return failed.text if failed else ""


LIGHT = {
    "model__init": "random",
    "model__head_norm": "layer",
    "model__image_size": 32,
    "model__max_tokens": 16,
    "model__vocabulary": 256,
}
"""Noise does not cover batch statistics; the rest only spares time."""


def said(preset: str) -> tuple[str, str]:
    """What the table of PRIVACY.md says of a preset: with noise, and encrypted; "runs" or why not."""
    text = (PROVISIONING / "PRIVACY.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if re.match(rf"\| [^|]*`{preset}`[^|]* \| runs \|", line))
    cells = [cell.strip() for cell in row.split("|")]
    return cells[3], cells[4]


@pytest.mark.parametrize("preset", OFTEN)
def test_the_shipped_policy_lets_every_figure_of_a_preset_go(preset: str, tmp_path: Path) -> None:
    """One that is not on its list would cost the update: a classifier's weight on the image did."""
    assert sent(committed(preset, **LIGHT), "privacy.json", tmp_path / "kit", evaluate=2) == ""


def test_the_shipped_policy_sends_the_words_as_they_came(tmp_path: Path) -> None:
    """The attack of S3: without the filter the rows that changed are those of words that occurred in the reports."""
    reply, received = answered(committed("fedavg", **LIGHT), "privacy.json", tmp_path / "kit")
    update = messages.receive_update(reply, "site-1")
    kept = [name for name, tensor in update.state.items() if torch.equal(tensor, received[name])]
    assert "text_encoder.words.weight" in kept
    assert len(kept) < len(update.state) / 2, "the others were trained"


@pytest.mark.parametrize(("rank", "layers"), [(0, "all"), (4, "all"), (4, "every")])
def test_the_shipped_policy_takes_frozen_towers_and_adapters(rank: int, layers: str, tmp_path: Path) -> None:
    """As the presets of real towers have them. Words of an adapted embedding go as they came, like the embedding."""
    settings = {"model__adapters": "lora", "model__adapter_rank": rank, "model__adapter_layers": layers}
    chosen = committed("fedavg", model__head_norm="layer", **settings)
    reply, received = answered(chosen, "privacy.json", tmp_path / "kit")
    update = messages.receive_update(reply, "site-1")
    words = [name for name in update.state if "words" in name]
    assert bool(words) == (layers == "every")
    assert all(torch.equal(update.state[name], received[name]) for name in words)
    assert any(not torch.equal(tensor, received[name]) for name, tensor in update.state.items())


@pytest.mark.parametrize("preset", OFTEN)
def test_a_preset_runs_with_noise_or_is_refused_as_the_table_says(preset: str, tmp_path: Path) -> None:
    noise, _ = said(preset)
    left = sent(committed(preset, **LIGHT), "privacy-dp.json", tmp_path / "kit")
    if noise == "runs":
        assert left == ""
    else:
        assert left.startswith("PrivacyError: ")
        assert noise.removeprefix("refused: ") in left


@pytest.mark.parametrize("preset", COMMITTED)
def test_a_preset_can_be_encrypted_or_is_refused_when_it_is_exported(preset: str) -> None:
    _, encrypted = said(preset)
    if encrypted == "runs":
        assert (
            "EncryptedController" in job_files(committed(preset), encrypted=True)["app/config/config_fed_server.json"]
        )
    else:
        assert encrypted == "refused when exported"
        with pytest.raises(ValueError, match="only a mean of whole models weighted by samples can be encrypted"):
            job_files(committed(preset), encrypted=True)
