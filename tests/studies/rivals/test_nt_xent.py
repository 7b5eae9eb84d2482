"""NT-Xent: values by hand, the closed form, a reference in plain Python, and what reaches the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from support.films import NT_XENT, Films, drawn, model
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.types import VLOutput
from fedvlp.objectives.convirt import info_nce
from studies.rivals import NTXentConfig
from studies.rivals.nt_xent import nt_xent

pytestmark = pytest.mark.slow(seconds=5)


def vectors(rows: int, seed: int, d: int = 5) -> Tensor:
    return torch.randn(rows, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_by_hand() -> None:
    """Films (1, 0), (0, 1) and their views (0, 1), (1, 0), T = 1.

    Each of the four has cosine 0 with its own view, 0 with one and 1 with the other view of the other film:
    -log(1 / (1 + 1 + e)) = log(2 + e). Lengths do not matter.
    """
    x = torch.eye(2, dtype=torch.float64)
    assert nt_xent(x, x.flip(0), 1.0).item() == pytest.approx(math.log(2 + math.e), abs=1e-14)
    assert nt_xent(3 * x, x.flip(0) / 7, 1.0).item() == pytest.approx(math.log(2 + math.e), abs=1e-14)


def test_closed_forms() -> None:
    """Equal views of orthogonal films: log(1 + (2B - 2) e^(-1/T)). All vectors the same: log(2B - 1)."""
    for temperature in [0.1, 0.5, 1.0]:
        for rows in [1, 2, 6]:
            x = torch.eye(6, dtype=torch.float64)[:rows]
            expected = math.log1p((2 * rows - 2) * math.exp(-1 / temperature))
            assert nt_xent(x, x, temperature).item() == pytest.approx(expected, abs=1e-12)
            same = x[:1].expand(rows, -1)
            assert nt_xent(same, same, temperature).item() == pytest.approx(math.log(2 * rows - 1), abs=1e-12)


def test_against_a_loop_over_all_views() -> None:
    first, second = vectors(4, 0), vectors(4, 1)
    z = [v / v.norm() for v in (*first, *second)]
    total = 0.0
    for i in range(8):
        scores = {k: math.exp(float(z[i] @ z[k]) / 0.3) for k in range(8) if k != i}
        total -= math.log(scores[(i + 4) % 8] / sum(scores.values())) / 8
    assert nt_xent(first, second, 0.3).item() == pytest.approx(total, abs=1e-12)
    assert nt_xent(second, first, 0.3).item() == pytest.approx(total, abs=1e-12)


def test_autocast_lowers_nothing_and_no_film_gives_zero() -> None:
    first, second = vectors(4, 0).float(), vectors(4, 1).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert nt_xent(first, second, 0.1).item() == pytest.approx(nt_xent(first, second, 0.1).item())
        low = nt_xent(first, second, 0.1)
    assert low.item() == pytest.approx(nt_xent(first.double(), second.double(), 0.1).item(), rel=1e-5)
    empty = torch.zeros(0, 3, requires_grad=True)
    nt_xent(empty, empty, 0.1).backward()
    assert empty.grad is not None
    with pytest.raises(ValueError, match=r"first \[4, 5\], second \[3, 5\]"):
        nt_xent(first, second[:3], 0.1)


def test_its_terms_on_the_dual_encoder() -> None:
    """Pairs give both terms, films alone the second, evaluation (without views) the first."""
    encoder, objective = model(), NTXentConfig(hidden=16, dim=8, weight=0.5).build(model(), 0)
    data = Films(0, 6)
    (batch,) = data.batches("train", 6, drop_last=False)
    batch |= {"views": drawn(objective, batch["image"])["views"]}
    output = encoder(batch)
    assert output.views.shape == (6, 2, 5, 128)  # 2 x 2 patches and the summary token
    terms = objective(output, batch)
    expected = 0.5 * nt_xent(*objective.projector(output.views[:, :, 0]).unbind(1), 0.5)  # type: ignore[operator]
    assert terms["nt_xent"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert terms["contrastive"].item() == pytest.approx(sum(info_nce(output.image, output.text, 0.07)).item(), rel=1e-6)
    assert list(objective(VLOutput(image=output.image, views=output.views), batch)) == ["nt_xent"]
    assert list(objective(VLOutput(output.image, output.text), batch)) == ["contrastive"]


def test_views_go_through_the_tower_like_films() -> None:
    """To float32's usual limits: other batch sizes go through other kernels, which add up in another order."""
    encoder, films = model().eval(), Films(0, 3).content["train"][0]
    views = torch.stack([films, films.flip(0)], dim=1)
    output = encoder({"image": films, "views": views})
    torch.testing.assert_close(output.views[:, 0], output.image_tokens)
    torch.testing.assert_close(output.views[:, 1], output.image_tokens.flip(0))
    alone = encoder({"views": views})
    assert alone.image is None
    torch.testing.assert_close(alone.views, output.views)


def test_weights_of_another_projector() -> None:
    objective, other = NT_XENT.build(model(), 0), NT_XENT.build(model(), 1)
    views = torch.randn(3, 2, 1, 128, generator=torch.Generator().manual_seed(0))
    seen = objective.project(views, other.state_dict())  # type: ignore[operator]
    torch.testing.assert_close(seen, other.project(views))  # type: ignore[operator]
    assert not torch.allclose(seen, objective.project(views))  # type: ignore[operator]


def test_what_is_refused() -> None:
    for wrong, said in [
        ({"temperature": 0.0}, "temperature 0"),
        ({"weight": -1.0}, "weight -1"),
        ({"min_area": 0.0}, "min_area 0"),
        ({"jitter": 1.0}, "jitter 1"),
        ({"hidden": 0}, "hidden 0"),
        ({"dim": 0}, "dim 0"),
        ({"itc_temperature": math.inf}, "itc_temperature inf"),
    ]:
        with pytest.raises(ValueError, match=f"NTXent: {said}"):
            NTXentConfig(**wrong)  # type: ignore[arg-type]


def test_cosines_are_of_unit_vectors() -> None:
    """The gradient of a row is orthogonal to it: its length teaches nothing."""
    first, second = vectors(3, 2).requires_grad_(), vectors(3, 3)
    nt_xent(first, second, 0.2).backward()
    assert first.grad is not None
    torch.testing.assert_close((first.grad * first).sum(1), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    assert F.normalize(first.grad).abs().sum() > 0
