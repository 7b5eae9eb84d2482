"""The one loop: a step by hand, when it stops, what is frozen, and how a broadcast scales it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy import ADAMW, SGD, Pairs, Toy, clone, pairs, same_bytes
from torch import Tensor, nn

from fedvlp.core.client import Client, named_state
from fedvlp.core.method import Method
from fedvlp.core.seeds import seed as core_seed
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, Broadcast, VLOutput, group
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.training.local_training import Aborted, train
from fedvlp.training.settings import Training


class Scalars(nn.Module):
    """image = a x, text = b y with the single weights a = 2 and b = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.image_encoder, self.text_encoder = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.image_encoder.weight, 2.0)
        nn.init.constant_(self.text_encoder.weight, 1.0)

    def forward(self, batch: Batch) -> VLOutput:
        return VLOutput(self.image_encoder(batch["image"]), self.text_encoder(batch["text"]))


class Square(nn.Module):
    """mean (image - text)^2"""

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        return {"square": (output.image - output.text).square().mean()}


def scalars_client() -> Client:
    data = Pairs(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [2.0]]))
    return Client("a", 0, Scalars(), Square(), data)


def weights(client: Client) -> tuple[float, float]:
    return client.model.image_encoder.weight.item(), client.model.text_encoder.weight.item()


def go(method: Method, client: Client, training: Training, message: Broadcast | None = None, stop: Any = None) -> Any:
    message = message or Broadcast(0, method.phases(0)[0], {})
    return train(method, client, message, training, stop or (lambda: False))


def toy_client(seed: int = 0, **options: Any) -> Client:
    return Client("a", 0, Toy(seed, **options), ConVIRT(), pairs(1))


class Drawing(ConVIRT):
    """Notes what it draws for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def draw(self, batch: Batch, generator: torch.Generator) -> Batch:
        self.drawn.append(float(torch.rand((), generator=generator)))
        return batch


@dataclass(frozen=True)
class TwoPhases(Method):
    def phases(self, round: int) -> tuple[str, ...]:
        return ("one", "two")


def test_views_differ_by_run_seed_site_round_and_phase() -> None:
    """And are not the numbers that order the batches."""

    def draw(seed: int = 0, site: str = "a", round: int = 0, phase: str = "one") -> float:
        objective = Drawing()
        client = Client(site, seed, Toy(), objective, pairs(1))
        go(TwoPhases(local_steps=1), client, SGD, Broadcast(round, phase, {}))
        return objective.drawn[0]

    batches = torch.Generator().manual_seed(core_seed(0, "a", 0, 0, "batches"))
    order = float(torch.rand((), generator=batches))
    assert len({order, draw(), draw(1), draw(site="b"), draw(round=1), draw(phase="two")}) == 6
    assert draw() == draw()


def test_one_step_by_hand() -> None:
    """x = (1, 2), y = (3, 2), a = 2, b = 1: residuals 2*1 - 3 = -1 and 2*2 - 2 = 2, loss (1 + 4)/2 = 2.5.

    dL/da = mean 2 r x = (-2 + 8)/2 = 3, dL/db = -mean 2 r y = -(-6 + 8)/2 = -1; with lr 0.1: a = 1.7, b = 1.1.
    """
    client = scalars_client()
    metrics = go(Method(local_steps=1), client, replace(SGD, batch_size=2))
    assert metrics == {"square": 2.5}
    assert weights(client) == pytest.approx((1.7, 1.1))


def test_epochs_are_passes_of_a_site_over_its_own_records_whatever_the_method_says() -> None:
    """Three passes of 9 records in batches of 4 are six steps, and of 17 twelve."""
    for records, steps in ((9, 6), (17, 12)):
        one, other = (Client("a", 0, Toy(), ConVIRT(), pairs(1, records)) for _ in range(2))
        training = replace(SGD, batch_size=4)
        go(Method(local_steps=1), one, replace(training, local_epochs=3))
        go(Method(local_steps=steps), other, training)
        same_bytes(one.state(), other.state())


def test_the_cosine_rate_is_the_rounds() -> None:
    """Of four rounds: half the rate in round 2, none in round 4, beside what the message says."""
    moved = []
    for round, scale in ((0, 0.25), (2, 0.5), (4, 1.0)):
        client = scalars_client()
        before = weights(client)
        cosine = replace(SGD, batch_size=2, cosine_rounds=4)
        go(Method(local_steps=1), client, cosine, Broadcast(round, "train", {}, lr_scale=scale))
        moved.append(weights(client)[0] - before[0])
    assert moved[0] == pytest.approx(moved[1])
    assert moved[2] == 0


def test_two_steps_by_hand() -> None:
    """From (1.7, 1.1): residuals 1.7 - 3.3 = -1.6, 3.4 - 2.2 = 1.2, loss (2.56 + 1.44)/2 = 2, so the mean is 2.25.

    dL/da = (-3.2 + 4.8)/2 = 0.8, dL/db = -(-9.6 + 4.8)/2 = 2.4: a = 1.62, b = 0.86.
    """
    client = scalars_client()
    assert go(Method(local_steps=2), client, replace(SGD, batch_size=2))["square"] == pytest.approx(2.25)
    assert weights(client) == pytest.approx((1.62, 0.86))


def test_adamw_by_hand() -> None:
    """The first AdamW step is lr (wd p + sign g): a = 2 - 0.01 (0.1*2 + 1) = 1.988, b = 1 - 0.01 (0.1 - 1) = 1.009."""
    client = scalars_client()
    go(Method(local_steps=1), client, replace(ADAMW, batch_size=2))
    assert weights(client) == pytest.approx((1.988, 1.009), abs=1e-6)


def test_warm_up_by_hand() -> None:
    """Two warm-up steps: lr 0.05, then 0.1. Step 1: a = 2 - 0.15 = 1.85, b = 1.05. Residuals there are -1.3 and 1.6:

    dL/da = (-2.6 + 6.4)/2 = 1.9, dL/db = -(-7.8 + 6.4)/2 = 0.7, so a = 1.85 - 0.19 = 1.66, b = 1.05 - 0.07 = 0.98.
    """
    client = scalars_client()
    go(Method(local_steps=1), client, replace(SGD, batch_size=2, warmup_steps=2))
    assert weights(client) == pytest.approx((1.85, 1.05))
    client = scalars_client()
    go(Method(local_steps=2), client, replace(SGD, batch_size=2, warmup_steps=2))
    assert weights(client) == pytest.approx((1.66, 0.98))
    client = scalars_client()
    message = Broadcast(0, "train", {}, lr_scale=2.0)
    go(Method(local_steps=1), client, replace(SGD, batch_size=2, warmup_steps=2), message)
    assert weights(client) == pytest.approx((1.7, 1.1))


def test_sgd_uses_momentum_and_weight_decay() -> None:
    """Step 1 by hand: a = 2 - 0.1 (3 + 0.5*2) = 1.6; b = 1 - 0.1 (-1 + 0.5*1) = 1.05."""
    client = scalars_client()
    go(Method(local_steps=1), client, replace(SGD, batch_size=2, weight_decay=0.5))
    assert weights(client) == pytest.approx((1.6, 1.05))
    with_momentum, without = scalars_client(), scalars_client()
    go(Method(local_steps=2), with_momentum, replace(SGD, batch_size=2, momentum=0.9))
    go(Method(local_steps=2), without, replace(SGD, batch_size=2))
    assert weights(with_momentum)[0] == pytest.approx(weights(without)[0] - 0.1 * 0.9 * 3)


def test_the_terms_are_summed_and_reported_by_name() -> None:
    @dataclass(frozen=True)
    class Two(Method):
        def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
            terms = super().losses(client, batch, message)
            return {**terms, "twice": 2 * terms["square"]}

    client = scalars_client()
    assert go(Two(local_steps=1), client, replace(SGD, batch_size=2)) == {"square": 2.5, "twice": 5.0}
    assert weights(client) == pytest.approx((2 - 0.1 * 9, 1 + 0.1 * 3))


@dataclass(frozen=True)
class Hooked(Method):
    """Notes the order of its hooks."""

    def complete(self, client: Client, batch: Batch, message: Broadcast) -> Batch:
        client.data.noted.append("complete")  # type: ignore[attr-defined]
        return {**batch, "image": torch.zeros_like(batch["image"])}

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        client.data.noted.append(f"losses {float(batch['image'].sum())}")  # type: ignore[attr-defined]
        return super().losses(client, batch, message)

    def after_step(self, client: Client, message: Broadcast) -> None:
        client.data.noted.append(f"after {weights(client)[1]:.1f}")  # type: ignore[attr-defined]


def test_the_hooks_of_a_step() -> None:
    """With x = 0: r = -(3, 2), dL/db = -mean 2 r y = 9 + 4 = 13; after_step is called when b = 1 - 1.3 = -0.3."""
    client = scalars_client()
    client.data.noted = []  # type: ignore[attr-defined]
    go(Hooked(local_steps=1), client, replace(SGD, batch_size=2))
    assert client.data.noted == ["complete", "losses 0.0", "after -0.3"]  # type: ignore[attr-defined]


def test_stops_between_steps() -> None:
    client, asked = toy_client(), []
    drawn = []
    client.data.tick = lambda: drawn.append(1)  # type: ignore[attr-defined]

    def third_time() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(Aborted, match="a: stopped in round 0 phase train"):
        go(Method(local_steps=50), client, SGD, stop=third_time)
    assert len(drawn) == 3  # two steps were done, the third batch was not used
    two_steps = toy_client()
    go(Method(local_steps=2), two_steps, SGD)
    same_bytes(client.state(), two_steps.state())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error_that_names_its_step(value: float) -> None:
    calls = []

    @dataclass(frozen=True)
    class Breaks(Method):
        def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
            calls.append(1)
            extra = torch.tensor(value if len(calls) == 3 else 0.0)
            return {**super().losses(client, batch, message), "extra": extra}

    with pytest.raises(FloatingPointError, match=rf"a: loss term 'extra' is {value} at step 2 of round 4 phase train"):
        go(Breaks(local_steps=5), toy_client(), SGD, Broadcast(4, "train", {}))


def test_the_loss_that_is_reported_is_not_scaled() -> None:
    client = scalars_client()
    message = Broadcast(0, "train", {}, loss_scale=3.0)
    assert go(Method(local_steps=1), client, replace(SGD, batch_size=2), message) == {"square": 2.5}
    assert weights(client) == pytest.approx((2 - 0.1 * 9, 1 + 0.1 * 3))


def test_a_fresh_optimiser_in_every_phase() -> None:
    """Two tasks of one step each are not one task of two steps when there is momentum."""
    split, whole = scalars_client(), scalars_client()
    momentum = replace(SGD, batch_size=2, momentum=0.9)
    for _ in range(2):
        go(Method(local_steps=1), split, momentum)
    go(Method(local_steps=2), whole, momentum)
    assert weights(split) == pytest.approx((1.62, 0.86))  # as without momentum
    assert weights(whole) != pytest.approx(weights(split))


@dataclass(frozen=True)
class HeadsOnly(Method):
    """Trains everything but the encoders, and notes the modes in which they run."""

    def trains(self, name: str, phase: str) -> bool:
        return group(name) != "encoder"

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        model = client.model
        modes = tuple(m.training for m in (model.image_encoder, model.text_encoder, model.image_alignment,
                                           model.text_head, client.objective))  # fmt: skip
        client.data.modes.append(modes)  # type: ignore[attr-defined]
        return super().losses(client, batch, message)


def test_what_is_frozen_runs_in_eval_mode_and_keeps_its_bits() -> None:
    client = toy_client(norm=True, dropout=0.5)
    client.data.modes = []  # type: ignore[attr-defined]
    before = clone(client.state())
    assert any("running_mean" in name for name in before)
    go(HeadsOnly(local_steps=3), client, ADAMW)
    assert client.data.modes == [(False, False, True, True, True)] * 3  # type: ignore[attr-defined]
    after = client.state()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (group(name) == "encoder"), name


def test_what_was_frozen_trains_again_in_the_next_phase() -> None:
    client = toy_client(norm=True)
    client.data.modes = []  # type: ignore[attr-defined]
    go(HeadsOnly(local_steps=1), client, SGD)
    before = clone(client.state())
    go(Method(local_steps=1), client, SGD)
    assert all(not torch.equal(before[name], t) for name, t in client.state().items() if "weight" in name)
    assert not torch.equal(before["image_encoder.1.running_mean"], client.state()["image_encoder.1.running_mean"])


def test_batches_depend_on_run_seed_site_round_and_phase_alone() -> None:
    @dataclass(frozen=True)
    class Phased(Method):
        def phases(self, round: int) -> tuple[str, ...]:
            return ("one", "two")

    def rows(seed: int = 0, name: str = "a", round: int = 0, phase: str = "one", noise: int = 0) -> list[int]:
        torch.manual_seed(noise)
        client = Client(name, seed, Toy(), ConVIRT(), pairs(1, 100))
        drawn: list[int] = []

        @dataclass(frozen=True)
        class Noting(Phased):
            def complete(self, client: Client, batch: Batch, message: Broadcast) -> Batch:
                drawn.extend(batch["row"].tolist())
                return batch

        go(Noting(local_steps=2), client, SGD, Broadcast(round, phase, {}))
        return drawn

    base = rows()
    assert len(base) == 8
    assert rows(noise=77) == base
    assert all(rows(**other) != base for other in ({"seed": 1}, {"name": "b"}, {"round": 1}, {"phase": "two"}))


def test_no_steps_no_change() -> None:
    client = toy_client()
    before = clone(client.state())
    assert go(Method(local_steps=0), client, ADAMW) == {}
    same_bytes(client.state(), before)


def test_the_base_class_trains_and_shares_everything() -> None:
    client = toy_client(norm=True)
    message = Broadcast(0, "train", {})
    assert Method().upload(client, message).keys() == client.state().keys()
    assert Method().upload(client, message)["text_head.bias"] is not None
    assert Method().phases(5) == ("train",)


def test_expected_weight_is_last_rounds() -> None:
    server = Server(("a", "b", "c"), {}, samples={"a": 3, "c": 4})
    assert Method().expected_weight(server) == 7.0
    assert Method(weighting="uniform").expected_weight(server) == 3.0


def test_the_objective_is_trained_too() -> None:
    class Learnt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
            return {"x": (output.image * output.text).mean() * self.temperature}

    client = Client("a", 0, Toy(), Learnt(), pairs(1))
    go(Method(local_steps=1), client, SGD)
    assert client.state()["objective.temperature"].item() != 1.0
    assert "objective.temperature" in named_state(client.model, client.objective)


def test_bad_hyper_parameters_fail_when_they_are_built() -> None:
    for kind, arguments, said in [
        (Method, {"weighting": "sample"}, "samples or uniform"),
        (Method, {"local_steps": -1}, "local_steps is -1"),
        (Training, {"batch_size": 1}, "at least 2"),
        (Training, {"optimizer": "adam"}, "adamw or sgd"),
        (Training, {"lr": -1e-3}, "lr is -0.001"),
        (Training, {"lr": math.nan}, "lr is nan"),
        (Training, {"threads": 0}, "at least 1"),
        (Training, {"warmup_steps": -1}, "warmup_steps is -1"),
        (Training, {"optimizer_state": "forget"}, "optimizer_state is 'forget'; choose reset or keep"),
    ]:
        with pytest.raises(ValueError, match=said):
            kind(**arguments)


def test_what_the_optimiser_would_refuse_fails_when_it_is_built() -> None:
    for arguments in [{"weight_decay": -0.1}, {"beta1": 1.0}, {"momentum": -1.0}, {"lr": math.inf}]:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            Training(optimizer="sgd" if "momentum" in arguments else "adamw", **arguments)  # type: ignore[arg-type]


def test_a_batch_without_any_loss_term_says_so() -> None:
    """A site that holds images alone gives the contrastive objective nothing to compute (faults, row 12)."""
    client = toy_client()
    client.data._batch = lambda split, rows: {"image": client.data.content[split][0][rows]}  # type: ignore
    with pytest.raises(Exception, match=r"modality|term"):
        go(Method(local_steps=1), client, SGD)


def test_what_a_warm_up_takes_away_by_hand() -> None:
    """10 steps of a warm-up of 10 are worth 0.1 + ... + 1 = 5.5, and 4 of them 1; 20 of a warm-up of 100 are 2.1."""
    for steps, warmup, worth, extra in [
        (40, 10, 35.5, 5), (50, 10, 45.5, 5), (10, 10, 5.5, 5), (5, 10, 1.5, 5), (3, 10, 0.6, 5), (1, 10, 0.1, 3),
        (40, 5, 38.0, 2), (40, 2, 39.5, 1), (40, 1, 40.0, 0), (40, 0, 40.0, 0), (0, 10, 0.0, 0), (2, 100, 0.03, 18),
    ]:  # fmt: skip
        training = Training(warmup_steps=warmup, make_up_warmup=True)
        assert training.full_rate(steps) == pytest.approx(worth)
        assert training.made_up(steps) == extra
        assert replace(training, make_up_warmup=False).made_up(steps) == 0


@settings(max_examples=60, deadline=None)
@given(steps=st.integers(0, 80), warmup=st.integers(0, 40))
def test_steps_made_up_are_the_fewest_that_do(steps: int, warmup: int) -> None:
    """And what steps are worth is the sum of the shares that the schedule gives them."""
    training = Training(warmup_steps=warmup, make_up_warmup=True, lr=1.0)
    total = steps + training.made_up(steps)
    assert training.full_rate(total) >= steps
    assert total == steps or training.full_rate(total - 1) < steps
    optimizer = training.build([nn.Parameter(torch.zeros(1))], 1.0)
    schedule, shares = training.warm_up(optimizer), 0.0
    for _ in range(total):
        shares += optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
    assert shares == pytest.approx(training.full_rate(total))


def test_a_warm_up_beyond_all_bounds_is_counted_at_once() -> None:
    """A job may say any number: sqrt(2 * 50 * 10^18) steps are 10^10, which nobody counts up to."""
    assert Training(warmup_steps=10**18, make_up_warmup=True).made_up(50) == 10**10 - 50


@pytest.mark.parametrize("made_up", [False, True])
def test_the_steps_are_made_up_with_the_sites_own_records(made_up: bool) -> None:
    """Two steps of a warm-up of 3 are worth 1/3 + 2/3, and the third is worth one."""
    client, seen = toy_client(), []
    client.data.tick = lambda: seen.append(1)  # type: ignore[attr-defined]
    go(Method(local_steps=2), client, replace(SGD, warmup_steps=3, make_up_warmup=made_up))
    assert len(seen) == (3 if made_up else 2)


def test_a_parameter_that_no_loss_reaches_is_no_reason_to_warm_up_again() -> None:
    """It has a mark in the place of moments, until a loss reaches it; then it has its own, from the first step on."""

    class Half(Square):
        whole = False

        def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
            text = output.text if self.whole else output.text.detach()
            return {"square": (output.image - text).square().mean()}

    client, kept = scalars_client(), {}
    client.objective = half = Half()
    training = replace(ADAMW, batch_size=2, warmup_steps=4, lr=0.01, weight_decay=0.0)

    def phase() -> float:
        before = weights(client)[0]
        train(Method(local_steps=1), client, Broadcast(0, "train", {}), training, lambda: False, optimizer=kept)
        return abs(weights(client)[0] - before)

    assert phase() == pytest.approx(0.0025, rel=1e-4), "a quarter of the rate"
    assert {name for name in kept if name.startswith("text")} == {"text_encoder.weight/idle"}
    assert phase() > 0.005
    half.whole = True
    assert phase() > 0.005
    assert {name.rpartition("/")[2] for name in kept if name.startswith("text")} == {"step", "exp_avg", "exp_avg_sq"}
    assert kept["text_encoder.weight/step"] == 1
