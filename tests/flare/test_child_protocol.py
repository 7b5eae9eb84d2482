"""What the job's process hands its training child, and back, is what crosses FLARE's wire, bit for bit."""

from __future__ import annotations

import pytest
import torch
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from fedvlp.core.checkpoint import CheckpointError
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, Update
from fedvlp.flare import child_protocol, messages
from fedvlp.flare.paths import SitePaths
from fedvlp.run import presets
from fedvlp.run.config import fingerprint

RUN = {"folder": "feddra/001", "fingerprint": "abc", "version": "0"}
PLACE = SitePaths("site-1", "/site/runs", "/site/local")
TENSORS = {"w": torch.randn(3, 2), "count": torch.tensor(7), "brain": torch.randn(4).bfloat16()}


@pytest.fixture(autouse=True)
def _registered() -> None:
    messages.register()


def test_a_task_reaches_the_child_with_the_sites_own_experiment_and_place() -> None:
    sent = Broadcast(3, "align", TENSORS, {"public": torch.randn(2, 2)}, lr_scale=1.25)
    task = messages.send_broadcast(sent, RUN)
    task.set_header("task_id", "17")
    handed = fobs.loads(fobs.dumps(child_protocol.to_child(task, presets.get("feddra"), PLACE, 77)))
    assert handed.get_header("task_id") == "17"
    message, run, experiment, place, most = child_protocol.in_child(FLModelUtils.from_shareable(handed))
    assert (message.round, message.phase, message.lr_scale, run, place, most) == (3, "align", 1.25, RUN, PLACE, 77)
    assert fingerprint(experiment) == fingerprint(presets.get("feddra"))
    assert message.state.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert message.state[name].dtype == tensor.dtype
        assert torch.equal(message.state[name], tensor)
    assert torch.equal(message.aux["public"], sent.aux["public"])


@pytest.mark.parametrize("state", [TENSORS, {}], ids=["trained", "evaluated"])
def test_an_update_comes_back_as_it_would_from_the_jobs_process(state: dict[str, torch.Tensor]) -> None:
    update = Update("site-1", 1, "train", 5, state, metrics={"loss/contrastive": 0.5})
    reply = fobs.loads(fobs.dumps(FLModelUtils.to_shareable(child_protocol.answer(update))))
    received = child_protocol.from_child(reply, "site-1")
    assert isinstance(received, Update)
    assert (received.num_samples, received.metrics) == (5, {"loss/contrastive": 0.5})
    assert all(torch.equal(received.state[name], tensor) for name, tensor in state.items())
    assert "fedvlp_site" not in str(reply), "what the site told its child stays there"


def test_a_failure_comes_back_in_fedvlps_words_only() -> None:
    def came(error: Exception) -> Reply:
        return child_protocol.from_child(FLModelUtils.to_shareable(child_protocol.answer(error)), "site-1")

    assert came(CheckpointError("the disk is full")) == Failure(FailureKind.FAILED, "CheckpointError: the disk is full")
    foreign = FileNotFoundError(2, "No such file", "/data/DOE^JANE/scan.dcm")
    assert came(foreign) == Failure(FailureKind.FAILED, "FileNotFoundError")
