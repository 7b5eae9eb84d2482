"""Writes docs/feddra.md: every line of FedDRA's algorithm beside its code, its tests and the setting that turns it off.

    PYTHONPATH=tests python -m support.feddra_page

The code is what the source marks: a comment that begins with "eq. 1", "line 2" or "lines 2 and 4". Formulas, tests and
settings stand in ``STEPS``.
"""

# ruff: noqa: RUF001  (formulas have Greek letters)
from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "feddra.md"
METHODS = ROOT / "custom" / "fedvlp" / "methods"
FILES = ("feddra.py", "robust.py", "guidance.py", "math/dro.py")


@dataclass(frozen=True)
class Step:
    """One equation or line of the algorithm. ``tests`` are ``file::test`` below tests/methods."""

    key: str  # as the code marks it
    says: str
    formula: str
    tests: tuple[str, ...]
    off: str  # the setting, as --set takes it
    leaves: str  # what remains with it


DRA, ROBUST, DRO = "test_feddra.py", "test_robust.py", "math/test_dro.py"

STEPS = (
    Step(
        "eq. 1",
        "The loss of a site: the objective, and the distance of both embeddings from the anchor's.",
        "L = L<sub>MI</sub>(z<sub>x</sub>, z<sub>y</sub>) + μ L<sub>C</sub><br>"
        "L<sub>C</sub> = 1/B Σ<sub>b</sub> (‖z<sub>x</sub> − z∗<sub>x</sub>‖² + ‖z<sub>y</sub> − z∗<sub>y</sub>‖²)",
        (
            f"{DRA}::test_the_constraint_by_hand",
            f"{DRA}::test_b3_where_the_anchor_is_the_model_the_constraint_and_its_gradient_are_0",
            f"{DRA}::test_b4_through_the_method",
        ),
        "method.mu=0",
        "the objective alone, without an anchor",
    ),
    Step(
        "line 1",
        "Site i is sent the model and its weight, and keeps a frozen copy as the anchor.",
        "(enc, al) → site i, with m<sub>i</sub> = N w<sub>i</sub><br>(enc∗, al∗) ← (enc, al)",
        (
            f"{ROBUST}::test_the_multiplier_is_n_times_the_weight",
            f"{ROBUST}::test_how_the_weights_act",
            f"{DRA}::test_the_anchor_of_each_phase_is_what_the_phase_started_from",
        ),
        "method.rho=0",
        "m<sub>i</sub> = 1 at every site",
    ),
    Step(
        "line 2",
        "Phase `align`, E1 steps: the alignment modules and heads learn, the encoders are frozen.",
        "al<sub>i</sub> ← al<sub>i</sub> − m<sub>i</sub> η ∇<sub>al</sub> L",
        (
            f"{DRA}::test_align_uploads_alignment_and_heads_alone",
            f"{DRA}::test_b2_without_the_joint_phase_encoders_keep_their_bits",
            f"{DRA}::test_frozen_encoders_run_in_eval_mode_in_the_align_phase",
            f"{DRA}::test_b6_what_the_weight_does_to_the_first_step",
        ),
        "method.align_steps=0",
        "one stage",
    ),
    Step(
        "line 3",
        "The server averages; model and anchor of the next phase start from this mean.",
        "al ← 1/N Σ<sub>i</sub> al<sub>i</sub>",
        (f"{DRA}::test_the_joint_phase_starts_from_the_averaged_alignment_and_the_rounds_encoders",),
        "method.weighting=samples",
        "a mean by number of records",
    ),
    Step(
        "line 4",
        "Phase `joint`, E2 steps: everything learns.",
        "(enc<sub>i</sub>, al<sub>i</sub>) ← (enc<sub>i</sub>, al<sub>i</sub>) − m<sub>i</sub> η ∇ L",
        (
            f"{DRA}::test_two_phases_in_every_round",
            f"{DRA}::test_b5_one_site_is_the_centralized_two_stage_loop",
        ),
        "method.local_steps=0",
        "the encoders as they came",
    ),
    Step(
        "line 5",
        "The server averages the whole model.",
        "(enc, al) ← 1/N Σ<sub>i</sub> (enc<sub>i</sub>, al<sub>i</sub>)",
        (
            "test_fedavg.py::test_uniform_by_hand",
            f"{DRA}::test_b1_without_its_parts_it_is_fedavg_bit_for_bit",
        ),
        "method.weighting=samples",
        "a mean by number of records",
    ),
    Step(
        "line 6a",
        "Each site measures the received model on its own training records.",
        "v<sub>i</sub> = mean L<sub>MI</sub> of (enc, al) on D<sub>i</sub>",
        (
            f"{ROBUST}::test_the_probe_by_hand",
            f"{ROBUST}::test_the_probe_uses_a_fixed_part_in_whole_batches",
        ),
        "method.gamma=0",
        "weights that do not follow the losses",
    ),
    Step(
        "line 6b",
        "Sites with a higher loss gain weight.",
        "ŵ<sub>i</sub> = w<sub>i</sub> e<sup>γ v<sub>i</sub></sup>"
        " / Σ<sub>j</sub> w<sub>j</sub> e<sup>γ v<sub>j</sub></sup>",
        (
            f"{ROBUST}::test_the_weights_by_hand",
            f"{DRO}::test_large_rho_is_exponentiated_gradient",
            f"{ROBUST}::test_the_hard_site_gains_over_a_real_run",
        ),
        "method.gamma=0",
        "weights that do not follow the losses",
    ),
    Step(
        "line 6c",
        "No site may gain too much: the weights are projected onto a ball round the uniform ones, u = 1/N.",
        "w ← Proj<sub>ρ</sub>(ŵ) = u + √(ρ / D(ŵ)) (ŵ − u) if D(ŵ) > ρ, else ŵ<br>D(w) = N/2 ‖w − u‖²",
        (
            f"{DRO}::test_published_vectors",
            f"{DRO}::test_ten_thousand_random_inputs_stay_in_the_simplex_and_the_ball",
            f"{DRO}::test_not_worse_than_slsqp",
        ),
        "method.rho=2",
        "the weights of line 6b as they are: of five sites, none leaves this ball",
    ),
)

INTRODUCTION = """\
# FedDRA, line by line

FedDRA ([Shuai et al., 2024](https://arxiv.org/abs/2404.03854)) beside the code that does it. The lines are those of
the docstring of `FedDRA`. [Section 4](methods/feddra.md#4-feddra) says where they differ from the paper's print
or from its released code, and why.

enc are the encoders; al the alignment modules with the projection heads; z = al(enc(x)) is an embedding of unit
length; a star marks what is frozen; N sites have the weights w; η is the learning rate; B the batch size.

The last column is a setting that takes the line away, for example `fedvlp simulate feddra --set method.mu=0`. With
`align_steps=0`, `mu=0` and `rho=0` together, FedDRA is FedAvg with uniform weights, bit for bit.
`studies/programs/ablation.py` measures FedDRA without its two stages, the constraint, and robust weights.

This page is written by `make docs` from the comments in the code that carry these numbers.
`tests/test_feddra_page.py` fails when a line has no code, a test is not there, or the page is out of date.
"""

MARKER = re.compile(r"# (eq|line)s?\.? (\d+[a-z]?)(?: and (\d+[a-z]?))?(?::|$)")


def keys(comment: str) -> list[str]:
    """``# lines 2 and 4: E1 and E2`` -> line 2, line 4."""
    match = MARKER.match(comment)
    kind = "eq." if match and match[1] == "eq" else "line"
    return [f"{kind} {number}" for number in match.groups()[1:] if number] if match else []


def marked(source: str) -> Iterator[tuple[str, str, str]]:
    """(key, class or function, statement) of every statement that a comment marks."""
    owners: dict[int, str] = {}
    statements: dict[int, str] = {}

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                inner = f"{name}.{child.name}".lstrip(".")
                owners.update(dict.fromkeys(range(child.lineno, (child.end_lineno or 0) + 1), inner))
            elif isinstance(child, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
                for line in range(child.lineno, (child.end_lineno or 0) + 1):
                    statements[line] = ast.get_source_segment(source, child) or ""
            visit(child, inner)

    visit(ast.parse(source), "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            for key in keys(token.string):
                yield key, owners[token.start[0]], one_line(statements[token.start[0]])


def one_line(code: str) -> str:
    """A statement without its comments, on one line."""
    bare = " ".join(re.sub(r"  # .*", "", line).strip() for line in code.splitlines())
    return re.sub(r"(?<=\() | (?=\))", "", bare)


def found() -> dict[str, list[tuple[str, str, str]]]:
    """{key: (file, function, code) of each statement that carries it}, in the order of ``FILES``."""
    places: dict[str, list[tuple[str, str, str]]] = {}
    for file in FILES:
        for key, owner, code in marked((METHODS / file).read_text(encoding="utf-8")):
            places.setdefault(key, []).append((file, owner, code))
    return places


def cell(lines: list[tuple[str, str, str]]) -> str:
    """The code of a step for a cell of a table: each function's name, then its lines."""
    parts: list[str] = []
    for index, (file, owner, code) in enumerate(lines):
        if (file, owner) != lines[index - 1][:2] or index == 0:
            parts.append(f"[{owner}](../custom/fedvlp/methods/{file})")
        parts.append(f"`{code}`")
    return "<br>".join(parts)


def link(test: str) -> str:
    """The name of a test in words, and the way to its file."""
    file, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../tests/methods/{file})"


def page() -> str:
    """The page. Raises KeyError for a step that no line of code carries."""
    places = found()
    rows = ["| in the paper | in the code | shown by | without it |", "|---|---|---|---|"]
    for step in STEPS:
        tests = "<br>".join(f"• {link(test)}" for test in step.tests)
        what = f"**{step.key}** {step.says}<br><br>{step.formula}"
        rows.append(f"| {what} | {cell(places[step.key])} | {tests} | `{step.off}`<br>{step.leaves} |")
    return INTRODUCTION + "\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
