"""Spec faults, rows 1-7 and 26, in FLARE: whatever a site sends, its reply is refused in words or passes checks.

A callback that raised would leave the round waiting for a site that has answered, so nothing may be raised.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply

from fedvlp.core.gate import check
from fedvlp.core.types import Expected, Failure, Update
from fedvlp.flare import messages
from fedvlp.flare.controller import FederatedController

REFERENCE = {"text_head.bias": torch.zeros(3)}
GOOD = messages.send_update(Update("a", 1, "train", 5, {"text_head.bias": torch.ones(3)}, metrics={"loss/x": 0.5}))
"""A reply as a site sends it."""

numbers = st.one_of(st.integers(), st.floats(allow_nan=True, allow_infinity=True))
plain = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), st.binary(max_size=8))
anything = st.recursive(
    plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(plain, inner, max_size=3)), max_leaves=6
)
tensors = st.sampled_from([torch.ones(3), torch.ones(1), torch.ones(3).half(), torch.tensor(math.nan), torch.zeros(0)])


def refused(reply: Shareable) -> str | None:
    """What the controller and the server's checks say of a reply in round 1."""
    read = FederatedController._reply(reply, "a")
    if isinstance(read, Failure):
        return read.text
    return check(read, site="a", round=1, phase="train", expected=Expected(REFERENCE), max_samples=100)


def changed(**header: Any) -> Shareable:
    """The good reply with other values in its header."""
    dxo = DXO(DataKind.WEIGHTS, data={"text_head.bias": torch.ones(3)})
    dxo.meta = {messages.KEY: {**messages._parts(GOOD)[2], **header}}
    return dxo.to_shareable()


def test_the_good_reply_passes() -> None:
    assert refused(GOOD) is None
    assert refused(changed()) is None


def test_what_is_no_reply_is_refused_in_words() -> None:
    for reply in [
        Shareable(),
        make_reply(ReturnCode.OK),
        make_reply(ReturnCode.EXECUTION_RESULT_ERROR),
        Shareable({"DXO": 7}),
        DXO(DataKind.WEIGHTS, data={}).to_shareable(),
        DXO(DataKind.WEIGHTS, data={}, meta={messages.KEY: {}}).to_shareable(),
        DXO(DataKind.WEIGHTS, data={}, meta={messages.KEY: [1]}).to_shareable(),
        DXO(DataKind.WEIGHTS, data={7: torch.ones(3)}, meta={messages.KEY: messages._parts(GOOD)[2]}).to_shareable(),
        changed(metrics=None),
        changed(metrics={7: 1.0}),
        changed(modalities=5),
        changed(modalities=[b"image"]),
        changed(public_id=None),
    ]:
        assert refused(reply)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.one_of(st.just("text_head.bias"), plain), st.one_of(tensors, anything), max_size=3), anything)
def test_no_body_and_no_header_raises(body: dict[Any, Any], header: Any) -> None:
    reply = DXO(DataKind.WEIGHTS, data=body, meta={messages.KEY: header}).to_shareable()
    assert refused(reply)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["round", "phase", "num_samples", "scalars", "metrics", "modalities", "public_id"]), anything)
def test_no_value_of_the_header_raises(key: str, value: Any) -> None:
    reply = refused(changed(**{key: value}))
    assert reply is None or isinstance(reply, str)
