"""What crosses FLARE's wire is what was sent, and nothing that the method did not send."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.fuel.utils import fobs

from fedvlp.core.checkpoint import unwritten
from fedvlp.core.types import Broadcast, Failure, FailureKind, Update, header
from fedvlp.flare import messages

RUN = {"folder": "feddra/001", "fingerprint": "abc", "version": "0"}


@pytest.fixture(autouse=True)
def _registered() -> None:
    messages.register()


def tensors() -> dict[str, torch.Tensor]:
    return {
        "image_encoder.w": torch.randn(3, 2),
        "count": torch.tensor(7),
        "half": torch.randn(4).half(),
        "brain": torch.randn(4).bfloat16(),
        "empty": torch.zeros(0, 3),
    }


def test_a_broadcast_survives_flares_own_serialiser_bit_for_bit() -> None:
    sent = Broadcast(3, "align", tensors(), {"public": torch.randn(2, 2)}, lr_scale=1.25, public_id=7)
    received, run = messages.receive_broadcast(fobs.loads(fobs.dumps(messages.send_broadcast(sent, RUN))))
    assert (header(received), run) == (header(sent), RUN)
    assert (received.round, received.phase, received.lr_scale, received.public_id) == (3, "align", 1.25, 7)
    assert received.aux.keys() == {"public"}
    for name, tensor in sent.state.items():
        assert received.state[name].dtype == tensor.dtype
        assert torch.equal(received.state[name], tensor)


def test_the_sites_name_is_the_channels_whatever_the_reply_says() -> None:
    reply = messages.send_update(Update("site-9", 1, "train", 5, tensors(), metrics={"loss/contrastive": 0.5}))
    received = messages.receive_update(reply, "site-1")
    assert received.site == "site-1"
    assert (received.round, received.phase, received.num_samples) == (1, "train", 5)
    assert received.metrics == {"loss/contrastive": 0.5}
    assert "site-9" not in repr(from_shareable(reply).meta)


def test_an_update_without_tensors_is_a_valid_message() -> None:
    received = messages.receive_update(messages.send_update(Update("a", 0, "evaluate", 5)), "a")
    assert received.state == {}


def test_a_message_of_somebody_else_is_refused() -> None:
    stranger = DXO(DataKind.WEIGHTS, data={"w": torch.zeros(1)}).to_shareable()
    with pytest.raises(ValueError, match="no fedvlp header"):
        messages.receive_broadcast(stranger)


def test_the_kind_of_a_failure_survives() -> None:
    for kind in FailureKind:
        said = "PathError: the server names a run folder outside this site's own; the task is refused"
        failed = Failure(kind, said, said)
        assert messages.failure(fobs.loads(fobs.dumps(messages.send_failure(failed)))) == failed


def test_a_strange_kind_is_an_ordinary_failure() -> None:
    for kind in ["of another fedvlp", 7, None, ["not held"]]:
        reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply.set_header(messages.KIND, kind)
        reply.set_header(messages.REASON, "x" * 5000)
        assert messages.failure(reply) == Failure(FailureKind.FAILED, "an error: the log of the site says why")


def test_an_error_reply_without_words_is_told_by_flares_code() -> None:
    for code in [ReturnCode.EXECUTION_EXCEPTION, ReturnCode.TASK_ABORTED, ReturnCode.TIMEOUT]:
        assert messages.failure(make_reply(code)) == Failure(FailureKind.FAILED, code)


def test_a_code_that_flare_does_not_have_is_not_repeated() -> None:
    for code in ["Jane Doe", "x" * 10**6, "EXECUTION_EXCEPTION\n[E:1]", 7]:
        reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply.set_return_code(code)
        assert messages.failure(reply) == Failure(FailureKind.FAILED, "an error: the log of the site says why")


def test_the_server_repeats_nothing_but_one_plain_line() -> None:
    """Whatever a site's own end let pass, or a site that has none sends."""
    for said in ["Jane Doe\n", "CheckpointError: cannot read /data/DOE^JANE/x", "x\n[E:1]", 7, ["x"]]:
        reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply.set_header(messages.REASON, said)
        failed = messages.failure(reply)
        assert failed is not None
        assert not any(word in failed.text for word in ("Jane", "DOE", "\n", "[E", "/data"))


def test_a_text_that_begins_like_another_failure_changes_nothing() -> None:
    """What the server does next depends on the kind alone."""
    failed = messages.failure(messages.send_failure(Failure(FailureKind.FAILED, "NotHeldError: gone")))
    assert failed is not None
    assert failed.kind is FailureKind.FAILED


def test_only_public_words_leave_a_site() -> None:
    """An exception's text may hold a patient's path: it is the site that keeps it, and not the server."""

    def sent(error: Exception) -> str:
        reply = messages.send_failure(error)
        failed = messages.failure(reply)
        assert failed is not None
        assert failed.text == reply.get_header(messages.REASON), "it is not the server that takes it out"
        return failed.text

    foreign = FileNotFoundError(2, "No such file", "/data/DOE^JANE/scan.dcm")
    assert sent(foreign) == "an error: the log of the site says why"
    assert sent(ValueError("Jane Doe")) == "an error: the log of the site says why"
    ours = unwritten(Path("/srv/anna/x"), OSError(errno.ENOSPC, "No space left"), 7000)
    assert sent(ours) == "CheckpointError: cannot write a file of the run: the disk is full; it needs 7,000 bytes"
    aborted = Failure(FailureKind.FAILED, ReturnCode.TASK_ABORTED)
    assert messages.failure(make_reply(ReturnCode.TASK_ABORTED)) == aborted
    assert messages.failure(messages.send_update(Update("a", 0, "train", 5))) is None
