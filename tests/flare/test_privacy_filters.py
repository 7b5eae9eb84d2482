"""A site's own filters: what reaches the server through them, and that everything unforeseen is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from fedvlp.core.checkpoint import CheckpointError
from fedvlp.core.types import Broadcast, Failure, FailureKind, Update
from fedvlp.federation.site import failure
from fedvlp.flare import messages
from fedvlp.flare.privacy_filters import (
    RECEIVED,
    AllowMetrics,
    AuditOutgoing,
    ClipAndNoise,
    ExcludeVariables,
    RememberReceived,
    SendAsReceived,
    UpdateFilter,
)

RUN = {"folder": "fedavg/001", "fingerprint": "abc", "version": "0"}
STATE = {"image_head.w": torch.zeros(100, 100), "text_head.w": torch.ones(10)}
BUDGET: dict[str, Any] = {"clip": 0.5, "noise_multiplier": 4.0, "epsilon": 8.0, "delta": 1e-5, "dataset": "chest"}


class Engine:
    """What a filter asks FLARE's engine for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get_workspace(self) -> Engine:
        return self

    def get_root_dir(self) -> str:
        return str(self.root)

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """FLARE logs through events too."""


def context(root: Path, state: dict[str, torch.Tensor] | None = STATE) -> FLContext:
    """The context of one task that brought ``state``, as FLARE's client runner fills it."""
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.ENGINE, Engine(root), private=True, sticky=False)
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False, sticky=False)
    if state is not None:
        task = messages.send_broadcast(Broadcast(1, "train", state), RUN)
        fl_ctx.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
        RememberReceived().handle_event(EventType.BEFORE_TASK_EXECUTION, fl_ctx)
        fl_ctx.set_prop(FLContextKey.TASK_DATA, None, private=True, sticky=False)
    return fl_ctx


def update(**changes: Any) -> Update:
    values = {"num_samples": 5, "state": {n: t + 1 for n, t in STATE.items()}, "metrics": {"seconds": 1.0}, **changes}
    return Update("site-1", 1, "train", **values)


def leaving(failure: Failure, tmp_path: Path) -> str:
    """What the server is told of a failure, past a filter."""
    reply = AllowMetrics([]).process(messages.send_failure(failure), context(tmp_path))
    failed = messages.failure(reply)
    assert failed is not None
    assert failed.kind is FailureKind.LOST
    return failed.text


def refused(site_filter: UpdateFilter, reply: Shareable | Update, fl_ctx: FLContext) -> str:
    """Why the filter let nothing go."""
    out = site_filter.process(messages.send_update(reply) if isinstance(reply, Update) else reply, fl_ctx)
    said = messages.failure(out)
    assert said is not None
    assert not out.get("DXO")
    return said.text


def test_noise_is_added_to_the_clipped_change_and_epsilon_is_told(tmp_path: Path) -> None:
    """|d| = sqrt(10,010) is clipped to 0.5 (0.005 a value); the noise has deviation 4 * 0.5 = 2."""
    pytest.importorskip("opacus")
    from fedvlp.flare.privacy_budget import epsilon

    reply = ClipAndNoise(**BUDGET).process(messages.send_update(update()), context(tmp_path))
    sent = messages.receive_update(reply, "site-1")
    assert sent.state.keys() == STATE.keys()
    noise = sent.state["image_head.w"].reshape(-1)
    assert abs(noise.mean() - 0.5 / math.sqrt(10_010)) < 5 * 2 / 100
    assert abs(noise.std() - 2) < 0.1
    assert sent.metrics == {"seconds": 1.0, "privacy/epsilon": epsilon({4.0: 1}, 1e-5)}
    assert (tmp_path / "privacy" / "ledger.json").exists()
    assert (tmp_path / "local" / "privacy-ledger-marker.json").exists(), "elsewhere"


def test_at_the_budget_nothing_leaves_in_whatever_job(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    tight = {**BUDGET, "epsilon": 4.0}
    replies = [ClipAndNoise(**tight).process(messages.send_update(update()), context(tmp_path)) for _ in range(4)]
    failures = [messages.failure(reply) for reply in replies]
    assert failures[0] is None
    assert "the privacy budget is used up: epsilon" in str(failures[-1])
    assert "chest" not in str(failures[-1]), "nor is the name of a data set told"
    assert not replies[-1].get("DXO")


def test_an_evaluation_costs_nothing(tmp_path: Path) -> None:
    reply = ClipAndNoise(**BUDGET).process(messages.send_update(update(state={})), context(tmp_path))
    assert messages.failure(reply) is None
    assert not (tmp_path / "privacy").exists()


def test_without_the_memory_of_what_was_received_nothing_leaves(tmp_path: Path) -> None:
    bare = context(tmp_path, state=None)
    assert "RememberReceived" in refused(ClipAndNoise(**BUDGET), update(), bare)
    assert "RememberReceived" in refused(ExcludeVariables(["text_head.*"]), update(), bare)


def test_what_was_received_is_remembered_as_it_was(tmp_path: Path) -> None:
    """A method that trained in place would else hide its change from the clipping."""
    state = {"w": torch.zeros(4)}
    fl_ctx = context(tmp_path, state)
    state["w"] += 100
    assert torch.equal(fl_ctx.get_prop("fedvlp_received")["w"], torch.zeros(4))


def test_what_is_remembered_stays_in_this_task_and_at_this_site(tmp_path: Path) -> None:
    """What is not private travels with FLARE's messages, what is sticky is there in the next task too."""
    found = context(tmp_path).get_prop_detail(RECEIVED)
    assert (found["private"], found["sticky"]) == (True, False)


def test_other_events_leave_what_is_remembered_alone(tmp_path: Path) -> None:
    """FLARE fires dozens, most of them without a task."""
    fl_ctx = context(tmp_path)
    before = fl_ctx.get_prop(RECEIVED)
    for event in (EventType.AFTER_TASK_EXECUTION, EventType.BEFORE_TASK_RESULT_FILTER, "anything"):
        RememberReceived().handle_event(event, fl_ctx)
    assert fl_ctx.get_prop(RECEIVED) is before


def test_an_update_of_both_modalities_passes(tmp_path: Path) -> None:
    for modalities in (("image", "text"), ("image",), ()):
        reply = AllowMetrics(["*"]).process(messages.send_update(update(modalities=modalities)), context(tmp_path))
        assert messages.receive_update(reply, "site-1").modalities == modalities


def test_a_filter_that_does_not_say_what_may_leave_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        UpdateFilter()  # type: ignore[abstract]
    with pytest.raises(ValueError, match="names is a list"):
        AllowMetrics("seconds")


def test_aux_tensors_and_strange_tensors_are_refused(tmp_path: Path) -> None:
    dp = ClipAndNoise(**BUDGET)
    assert "beside the model" in refused(dp, update(aux={"rep": torch.ones(2)}), context(tmp_path))
    assert "exact figures of this site's records; take" in refused(dp, update(scalars={"loss": 7.3}), context(tmp_path))
    assert "another type than float32" in refused(
        dp, update(state={"image_head.w": torch.ones(100, 100).long()}), context(tmp_path)
    )
    assert "not received" in refused(dp, update(state={"other": torch.ones(1)}), context(tmp_path))
    assert not (tmp_path / "privacy").exists(), "a refusal costs no budget"


def test_a_forbidden_tensor_stops_the_update_in_aux_too(tmp_path: Path) -> None:
    only_text = ExcludeVariables(["text_head.*"])
    assert "does not let 1 of the tensors go" in refused(only_text, update(), context(tmp_path))
    assert "does not let 1 of the tensors go" in refused(
        only_text, update(state={}, aux={"text_head.x": torch.ones(1)}), context(tmp_path)
    )
    reply = only_text.process(messages.send_update(update(state={"image_head.w": torch.ones(1)})), context(tmp_path))
    assert messages.receive_update(reply, "site-1").state.keys() == {"image_head.w"}
    assert "matches no tensor" in refused(ExcludeVariables(["texthead.*"]), update(), context(tmp_path))


def test_the_change_of_a_control_variate_stays_with_the_tensor_that_it_tells_of(tmp_path: Path) -> None:
    """The rows of a word embedding that have a mean gradient are those of words that occurred."""
    sent = update(state={"image_head.w": torch.ones(1), "change/text_head.x": torch.ones(1)})
    here = context(tmp_path, {**STATE, "text_head.x": torch.zeros(1)})
    assert "was not received" in refused(SendAsReceived(["text_head.*"]), sent, here)
    assert "does not let 1 of the tensors go" in refused(ExcludeVariables(["text_head.*"]), sent, here)
    assert "not received" in refused(ClipAndNoise(**BUDGET), sent, here)


def test_representations_pass_where_a_task_brings_no_model(tmp_path: Path) -> None:
    words, here = SendAsReceived(["text_head.*"]), context(tmp_path, {})
    reply = words.process(messages.send_update(update(state={"text": torch.ones(2)})), here)
    assert messages.receive_update(reply, "site-1").state.keys() == {"text"}
    assert "was not received" in refused(words, update(state={"text_head.x": torch.ones(2)}), here)


@pytest.mark.parametrize("kind", [ExcludeVariables, SendAsReceived, AuditOutgoing])
def test_an_empty_list_of_names_is_a_mistake(kind: Any) -> None:
    for names in ([], "text_head.*"):
        with pytest.raises(ValueError, match="names"):
            kind(names)


def test_only_the_tensors_that_a_site_names_are_sent_as_they_came(tmp_path: Path) -> None:
    """By any of several patterns; an evaluation has no state, and a pattern that matches nothing is a mistake."""
    kept = SendAsReceived(["text_*", "image_head.b*"])
    brought = {**STATE, "image_head.bias": torch.zeros(3)}
    sent = update(state={name: tensor + 1 for name, tensor in brought.items()})
    left = messages.receive_update(kept.process(messages.send_update(sent), context(tmp_path, brought)), "site-1")
    assert torch.equal(left.state["text_head.w"], STATE["text_head.w"])
    assert torch.equal(left.state["image_head.bias"], brought["image_head.bias"])
    assert torch.equal(left.state["image_head.w"], STATE["image_head.w"] + 1)
    assert "matches no tensor" in refused(SendAsReceived(["text_*", "txt_*"]), sent, context(tmp_path, brought))
    evaluated = kept.process(messages.send_update(update(state={})), context(tmp_path, None))
    assert messages.receive_update(evaluated, "site-1").state == {}


def telling(rows: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A word embedding of 50 rows as it came, and after a step with decay that read so many words."""
    before = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    after = before * 0.999
    after[:rows] += 1e-3 * torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return {**STATE, "text_encoder.words.weight": before}, {**STATE, "text_encoder.words.weight": after}


def test_an_update_from_which_words_can_be_read_does_not_leave(tmp_path: Path) -> None:
    """The refusal names the tensor and the number; behind SendAsReceived, or with noise on every row, it passes."""
    brought, trained = telling(rows=3)
    here, words = context(tmp_path, brought), ["text_encoder.words*"]
    said = refused(AuditOutgoing(words, most=2), update(state=trained), here)
    assert said == (
        "PrivacyError: words of this site's reports can be read off the update; its engineer lists SendAsReceived, or "
        "noise, before AuditOutgoing"
    )
    for audit in (AuditOutgoing(words, most=3), AuditOutgoing(words, most=-1)):
        passed = messages.receive_update(audit.process(messages.send_update(update(state=trained)), here), "site-1")
        assert torch.equal(passed.state["text_encoder.words.weight"], trained["text_encoder.words.weight"])
    behind = SendAsReceived(words).process(messages.send_update(update(state=trained)), here)
    assert messages.receive_update(AuditOutgoing(words).process(behind, here), "site-1").state.keys() == trained.keys()
    _, noised = telling(rows=50)
    passed = messages.receive_update(
        AuditOutgoing(words).process(messages.send_update(update(state=noised)), here), "site-1"
    )
    assert passed.state.keys() == noised.keys()


def test_a_change_that_travels_beside_the_model_is_audited_too(tmp_path: Path) -> None:
    brought, trained = telling(rows=3)
    name = "text_encoder.words.weight"
    change = {**STATE, name: brought[name], f"change/{name}": trained[name] - brought[name]}
    said = refused(AuditOutgoing(["text_encoder.words*"]), update(state=change), context(tmp_path, brought))
    assert "words of this site's reports can be read off" in said
    assert "matches no tensor" in refused(AuditOutgoing(["txt*"]), update(state=trained), context(tmp_path, brought))
    assert "is not an embedding of the received" in refused(AuditOutgoing(["text_head.*"]), update(), context(tmp_path))


def test_metrics_by_name(tmp_path: Path) -> None:
    secret = update(metrics={"seconds": 1.0, "Doe^Jane": 7.0})
    assert "Doe" not in refused(AllowMetrics(["seconds"]), secret, context(tmp_path))
    kept = AllowMetrics(["seconds"], drop=True).process(messages.send_update(secret), context(tmp_path))
    assert messages.receive_update(kept, "site-1").metrics == {"seconds": 1.0}


def test_a_figure_leaves_with_as_many_digits_as_the_site_says(tmp_path: Path) -> None:
    """Also a method's scalars, which are measured like others: FedDRA's v_i left with all of its digits once."""
    exact = update(
        metrics={"loss/x": 1.23456789, "val/r1": 66.6666667, "seconds": 123456.0, "probe/loss": -1.5e-9},
        scalars={"loss": 1.40500152, "unknown": math.nan},
    )
    rounded = AllowMetrics(["*"], digits=3).process(messages.send_update(exact), context(tmp_path))
    left = messages.receive_update(rounded, "site-1")
    assert left.metrics == {"loss/x": 1.23, "val/r1": 66.7, "seconds": 123000.0, "probe/loss": -1.5e-9}
    assert left.scalars["loss"] == 1.41
    assert math.isnan(left.scalars["unknown"])
    whole = messages.receive_update(
        AllowMetrics(["*"]).process(messages.send_update(exact), context(tmp_path)), "site-1"
    )
    assert whole.metrics == exact.metrics
    assert whole.scalars["loss"] == 1.40500152
    with pytest.raises(ValueError, match="digits is -1"):
        AllowMetrics(["*"], digits=-1)


TELLING = [
    "CheckpointError: cannot write x.safetensors in /srv/hospital/DOE^JANE/runs: the disk is fulll",
    "SiteConfigError: '/data/cxr' is missing", "x: ~/secret", "ValueError: C:\\data\\x", r"ValueError: \\\\nas\\share",
    "CheckpointError: (/a/b)", "PathError: ../../x", "SiteConfigError: local/fedvlp.json: 'root' is /data/cxr",
    "NoRecordsError: site 'st-anna' has no records in this experiment; there are: Jane, Doe", "x" * 10**6,
]  # fmt: skip


def test_no_path_of_the_site_leaves_in_an_error(tmp_path: Path) -> None:
    """Security S10: an error that the executor or a child process worded, and one of a filter itself.

    Nor the name of a data set, a column or a site; tests/core/test_site_error.py has the whole list.
    """
    for text in TELLING:

        class Failing(UpdateFilter):
            def filtered(self, update: Update, fl_ctx: FLContext, text: str = text) -> Update:
                raise CheckpointError(text.partition(": ")[2])

        raised = refused(Failing(), update(), context(tmp_path))
        for said, begins in (
            (leaving(Failure(FailureKind.LOST, text), tmp_path), "an error"),
            (raised, "CheckpointError"),
        ):
            assert said.startswith(f"{begins}: ")
            assert len(said) < 200
            assert not any(
                word in said for word in ("/srv", "/data", "DOE", "secret", "nas", "../", "Jane", "st-anna", "xx")
            )


def test_public_words_leave_with_their_numbers(tmp_path: Path) -> None:
    few = failure(CheckpointError("row 7 of /data/x.csv", public="it has {rows} records", rows=1))
    assert leaving(replace(few, kind=FailureKind.LOST), tmp_path) == "CheckpointError: it has 1 records"


FILTERS = [ClipAndNoise(**BUDGET), ExcludeVariables(["text_head.*"]), AllowMetrics(["seconds"], drop=True)]


def test_whatever_is_no_update_is_refused(tmp_path: Path) -> None:
    for site_filter in FILTERS:
        for reply in [
            Shareable({"report": "Jane Doe"}),
            DXO(DataKind.WEIGHTS, data={"w": torch.ones(1)}).to_shareable(),
            DXO(DataKind.METRICS, data={"Jane": 1.0}).to_shareable(),
            DXO(DataKind.WEIGHT_DIFF, data={}, meta=from_shareable(messages.send_update(update())).meta).to_shareable(),
            messages.send_update(update(num_samples="Jane Doe")),
            messages.send_update(update(num_samples=5.5)),
            messages.send_update(update(modalities=("image", "Jane Doe"))),
            messages.send_update(update(public_id="Jane Doe")),
            messages.send_update(update(metrics=["Jane Doe"])),
            messages.send_update(update(scalars=["Jane Doe"])),
            messages.send_update(Update("site-1", 1, "train", 5, {"text": "Jane Doe"})),  # type: ignore[dict-item]
            DXO(DataKind.COLLECTION, data={"x": DXO(DataKind.WEIGHTS, data={"w": torch.ones(1)})}).to_shareable(),
        ]:
            said = refused(site_filter, reply, context(tmp_path))
            assert "not an update of fedvlp" in said
            assert "Jane" not in said


def test_what_rides_beside_an_update_or_on_a_failure_stays(tmp_path: Path) -> None:
    rule = AllowMetrics(["seconds"])
    laden = messages.send_update(update(state={}))
    laden["report"] = "Jane Doe"
    laden.set_header("patient", "Jane Doe")
    from_shareable(laden).meta["patient"] = "Jane Doe"
    assert "Jane" not in repr(rule.process(laden, context(tmp_path)))
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    failed["report"] = "Jane Doe"
    failed.set_header("patient", "Jane Doe")
    out = rule.process(failed, context(tmp_path))
    assert "Jane" not in repr(out)
    assert out.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    aborted = rule.process(make_reply(ReturnCode.TASK_ABORTED), context(tmp_path))
    assert aborted.get_return_code() == ReturnCode.TASK_ABORTED
    said = "PrivacyError: the reply is not an update of fedvlp"
    told = Failure(FailureKind.FAILED, said, said)
    own = rule.process(messages.send_failure(told), context(tmp_path))
    assert messages.failure(own) == told
