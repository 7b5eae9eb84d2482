"""The normalisation's published steps one by one, and the official accuracy by hand."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from studies.protocols.vqa import CONTRACTIONS, normalised, official_accuracy, soft_scores

pytestmark = pytest.mark.slow(seconds=5)


def test_every_step_of_the_published_normalisation() -> None:
    for said, expected in [
        ("Yes", "yes"),  # lower case
        ("  red \n and\tblue ", "red and blue"),
        ("St. Louis.", "st louis"),  # a period goes
        ("U.S.A.", "usa"),
        ("1.5", "1.5"),  # a decimal point stays
        (".5 m.", ".5 m"),
        ("two", "2"),  # number words
        ("ten or Zero", "10 or 0"),
        ("none", "0"),
        ("someone", "someone"),
        ("the dog and a cat", "dog and cat"),  # articles
        ("an apple", "apple"),
        ("another theme", "another theme"),
        ("dont", "don't"),  # contractions
        ("Whats that", "what's that"),
        ("can't", "can't"),
        ("well were ill", "well were ill"),
        ("girl's", "girl's"),  # an apostrophe stays
        ("2:50 pm", "2:50 pm"),  # a colon stays
        ("100,978", "100978"),  # a comma between digits leaves no space
        ("red,blue", "red blue"),
        ("black-and-white", "black and white"),
        ("what?!", "what"),
        ("yes/no", "yes no"),
        ("", ""),
    ]:
        assert normalised(said) == expected


@given(st.text(max_size=30))
def test_normalising_twice_changes_nothing(said: str) -> None:
    """Unless the first time has joined what a period or a comma parted: such answers are the same after a few times."""
    once = normalised(normalised(normalised(said)))
    assert normalised(once) == once
    assert once == once.strip()


def test_no_contraction_is_another_word_without_its_apostrophe() -> None:
    assert not {"were", "well", "hell", "shell", "ill", "id", "wed", "shed", "its", "lets go"} & CONTRACTIONS.keys()
    assert all(word.replace("'", "") == bare for bare, word in CONTRACTIONS.items())


def test_official_accuracy_by_hand() -> None:
    """Ten people. 2 match: of ten subsets of nine, two have 1 match (1/3), eight have 2 (2/3): (2/3 + 16/3) / 10 = 0.6.

    1 matches: one subset has none, nine have 1: 0.3. 3 match: three have 2, seven have 3: (2 + 7) / 10 = 0.9.
    """
    people = torch.tensor(10)
    found = official_accuracy(torch.arange(11), people).tolist()
    assert found == pytest.approx([0, 0.3, 0.6, 0.9, *[1.0] * 7])


@given(st.integers(4, 10), st.data())
def test_official_accuracy_is_the_mean_over_subsets(people: int, data: st.DataObject) -> None:
    matches = data.draw(st.integers(0, people))
    answers = [True] * matches + [False] * (people - matches)
    subsets = list(combinations(answers, people - 1))
    by_hand = sum(min(sum(subset) / 3, 1) for subset in subsets) / people
    assert float(official_accuracy(torch.tensor(matches), torch.tensor(people))) == pytest.approx(by_hand)


def test_a_single_person_tells_the_truth() -> None:
    matches, people = torch.tensor([0, 1]), torch.tensor([1, 1])
    assert official_accuracy(matches, people).tolist() == [0, 1]
    assert soft_scores(matches, people).tolist() == [0, 1]


def test_soft_scores_reach_1_with_three() -> None:
    found = soft_scores(torch.arange(5), torch.tensor(10))
    assert found.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])
