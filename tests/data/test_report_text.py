"""Words of reports in the letters of every language that has them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from fedvlp.data.report_text import AS_WRITTEN, CLEANED, clean_report, letters_lost, read_report


def test_letters_without_a_base_letter_are_written_out() -> None:
    for text, words in [
        ("Größe des Herzens normal.", "grosse des herzens normal"),
        ("STRAßE ist ein Wort", "strasse ist ein wort"),
        ("Venstre lunge ødem Øget tegning", "venstre lunge odem oget tegning"),
        ("Płyn w jamie opłucnej", "plyn w jamie oplucnej"),
        ("Cæcum œdème hjerte", "caecum oedeme hjerte"),
        ("pneumonía en base", "pneumonia en base"),
    ]:
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


def test_reports_of_five_languages_lose_no_word_and_no_digit() -> None:
    """Abbreviations end no word; a sentence of one is kept, and accents leave their letters."""
    for report, words in [
        (
            "Thorax p.a. vom Vortag zum Vgl.: Pleuraerguss li. basal, ca. 3,5 cm. Kein Pneumothorax. Herzgröße o.B.",
            "thorax p a vom vortag zum vgl pleuraerguss li basal ca 3 5 cm kein pneumothorax herzgrosse o b",
        ),
        (
            "Derrame pleural izq. basal. Cardiomegalia. No se observa neumotórax.",
            "derrame pleural izq basal cardiomegalia no se observa neumotorax",
        ),
        (
            "Opacidade no lobo inf. direito, com 2.5 cm. Sem derrame. Coração normal.",
            "opacidade no lobo inf direito com 2.5 cm sem derrame coracao normal",
        ),
        (
            "1. Épanchement pleural gauche.\n2. Cœur de taille normale.\n3. Pas d'œdème.",
            "epanchement pleural gauche coeur de taille normale pas d oedeme",
        ),
        (
            "Płyn w lewej jamie opłucnowej. Serce powiększone. Bez odmy.",
            "plyn w lewej jamie oplucnowej serce powiekszone bez odmy",
        ),
    ]:
        assert read_report(report, CLEANED, 3) == words.replace("2.5", "2 5")
        assert read_report(report, AS_WRITTEN, 3).split() == report.split()


def test_other_scripts_are_read_as_written_alone() -> None:
    """Where words have no blanks between them, each character counts as one."""
    for report in [
        "右下肺可见斑片状阴影。",
        "Очаг слева 12 мм.",
        "Χωρίς πλευριτική συλλογή.",
        "胸水なし。心拡大あり。",
    ]:
        assert read_report(f" {report}\n", AS_WRITTEN, 3) == report
        assert letters_lost(report) > 0.9
        assert read_report("Normal.", AS_WRITTEN, 3) == ""
