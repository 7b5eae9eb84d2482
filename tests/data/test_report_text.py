"""Words of reports in the letters of every language that has them."""

from __future__ import annotations

import pytest

from fedvlp.data.report_text import clean_report


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Größe des Herzens normal.", "grosse des herzens normal"),
        ("STRAßE ist ein Wort", "strasse ist ein wort"),
        ("Venstre lunge ødem Øget tegning", "venstre lunge odem oget tegning"),
        ("Płyn w jamie opłucnej", "plyn w jamie oplucnej"),
        ("Cæcum œdème hjerte", "caecum oedeme hjerte"),
        ("pneumonía en base", "pneumonia en base"),
    ],
)
def test_letters_without_a_base_letter_are_written_out(text: str, words: str) -> None:
    assert clean_report(text) == words
