"""Whose update it is: told where updates differ by site, not told where they do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.cases import cases

from fedvlp.evaluation import intervals
from fedvlp.evaluation.intervals import resampled
from studies.attacks.one_update import told

pytestmark = pytest.mark.slow(seconds=2)


def cosines(apart: float) -> tuple[torch.Tensor, list[int]]:
    """Five sites, twelve batches of each; a batch goes with its own site's update by ``apart`` more.

    Batches differ as a whole too, which says nothing of the site.
    """
    generator = torch.Generator().manual_seed(0)
    owner = [site for site in range(5) for _ in range(12)]
    noise = 0.05 * torch.randn(60, 5, generator=generator)
    of_batch = torch.randn(60, 1, generator=generator)
    own = torch.nn.functional.one_hot(torch.tensor(owner), 5)
    return of_batch + noise + apart * own, owner


def test_updates_that_go_with_their_own_sites_records_are_told() -> None:
    found = told(*cosines(0.2), resamples=100)
    assert found.area.value > 95 > found.chance.high
    assert found.right == 100
    assert found.guess == 20
    assert (found.count, found.batches) == (5, 60)


def test_updates_that_differ_by_nothing_are_not() -> None:
    """Also where all batches of a site go with one update by chance: the orders vary as much."""
    plain, owner = cosines(0.0)
    of_site = 0.5 * torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    for apart in (plain, plain + of_site[torch.tensor(owner)]):
        found = told(apart, owner, resamples=20)
        assert found.chance.low < found.area.value < found.chance.high
        assert found.chance.value == pytest.approx(50, abs=1)


@pytest.mark.parametrize(("sites", "most"), cases([(2, 0), (3, 0), (5, 2), (6, 3)], often=(3, 5)))
def test_noise_lies_above_chance_as_seldom_as_it_is_said(sites: int, most: int) -> None:
    """In 2.5 % of trials at most, and with fewer than five sites never: of 40 trials of noise in ``most`` or fewer.

    A band between the areas of two orders left out the larger of two in half of all trials, and of six in a quarter.
    """
    generator = torch.Generator().manual_seed(0)
    owner = [site for site in range(sites) for _ in range(4)]
    above = 0
    for _ in range(40):
        found = told(torch.randn(4 * sites, sites, generator=generator), owner, resamples=2)
        above += found.area.value > found.chance.high
    assert above <= most


def test_the_figures_by_hand() -> None:
    """Two sites, a batch of each, less its mean: 0.1, -0.1 and 0.2, -0.2.

    With their own updates they score 0.1 and -0.2, with the others' -0.1 and 0.2: of these four pairs one is right; in
    the other order three are. The first update scores 0.2 with the second site, the second one -0.1 with the first:
    both are taken for the other.
    """
    found = told(torch.tensor([[0.3, 0.1], [0.5, 0.1]]), [0, 1], resamples=10)
    assert found.area.value == pytest.approx(25)
    assert found.chance.value == pytest.approx(50)
    assert found.right == 0


def test_a_batch_is_drawn_with_all_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cosines of one batch with the updates are of the same records: 60 batches are drawn, and not 300 scores."""
    drawn: list[list[int]] = []

    def noted(whose: list[int], resamples: int, seed: int) -> Iterator[torch.Tensor]:
        drawn.append(whose)
        return resampled(whose, resamples, seed)

    monkeypatch.setattr(intervals, "resampled", noted)
    told(*cosines(0.0), resamples=2)
    assert drawn == [[batch for batch in range(60) for _ in range(5)]]


def test_of_many_sites_some_orders_are_tried() -> None:
    generator = torch.Generator().manual_seed(0)
    found = told(torch.randn(24, 8, generator=generator), [site for site in range(8) for _ in range(3)], resamples=10)
    assert found.chance.value == pytest.approx(50, abs=3)
