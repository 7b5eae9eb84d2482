"""docs/ can be followed: references to it resolve, all that it names exists, its tables of settings are the code's.

A reference is "spec 4.5" (a section of docs/methods, or several: "spec 7.6 and 15.E"), "Spec faults, row 7" (the
table of faults) or the name of a document. Code is read as text, so that comments and docstrings count alike.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import inspect
import json
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from latex2mathml.converter import convert
from support import evidence
from support.laboratory import METHODS
from support.rooms import BELOW

from fedvlp.core.method import Method, Schedule, ServerHooks, SiteHooks
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.latent import LatentCohort
from fedvlp.deploy.envelope import Envelope
from fedvlp.deploy.kit import DOCS as KIT_DOCS
from fedvlp.deploy.kit import GUIDES, SITE
from fedvlp.evaluation.linear_probe import LinearProbe
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.evaluation.segmentation import Segmentation
from fedvlp.evaluation.zero_shot import ZeroShot
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.models.selector import SelectorConfig
from fedvlp.objectives import OBJECTIVES
from fedvlp.run.experiment import Partition
from fedvlp.training.settings import Training
from studies import rivals
from studies.protocols.vqa import VQA
from studies.rivals.vae import DistillerConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "custom" / "fedvlp"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
CODE = [
    path
    for folder in ("custom", "studies", "tests", "poc")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]
PROSE = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *(path for f in ("provisioning", "studies", "tests", "poc") for path in (ROOT / f).rglob("*.md")),
]


# What docs/ offers


@lru_cache
def text(name: str) -> str:
    """A document of docs/, "" where there is none."""
    path = ROOT / "docs" / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


@lru_cache
def methods_text() -> str:
    """The pages of docs/methods, one after the other."""
    return "\n".join(page.read_text(encoding="utf-8") for page in DOCS if page.parent.name == "methods")


def sections_of(document: str) -> dict[str, set[str]]:
    """{number of a section: labels such as B3 or Z1 that stand in bold in it}; a chapter has those of its sections."""
    found: dict[str, set[str]] = {}
    chapter = section = ""
    for line in document.splitlines():
        heading = re.match(r"#+ (\d+)(?:\.(\d+))?[. ]", line)
        if heading:
            chapter = heading[1]
            section = chapter if heading[2] is None else f"{chapter}.{heading[2]}"
            found.setdefault(section, set())
        for label in re.findall(r"\*\*([A-Z]\d*)\*\*|\*\*([A-Z])\. ", line):
            for place in {chapter, section} - {""}:
                found[place].add(label[0] or label[1])
    return found


# What refers to it

ITEM = r"\d+(?:\.\d+)?(?:[. ]?\b[A-Z]\d*\b)?"
SPEC = re.compile(rf"\b[Ss]pec(?:ification)?\s+(?:section\s+)?({ITEM}(?:(?:,\s+|\s+and\s+){ITEM})*)")
FAULTS = re.compile(r"\b[Ss]pec faults, rows?\s+((?:\d+(?:-\d+)?(?:,\s+|\s+and\s+)?)+)")
DOCUMENT = re.compile(r"\b(?:spec|docs)/[\w/-]+\.md\b")
DESIGN = re.compile(r"\bDESIGN section \d+\b")
REFERS = re.compile(r"\b[Ss]pec(?:ification)?\b|\bDESIGN\b|\bdocs/")


def dangling(content: str) -> list[str]:
    """The references in ``content`` to something that docs/ does not have."""
    if not REFERS.search(content):
        return []
    joined = re.sub(r"\n\s*(?:#|>)?\s*", " ", content)  # a reference may go on in the next line
    methods, bad = sections_of(methods_text()), []
    for match in SPEC.finditer(joined):
        for number, label in re.findall(r"(\d+(?:\.\d+)?)(?:[. ]?\b([A-Z]\d*)\b)?", match[1]):
            if number not in methods:
                bad.append(f"spec {number}")
            elif re.fullmatch(r"[A-Z]\d+|[A-L]", label) and label not in methods[number]:
                bad.append(f"spec {number} {label}")
    rows = set(re.findall(r"^\| (\d+) \|", (ROOT / "tests/faults/README.md").read_text(encoding="utf-8"), re.MULTILINE))
    for match in FAULTS.finditer(joined):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", match[1]):
            bad += [f"faults row {row}" for row in range(int(first), int(last or first) + 1) if str(row) not in rows]
    bad += [name for name in DOCUMENT.findall(joined) if not (ROOT / name).exists()]
    bad += [name for name in DESIGN.findall(joined) if name.split()[-1] not in sections_of(text("design.md"))]
    return bad


def test_every_reference_resolves() -> None:
    """Also in prose: README and the guides may not send a reader to a section that is not there."""
    found = {
        f"{path.relative_to(ROOT)}: {bad}"
        for path in CODE + PROSE
        for bad in dangling(path.read_text(encoding="utf-8"))
    }
    assert found == set(), "write the reference anew, or the section"


def test_there_are_references_to_follow() -> None:
    """A pattern that matched nothing would resolve everything."""
    everything = "\n".join(path.read_text(encoding="utf-8") for path in CODE)
    assert len(SPEC.findall(everything)) > 60
    assert len(FAULTS.findall(everything)) >= 5


def test_a_dangling_reference_is_found() -> None:
    for planted, found in [
        ('"""As spec 4.5 says, and spec 99.9 does not."""', ["spec 99.9"]),
        ("# the checks of spec 15 B6 and of spec 15 B9", ["spec 15 B9"]),
        ("(spec 7.3,\n    10.4, 7.77)", ["spec 7.77"]),
        ("# Spec 7.6 and 15.E and 15.M1", ["spec 15 M1"]),
        ("# spec section 0 Z3, spec 0 Z12", ["spec 0 Z12"]),
        ('"""Spec faults, rows 7, 9 and 41: a site."""', ["faults row 41"]),
        ('"""Spec faults, rows 36-40."""', ["faults row 39", "faults row 40"]),
        ("# see docs/own-data.md and docs/no-thing.md", ["docs/no-thing.md"]),
        ("the law of DESIGN section 99", ["DESIGN section 99"]),
        ("spec.seed, spec 9's number of steps, spec 2.1 (AdamW), 30 specs", []),
    ]:
        assert dangling(planted) == found


def test_links_between_documents_lead_somewhere() -> None:
    """To a file, and where a section is named to a heading of it."""
    for path in DOCS + PROSE:
        for target, section in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
            if target.startswith("https://"):
                continue
            page = path.parent / target if target else path
            assert page.exists(), f"{path.name}: {target}"
            assert not section or section in anchors(page), f"{path.name}: {target}#{section}"


def anchors(page: Path) -> set[str]:
    """The sections of a page that a link can lead to."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return {anchor(line.lstrip("# ")) for line in lines if line.startswith("#")}


def anchor(heading: str) -> str:
    """The link that a heading gets on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# What docs/ names


@lru_cache
def functions(path: str) -> frozenset[str]:
    """Names of the functions on top of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_file_and_test_that_is_named_exists() -> None:
    for path in PROSE + DOCS:
        for name in re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8")):
            file, _, test = name.partition("::")
            if re.fullmatch(r"(?:custom|studies|tests|jobs|provisioning|poc|docs)/[\w./-]*", file):
                assert (ROOT / file).exists(), f"{path.name} names {file}"
                assert not test or test in functions(file), f"{file} has no {test}"


def test_the_evidence_names_tests_for_every_guard_attack_and_party() -> None:
    """The hospitals' pages say what holds; the site has a page of the tests that show it, by the same names."""
    assert evidence.content().count("\n## ") == 4
    assert f"and {len(evidence.shown_by(evidence.FAULTS))} faults" in text("README.md")
    assert len(evidence.shown_by(evidence.ATTACKS)) == 13, "so many does security.md say"
    assert "Thirteen attacks succeeded" in text("security.md")
    guards = text("security.md").partition("## Guards\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| \*\*([^*]+)\*\*", guards, re.MULTILINE) == list(evidence.shown_by(evidence.GUARDS))
    for file in re.findall(r"`([\w/.]+\.\w+)`", "".join(line.rpartition(" | ")[2] for line in guards.splitlines())):
        assert (PACKAGE / file).exists() or (ROOT / file).exists(), file
    page = (ROOT / "provisioning" / "DATA_FLOW.md").read_text(encoding="utf-8")
    table = page.partition("| who | can learn | cannot |\n")[2].partition("\n\n")[0]
    parties = [line.split("|")[1].strip() for line in table.splitlines()[1:]]
    assert [f"{who}, {what}" for who in parties for what in ("can learn", "cannot")] == list(
        evidence.shown_by(evidence.PARTIES)
    )
    for shown in map(evidence.shown_by, (evidence.GUARDS, evidence.ATTACKS, evidence.PARTIES, evidence.FAULTS)):
        for statement, files in shown.items():
            assert files, statement
            for file, names in files.items():
                assert set(names) <= functions(f"tests/{file}"), (statement, file)


def test_a_stranger_can_read_it() -> None:
    """No paths of somebody's machine, no numbers of an issue tracker, no folder that is not in the repository."""
    for path in [ROOT / "README.md", *DOCS]:
        private = re.compile(r"(?<!\w)/(?:work|tmp|home|root)\b|\bshared/|\bissue \d+|\bspec/|\bI ran\b|\[I\]")
        assert private.findall(path.read_text(encoding="utf-8")) == [], path.name


# docs/design.md


def section(heading: str) -> str:
    """A section of the design."""
    return text("design.md").partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_the_design_names_every_package() -> None:
    words = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"]
    assert re.findall(r"has (\w+) packages", text("design.md")) == [words[len(BELOW) - 10]]
    assert set(re.findall(r"^\| `(\w+)` \|", section("2. The packages"), re.MULTILINE)) == BELOW.keys()


def test_the_design_names_every_hook_in_its_group() -> None:
    named: dict[str, set[str]] = {}
    group = ""
    for first, hooks in re.findall(
        r"^\| ?(`\w+`)? \| ((?:`\w+`(?:, )?)+) \|", section("3. The contract"), re.MULTILINE
    ):
        group = first.strip("`") or group
        named.setdefault(group, set()).update(re.findall(r"`(\w+)`", hooks))
    groups = (Schedule, ServerHooks, SiteHooks, Method)
    assert named == {
        kind.__name__: {name for name, hook in vars(kind).items() if inspect.isfunction(hook) and name[0] != "_"}
        for kind in groups
    }


# Tables of settings

SELECTED: tuple[type[Any], ...] = (
    Method, Training, SyntheticCohort, LatentCohort, Retrieval, ZeroShot, LinearProbe, Segmentation, VQA, Partition,
    SelectorConfig, MultimodalConfig, *OBJECTIVES.values(), *METHODS.values(), *rivals.OBJECTIVES.values(),
    DistillerConfig,
)  # fmt: skip
CONFIGURED = {base.__name__: base for kind in SELECTED for base in kind.__mro__ if dataclasses.is_dataclass(base)}
"""Every dataclass of settings by its name, base classes included."""

Row = tuple[str, str]


def tables(document: str) -> Iterator[tuple[str, str, list[Row]]]:
    """(class, its file, rows of field and default) of every table of settings."""
    for match in re.finditer(
        r"\*\*Settings of `(\w+)`\*\* in `([\w/.]+)`(?:(?!\*\*Settings)[^|])*\n\n((?:\|.*\n)+)", document
    ):
        rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in match[3].splitlines()[2:]]
        yield match[1], match[2], [(row[0], row[1]) for row in rows]


def default_of(kind: type[Any], name: str) -> Any:
    """The default of a field. Raises KeyError where there is no such field."""
    field = {field.name: field for field in dataclasses.fields(kind)}[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def wrong_rows(kind: type[Any], rows: list[Row]) -> list[str]:
    """What a table says of ``kind`` and the code does not."""
    names = {field.name for field in dataclasses.fields(kind)}
    unknown = [f"{kind.__name__} has no field {name}" for name, _ in rows if name not in names]
    stale = [
        f"{kind.__name__}.{name} is {default_of(kind, name)!r}, the table says {shown}"
        for name, shown in rows
        if name in names and ast.literal_eval(shown) != default_of(kind, name)
    ]
    return unknown + stale


TABLES = {name: (file, rows) for name, file, rows in tables(methods_text())}


def test_a_table_of_settings_is_the_codes() -> None:
    for name in TABLES:
        file, rows = TABLES[name]
        kind = CONFIGURED[name]
        assert (ROOT / file).stem == kind.__module__.rpartition(".")[2], f"{name} is defined in {kind.__module__}"
        assert wrong_rows(kind, rows) == [], name


def test_stale_tables_are_found() -> None:
    """A default that has changed, and a field that has gone."""
    table = "**Settings of `Method`** in `a.py`:\n\n| field | default | paper |\n|---|---|---|\n"
    ((name, _, rows),) = tables(table + "| `local_steps` | `21` | 50 |\n| `gone` | `1` | 2 |\n")
    assert wrong_rows(CONFIGURED[name], rows) == [
        "Method has no field gone",
        "Method.local_steps is 20, the table says 21",
    ]


def test_pages_of_the_methods_are_short() -> None:
    """Below 60 kB each on the site, which adds 28 kB and 1.5 bytes a byte."""
    assert {page.name for page in DOCS if page.parent.name == "methods" and page.stat().st_size > 21_200} == set()


def test_no_asterisk_of_a_formula_is_taken_for_emphasis() -> None:
    r"""Markdown would swallow both of "al*(x), al*(y)"; in text they are written \*."""
    prose = re.sub(r"(?m)^    .*  .*$|`[^`]*`|\*\*|\\\*|(?<= )\*[a-zA-Z ]+\*", "", methods_text())
    assert [line for line in prose.splitlines() if "*" in line] == []


def test_every_formula_can_be_drawn() -> None:
    """In LaTeX between dollars; GitHub takes a backslash before punctuation away, and then draws something else."""
    found = re.findall(r"\$\$(.+?)\$\$|\$((?:[^$\n]|\n(?!\n))+)\$", methods_text(), flags=re.DOTALL)
    assert len(found) > 50
    for formula in map("".join, found):
        assert not re.search(r"\\[^a-zA-Z]", formula), formula
        assert "\\" not in convert(formula), f"a command that is not known: {formula}"


def test_every_method_has_its_section_and_its_presets_are_real() -> None:
    """A method whose settings have no value of a paper has a line, or a row in section 9."""
    from fedvlp.run.presets import PRESETS

    for kind in METHODS.values():
        named = f"**Settings of `{kind.__name__}`**", f"| `{kind.__name__}` |"
        assert any(name in methods_text() for name in named), kind.__name__
    for match in re.findall(r"[Pp]resets?:? ((?:`[\w-]+`(?:,\s+)?)+)", methods_text()):
        for name in re.findall(r"`([\w-]+)`", match):
            assert name in PRESETS.keys() | rivals.PRESETS.keys(), name


def test_what_is_said_to_be_missing_is_missing() -> None:
    """Who implements an amendment or a baseline strikes it off section 0 or 9."""
    baselines = methods_text().partition("# 9. Baselines")[2].partition("**Settings of")[0]
    rows = re.findall(r"^\| ([\w-]+).*\| (?:`(\w+)`|not yet) \|$", baselines, re.MULTILINE)
    assert len(rows) >= 19
    assert [name for name, there in rows if not there and name.lower() in METHODS] == []
    assert len(re.findall(r"not yet|planned", methods_text())) == sum(not there for _, there in rows)
    assert {there for _, there in rows if there} <= {kind.__name__ for kind in METHODS.values()}


# docs/choose.md


def test_what_leaves_a_site_is_said_for_every_preset_that_discloses_more() -> None:
    from fedvlp.run.presets import PRESETS

    said: dict[str, str] = {}
    for names, leaves in re.findall(r"^\| ((?:`[\w-]+` ?)+) \| (.*) \|$", text("choose.md"), re.MULTILINE):
        said |= {name: leaves for name in re.findall(r"`([\w-]+)`", names) if PRESETS[name].method.discloses()}
    assert said == {name: preset.method.discloses() for name, preset in PRESETS.items() if preset.method.discloses()}


def test_choose_names_every_preset() -> None:
    from fedvlp.run.presets import PRESETS

    shown = set(re.findall(r"`([\w-]+)`", text("choose.md").partition("All presets")[2].partition("\n## ")[0]))
    assert PRESETS.keys() - shown <= {"tiny-pool"}


def test_the_readme_is_short_and_its_figures_are_the_results() -> None:
    readme, results = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md"))
    assert len(readme.encode()) <= 8000
    plain = " ".join(results.split())
    assert len(intervals(readme)) >= 6
    for path in [ROOT / "README.md", *DOCS, *PROSE]:
        if path.name not in ("results.md", "claims.md") and path.parent.name != "methods":
            assert {one for one in intervals(path.read_text(encoding="utf-8")) if one not in plain} == set(), path.name
    assert set(re.findall(r"https://(?:arxiv.org/abs/|openreview.net/forum\?id=)([\w.]+)", readme)) >= FIVE_PAPERS


FIVE_PAPERS = {"2404.03854", "2404.03854v1", "2302.08888", "2407.04011", "zfLHmnU1fs"}


def intervals(page: str) -> set[str]:
    """Every "+1.6 [+0.4, +2.8]" of a page."""
    return set(re.findall(r"[+-]?\d+\.\d+ \[[^]]+\]", " ".join(page.split())))


# Figures and names that go stale


COMPUTED = {
    "cached features, FedDRA after 50 steps": ["-1.3 [-2.5, -0.2]"],
    "kept moments": ["+1.0 [-2.6, +4.6]", "-0.3 [-4.3, +3.7]"],
    "CAR-MFL with the whole public set, minus 10 candidates": ["+2.8 [+0.9, +4.8]"],
    "real X-rays, between rows of frozen_pair.py": ["+1.4 [-0.3, +3.1]"],
    "FedRGB's cosines and its guidance": [
        "+1.6 [+0.9, +2.3]", "+0.7 [+0.0, +1.3]", "+0.7 [+0.4, +1.0]", "+0.3 [+0.1, +0.5]",
    ],
}  # fmt: skip
"""What -> differences that no table of results has: they were computed from its cells."""

ON_VALIDATION = ["+5.1 [+4.1, +6.2]", "+8.3 [+4.4, +12.2]"]
"""Short rounds minus FedAvg where scanners differ, of runs of one machine: average and worst site, seeds 0 to 2."""


def test_short_rounds_on_validation_are_of_one_machine() -> None:
    """After their last round, against FedAvg after eight of 24 rounds: its own row of eight ran elsewhere."""
    from fedvlp.evaluation import metric_names
    from fedvlp.evaluation.intervals import over_seeds
    from studies.claims import results_page
    from studies.claims.cell_results import Table

    filed, derived = results_page.loaded("scanner-shift"), []
    for kind in (metric_names.AVERAGE, metric_names.WORST):
        figure = metric_names.over_sites(metric_names.recall("val", 1), kind)
        ends = {"fedavg-short": 30, "fedavg-rounds": 8}
        cells = {(row, seed): filed.by_round((row, seed))[end] for row, end in ends.items() for seed in range(3)}
        table = Table(cells, made=filed.made())
        derived.append(str(over_seeds(table.difference("fedavg-short", "fedavg-rounds", figure))))
    assert derived == ON_VALIDATION
    assert all(one in text("results.md") for one in derived)


OVERLAPPING = {
    "+2.9 [+0.4, +5.4]": "+2.9 [-1.6, +7.4]", "+4.1 [+1.3, +6.9]": "+4.1 [-0.9, +9.1]",
    "+4.0 [+1.8, +6.3]": "+4.0 [-0.1, +8.1]", "+3.1 [+0.8, +5.4]": "+3.1 [-1.0, +7.2]",
    "+0.7 [-2.1, +3.4]": "+0.7 [-4.3, +5.6]", "+1.5 [-0.5, +3.4]": "+1.5 [-2.1, +5.0]",
    "+0.2 [+0.1, +0.3]": "+0.2 [+0.0, +0.4]", "+1.0 [+0.6, +1.3]": "+1.0 [+0.3, +1.6]",
    "-0.6 [-2.2, +1.0]": "-0.6 [-3.5, +2.3]",
}  # fmt: skip
"""Of real X-rays the interval that takes splits for independent ones, as it was filed -> as the page has it."""


def test_intervals_over_splits_of_the_same_pairs_are_corrected() -> None:
    """Eight splits, 71.25 pairs tested and 255.875 trained on: the reach grows by sqrt(1 + 8 x 71.25 / 255.875).

    What was filed is rounded to 0.05, which grows too; where that leaves a side open, the page has the wider one.
    """
    growth = math.sqrt(1 + 8 * 71.25 / 255.875)
    page = " ".join(text("results.md").split())
    for filed, shown in OVERLAPPING.items():
        (mean, low, high), (same, lower, higher) = (
            tuple(map(float, re.findall(r"[+-]\d+\.\d+", one))) for one in (filed, shown)
        )
        reach = growth * (high - low) / 2
        assert mean == same
        assert (lower, higher) == pytest.approx(((low + high) / 2 - reach, (low + high) / 2 + reach), abs=0.15)
        assert shown in page
        assert filed not in page


def test_the_page_of_claims_has_the_verdicts_of_the_tables() -> None:
    """What is no verdict any more, and what is undecided after Holm's correction, cannot stay in a sentence's table."""
    from studies.claims import results_page

    assert results_page.verdicts(results_page.judgements()) in text("claims.md")


def test_a_figure_of_a_claim_in_the_readme_has_its_verdict() -> None:
    """Ranked, and with a star exactly where Holm's correction leaves it undecided."""
    from studies.claims import results_page

    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    table = readme.partition("| FedDRA |")[2].partition("Total steps count")[0]
    assert len(intervals(table)) >= 6
    judged = [one for results in results_page.judgements() for one in results.outcomes if one.measured]
    for cited in intervals(table):
        known = [one for one in judged if str(one.measured) == cited]
        assert [one.ranked for one in known].count(True) == 1, cited
        (one,) = [one for one in known if one.ranked]
        assert (cited + r"\*" in table) == (results_page.starred(one) != one.verdict), cited


def test_every_interval_of_the_results_is_in_a_table() -> None:
    """An interval of another cohort than the sentence's, or of an earlier measurement, would be none of them."""
    from studies import real_federation_page
    from studies.claims import results_page

    def numbers(page: str) -> set[tuple[float, ...]]:
        return {tuple(float(n) for n in re.findall(r"[+-]?\d+\.\d+", one)) for one in intervals(page)}

    tables = (ROOT / "studies" / "results" / "programs.csv").read_text(encoding="utf-8")
    computed = [one for some in COMPUTED.values() for one in some]
    computed.append(real_federation_page.section())  # what it says of its own table
    measured = numbers(
        "\n".join([*results_page.pages().values(), tables, *computed, *OVERLAPPING.values(), *ON_VALIDATION])
    )
    measured |= {(-mean, -high, -low) for mean, low, high in (one for one in measured if len(one) == 3)}
    before, _, rest = text("results.md").partition("## The main job")
    for page in (before, rest.partition("\n## ")[2], text("claims.md")):
        assert {one for one in numbers(page) if one not in measured} == set()


def test_a_figure_with_a_revision_is_in_the_tables() -> None:
    """ "650 (`gpu.py`, revision 9c238fc3)": the numbers of that sentence are results of that program and revision."""
    with (ROOT / "studies" / "results" / "programs.csv").open(newline="", encoding="utf-8") as file:
        rows = [(row["program"], row["revision"], row["value"]) for row in csv.DictReader(file)]
    found = 0
    for path in [ROOT / "README.md", *DOCS]:
        plain = " ".join(path.read_text(encoding="utf-8").split())
        for cited in re.finditer(r"\(`(\w+)\.py`, revision (\w{7,8})\)", plain):
            values = " ".join(value for program, revision, value in rows if (program, revision) == cited.groups())
            sentence = re.sub(r"`[^`]*`", "", plain[: cited.start()].rpartition(". ")[2])
            for number in re.findall(r"(?<![\w.])\d[\d,]*\.?\d+", sentence):
                found += 1
                assert number in values, f"{path.name}: {number} is no figure of {cited[0]}"
    assert found >= 4


def test_a_table_names_the_presets_as_they_were_measured() -> None:
    """ "Presets as measured: `feddra` (1a2b3c4d)": the preset has that fingerprint still, or is measured anew."""
    from fedvlp.run import presets
    from fedvlp.run.config import fingerprint

    said = re.findall(r"Presets as measured: ([^.]*)\.", " ".join(text("results.md").split()))
    named = [pair for line in said for pair in re.findall(r"`([\w-]+)` \((\w{8})\)", line)]
    assert len(named) >= 3
    assert [name for name, mark in named if fingerprint(presets.get(name))[:8] != mark] == []


def test_a_kits_pages_name_the_files_of_a_kit() -> None:
    """Policies are in site/ and server/ of the repository, and in local/ of a kit, where these pages are read."""
    for name in GUIDES[SITE]:
        page = ROOT / ("" if name in KIT_DOCS else "provisioning") / name
        assert re.findall(r"`(?:site|server)/[\w.-]+", page.read_text(encoding="utf-8")) == [], name


def test_the_privacy_page_has_each_policys_filters_and_each_limits_default() -> None:
    page = (ROOT / "provisioning" / "PRIVACY.md").read_text(encoding="utf-8")
    for policy in (ROOT / "provisioning" / "site").glob("privacy*.json"):
        (scope,) = json.loads(policy.read_text(encoding="utf-8"))["scopes"]
        filters = [
            each["path"].rpartition(".")[2] for side in ("data", "result") for each in scope[f"task_{side}_filters"]
        ]
        shown = ", ".join(f"`{name}`" for name in filters)
        assert f"\n| `local/{policy.name}` | {shown} |" in page, policy.name
    table = page.partition("| limit | default |")[2].partition("\n\n")[0]
    rows = [line.split(" | ")[:2] for line in table.splitlines()[2:]]
    said = [(re.findall(r"`(\w+)`", names), default) for names, default in rows]
    limits = {field.name: field.default for field in dataclasses.fields(Envelope)}
    assert sorted(name for names, _ in said for name in names) == sorted(limits)
    for names, default in said:
        numbers = [float(number) for number in re.findall(r"\b\d+\b", default)]
        assert numbers in ([], [limits[name] for name in names]), names


def test_the_pages_agree_on_python() -> None:
    pages = [ROOT / "README.md", *DOCS, *PROSE]
    ranges = {said for path in pages for said in re.findall(r"Python 3\.\d+ to 3\.\d+", path.read_text("utf-8"))}
    assert ranges == {"Python 3.10 to 3.13"}
    for project in (ROOT, ROOT / "studies"):
        assert 'requires-python = ">=3.10"' in (project / "pyproject.toml").read_text(encoding="utf-8")


def test_what_a_guide_shows_of_a_run_has_no_figures() -> None:
    """They are another start's or another processor's by the time that somebody compares them; "..." stays true."""
    for path in [*(ROOT / "provisioning").glob("*.md"), ROOT / "poc" / "README.md"]:
        shown = "\n".join(re.findall(r"```\w*\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
        assert re.findall(r"(?:loss|val_\w+)[ =]\d\S*|│ +\d\S*", shown) == [], path.name


def test_the_runbooks_errors_are_fedvlps() -> None:
    """What it says that a log shows, "EnvelopeError: the update rests on ... records", is text of the package."""
    runbook = (ROOT / "provisioning" / "RUNBOOK.md").read_text(encoding="utf-8")
    sources = (ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py")))
    texts = "\n".join(
        node.value
        for tree in sources
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    said = re.findall(r"`((?!OSError)[A-Z]\w+Error): ([^`]+)`", runbook)  # OSError: the system's words
    assert len(said) >= 8
    parts = {part.strip() for _, message in said for part in re.split(r"\.\.\.|SITE", message) if part.strip()}
    assert {part for part in parts if part not in texts} == set(), "no error of fedvlp has these words"
