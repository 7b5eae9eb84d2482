"""Names of figures: what files hold stays as it is, and each family is made in one place."""

from __future__ import annotations

import ast
import json
from itertools import product
from pathlib import Path

import fedvlp
from fedvlp.core import metric_keys as phase_names
from fedvlp.core.types import EVALUATE, MODALITIES, curve
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.evaluation import metric_names as names
from fedvlp.run.experiment import POOLED
from fedvlp.run.metrics import about, by_site, of_server

PACKAGE = Path(fedvlp.__file__).parent
GOLDEN = Path(__file__).parents[1] / "golden"

PINNED = {  # what metrics.csv, TensorBoard, summaries and FLARE's allow-lists call these figures
    names.recall("val", 1): "val/mean/r1",
    names.recall("test", 5, names.WHOLE_SET): "test/all/mean/r5",
    names.recall("test", 10, names.FOLDS, names.T2I): "test/fold/t2i/r10",
    names.recall("val", 1, direction=names.I2T): "val/i2t/r1",
    names.recall_at(10): "mean/r10",
    names.over_sites("val/mean/r1", names.AVERAGE): "val/mean/r1/average",
    names.over_sites("val/mean/r1", names.WORST): "val/mean/r1/worst",
    names.over_sites("val/mean/r1", names.DISPARITY): "val/mean/r1/disparity_population_std",
    names.similarity("val"): "val/similarity",
    names.auc("test", "Edema"): "test/auc/Edema",
    names.auc("val", names.MACRO): "val/auc/macro",
    names.auc("val", names.RARE): "val/auc/rare",
    names.IMAGE_WEIGHT: "classifier/image",
    phase_names.loss("contrastive"): "loss/contrastive",
    phase_names.probe("loss"): "probe/loss",
    phase_names.update_norm("site-1"): "update_norm/site-1",
    phase_names.BYTES_DOWN: "bytes_down",
    phase_names.BYTES_UP: "bytes_up",
    phase_names.SECONDS: "seconds",
    phase_names.PROCESSOR_SECONDS: "processor_seconds",
    of_server("val/all/mean/r1"): "server/val/all/mean/r1",
    about("site-1", "val/mean/r1"): "site-1:val/mean/r1",
}


def test_the_names_in_files_do_not_change() -> None:
    assert {made: pinned for made, pinned in PINNED.items() if made != pinned} == {}


def test_every_figure_of_the_golden_runs_is_made_here() -> None:
    """The golden files hold what real runs reported (test_golden.py), by phase, name and reporter."""
    reported: set[str] = set()
    for file in GOLDEN.glob("*.json"):
        for phase, figures in json.loads(file.read_text(encoding="utf-8")).items():
            if phase.startswith("round "):
                reported |= figures.keys()
    splits, ks = ("val", "test"), (1, 5, 10)
    scopes, directions = (names.IN_BATCH, names.WHOLE_SET, names.FOLDS), (names.I2T, names.T2I, names.BOTH)
    made = {names.recall(*of) for of in product(splits, ks, scopes, directions)}
    made |= {names.similarity(split) for split in splits} | {names.IMAGE_WEIGHT}
    made |= {names.auc(*of) for of in product(splits, (*FINDINGS, names.MACRO, names.RARE))}
    made |= {phase_names.update_norm(f"site-{number}") for number in range(1, 6)}
    made |= {phase_names.BYTES_DOWN, phase_names.BYTES_UP}
    made |= {
        names.auc(split, names.without(mean, half))
        for split, mean, half in product(splits, (names.MACRO, names.RARE), MODALITIES)
    }
    others = {name for name in reported - made if phase_names.loss_term(name) is None}
    probes = {phase_names.probe(name) for name in ("loss", "loss_error", "distinct_partners")}
    assert others == {"dro_weights", "dro_losses"} | probes
    assert reported & made >= {"val/mean/r1", "test/all/t2i/r10", "val/auc/macro", "classifier/image", "bytes_up"}


def test_the_core_knows_the_name_by_which_a_round_is_chosen() -> None:
    assert names.auc("val", names.MACRO) == phase_names.MACRO_AUC_ON_VAL


def test_names_are_read_as_they_are_made() -> None:
    assert names.parse_auc(names.auc("val", "Pleural Effusion")) == ("val", "Pleural Effusion")
    assert names.parse_auc(of_server(names.auc("test", names.MACRO))) == ("server/test", "macro")
    assert names.parse_auc("val/mean/r1") is None
    assert phase_names.loss_term(phase_names.loss("distil/image")) == "distil/image"
    assert phase_names.loss_term("probe/loss") is None
    assert phase_names.loss_term("a loss/term") is None
    recall = names.recall("val", 10, names.WHOLE_SET)
    assert names.is_recall(recall)
    assert not names.is_recall(names.over_sites(recall, names.WORST))
    assert not names.is_recall(names.similarity("val"))


def test_a_pooled_site_reports_about_others() -> None:
    figures = {about("site-2", "val/mean/r1"): 5.0, "loss/x": 1.0}
    record = {"members": [POOLED], "sites": {POOLED: figures}}
    assert by_site(record) == {"site-2": {"val/mean/r1": 5.0}, POOLED: {"loss/x": 1.0}}
    assert by_site({"members": ["site-1"], "sites": {"site-1": {"a:b": 2.0}}}) == {"site-1": {"a:b": 2.0}}


def test_a_finding_with_a_colon_is_read_as_it_was_made() -> None:
    """It was taken for a site named "site-1:val/auc/Lung"."""
    finding = names.auc("val", "Lung: opacity")
    for site in ("site-1", "Ward A/B", "St. Mary"):
        record = {"members": [POOLED], "sites": {POOLED: {about(site, finding): 0.7, finding: 0.6}}}
        assert by_site(record) == {site: {finding: 0.7}, POOLED: {finding: 0.6}}


def test_a_site_speaks_for_itself_alone_whatever_it_is_called() -> None:
    """A hospital named "pooled" gave others figures, and chose the folder of its curves."""
    others = {about("a", "test/mean/r1"): 99.0, "test/mean/r1": 30.0}
    record = {"members": ["a", POOLED], "sites": {"a": {"test/mean/r1": 20.0}, POOLED: others}}
    assert by_site(record)["a"] == {"test/mean/r1": 20.0}
    assert by_site(record)[POOLED] == others
    for outside in ("a/../../../evil", "..", "/etc", "a//b", "./a"):
        alone = {"members": [POOLED], "sites": {POOLED: {about(outside, "val/mean/r1"): 1.0}}}
        assert by_site(alone).keys() == {POOLED}


def test_curves_that_every_phase_has_are_named_by_phase() -> None:
    for tag, expected in [
            ("loss/contrastive", "/align"), ("update_norm/site-1", "/align"), ("seconds", "/align"),
            ("bytes_up", "/align"), ("processor_seconds", "/align"),
            ("bytes_down", "/align"), ("probe/loss", ""), ("val/mean/r1", ""), ("dro_weights/site-1", ""),
        ]:  # fmt: skip
        assert curve(tag, "align") == tag + expected
        assert curve(tag, EVALUATE) == tag


FRAGMENTS = (
    "loss/",
    "probe/",
    "auc/",
    "update_norm/",
    "mean/r",
    "i2t/r",
    "t2i/r",
    "/similarity",
    "bytes_up",
    "/average",
)
MAKERS = {"evaluation/metric_names.py", "core/metric_keys.py"}


def texts(tree: ast.AST) -> set[str]:
    """Every string of a module, also within f-strings, but for docstrings."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documentation]
    return {node.value for node in constants if isinstance(node.value, str)}


def test_no_other_module_spells_a_name() -> None:
    spelt = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name not in MAKERS:
            strings = texts(ast.parse(path.read_text(encoding="utf-8")))
            spelt[name] = sorted(text for text in strings if any(fragment in text for fragment in FRAGMENTS))
    assert {name: found for name, found in spelt.items() if found} == {}
    assert texts(ast.parse('"""probe/"""\nx = f"loss/{y}"')) == {"loss/"}
