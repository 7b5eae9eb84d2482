"""Words of reports in the letters of every language that has them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


PHRASES = st.sampled_from(
    ["Kardiomegalie", "Rundherd von {} cm", "Derrame de {} mm", "Nódulo {} cm", "Płyn {} ml", "Épanchement", "Rippe {}"]
)
SIZES = st.sampled_from(["3.5", "12", "0.75", "1.2.2019", "10:30"])


@given(st.lists(st.tuples(PHRASES, SIZES), min_size=1), st.booleans())
def test_no_digit_and_no_sentence_of_one_word_is_lost(parts: list[tuple[str, str]], numbered: bool) -> None:
    said = [phrase.format(size) for phrase, size in parts]
    report = "\n".join(f"{number}. {text}." if numbered else f"{text}." for number, text in enumerate(said, start=1))
    cleaned = clean_report(report, 1)
    assert re.findall("[0-9]", cleaned) == re.findall("[0-9]", " ".join(said))
    assert len(cleaned.split()) == sum(len(re.findall(r"\w+", text)) for text in said)


def test_the_papers_drop_sentences_of_one_word() -> None:
    assert clean_report("Edema. Pneumothorax. No bony abnormality.", 1, 2) == "no bony abnormality"
