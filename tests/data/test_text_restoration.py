"""What exports, PDF readers, de-identification and radiologists write in the place of words."""

from __future__ import annotations

import re
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from support.starts import REAL

from fedvlp.data.deid import spans
from fedvlp.data.report_text import AS_WRITTEN, CLEANED, clean_report, plain, read_report
from fedvlp.data.sources.table import TableSource
from fedvlp.data.text_restoration import ESCAPES, INVISIBLE, KINDS, MARKS, SIGNS, restore


def test_escapes_that_were_written_out_keep_the_negation() -> None:
    for text, words in [
        (r"Lungs are clear.\nNo effusion.", "lungs are clear no effusion"),
        (r"Lungs are clear\nno effusion", "lungs are clear no effusion"),
        (r"Lungs are clear.\r\nNo effusion.\tEnd", "lungs are clear no effusion end"),
        (r"Lungs are clear.\\n\\nNo effusion.", "lungs are clear no effusion"),
        (r"Lungs are clear.\015\012No effusion.", "lungs are clear no effusion"),
        ("Lungs are clear.%0D%0ANo effusion.", "lungs are clear no effusion"),
        (r"Herz nicht vergr\u00f6\u00dfert, kein Erguss.", "herz nicht vergrossert kein erguss"),
        (r"Herz nicht vergr\xc3\xb6\xc3\x9fert, kein Erguss.", "herz nicht vergrossert kein erguss"),
        (r"Herz nicht vergr\xf6\xdfert, kein Erguss.", "herz nicht vergrossert kein erguss"),
        ("Herz nicht vergr=C3=B6=C3=9Fert, kein Erguss.", "herz nicht vergrossert kein erguss"),
    ]:
        assert clean_report(text) == words
        assert clean_report(plain(text)) == words


def test_paths_latex_and_joined_words_are_no_escapes() -> None:
    for text in (
        r"stored in C:\new\table\node and \\pacs\new\reports today",
        r"see results\new\text.txt for it",
        r"the angle \theta is \nu times \textbf{x} \rightarrow y",
        r"Lunge links\rechts frei",
    ):
        assert restore(text) == text
    assert plain(r"clear\.br\No effusion\T\edema") == "clear\nNo effusion&edema"


def test_characters_that_nobody_sees_split_no_word() -> None:
    for unseen in (
        "\u00ad",
        "\u200b",
        "\u200d",
        "\u2060",
        "\ufeff",
        "\u200e",
        "\x1f",
        "\x02",
        "\x00",
        "\ufe0f",
        "\u00ac",
    ):
        assert clean_report(f"Kein Pneu{unseen}mo{unseen}thorax rechts.") == "kein pneumothorax rechts", repr(unseen)
        assert read_report(f"Kein Pneu{unseen}mothorax rechts", AS_WRITTEN, 1) == "Kein Pneumothorax rechts"
    assert clean_report("no\u00a0pneumothorax\u2009seen\u2028today") == "no pneumothorax seen today"


def test_marks_of_deidentification_are_no_words() -> None:
    for mark in (
        *("XXXX", "xxxxx", "XX-XX-XXXX", "____", "*****", "#####", "@@@@", "\u2588\u2588\u2588"),
        *("[**2031-3-14**]", "[**Hospital Ward Name 12**]", "**NAME[AAA BBB]", "**DATE", "**AGE<in 40s>"),
        *("<NAME>", "<PERSON>", "<DATE_TIME>", "[PERSON_1]", "[redacted]", "[Name Removed]", "{{DATE}}", "<ID/>"),
    ):
        assert clean_report(f"Small effusion {mark} since then.") == "small effusion since then", mark
        assert read_report(f"Small effusion {mark} since then", AS_WRITTEN, 1).replace("____ ", "") == (
            "Small effusion since then"
        )
    for kept in (
        *("nodule [5 mm] seen", "nodule <5 mm seen", "x-ray of XX seen", "see [image] there", "(reason) {a}"),
        *("**No effusion** is seen", "**NO EFFUSION**", "**Impression:** clear", "[no] effusion", "[US] of <US>"),
    ):
        assert restore(kept, (MARKS,)) == kept
    assert clean_report("a 53XXXX woman, XXXX-year-old") == "a 53 woman year old"


def test_marks_are_no_identifiers_and_hide_none() -> None:
    assert spans("Seen [**2031-3-14**] by Dr. [**Last Name**] at <LOCATION>. Dr. XXXX on the phone") == []
    text = "Dr. XXXX, on 14-\u200bMAR-31 \u00ad and"
    assert [(kind, text[start:end]) for kind, start, end in spans(text)] == [("date", "14-\u200bMAR-31")]


def test_signs_say_what_is_there() -> None:
    for text, words in [
        ("Pleural effusion (+), pneumothorax (-).", "pleural effusion positive pneumothorax negative"),
        ("Pleural effusion (\u2212), pneumothorax [++].", "pleural effusion negative pneumothorax positive"),
        ("Effusion: \u2212 Edema: +", "effusion negative edema positive"),
        ("Effusion: - Edema: +", "effusion negative edema positive"),
        ("Effusion: +\nEdema: \u2013", "effusion positive edema negative"),
        ("effusion +, edema -.", "effusion positive edema negative"),
        ("Effusion +ve, edema -ve", "effusion positive edema negative"),
        ("Effusion (+/-), edema (\u00b1)", "effusion equivocal edema equivocal"),
        ("[x] effusion [ ] edema", "positive effusion negative edema"),
        ("\u2611 effusion \u2610 edema", "positive effusion negative edema"),
        ("effusion \u2713, edema \u2717", "effusion positive edema negative"),
        ("\u2205 effusion seen", "no effusion seen"),
        ("FINDINGS: Effusion: + Edema: -", "findings effusion positive edema negative"),
    ]:
        assert clean_report(text) == words


def test_dashes_hyphens_and_bullets_are_no_signs() -> None:
    for text in (
        *("Findings: - No effusion - Clear lungs", "Impression:\n- Cardiomegaly\n- No effusion", "CHEST PA -\nclear"),
        *("Ober-, Mittel- und Unterlappen frei", "pre-, peri- and postoperative", "K+, Na+ and Ca++, CD4+", "5-10 mm"),
        *("left-sided T-tube, L4-5", "SpO2 = -5 to +5", "ventre \u00f8dem", "lungs clear - no effusion"),
        *("- If symptoms persist", "- IV contrast was given", "Rundherd \u00d8 3 cm", "The heart is [ ] and [ ] cm"),
        *("Findings: -\n", "Comparison: -", "Findings: - Heart: - normal", "VIEWS -\nlungs clear"),
    ):
        assert restore(text) == text
    assert read_report("Effusion (+), seen", AS_WRITTEN, 1) == "Effusion (+), seen"  # a tokenizer knows the sign


def test_a_report_is_counted_once_for_each_kind() -> None:
    counts: Counter[str] = Counter()
    restore(r"XXXX\nXXXX pneu" + "\u00ad" + "mo (+) and (+)", counts=counts)
    restore("Lungs are clear.", counts=counts)
    assert counts == dict.fromkeys(KINDS, 1)
    assert KINDS == (ESCAPES, INVISIBLE, MARKS, SIGNS)


REPORTS = REAL.parents[1] / "real-tables" / "NLMCXR_reports.tgz"


@pytest.mark.skipif(not REPORTS.is_file(), reason="no shared/data beside this checkout")
def test_real_reports_lose_their_marks_and_nothing_else() -> None:
    """Of Open-i's reports no run of X is left, and of other words none is lost and none is new."""
    with tarfile.open(REPORTS) as files:
        reports = [
            " ".join(text.text or "" for text in ElementTree.parse(files.extractfile(name)).iter("AbstractText"))  # type: ignore[arg-type]
            for name in files.getnames()
            if name.endswith(".xml")
        ]
    marked = 0
    for report in reports:
        marked += "XXXX" in report
        words = Counter(read_report(report, CLEANED, 1).split())
        assert not any("xxx" in word for word in words)
        without = re.sub(r"x{4,}|\bx{3,}\b", " ", " ".join(re.findall(r"[^\W_]+", report.lower())))
        expected = Counter(without.split())
        assert not words - expected, "nothing is written that was not there"
        # numbers of lists are left out, as ever; what stays of "XX-XX" is short
        assert all(word.isdigit() or len(word) < 3 for word in expected - words), expected - words
    assert marked > 3000


def test_a_data_set_says_how_many_reports_were_restored(tmp_path: Path) -> None:
    texts = [r"Lungs clear.\nNo effusion.", "Effusion (+) XXXX", "Effusion (-)", "Heart is normal"]
    lines = [f'{number},"{text}"' for number, text in enumerate(texts)]
    (tmp_path / "reports.csv").write_text("\n".join(["patient_id,report", *lines]))
    source = TableSource(str(tmp_path / "reports.csv"), image_column="", site_column="", min_report_words=1)
    cohort, summary = source.prepare()
    assert sorted(cohort.reports) == sorted(
        ["lungs clear no effusion", "effusion positive", "effusion negative", "heart is normal"]
    )
    assert {name: count for name, count in summary.items() if name.startswith("reports with")} == {
        "reports with decoded escapes": 1,
        "reports without their de-identification marks": 1,
        "reports with signs as words": 2,
    }
