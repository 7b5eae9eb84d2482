"""Gradient caching: the gradient of a large batch, exactly, whatever the method, with dropout and BatchNorm heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.towers import client, encoder
from torch import Tensor, nn

from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.types import Broadcast, VLOutput
from fedvlp.methods import FedDRA, FedRGB
from fedvlp.training.grad_cache import MicroBatches, rows_of

Gradients = dict[str, Tensor]
METHODS = [(Method(), "train"), (FedDRA(), "align"), (FedDRA(), "joint"), (FedRGB(), "local"), (FedRGB(), "aligner")]


def gradients(one: Client, method: Method, phase: str, split: MicroBatches | None) -> tuple[float, Gradients]:
    """The loss of one batch of 10, and its gradient, with an anchor that differs from the model."""
    state = {name: t * 1.1 if t.is_floating_point() else t for name, t in one.state().items()}
    message = Broadcast(0, phase, {name: t.clone() for name, t in state.items()})
    one.set_trainable(lambda name: method.trains(name, phase))
    one.model.micro_batches = split
    torch.manual_seed(5)
    (batch,) = one.data.train_batches(1, 10, torch.Generator().manual_seed(7))
    loss: Any = sum(method.losses(one, batch, message).values())
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in one.trainable() if p.grad is not None}


def furthest(left: Gradients, right: Gradients) -> float:
    """|left - right| / |right|, all parameters together."""
    assert left.keys() == right.keys()
    norms = [torch.stack([g.double().norm() for g in gradient]).norm() for gradient in
             ([left[name] - right[name] for name in right], right.values())]  # fmt: skip
    return float(norms[0] / norms[1])


@pytest.mark.parametrize(("dtype", "parts"), [(torch.float64, (1, 4, 99)), (torch.float32, (4,))], ids=["64", "32"])
@pytest.mark.parametrize(("method", "phase"), METHODS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_gradient_is_that_of_the_whole_batch(
    method: Method, phase: str, dtype: torch.dtype, parts: tuple[int, ...]
) -> None:
    """In parts of one, with a last one that is smaller, and in one part."""
    whole_loss, whole = gradients(client(encoder(dtype=dtype)), method, phase, None)
    # fewer rows go through other float32 kernels, which round differently: by 2e-6 at the most with SSE4 and AVX2
    limit = 1e-12 if dtype == torch.float64 else 5e-6
    for rows in parts:
        loss, cached = gradients(client(encoder(dtype=dtype)), method, phase, MicroBatches(rows))
        assert loss == pytest.approx(whole_loss, rel=limit), rows
        assert furthest(cached, whole) < limit, rows


def test_without_negatives_of_the_whole_batch_it_would_differ() -> None:
    """The test above bites: the mean of the parts' own gradients is far away."""
    one = client(encoder(dtype=torch.float64))
    _, whole = gradients(one, Method(), "train", None)
    one = client(encoder(dtype=torch.float64))
    (batch,) = one.data.train_batches(1, 10, torch.Generator().manual_seed(7))
    for rows in (slice(0, 5), slice(5, 10)):
        piece = rows_of(batch, rows)
        (sum(Method().losses(one, piece, Broadcast(0, "train", {})).values()) / 2).backward()
    assert furthest({name: p.grad for name, p in one.trainable()}, whole) > 0.1


def test_dropout_draws_the_same_numbers_the_second_time() -> None:
    """Against the same parts with everything kept: torch.cat of ``align(towers(part))`` under one generator."""
    caching, keeping = (client(encoder(dropout=0.4, dtype=torch.float64)) for _ in range(2))
    _, cached = gradients(caching, Method(), "train", MicroBatches(4))
    model = keeping.model
    (batch,) = keeping.data.train_batches(1, 10, torch.Generator().manual_seed(7))
    keeping.set_trainable(lambda name: True)
    torch.manual_seed(5)
    pieces = [model.align(model.towers(rows_of(batch, slice(start, min(start + 4, 10))))) for start in (0, 4, 8)]
    image, text = (torch.cat([getattr(piece, name) for piece in pieces]) for name in ("image", "text"))
    unit = nn.functional.normalize
    output = VLOutput(unit(model.image_head(image), dim=-1), unit(model.text_head(text), dim=-1))
    sum(keeping.objective(output, batch).values()).backward()
    kept = {name: p.grad for name, p in keeping.trainable()}
    assert furthest(cached, kept) < 1e-12
    without = gradients(client(encoder(dtype=torch.float64)), Method(), "train", MicroBatches(4))[1]
    assert furthest(cached, without) > 0.1, "there was dropout"


class Local(nn.Module):
    """A loss of the tokens, as local objectives have: sum of |image token| + |text token| at real positions."""

    needs = ("image", "text", "words", "patches")

    def forward(self, output: VLOutput, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        assert output.image_tokens is not None
        assert output.text_tokens is not None
        assert output.text_mask is not None
        text = (output.text_tokens * output.text_mask[:, :, None]).abs().mean()
        return {"tokens": output.image_tokens.abs().mean() + text, "global": (output.image * output.text).sum()}


def test_objectives_of_tokens_get_them() -> None:
    _, whole = gradients(client(encoder(dtype=torch.float64), Local()), Method(), "train", None)
    _, cached = gradients(
        client(encoder(dtype=torch.float64), Local()), Method(), "train", MicroBatches(3, tokens=True)
    )
    assert furthest(cached, whole) < 1e-12


@pytest.mark.parametrize("missing", ["image", "text"])
def test_one_modality_alone(missing: str) -> None:
    model = encoder()
    (batch,) = client(model).data.train_batches(1, 10, torch.Generator().manual_seed(7))
    there = {name: t for name, t in batch.items() if not name.startswith(missing)}
    whole = model.eval()(there)
    model.micro_batches = MicroBatches(3)
    assert getattr(model(there), missing) is None
    other = "text" if missing == "image" else "image"
    assert torch.allclose(getattr(model(there), other), getattr(whole, other), atol=1e-6)


def test_what_is_encoded_without_gradient_stays_without() -> None:
    """FedRGB encodes with the frozen towers and projects with the model: the gradient ends at the alignment."""
    model = encoder()
    model.micro_batches = MicroBatches(4)
    (batch,) = client(model).data.train_batches(1, 10, torch.Generator().manual_seed(7))
    with torch.no_grad():
        encoded = model.encode(batch)
    model.project(encoded).image[:, 0].sum().backward()
    assert all(p.grad is None for p in model.image_encoder.parameters())
    assert model.image_alignment.qkv.weight.grad is not None


def test_a_tower_that_normalises_over_the_batch_is_refused() -> None:
    one = client()
    one.model.image_encoder.stem[1] = nn.BatchNorm2d(32)
    with (
        pytest.raises(ValueError, match=r"image_encoder\.stem\.1 normalises over the batch"),
        one.in_micro_batches(MicroBatches(4)),
    ):
        pass
    one.set_trainable(lambda name: not name.startswith("image"))  # frozen, it uses its running statistics
    with one.in_micro_batches(MicroBatches(4)):
        assert one.model.micro_batches == MicroBatches(4)
    assert one.model.micro_batches is None


def test_a_model_that_cannot_take_micro_batches_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="micro_batch"),
        Client("a", 0, nn.Linear(1, 1), nn.Identity(), None).in_micro_batches(MicroBatches(4)),
    ):  # type: ignore[arg-type]
        pass


def test_anchors_run_in_parts_too() -> None:
    """Else their memory would grow with the batch: no tower ever sees more rows than a micro-batch has."""
    seen: list[int] = []
    one = client()
    one.model.image_encoder.norm.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    gradients(one, FedDRA(), "joint", MicroBatches(4))
    assert len(seen) >= 9, "model, anchor and the second pass of the model"
    assert max(seen) == 4
