"""Nearest neighbours against brute force, the order of equals, and the choice by labels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedvlp.methods.math.neighbours import most_alike, nearest


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_by_hand() -> None:
    """From (0, 0): distances 1, 4, 0 and 1: itself, then the first of the two at distance 1."""
    pool = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, -1.0]])
    assert nearest(torch.zeros(1, 2), pool, 4).tolist() == [[2, 0, 3, 1]]
    assert nearest(torch.zeros(1, 2), pool, 2).tolist() == [[2, 0]]


def test_lengths_count_and_not_the_angle_alone() -> None:
    """(3, 0) points where the query (1, 0) does, but (0.9, 0.5) is nearer: 4 against 0.26."""
    assert nearest(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.9, 0.5]]), 1).tolist() == [[1]]


def test_agrees_with_brute_force_in_every_tiling() -> None:
    for tile in [1, 7, 1024]:
        for k in [1, 5, 40]:
            queries, pool = random(0, 30, 8), random(1, 40, 8)
            expected = (
                (queries[:, None].double() - pool[None].double()).square().sum(2).sort(dim=1, stable=True).indices
            )
            assert torch.equal(nearest(queries, pool, k, tile), expected[:, :k])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_equals_come_in_the_order_of_the_pool(seed: int, k: int) -> None:
    """Small whole numbers, so that distances are exact and most of them tie."""
    generator = torch.Generator().manual_seed(seed)
    queries, pool = (torch.randint(0, 2, (n, 3), generator=generator).float() for n in (9, 12))
    expected = (queries[:, None] - pool[None]).square().sum(2).sort(dim=1, stable=True).indices
    assert torch.equal(nearest(queries, pool, k), expected[:, :k])


def test_no_query_gives_no_row() -> None:
    assert nearest(torch.empty(0, 3), random(0, 5, 3), 2).shape == (0, 2)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"k is 6, expected 1 to 5"):
        nearest(random(0, 2, 3), random(1, 5, 3), 6)
    with pytest.raises(ValueError, match=r"k is 0, expected 1 to 5"):
        nearest(random(0, 2, 3), random(1, 5, 3), 0)
    for queries, pool in (((2, 3), (5, 4)), ((3,), (5, 3)), ((2, 3, 1), (5, 3)), ((2, 3), (5, 3, 1))):
        with pytest.raises(ValueError, match=r"expected \[N, d\] and \[P, d\]"):
            nearest(random(0, *queries), random(1, *pool), 1)


def test_jaccard_by_hand() -> None:
    """{0, 1} against {0}, {0, 1, 2}, {2}, {}: 1/2, 2/3, 0, 0; an empty set is like the empty one only."""
    pool = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0]], dtype=torch.bool)
    mine = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]], dtype=torch.bool)
    candidates = torch.tensor([[0, 1, 2, 3], [2, 0, 1, 3], [2, 0, 3, 1]])
    assert most_alike(mine, pool, candidates).tolist() == [1, 3, 1]


def test_the_same_single_finding_is_the_best_match() -> None:
    """{0} against {0, 1} and {0}: 1/2 and 1/1."""
    pool = torch.tensor([[1, 1], [1, 0]], dtype=torch.bool)
    assert most_alike(pool[1:], pool, torch.tensor([[0, 1]])).tolist() == [1]


def test_equal_similarity_goes_to_the_nearer() -> None:
    """1/2 = 2/4 exactly; whichever comes first among the candidates wins."""
    pool = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
    mine = torch.tensor([[1, 1, 0, 0]], dtype=torch.bool).expand(2, 4)
    assert most_alike(mine, pool, torch.tensor([[2, 0, 1], [2, 1, 0]])).tolist() == [0, 1]


def test_one_candidate_is_taken_whatever_its_labels() -> None:
    """k = 1 is the plain nearest neighbour."""
    queries, pool = random(2, 6, 4), random(3, 9, 4)
    labels, theirs = torch.ones(6, 2, dtype=torch.bool), torch.zeros(9, 2, dtype=torch.bool)
    one = nearest(queries, pool, 1)
    assert torch.equal(most_alike(labels, theirs, one), one[:, 0])
