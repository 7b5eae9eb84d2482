"""What leaves a site of an error: a sentence of the closed list with its numbers, or the kind of the error alone."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest

import fedvlp
from fedvlp.core.reasons import FIELDS, IN_THE_LOG, KINDS, OWN, REASONS, Reason, for_the_server, pattern_of

SOURCES = sorted(Path(fedvlp.__file__).parent.rglob("*.py"))
SECRETS = (
    "/srv/hospital/DOE^JANE/scan.dcm", "C:\\films\\Doe.dcm", "pretrain-oncology", "Befund_Spalte", "Jane Doe, 1984",
    "effusion on the left", "Jane\nDoe", "<script>x</script>", "7' or 1", "site-9: MRN 0012345", "{number}", "x" * 5000,
)  # fmt: skip
"""What no sentence that leaves may hold: paths, names of data sets and columns, patients' words."""


def filled(form: str, random: Random) -> tuple[str, list[str]]:
    """A sentence of the form, any text where it has any; and what stands in its fields."""
    numbers: list[str] = []
    said = ""
    for token in re.split(r"(\*|\{\w+\})", form):
        if token == "*":
            said += random.choice(SECRETS[:-1])
        elif token.startswith("{"):
            kind = token[1:-1].rstrip("0123456789")
            choices = {
                "number": ("0", "17", "1,234,567", "0.125", "3e-05", "nan", "-2.5", "1e+09"),
                "hash": ("0123456789abcdef", "0", "00ff00ff00ff"),
                "version": ("0.1.0", "12.3"),
            }
            numbers.append(random.choice(choices[kind]))
            said += numbers[-1]
        else:
            said += token
    return said, numbers


def titled(reason: Reason) -> Iterator[str]:
    """What stands before the sentence, for each kind of error that says so."""
    yield from (f"{kind}: " for kind in reason.kinds.split() or [""]) if reason.kinds else ("",)


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: f"{reason.kinds}: {reason.told[:60]}")
def test_each_sentence_leaves_with_its_numbers_and_nothing_else(reason: Reason) -> None:
    random = Random(reason.said)
    for title in titled(reason):
        for _ in range(20):
            said, numbers = filled(reason.said, random)
            left = for_the_server(title + said)
            assert left.startswith(title)
            wanted = set(re.findall(r"\{(\w+)\}", reason.told))
            shown = dict(zip(re.findall(r"\{(\w+)\}", reason.said), numbers, strict=True))
            assert wanted <= shown.keys()
            assert left == title + reason.told.format(**{name: shown[name] for name in wanted})
            assert not any(secret in left for secret in SECRETS)
            assert left.isprintable()
            assert for_the_server(left) == left, "the filter and the server look at it again"


@pytest.mark.parametrize("kind", [*OWN, "ValueError", "MemoryError", "Patient", "Jane Doe", ""])
def test_no_other_text_leaves(kind: str) -> None:
    """Generated errors with planted paths, names of data sets and columns, and patients' words."""
    random = Random(kind)
    for number in range(200):
        words = [random.choice(SECRETS) for _ in range(random.randrange(1, 4))]
        if number % 3:  # next to a sentence of the list, or in the place of one of its numbers
            form = random.choice(REASONS).said
            sentence, _ = filled(form.replace("*", "x"), random)
            field = re.compile(FIELDS["number"])
            words.insert(random.randrange(len(words) + 1), field.sub("Jane Doe", sentence) if number % 2 else sentence)
        text = f"{kind}: {random.choice((' ', '; ', ': ')).join(words)}" if kind else " ".join(words)
        left = for_the_server(text)
        assert not any(secret in left for secret in (*SECRETS, "Jane", "Doe")), left
        assert left.isprintable()
        assert len(left) < 500


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("CheckpointError: cannot read notes.safetensors in /a/DOE^JANE", "CheckpointError: a file of the run is"),
        ("FileNotFoundError: [Errno 2] '/a/b'", f"FileNotFoundError: {IN_THE_LOG}"),
        ("FileNotFoundError", f"FileNotFoundError: {IN_THE_LOG}"),
        ("JaneDoeError: x", f"an error: {IN_THE_LOG}"),
        ("Jane Doe", f"an error: {IN_THE_LOG}"),
        ("", f"an error: {IN_THE_LOG}"),
        (
            "NoWeightsError: text_tower '/a/DOE^JANE': no tokenizer found (OSError). Give a local folder",
            "NoWeightsError: the weights of a tower that the job names are not on this machine; they belong into",
        ),
        (
            "EnvelopeError: training.threads is Jane; this site lets a job have at most 4",
            f"EnvelopeError: {IN_THE_LOG}",
        ),
        (
            "EnvelopeError: training.threads is \u0667; this site lets a job have at most 4",
            f"EnvelopeError: {IN_THE_LOG}",
        ),
        ("ValueError: training.threads is 17; this site lets a job have at most 4", f"ValueError: {IN_THE_LOG}"),
        (7, f"an error: {IN_THE_LOG}"),
        (None, f"an error: {IN_THE_LOG}"),
        (["EnvelopeError: x"], f"an error: {IN_THE_LOG}"),
    ],
)
def test_of_anything_else_the_kind_is_told(text: object, left: str) -> None:
    assert for_the_server(text).startswith(left)


def test_a_text_that_would_take_long_to_read_is_not_read() -> None:
    assert for_the_server("PrivacyError: " + " is " * 10**6) == f"PrivacyError: {IN_THE_LOG}"
    assert for_the_server("PrivacyError: " + "cannot" * 300) == f"PrivacyError: {IN_THE_LOG}"


# The list against the code


@cache
def said() -> frozenset[str]:
    """Every text of the package's code, of two words and more, with 7 for what the code puts in.

    After a colon a sentence stands for it too; and each is there also without what the code puts before its colon.
    """
    found: list[str] = []
    for file in SOURCES:
        if file.name == "reasons.py":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }

        def shown(part: ast.expr, known: dict[str, object] = constants) -> str:
            if isinstance(part, ast.Constant):
                return str(part.value)
            value = part.value if isinstance(part, ast.FormattedValue) else part
            return str(known[value.id]) if isinstance(value, ast.Name) and value.id in known else "7"

        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(map(shown, node.values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    texts = {text for one in found for text in (one, one.replace(": 7", ": the disk is full")) if " " in text}
    return frozenset(texts | {text.removeprefix("7: ") for text in texts})


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: f"{reason.kinds}: {reason.told[:60]}")
def test_each_sentence_is_one_that_the_code_says(reason: Reason) -> None:
    """A reworded error would else leave as its kind alone, unnoticed."""
    assert any(map(pattern_of(reason.said).fullmatch, said()))


def test_the_kinds_are_pythons_and_those_of_the_package() -> None:
    defined = {
        node.name
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    assert set(OWN) <= defined
    assert {kind for reason in REASONS for kind in reason.kinds.split()} <= KINDS
    assert {"ValueError", "MemoryError"} <= KINDS
    assert not {kind for kind in KINDS - set(OWN) if not hasattr(builtins, kind)} - {
        "JSONDecodeError", "OutOfMemoryError", "SafetensorError",
    }  # fmt: skip
