"""One optimiser step: what each setting does to it by hand, and what one of several processes does and asks of others.

That several real processes agree is shown by test_distributed.py; here the others are played by this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.towers import client as dual_client
from support.toy import ADAMW, SGD, same_bytes
from torch import Tensor, nn

from fedvlp.core.client import Client
from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.seeds import seed
from fedvlp.core.types import Batch, Broadcast
from fedvlp.training import distributed
from fedvlp.training.grad_cache import MicroBatches
from fedvlp.training.settings import Training
from fedvlp.training.step import Stepper, _piece, compile_towers

PLAIN = replace(SGD, batch_size=4)  # SGD at rate 0.1
BATCH = {"x": torch.tensor([1.0, 2.0, 3.0, 6.0])}
PURPOSE = 77


class Two(nn.Module):
    """Weights a = 2 and b = 1, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mean", torch.tensor(3.0))
        self.register_buffer("count", torch.tensor(5))


class Counting(ObjectiveModule):
    """An objective that counts steps, with a running statistic."""

    needs: tuple[str, ...] = ("image", "text")

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.register_buffer("scale", torch.tensor(4.0))

    def after_step(self) -> None:
        self.steps += 1


def client(model: nn.Module | None = None) -> Client:
    return Client("a", 0, model or Two(), Counting(), None)  # type: ignore[arg-type]


def stepper(one: Client, training: Training = PLAIN, **scalars: float) -> Stepper:
    return Stepper(one, training, Broadcast(0, "train", {}, **scalars), PURPOSE)


def product(one: Client) -> Callable[[Batch], dict[str, Tensor]]:
    """a * mean x: its derivative by a is mean x = 3 on ``BATCH``; b has none."""
    return lambda batch: {"product": one.model.a * batch["x"].mean()}


def test_a_step_by_hand() -> None:
    """a = 2 - 0.1 * 3; b takes no part. The term is 2 * 3, without a graph."""
    one = client()
    step = stepper(one)
    assert step.numbers()["done"] == 0
    terms = step(BATCH, product(one))
    assert (one.model.a.item(), one.model.b.item()) == pytest.approx((1.7, 1.0))
    assert terms["product"].item() == 6
    assert not terms["product"].requires_grad
    assert step.numbers()["done"] == 1
    assert one.objective.steps == 1


def test_a_loss_scale_of_nothing_moves_nothing() -> None:
    one = client()
    terms = stepper(one, loss_scale=0.0)(BATCH, product(one))
    assert one.model.a.item() == 2
    assert terms["product"].item() == 6, "the term is reported as it is"


def test_an_optimiser_that_is_handed_on_shares_no_memory() -> None:
    """The optimiser works in place, and what was handed on is what a site saves; an unmoved b leaves an empty mark."""
    first, second, kept = client(), client(), {}
    training = replace(ADAMW, batch_size=4, warmup_steps=0)
    step = stepper(first, training)
    step(BATCH, product(first))
    step.hand_on(kept)
    assert kept["b/idle"].numel() == 0
    as_saved = {name: tensor.clone() for name, tensor in kept.items()}
    following = stepper(second, training)
    assert following.go_on(kept)
    for one, own in ((step, first), (following, second)):
        one(BATCH, product(own))
        same_bytes(kept, as_saved)


def test_only_tensors_of_parameters_that_it_trains_are_taken_over() -> None:
    """Others, whose place may be before them, are passed over; with nothing to take over there is a warm-up."""
    one, kept = client(), {}
    training = replace(ADAMW, batch_size=4)
    step = stepper(one, training)
    step(BATCH, lambda batch: {"sum": one.model.a + one.model.b})
    step.hand_on(kept)
    following = stepper(client(), training)
    assert not following.go_on({})
    assert not following.go_on({"gone/exp_avg": torch.ones(3)})
    assert following.go_on({"gone/exp_avg": torch.ones(3), **kept})
    same_bytes(following.tensors(), kept)


def test_what_is_handed_on_replaces_what_stood_for_the_same_parameters() -> None:
    """What is of other phases' parameters stays."""
    one = client()
    step = stepper(one, replace(ADAMW, batch_size=4))
    step(BATCH, lambda batch: {"sum": one.model.a + one.model.b})
    kept = {name: torch.ones(1) for name in ("a/idle", "b/former", "gone/exp_avg")}
    step.hand_on(kept)
    assert kept.keys() == {"gone/exp_avg", *step.tensors()}


def test_the_rate_rises_to_its_full_height_and_is_there_at_once_with_an_optimiser_that_is_warm() -> None:
    def rate(of: Stepper) -> float:
        return float(of.numbers()["groups"][0]["lr"])

    training, kept = replace(ADAMW, batch_size=4, warmup_steps=2), {}
    one = client()
    step = stepper(one, training)
    rates = [rate(step)]
    for _ in range(2):
        step(BATCH, lambda batch: {"sum": one.model.a + one.model.b})
        rates.append(rate(step))
    assert rates == pytest.approx([training.lr / 2, training.lr, training.lr])
    step.hand_on(kept)
    warm, cold = stepper(client(), training), stepper(client(), training)
    assert warm.go_on(kept)
    assert not cold.go_on({})
    assert (rate(warm), rate(cold)) == pytest.approx((training.lr, training.lr / 2))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_loss_runs_in_the_precision_of_the_settings() -> None:
    for precision, low in (("float32", None), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        one, seen = client(), []

        def losses(batch: Batch, one: Client = one, seen: list[Any] = seen) -> dict[str, Tensor]:
            seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
            return product(one)(batch)

        stepper(one, replace(PLAIN, precision=precision))(BATCH, losses)
        assert seen == [low], precision


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_one_infinite_value_among_finite_ones_leaves_a_step_in_float16_out() -> None:
    """In one of two weights, or in one value of a weight: nothing is corrected, and nothing moves."""
    both, vector = Two(), Two()
    vector.a = nn.Parameter(torch.ones(2))
    for model, factor in ((both, torch.tensor(1e38)), (vector, torch.tensor([1e38, 1e-3]))):
        one, called, before = client(model), [], model.a.tolist()

        def losses(batch: Batch, one: Client = one, factor: Tensor = factor) -> dict[str, Tensor]:
            return {"sum": (one.model.a * factor).sum() + one.model.b * 1e-3}

        stepper(one, replace(PLAIN, precision="float16"))(BATCH, losses, lambda called=called: called.append(1))
        assert called == []
        assert (model.a.tolist(), model.b.item()) == (before, 1)


def test_a_weight_without_gradient_is_left_alone_whatever_came_before() -> None:
    """AdamW's momentum and decay would move b in the second step if its gradient were zero instead of none."""
    one = client()
    step = stepper(one, replace(ADAMW, batch_size=4))
    step(BATCH, lambda batch: {"sum": one.model.a + one.model.b})
    a, b = one.model.a.item(), one.model.b.item()
    step(BATCH, product(one))
    assert one.model.a.item() < a
    assert one.model.b.item() == b


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"accumulation": "plain"}, [4]),
        ({"accumulation": "plain", "micro_batch": 1}, [1, 1, 1, 1]),
        ({"accumulation": "plain", "micro_batch": 2}, [2, 2]),
        ({"accumulation": "plain", "micro_batch": 3}, [2, 2]),
        ({"accumulation": "plain", "micro_batch": 4}, [4]),
        ({"accumulation": "plain", "micro_batch": 9}, [4]),
        ({"accumulation": "cached", "micro_batch": 3}, [4]),
    ],
)
def test_rows_of_a_loss(settings: dict[str, Any], seen: list[int]) -> None:
    """Cached parts share one loss; plain ones have one each, and the mean of all is 3. Unequal ones: test_config.py."""
    one, rows = client(), []

    def losses(batch: Batch) -> dict[str, Tensor]:
        rows.append(len(batch["x"]))
        return product(one)(batch)

    terms = stepper(one, replace(PLAIN, **settings))(BATCH, losses)
    assert rows == seen
    assert terms["product"].item() == pytest.approx(6)
    assert not terms["product"].requires_grad
    assert one.model.a.item() == pytest.approx(1.7)


def test_no_part_of_a_batch_is_one_record() -> None:
    """It would have no negatives, and no variance; parts that are equal anyway stay as they are."""
    for rows, micro_batch, seen in [
        (33, 16, [11, 11, 11]),
        (34, 16, [11, 11, 12]),
        (5, 2, [2, 3]),
        (3, 2, [3]),
        (7, 6, [3, 4]),
        (6, 2, [2, 2, 2]),
    ]:
        settings = replace(PLAIN, accumulation="plain", micro_batch=micro_batch)
        pieces = list(stepper(client(), settings)._pieces({"x": torch.arange(rows)}))
        assert [len(piece["x"]) for piece in pieces] == seen
        assert torch.cat([piece["x"] for piece in pieces]).tolist() == list(range(rows))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_an_overflow_in_float16_is_left_out_and_halves_the_scale() -> None:
    """GradScaler begins with 2^16; a gradient that is infinite under it moves nothing."""
    one = client()
    step = stepper(one, replace(PLAIN, precision="float16"))
    assert step.numbers()["scaler"]["scale"] == 2.0**16
    step(BATCH, lambda batch: {"huge": one.model.a * 1e38})
    assert one.model.a.item() == 2
    assert step.numbers()["scaler"]["scale"] == 2.0**15
    again = stepper(client(), replace(PLAIN, precision="float16"))
    again.restore(step.tensors(), step.numbers())
    assert again.numbers()["scaler"]["scale"] == 2.0**15


def corrected(one: Client, seen: list[float], by: float = 0.0) -> Callable[[], None]:
    """Notes the gradient of a, and adds ``by`` to it."""

    def correct() -> None:
        seen.append(float(one.model.a.grad))
        one.model.a.grad += by

    return correct


def test_gradients_are_corrected_whole_and_before_they_are_clipped() -> None:
    """3 for any parts; corrected to 5 and clipped to 1, a = 2 - 0.1 * 1. Clipped first it would be 1 + 2."""
    for settings in ({}, {"accumulation": "plain", "micro_batch": 1}):
        one, seen = client(), list[float]()
        stepper(one, replace(PLAIN, clip_norm=1.0, **settings))(BATCH, product(one), corrected(one, seen, 2.0))
        assert seen == pytest.approx([3])
        assert one.model.a.item() == pytest.approx(1.9)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_gradients_in_float16_are_corrected_without_their_scale_and_not_in_a_step_left_out() -> None:
    one, seen = client(), list[float]()
    step = stepper(one, replace(PLAIN, precision="float16"))
    step(BATCH, lambda batch: {"huge": one.model.a * 1e38}, corrected(one, seen))
    assert seen == []
    step(BATCH, product(one), corrected(one, seen))
    assert seen == pytest.approx([3])


@pytest.mark.parametrize("wanted", [False, True])
def test_channels_last_is_the_layout_of_weights_and_images(wanted: bool) -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(2, 3, 3)

    def is_last(tensor: Tensor) -> bool:
        return tensor.is_contiguous(memory_format=torch.channels_last)

    one, seen = client(Convolution()), []

    def losses(batch: Batch) -> dict[str, Tensor]:
        seen.append(batch)
        return {"sum": one.model.layer.weight.sum()}

    step = stepper(one, replace(PLAIN, channels_last=wanted))
    assert is_last(one.model.layer.weight) == wanted
    images = torch.arange(4.0 * 2 * 5 * 5).view(4, 2, 5, 5)
    step({"image": images, "text": torch.zeros(4, 3)}, losses)
    assert is_last(seen[0]["image"]) == wanted
    assert torch.equal(seen[0]["image"], images)
    step({"text": torch.zeros(4, 3)}, losses)
    assert seen[1].keys() == {"text"}


# Compiled towers


def test_both_towers_are_compiled_after_a_trial_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, compiled = [], []

    def trial(function: Any) -> Any:
        return lambda tensor: tried.append((function(tensor + 1).tolist(), tensor.device))

    monkeypatch.setattr(torch, "compile", trial)
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    model = dual_client().model
    compile_towers(model)
    assert len(tried) == 1
    assert tried[0][1] == torch.device("cpu")
    assert compiled == [model.image_encoder, model.text_encoder]


# Parts of a batch


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """This process is rank 1 of two; the other has the same gradients, so that the mean is ten times as large here.

    What :func:`distributed.my_rows` is asked for is noted.
    """
    asked: list[tuple[int, int]] = []

    def my_rows(total: int, least: int) -> slice:
        asked.append((total, least))
        return slice(total // 2, total)

    def average(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.detach().mul_(10)

    monkeypatch.setattr(distributed, "together", lambda: True)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "my_rows", my_rows)
    monkeypatch.setattr(distributed, "average", average)

    class Sum:
        def __init__(self, flat: Tensor, async_op: bool) -> None:
            flat.mul_(20)

        def wait(self) -> None:
            pass

    monkeypatch.setattr(dist, "all_reduce", Sum)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return asked


def split_of(training: Training, needs: tuple[str, ...] = ("image", "text")) -> MicroBatches | None:
    """How the towers see a batch while steps run."""
    one = dual_client(objective=Counting())
    one.objective.needs = needs  # type: ignore[assignment]
    with stepper(one, training).running():
        seen: MicroBatches | None = one.model.micro_batches
    assert one.model.micro_batches is None
    return seen


GATHER = replace(PLAIN, gather_negatives=True)


def test_alone_the_towers_see_parts_where_a_cached_micro_batch_is_asked_for() -> None:
    assert split_of(PLAIN) is None
    assert split_of(GATHER) is None
    assert split_of(replace(PLAIN, micro_batch=2, accumulation="plain")) is None
    assert split_of(replace(PLAIN, micro_batch=2)) == MicroBatches(2)


def test_among_several_they_see_the_rows_of_a_process_where_negatives_are_gathered(several: Any) -> None:
    assert split_of(PLAIN) is None
    assert split_of(replace(PLAIN, micro_batch=2)) == MicroBatches(2)
    assert split_of(GATHER) == MicroBatches(0, gather=True)
    assert split_of(replace(GATHER, micro_batch=2)) == MicroBatches(2, gather=True)
    assert split_of(replace(GATHER, micro_batch=2, accumulation="plain")) == MicroBatches(0, gather=True)


def test_tokens_are_kept_for_an_objective_that_reads_them() -> None:
    cached = replace(PLAIN, micro_batch=2)
    assert split_of(cached, ("image", "text", "words")) == MicroBatches(2, tokens=True)
    assert split_of(cached, ("patches",)) == MicroBatches(2, tokens=True)
    assert split_of(cached, ()) == MicroBatches(2)


# Among several processes


def test_each_process_takes_its_rows_and_the_mean_of_all_gradients(several: list[tuple[int, int]]) -> None:
    """Rows 2 and 3 have the mean 4.5: a = 2 - 0.1 * 10 * 4.5, the "mean" being ten times one's own."""
    one = client()
    terms = stepper(one)(BATCH, product(one))
    assert several == [(4, 2)], "a contrastive loss needs two rows"
    assert terms["product"].item() == 9
    assert one.model.a.item() == pytest.approx(2 - 4.5)
    assert one.model.b.item() == 1, "it has no gradient to average"


def test_the_gradients_that_are_corrected_are_those_of_all_processes(several: Any) -> None:
    one, seen = client(), list[float]()
    stepper(one)(BATCH, product(one), corrected(one, seen))
    assert seen == pytest.approx([45]), "ten times one's own"


def test_with_gathered_negatives_each_process_takes_all_rows(several: list[tuple[int, int]]) -> None:
    """The towers share them out (grad_cache); the gradient is averaged all the same: a = 2 - 0.1 * 10 * 3."""
    one = client()
    stepper(one, GATHER)(BATCH, product(one))
    assert several == []
    assert one.model.a.item() == pytest.approx(-1)


@pytest.mark.parametrize(("training", "rank"), [(PLAIN, 1), (GATHER, 0)])
def test_random_numbers_of_a_step_are_a_process_own_unless_negatives_are_gathered(
    training: Training, rank: int, several: Any
) -> None:
    """Then all have the same, of which grad_cache makes its own."""
    one, seeds = client(), []

    def losses(batch: Batch) -> dict[str, Tensor]:
        seeds.append(torch.initial_seed())
        return product(one)(batch)

    step = stepper(one, training)
    step(BATCH, losses)
    step(BATCH, losses)
    assert seeds == [seed(PURPOSE, 0, rank), seed(PURPOSE, 1, rank)]


def test_alone_random_numbers_go_on() -> None:
    one = client()
    torch.manual_seed(5)
    step = stepper(one)
    step(BATCH, product(one))
    assert torch.initial_seed() == 5


def test_at_the_end_gradients_are_freed_and_statistics_and_terms_are_means(several: Any) -> None:
    """Statistics of model and objective; the count of batches is no mean."""
    one = client()
    step = stepper(one)
    terms = step(BATCH, product(one))
    step.end([terms])
    assert one.model.a.grad is None
    assert (one.model.mean.item(), one.objective.scale.item(), one.model.count.item()) == (30, 40, 5)
    assert terms["product"].item() == 90


def test_alone_the_end_changes_no_statistic_and_no_term() -> None:
    one = client()
    step = stepper(one)
    terms = step(BATCH, product(one))
    step.end([terms])
    assert one.model.a.grad is None
    assert (one.model.mean.item(), terms["product"].item()) == (3, 6)


def test_towers_are_compiled_once_in_a_run_and_the_anchor_as_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trial and two towers, whatever the phases; copying a module leaves compiled code behind."""
    compiled = []

    def compile_(function: Any, **_: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    client = dual_client()
    for _ in range(3):
        compile_towers(client.model)
    assert len(compiled) == 3
    anchor = client.anchor(client.state())
    assert [name for name, module in anchor.named_modules() if module._compiled_call_impl] == [
        "image_encoder",
        "text_encoder",
    ]
    client.release()
    client.anchor(client.state())
    assert len(compiled) == 5


def test_the_parts_of_a_batch_are_cut_by_their_own_lengths() -> None:
    """Three records and seven public items in pieces of two records; the first tensor says how many there are."""
    batch = {"row": torch.arange(3), "public/row": torch.arange(7), "public/few": torch.arange(1)}
    first, second = _piece(batch, 0, 2), _piece(batch, 2, 3)
    assert {n: t.tolist() for n, t in first.items()} == {"row": [0, 1], "public/row": [0, 1, 2, 3]}
    assert {n: t.tolist() for n, t in second.items()} == {"row": [2], "public/row": [4, 5, 6], "public/few": [0]}
