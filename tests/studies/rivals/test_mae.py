"""MAE: patches and the error by hand, how much is masked, and that what is visible teaches nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.films import MAE, MODEL, SIDE, Films, drawn, model
from torch import Tensor, nn

from fedvlp.core.types import VLOutput
from studies.rivals import MAEConfig
from studies.rivals.mae import masked_error, patchify

pytestmark = pytest.mark.slow(seconds=5)

FILM = torch.arange(16, dtype=torch.float64).view(1, 1, 4, 4)  # patches of 2 x 2: [0 1 4 5] [2 3 6 7] [8 9 ..] ..


def mask(*hidden: int) -> Tensor:
    return torch.tensor([[index in hidden for index in range(4)]])


def test_patches_by_hand() -> None:
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert patchify(FILM, 2)[0].tolist() == expected
    two = torch.cat([FILM, -FILM], dim=1)
    assert patchify(two, 2)[0, 1].tolist() == [2, 3, 6, 7, -2, -3, -6, -7]


def test_the_error_by_hand() -> None:
    """Patch [0 1 4 5]: mean 2.5, variance (6.25 + 2.25 + 2.25 + 6.25) / 4 = 4.25; normalised it has mean 0, variance 1.

    A prediction of 0 has error 1 on it, one of 1 has 1 + 1 = 2; the mean of a patch with each is 1.5. Other patches do
    not count, however wrong.
    """
    predicted = torch.full((1, 4, 4), 99.0, dtype=torch.float64)
    predicted[0, 0], predicted[0, 3] = 0, 1
    assert masked_error(predicted, FILM, mask(0)).item() == pytest.approx(1, abs=1e-5)
    assert masked_error(predicted, FILM, mask(3)).item() == pytest.approx(2, abs=1e-5)
    assert masked_error(predicted, FILM, mask(0, 3)).item() == pytest.approx(1.5, abs=1e-5)


def test_a_mask_of_nothing_gives_0_with_a_gradient_of_0() -> None:
    predicted = torch.ones(1, 4, 4, requires_grad=True)
    error = masked_error(predicted, FILM, mask())
    error.backward()
    assert error.item() == 0
    assert predicted.grad is not None
    assert predicted.grad.abs().sum() == 0


def test_a_visible_patch_is_no_target() -> None:
    """Spec 9: another film in the visible patches changes nothing; in a masked one it does."""
    predicted = torch.randn(1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = masked_error(predicted, FILM, mask(0, 2))
    visible, hidden = FILM.clone(), FILM.clone()
    visible[..., :2, 2] += 7  # of patch 1
    hidden[..., :2, 0] += 7  # of patch 0
    assert masked_error(predicted, visible, mask(0, 2)) == before
    assert masked_error(predicted, hidden, mask(0, 2)) != before


@pytest.mark.parametrize(("ratio", "hidden"), [(0.0, 0), (0.3, 1), (0.75, 3), (1.0, 4)])
def test_of_every_film_as_many_patches_are_hidden_as_is_said(ratio: float, hidden: int) -> None:
    objective = MAEConfig(ratio=ratio, width=16, blocks=1, heads=2).build(model(), 0)  # 16 pixels: 2 x 2 patches of 8
    films = Films(0, 50).content["train"][0]
    batch = drawn(objective, films)
    masked, view = batch["masked"], batch["views"][:, 0]
    assert masked.sum(dim=1).tolist() == [hidden] * 50
    patches, shown = patchify(films, 8), patchify(view, 8)
    assert torch.equal(shown, torch.where(masked[..., None], 0.0, patches))
    if 0 < hidden < 4:
        assert (masked.float().mean(dim=0) - hidden / 4).abs().max() < 0.3, "each place has its turn"


def test_the_decoder_sees_nothing_of_a_hidden_patch() -> None:
    """Not by its token either, which a convolution of the neighbours reaches."""
    objective: Any = MAE.build(model(), 0)
    tokens = torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(0))
    masked = mask(1)
    before = objective.restore(tokens, masked)
    assert before.shape == (1, 4, 64)
    hidden, visible = tokens.clone(), tokens.clone()
    hidden[:, 2] += 1  # after the summary token and patch 0
    visible[:, 1] += 1
    torch.testing.assert_close(objective.restore(hidden, masked), before)
    assert not torch.allclose(objective.restore(visible, masked), before)


def test_the_film_that_is_matched_is_whole_and_the_terms_are_two() -> None:
    encoder, objective = model(), MAEConfig(ratio=0.5, width=16, blocks=1, heads=2, weight=2.0).build(model(), 0)
    (batch,) = Films(0, 4).batches("train", 4, drop_last=False)
    batch |= drawn(objective, batch["image"])
    output = encoder(batch)
    torch.testing.assert_close(output.image, encoder({"image": batch["image"]}).image)
    terms: dict[str, Tensor] = objective(output, batch)
    assert terms.keys() == {"contrastive", "masked"}
    restored = objective.restore(output.views[:, 0], batch["masked"])  # type: ignore[operator]
    assert terms["masked"].item() == pytest.approx(
        2 * masked_error(restored, batch["image"], batch["masked"]).item(), rel=1e-6
    )
    terms["masked"].backward()
    assert encoder.image_encoder.stem[0].weight.grad is not None, "the tower learns"
    assert list(objective(VLOutput(output.image, output.text), batch)) == ["contrastive"]


def test_it_learns_to_restore() -> None:
    """Twenty steps on the same four films: the error falls by a quarter at least."""
    encoder, objective = model(), MAE.build(model(), 0)
    batch = drawn(objective, torch.linspace(-1, 1, SIDE).expand(4, 1, SIDE, SIDE).contiguous())
    optimizer = torch.optim.Adam([*encoder.parameters(), *objective.parameters()], lr=1e-2)
    errors = []
    for _ in range(20):
        error = objective(encoder(batch), batch)["masked"]
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.75 * errors[0], errors


class Odd(nn.Module):
    """A tower of six patches."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.zeros(len(images), 7, 4)


def test_a_tower_without_a_square_grid_is_refused() -> None:
    encoder = model()
    encoder.image_encoder = Odd()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="6 patches of images of 16 pixels"):
        MAE.build(encoder, 0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"ratio": 1.5}, r"ratio 1\.5"), ({"width": 10, "heads": 4}, "width 10"), ({"blocks": 0}, "blocks 0")],
)
def test_what_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MAEConfig(**wrong)


def test_of_colour_every_channel_is_restored() -> None:
    """Three channels of each patch; a grey film at such a model counts as three equal ones."""
    encoder = replace(MODEL, in_channels=3).build(0)
    objective = MAE.build(encoder, 0)
    colour = 2 * torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) - 1
    grey = colour[:, :1]
    errors = {}
    for name, films in (("colour", colour), ("grey", grey), ("repeated", grey.expand(-1, 3, -1, -1))):
        batch = drawn(objective, films)
        error = objective(encoder(batch), batch)["masked"]
        error.backward()
        errors[name] = error.item()
    assert errors["grey"] == errors["repeated"] != errors["colour"]
    with pytest.raises(ValueError, match=r"images of 3 channels, and a decoder that restores 1; set model.in_channels"):
        masked_error(torch.zeros(4, 4, 64), colour, torch.ones(4, 4, dtype=torch.bool))
