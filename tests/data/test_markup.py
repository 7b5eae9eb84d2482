"""Reports as other systems write them become their words."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from fedvlp.data.report_text import clean_report, is_rtf, lacks_letters, letters_lost, plain, sections, sentences


def test_markup_is_no_word() -> None:
    for written, words in [
        (r"Kein Erguss.\.br\Herz \H\normal\N\ gro\XDF\.\.sp2\Ende", "kein erguss herz normal gross ende"),
        ("<p><b>Befund</b><br/>Kein&nbsp;Erguss.</p>", "befund kein erguss"),
        ("Sin derrame._x000D_\nCoraz\u00f3n normal", "sin derrame corazon normal"),
        ("&lt;div class=&quot;x&quot;&gt;Brak p\u0142ynu&lt;/div&gt;", "brak plynu"),
        ("Nodule <5 mm, a < b and c > d", "nodule 5 mm a b and c d"),
        ('<?xml version="1.0"?><text><content>Kein Erguss.</content></text>', "kein erguss"),
        ("Petit &eacute;panchement &lt;5&#160;mm", "petit epanchement 5 mm"),
    ]:
        assert clean_report(plain(written), 1) == words


@given(st.lists(st.sampled_from(["Erguss", "<5 mm", "a < b", "c > d", "3.5 cm", "R&D", r"links\rechts"])))
def test_text_without_markup_stays(parts: list[str]) -> None:
    assert plain(" ".join(parts)) == " ".join(parts)


def test_rtf_and_letters_that_are_not_read_are_told() -> None:
    assert is_rtf(r"{\rtf1\ansi Kein Erguss.}")
    assert not is_rtf("Kein Erguss {links}.")
    assert letters_lost("\u041e\u0447\u0430\u0433 12 mm S6") > 0.1
    assert letters_lost("Gr\u00f6\u00dfe \u0141\u00f3d\u017a \u00e9panchement n\u00f3dulo") == 0


PUMPED = [
    "<!--",
    "<style>",
    "<p a='",
    "<p ",
    "&",
    "amp;",
    "\\.br ",
    "\n",
    " ",
    ".\n",
    ";\n ",
    "1.",
    "<<p>p>",
    "a\u0327\u0301",
    "\u0301\u0327",
]


def test_reading_takes_time_in_proportion_to_the_text() -> None:
    """Of 50,000 characters; "<!--" without an end, escapes of escapes, blank lines and marks took the square of it."""
    for piece in PUMPED:
        text = "&" + piece * (50_000 // len(piece)) + "!"
        start = time.process_time()
        for read in (plain, clean_report, sentences, sections, letters_lost):
            read(text)
        assert time.process_time() - start < 0.5


def test_a_number_that_names_no_character_stays() -> None:
    assert plain("&#" + "9" * 5000 + ";").startswith("&#9")


@given(
    st.lists(
        st.sampled_from(["Erguß", "größer", "épanchement", "źródło", "3\u00a0mm", "patient\u2019s", "«CAFÉ»", "TÓRAX"])
    )
)
def test_letters_that_were_encoded_twice_are_what_they_were(words: list[str]) -> None:
    """As where UTF-8 was read as cp1252; bytes that are no letter there stay as they are."""
    written = " ".join(words)
    twice = "".join(
        chr(b) if b in (0x81, 0x8D, 0x8F, 0x90, 0x9D) else bytes([b]).decode("cp1252") for b in written.encode()
    )
    assert plain(twice) == plain(written) == written


def test_letters_that_are_lost_are_told() -> None:
    assert lacks_letters("Kein Ergu\ufffd. Gr\ufffd\ufffder")
    assert not any(
        map(lacks_letters, ("the patient\ufffds chest", "\ufffdnormal\ufffd", "3\ufffd4 cm", "clear \ufffd no change"))
    )
