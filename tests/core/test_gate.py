"""What the gate lets through to the server, and what it refuses, in words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedvlp.core.gate import check, check_broadcast, check_tensors
from fedvlp.core.types import Broadcast, Expected, Update

REFERENCE = {"image_encoder.weight": torch.zeros(2, 3), "text_head.bias": torch.zeros(3), "count": torch.tensor(7)}
GOOD = Update("a", 3, "train", 10, {"image_encoder.weight": torch.ones(2, 3), "text_head.bias": torch.ones(3),
                                    "count": torch.tensor(9)}, metrics={"loss/x": 1.0})  # fmt: skip


def checked(update: Update) -> str | None:
    return check(update, site="a", round=3, phase="train", expected=Expected(REFERENCE), max_samples=1000)


def test_a_good_update_passes() -> None:
    assert checked(GOOD) is None
    assert checked(replace(GOOD, num_samples=0)) is None
    assert checked(replace(GOOD, num_samples=1000)) is None
    assert checked(replace(GOOD, metrics={"loss/x": 1e12, "loss/y": -1e12})) is None
    assert checked(replace(GOOD, metrics={str(i): 1.0 for i in range(1000)})) is None
    assert checked(replace(GOOD, metrics={"x": 1.0, "y" * 200: 1.0})) is None
    named = ("val/auc/Pleural Effusion", "site-1:val/all/mean/r1", "test/auc/\u00d6dem (links), 50%", "a@1")
    assert checked(replace(GOOD, metrics=dict.fromkeys(named, 1.0))) is None
    declared = {"rows": torch.zeros(2)}
    assert check(
        replace(GOOD, aux={"rows": torch.ones(2)}), site="a", round=3, phase="train",
        expected=Expected(REFERENCE, declared), max_samples=1000,
    ) is None  # fmt: skip
    assert checked(replace(GOOD, modalities=("image", "text"), public_id=2**53 - 1)) is None


REFUSED = {
    "another site's name": (replace(GOOD, site="b"), "expected a"),
    "an old round": (replace(GOOD, round=2), "round 2"),
    "a round to come": (replace(GOOD, round=4), "round 4"),
    "the wrong phase": (replace(GOOD, phase="joint"), "a str of 5, expected 3 'train'"),
    "negative samples": (replace(GOOD, num_samples=-1), "-1"),
    "fractional samples": (replace(GOOD, num_samples=2.5), "2.5"),  # type: ignore[arg-type]
    "a bool": (replace(GOOD, num_samples=True), "True"),
    "samples in words": (replace(GOOD, num_samples="10"), "a str of 2"),  # type: ignore[arg-type]
    "1e30 samples": (replace(GOOD, num_samples=1e30), "1e+30"),  # type: ignore[arg-type]
    "10**30 samples": (replace(GOOD, num_samples=10**30), "1,000"),
    "one sample too many": (replace(GOOD, num_samples=1001), "1,000"),
    "NaN samples": (replace(GOOD, num_samples=math.nan), "nan"),  # type: ignore[arg-type]
    "no samples at all": (replace(GOOD, num_samples=None), "None"),  # type: ignore[arg-type]
    "a NaN metric": (replace(GOOD, metrics={"loss/x": math.nan}), "'loss/x' is nan"),
    "an infinite metric": (replace(GOOD, metrics={"probe/loss": math.inf}), "'probe/loss' is inf"),
    "a metric that would overflow": (replace(GOOD, metrics={"loss/x": -1e300}), "'loss/x' is -1e+300"),
    "a metric just too large": (replace(GOOD, metrics={"loss/x": 1e12 + 1}), "'loss/x' is 1000000000001"),
    "a metric of text": (replace(GOOD, metrics={"note": "secret"}), "'note'"),  # type: ignore[dict-item]
    "a metric that is a bool": (replace(GOOD, metrics={"loss/x": True}), "'loss/x' is True"),
    "a metric without a name": (replace(GOOD, metrics={"": 1.0}), "a str of 0"),
    "a name of 201 characters": (replace(GOOD, metrics={"x" * 201: 1.0}), "a str of 201"),
    "a name that breaks the line": (replace(GOOD, metrics={"x\ny": 1.0}), "a str of 3"),
    "a name with markup": (replace(GOOD, metrics={"loss/<b>x</b>": 1.0}), "a str of 13, expected at most 200 letters"),
    "a name with a quote": (replace(GOOD, metrics={'x" y': 1.0}), "a str of 4"),
    "a formula as a name": (replace(GOOD, metrics={"=1+1": 1.0}), "a str of 4"),
    "a name that a spreadsheet runs": (replace(GOOD, metrics={"@SUM(1)": 1.0}), "a str of 7"),
    "a number as a name": (replace(GOOD, metrics={7: 1.0}), "the name of a metric is 7"),  # type: ignore[dict-item]
    "1,001 metrics": (replace(GOOD, metrics={str(i): 1.0 for i in range(1001)}), "a dict of 1001"),
    "a list of metrics": (replace(GOOD, metrics=[]), "metrics is a list"),  # type: ignore[arg-type]
    "a round that is a bool": (replace(GOOD, round=True), "round True"),
    "a modality twice": (replace(GOOD, modalities=("image", "image")), "modalities is a tuple of 2"),
    "an unknown modality": (replace(GOOD, modalities=("sound",)), "modalities is a tuple of 1"),
    "modalities as a list": (replace(GOOD, modalities=["image"]), "modalities is a list"),  # type: ignore[arg-type]
    "a public set of 2^53": (replace(GOOD, public_id=2**53), "public_id is 9007199254740992"),
    "a negative public set": (replace(GOOD, public_id=-1), "public_id is -1"),
    "a fractional public set": (replace(GOOD, public_id=1.0), "public_id is 1.0"),  # type: ignore[arg-type]
    "a scalar nobody declared": (replace(GOOD, scalars={"loss": 1.0}), "1 scalar(s) that the method does not know"),
    "a list of scalars": (replace(GOOD, scalars=[]), "scalars is a list"),  # type: ignore[arg-type]
    "tensors as a list": (replace(GOOD, state=[]), "its tensors are a list"),  # type: ignore[arg-type]
    "undeclared aux": (replace(GOOD, aux={"rows": torch.ones(2)}), "1 unexpected tensor"),
}


def test_refused() -> None:
    unlike = {name: checked(update) for name, (update, said) in REFUSED.items() if said not in str(checked(update))}
    assert not unlike


@pytest.mark.parametrize("field", ["num_samples", "public_id", "modalities", "phase", "round", "scalars", "metrics"])
def test_words_that_a_site_sends_by_mistake_are_not_repeated(field: str) -> None:
    for words in ("Jane Doe, effusion", ("Jane Doe",), {"Jane Doe": 1}, b"Jane Doe", {"Jane Doe"}):
        refused: Any = {field: words}
        assert "Jane" not in str(checked(replace(GOOD, **refused)))


def test_a_name_that_is_not_plain_is_not_repeated() -> None:
    for name in ["Jane Doe", "Jane\nDoe", "Jane\x1b[31m", "Jane<b>", "J\u00e4ne", "Jane" * 51]:
        said = [checked(replace(GOOD, state={**GOOD.state, name: torch.ones(1)}))]
        said += [checked(replace(GOOD, metrics={name: math.nan})), probed(replace(PROBED, scalars={name: 1.0}))]
        for answer in said:
            assert answer is not None
            assert "J" not in answer
            assert answer.isprintable()
        assert said[0] == f"1 unexpected tensor(s), e.g. a str of {len(name)}"


# What a site takes from the server


def train(round: int) -> tuple[str, ...]:
    return ("align", "joint") if round else ("train",)


TASK = Broadcast(3, "joint", dict(GOOD.state), {"rows": torch.full((2,), math.nan)}, 2, 0.5, 2.0, 7, {"v": math.nan})


def test_a_good_task_is_taken() -> None:
    assert check_broadcast(TASK, train) is None
    assert check_broadcast(Broadcast(0, "train", {}), train) is None
    assert check_broadcast(replace(TASK, round=10**9, phase="evaluate", lr_scale=0, public_id=0), train) is None


REFUSED_TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "a negative round": ({"round": -1}, "round is -1, expected a whole number from 0 to 1000000000"),
    "a round that is a bool": ({"round": True}, "round is True"),
    "a fractional round": ({"round": 1.0}, "round is 1.0"),
    "a round without end": ({"round": 10**9 + 1}, "round is 1000000001"),
    "a third split": ({"evaluate": 3}, "evaluate is 3"),
    "a negative public set": ({"public_id": -1}, "public_id is -1"),
    "a phase of another method": ({"phase": "Jane"}, "the phase is a str of 4, expected one of align, joint, evaluate"),
    "a phase of another round": ({"phase": "train"}, "the phase is a str of 5, expected one of align, joint, evaluate"),
    "a phase that is a list": ({"phase": ["joint"]}, "the phase is a list"),
    "a NaN rate": ({"lr_scale": math.nan}, "lr_scale is nan"),
    "an infinite rate": ({"lr_scale": math.inf}, "lr_scale is inf"),
    "a negative factor": ({"loss_scale": -1e-9}, "loss_scale is -1e-09"),
    "a factor in words": ({"loss_scale": "Jane"}, "loss_scale is a str of 4"),
    "a list of scalars": ({"scalars": [1.0]}, "scalars is a list"),
    "1,001 scalars": ({"scalars": {str(i): 1.0 for i in range(1001)}}, "scalars is a dict of 1001"),
    "a scalar in words": ({"scalars": {"v": "Jane"}}, "scalar 'v' is a str of 4"),
    "a scalar without a plain name": ({"scalars": {"Jane Doe": 1.0}}, "scalar named by a str of 8 is 1.0"),
    "tensors as a list": ({"aux": []}, "its tensors are a list"),
    "a tensor without a plain name": ({"aux": {"Jane Doe": torch.ones(1)}}, "the name of a tensor is a str of 8"),
    "no tensor": ({"aux": {"w": [1.0]}}, "w is a list, expected a dense tensor"),
    "a sparse tensor": ({"state": {"w": torch.ones(2, 2).to_sparse()}}, "w is a Tensor, expected a dense tensor"),
    "a tensor without memory": ({"state": {"w": torch.ones(2, device="meta")}}, "expected a dense tensor"),
    "a NaN model": ({"state": {"w": torch.tensor([1.0, math.nan])}}, "w has 1 value(s) that are NaN or infinite"),
}


def test_a_task_of_no_form_is_refused() -> None:
    for name, (change, said) in REFUSED_TASKS.items():
        problem = str(check_broadcast(replace(TASK, **change), train))
        assert said in problem, name
        assert "Jane" not in problem, name


def test_a_long_number_is_cut_to_forty_characters() -> None:
    assert str(checked(replace(GOOD, num_samples=10**60))).startswith(f"num_samples is {10**39}, expected")


PROBED = replace(GOOD, scalars={"loss": 1.5})


def probed(update: Update) -> str | None:
    expected = Expected(REFERENCE)
    return check(update, site="a", round=3, phase="train", expected=expected, max_samples=1000, probes=("loss",))


def test_a_declared_scalar_is_needed_and_may_be_unknown() -> None:
    assert probed(PROBED) is None
    for value in (math.nan, 1e12, -1e12):
        assert probed(replace(PROBED, scalars={"loss": value})) is None
    assert "it lacks the scalar 'loss', which the method needs" in str(probed(GOOD))


def test_a_scalar_is_a_number_in_range() -> None:
    values: list[Any] = [math.inf, -math.inf, 1e12 + 1, "1.5", None, True, [1.5]]
    for value in values:
        assert "scalar 'loss' is" in str(probed(replace(PROBED, scalars={"loss": value}))), value


def test_no_scalar_rides_along() -> None:
    two = replace(PROBED, scalars={"loss": 1.5, "more": 1.0})
    assert probed(two) == "it has 1 scalar(s) that the method does not know"


def with_tensor(value: object) -> Update:
    return replace(GOOD, state={**GOOD.state, "image_encoder.weight": value})  # type: ignore[dict-item]


REFUSED_TENSORS = {
    "NaN": torch.tensor([[1.0, math.nan, 0.0], [0.0, math.nan, 1.0]]),
    "inf": torch.full((2, 3), math.inf),
    "inf and -inf that cancel to NaN": torch.tensor([[math.inf, -math.inf, 0.0], [0.0, 0.0, 0.0]]),
    "a broadcastable (1,)": torch.ones(1),
    "0-d": torch.tensor(1.0),
    "a row too many": torch.ones(3, 3),
    "the transpose": torch.ones(3, 2),
    "float64": torch.ones(2, 3, dtype=torch.float64),
    "float16": torch.ones(2, 3, dtype=torch.float16),
    "int64": torch.ones(2, 3, dtype=torch.int64),
    "a list": [[1.0] * 3] * 2,
    "sparse": torch.ones(2, 3).to_sparse(),
    "sparse rows": torch.ones(2, 3).to_sparse_csr(),
    "without memory": torch.ones(2, 3, device="meta"),
    "None": None,
}


def test_refused_tensors_are_named() -> None:
    for name, tensor in REFUSED_TENSORS.items():
        assert "image_encoder.weight" in str(checked(with_tensor(tensor))), name


def test_the_count_of_bad_values_is_told() -> None:
    assert "2 value(s)" in str(checked(with_tensor(REFUSED_TENSORS["NaN"])))


def test_keys_must_be_exactly_those_that_are_shared() -> None:
    bias = GOOD.state["text_head.bias"]
    without = {n: t for n, t in GOOD.state.items() if n != "text_head.bias"}
    assert "1 missing tensor(s), e.g. text_head.bias" in str(checked(replace(GOOD, state=without)))
    assert "unexpected" in str(checked(replace(GOOD, state={**GOOD.state, "backdoor": bias})))
    assert "text_head.bias" in str(checked(replace(GOOD, state={**without, "text_head.offset": bias})))
    assert "missing" in str(checked(replace(GOOD, state={})))


def test_of_many_wrong_keys_three_are_listed() -> None:
    state = {**GOOD.state, **{f"extra{index}": torch.ones(1) for index in range(9)}}
    assert checked(replace(GOOD, state=state)) == "9 unexpected tensor(s), e.g. extra0, extra1, extra2"


def test_huge_but_finite_values_are_not_refused() -> None:
    """Their sum overflows, they do not: 4 * max is infinite in every dtype."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        huge = {"w": torch.full((4,), torch.finfo(dtype).max, dtype=dtype)}
        assert not torch.isfinite(huge["w"].sum())
        assert check_tensors(huge, huge) is None


def test_a_running_variance_may_be_zero_and_never_negative() -> None:
    """A constant channel has variance 0; one negative value among many is refused; a mean may be negative."""
    zeros = {"head.1.running_var": torch.zeros(3), "head.1.running_mean": -torch.ones(3)}
    assert check_tensors(zeros, zeros) is None
    negative = {**zeros, "head.1.running_var": torch.tensor([1.0, -1e-6, 1.0])}
    assert check_tensors(negative, zeros) == "head.1.running_var has a negative variance"


def test_one_nan_among_many_is_found() -> None:
    state = {"a": torch.zeros(10_000), "b": torch.zeros(10_000)}
    assert check_tensors(state, state) is None
    state["b"][7_777] = math.nan
    assert check_tensors(state, state) == "b has 1 value(s) that are NaN or infinite"
