"""The PHI scan of reports on planted identifiers: what it finds of 500, and how often it is wrong.

    python studies/programs/identifiers.py [--openi NLMCXR_reports.tgz] [--seed 0] [--each 50] [--misses] [--quick]

Each identifier stands in a sentence of its own, at a random end of a de-identified report of Open-I (without --openi:
of the built-in cohort): names with a title and without one, labelled names, record numbers, accession numbers, dates,
telephone numbers, addresses, e-mail and links, and ages above 89, each in the forms that people write, half of which
the gate's patterns were never written for. By kind: recall (what it counts of the planted, as that kind and as any) and
precision (findings of that kind that touch the planted words, of all in these reports), with Wilson's 95 % intervals.
Then the reports that it refuses of the clean ones, by kind, per 1,000. ``--misses`` prints what was missed, and the
words of the false alarms: only of published or drawn reports.

Where presidio-analyzer and a model of spaCy for English are installed (``--model``), the same reports go through it,
its entities counted as the kind they mean. ``--quick`` plants 5 of each kind in 50 reports.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common import command_line, machine, rounded, say
from scipy.stats import binomtest

from fedvlp.data.deid import spans
from fedvlp.data.sources.openi import OpenISource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort

FIRST = ("Anna", "James", "María", "Wei", "Fatima", "Jean-Luc", "Olga", "Thomas", "Aisha", "Élise")
LAST = ("Ferreira", "Smith", "O'Neill", "Nowak", "García", "van der Berg", "McAllister", "Øster", "Patel", "Li")
TITLES = ("Dr.", "Dr", "dr.", "DR.", "Mr.", "Mrs.", "Ms", "Prof.", "Doctor")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
STREETS = ("Elm Street", "Oak Ave.", "Mill Lane", "Park Road", "St. Mary's Road", "W. Main St", "Kings Drive")

NAME_ALONE, AGE = "name without title", "age above 89"


@dataclass(frozen=True)
class Planted:
    """A report with one identifier in it."""

    kind: str  # of the gate, or one that the gate does not know
    report: str
    start: int  # of the identifier's words
    end: int


def pick(draw: random.Random, forms: Sequence[str]) -> str:
    return draw.choice(forms)


def digits(draw: random.Random, count: int) -> str:
    """``count`` digits, the first not 0."""
    return str(draw.randint(10 ** (count - 1), 10**count - 1))


def titled(draw: random.Random) -> str:
    first, last = pick(draw, FIRST), pick(draw, LAST)
    name = pick(draw, (last, f"{first} {last}", f"{first[0]}. {last}", last.upper(), last.lower()))
    return f"{pick(draw, TITLES)} {name}"


def labelled(draw: random.Random) -> str:
    first, last = pick(draw, FIRST), pick(draw, LAST)
    label = pick(draw, ("Patient name", "Patient", "NAME", "Signed by", "Dictated by", "Referring physician", "Pt"))
    return f"{label}: " + pick(draw, (f"{first} {last}", f"{last}, {first}", f"{last.upper()}, {first.upper()}"))


def record_number(draw: random.Random) -> str:
    label = pick(draw, ("MRN", "MRN:", "Medical record number", "Patient ID", "Hospital no.", "SSN", "Record #"))
    number = pick(draw, (digits(draw, 8), f"{digits(draw, 3)}-{digits(draw, 2)}-{digits(draw, 4)}", digits(draw, 6)))
    return f"{label} {number}"


def accession(draw: random.Random) -> str:
    number = digits(draw, draw.choice((6, 8, 10)))
    return pick(draw, ("Accession number: {}", "Acc# {}", "study CR{}", "Exam # {}", "order no: {}", "ref {}")).format(
        number
    )


def date(draw: random.Random) -> str:
    day, month, year = draw.randint(1, 28), draw.randint(1, 12), draw.randint(1998, 2024)
    name = MONTHS[month - 1]
    return pick(
        draw,
        (
            f"{month}/{day}/{year}",
            f"{month:02d}/{day:02d}/{year % 100:02d}",
            f"{year}-{month:02d}-{day:02d}",
            f"{day}.{month}.{year}",
            f"{day} {name} {year}",
            f"{name[:3]} {day}, {year}",
            f"{name} {day}",
            f"{day}-{name[:3]}-{year}",
            f"{year}{month:02d}{day:02d}",
            f"{name} {year}",
        ),
    )


def phone(draw: random.Random) -> str:
    area, line = digits(draw, 3), digits(draw, 4)
    return pick(
        draw,
        (
            f"({area}) 555-{line}",
            f"{area}-555-{line}",
            f"{area}.555.{line}",
            f"+1 {area} 555 {line}",
            f"+44 20 7946 {line}",
            f"+49 30 {digits(draw, 7)}",
            f"ext. {line}",
            f"pager {digits(draw, 5)}",
            f"555-{line}",
        ),
    )


def address(draw: random.Random) -> str:
    number, street = draw.randint(1, 9999), pick(draw, STREETS)
    last = pick(draw, ("Linden", "Bahnhof", "Goethe"))
    return pick(
        draw,
        (
            f"{number} {street}",
            f"{number} {street}, Springfield, IL {digits(draw, 5)}",
            f"{number} {street.upper()}",
            f"{last}straße {number % 200 + 1}",
            f"{digits(draw, 2)} rue Victor Hugo",
            f"P.O. Box {digits(draw, 4)}",
        ),
    )


def link(draw: random.Random) -> str:
    last = pick(draw, ("ferreira", "smith", "nowak"))
    return pick(
        draw,
        (
            f"{last}@clinic.example",
            f"a.{last}+pacs@radiology.hospital.example",
            f"https://pacs.example/study/{digits(draw, 6)}",
            "www.clinic.example/reports",
            f"{last} at clinic.example",
        ),
    )


def name_alone(draw: random.Random) -> str:
    first, last = pick(draw, FIRST), pick(draw, LAST)
    return pick(draw, (f"{first} {last}", last, f"{last}, {first}"))


def age(draw: random.Random) -> str:
    years = draw.randint(90, 103)
    return pick(draw, (f"{years}-year-old", f"{years} year old", f"{years} yo", f"{years}M", f"aged {years}"))


IDENTIFIERS: dict[str, tuple[Callable[[random.Random], str], tuple[str, ...]]] = {
    "name with title": (titled, ("Discussed with {} by telephone.", "Findings were seen by {}.", "{} was informed.")),
    "labelled name": (labelled, ("{}.", "Report. {}.")),
    "record number": (record_number, ("{}.", "The film was filed under {}.")),
    "accession-like id": (accession, ("Compared with {}.", "{}.")),
    "date": (date, ("Compared with the film of {}.", "{}: no change.", "Sternotomy on {}.")),
    "phone": (phone, ("Called to the ward at {}.", "Results given, {}.")),
    "address": (address, ("The patient lives at {}.", "Sent to {}.")),
    "email or link": (link, ("Images sent to {}.", "See {}.")),
    NAME_ALONE: (name_alone, ("Discussed with {} on the ward.", "{} was brought in by ambulance.")),
    AGE: (age, ("Clinical history: {}, cough.", "The patient is {}.")),
}

MEANT = {
    "PERSON": ("name with title", "labelled name", NAME_ALONE),
    "DATE_TIME": ("date", AGE),
    "AGE": (AGE,),
    "PHONE_NUMBER": ("phone",),
    "LOCATION": ("address",),
    "EMAIL_ADDRESS": ("email or link",),
    "URL": ("email or link",),
    "US_SSN": ("record number",),
    "UK_NHS": ("record number",),
    "MEDICAL_LICENSE": ("record number", "accession-like id"),
    "US_DRIVER_LICENSE": ("record number", "accession-like id"),
    "US_BANK_NUMBER": ("record number", "accession-like id"),
    "US_PASSPORT": ("record number", "accession-like id"),
}
"""Kinds that an entity of Presidio can be."""

Span = tuple[str, int, int]  # name, start, end
Finder = Callable[[str], list[Span]]


def presidio(model: str, least: float) -> Finder | None:
    """Presidio's analyzer with spaCy's ``model``, findings scored at least ``least``; None where either is missing."""
    try:
        from presidio_analyzer import AnalyzerEngine
        from presidio_analyzer.nlp_engine import NlpEngineProvider

        settings = {"nlp_engine_name": "spacy", "models": [{"lang_code": "en", "model_name": model}]}
        engine = NlpEngineProvider(nlp_configuration=settings).create_engine()
    except (ImportError, OSError):
        return None
    analyzer = AnalyzerEngine(nlp_engine=engine, supported_languages=["en"])
    return lambda report: [
        (found.entity_type, found.start, found.end)
        for found in analyzer.analyze(report, language="en", score_threshold=least)
    ]


def means(name: str, kind: str) -> bool:
    """Whether a finding called ``name`` says ``kind``."""
    return name == kind or kind in MEANT.get(name, ())


def plant(reports: Sequence[str], each: int, draw: random.Random) -> list[Planted]:
    """``each`` identifiers of every kind, one in a report."""
    planted = []
    for kind, (make, sentences) in IDENTIFIERS.items():
        for _ in range(each):
            report, words, sentence = draw.choice(reports), make(draw), pick(draw, sentences)
            before, _, after = sentence.partition("{}")
            lead = f"{report} " if draw.random() < 0.5 else ""
            rest = "" if lead else f" {report}"
            start = len(lead) + len(before)
            planted.append(Planted(kind, f"{lead}{before}{words}{after}{rest}", start, start + len(words)))
    return planted


def share(hits: int, of: int) -> dict[str, Any]:
    """Percent with its interval; nothing where there is nothing to divide by."""
    if not of:
        return {"percent": None, "of": 0}
    low, high = binomtest(hits, of).proportion_ci(method="wilson")
    return {"percent": rounded(100 * hits / of), "of": of, "interval": [rounded(100 * low), rounded(100 * high)]}


def judge(of: str, find: Finder, planted: Sequence[Planted], clean: Sequence[str], misses: bool) -> None:
    """Prints recall, precision and false alarms of ``find``."""
    spans = [find(one.report) for one in planted]
    touching = [
        [name for name, start, end in found if start < one.end and end > one.start]
        for one, found in zip(planted, spans, strict=True)
    ]
    for kind in IDENTIFIERS:
        mine = [(one, names) for one, names in zip(planted, touching, strict=True) if one.kind == kind]
        say(
            {
                "of": of,
                "kind": kind,
                "recall": share(sum(any(means(name, kind) for name in names) for _, names in mine), len(mine)),
                "recall as any kind": share(sum(bool(names) for _, names in mine), len(mine)),
                "missed": sorted({one.report[one.start : one.end] for one, names in mine if not names})
                if misses
                else "--misses",
            }
        )
    say({"of": of, "kind": "all", "recall as any kind": share(sum(map(bool, touching)), len(planted))})
    names = sorted({name for found in spans for name, _, _ in found})
    for name in names:
        right = sum(names_.count(name) for names_ in touching)
        every = sum(found == name for one in spans for found, _, _ in one)
        say({"of": of, "finding": name, "precision": share(right, every)})
    began = time.process_time()
    alarms = [find(report) for report in clean]
    seconds = time.process_time() - began
    reports = Counter(name for found in alarms for name in {name for name, _, _ in found})
    say(
        {
            "of": of,
            "clean reports": len(clean),
            "refused per 1,000": rounded(1000 * sum(map(bool, alarms)) / len(clean)),
            "by kind": {name: rounded(1000 * count / len(clean)) for name, count in reports.most_common()},
            "processor ms a report": rounded(1000 * seconds / len(clean)),
            "words": _words(clean, alarms) if misses else "--misses",
        }
    )


def _words(reports: Iterable[str], alarms: Iterable[Sequence[Span]]) -> list[tuple[str, int]]:
    counted = Counter(
        f"{name}: {report[start:end]}"
        for report, found in zip(reports, alarms, strict=True)
        for name, start, end in found
    )
    return counted.most_common(30)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--openi", help="NLMCXR_reports.tgz; default: the built-in cohort's reports")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=50, help="identifiers of each kind")
    parser.add_argument("--model", default="en_core_web_lg", help="spaCy's, for Presidio")
    parser.add_argument("--misses", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.openi:
        texts = [" ".join(report.sections.values()) for report in OpenISource(arguments.openi).reports()]
    else:
        texts = list(SyntheticCohort(size=50 if arguments.quick else 2000).build().reports)
    clean = sorted({text.strip() for text in texts} - {""})[: 50 if arguments.quick else None]
    planted = plant(clean, 5 if arguments.quick else arguments.each, random.Random(arguments.seed))
    say(machine() | {"planted": len(planted), "reports": "Open-I" if arguments.openi else "built-in"})
    judge("fedvlp", spans, planted, clean, arguments.misses)
    for least in (0.0, 0.5):
        other = presidio(arguments.model, least)
        if other is None:
            say({"of": "presidio", "missing": f"presidio-analyzer or spaCy's {arguments.model}"})
            return
        judge(f"presidio, score {least} or more", other, planted, clean, arguments.misses)


if __name__ == "__main__":
    main()
