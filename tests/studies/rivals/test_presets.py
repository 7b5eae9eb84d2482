"""The presets of a clone: each is one of fedvlp with another method, so that tables compare on equal terms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedvlp.run import plugins, presets
from studies import rivals
from studies.claims import ledger
from studies.claims.cell_results import CellResults, code, code_of_cell

pytestmark = pytest.mark.slow(seconds=5)

LIKE = {
    **dict.fromkeys(("fedldawa", "fedu", "fedema", "fedx", "fedmae"), "fedavg"),
    **dict.fromkeys(("fedmd", "fedet", "fedgems", "fediot"), "creamfl"),
    "fedfed": "pms-fm",
}


def test_every_preset_is_one_of_fedvlp_but_for_what_its_method_is() -> None:
    """Self-supervised ones have an objective of their own, FedFed a distiller, FedIoT one architecture at all sites."""
    assert LIKE.keys() == rivals.PRESETS.keys()
    for name, of in LIKE.items():
        one, other = rivals.PRESETS[name], presets.get(of)
        changed = {"name": other.name, "method": other.method}
        if name in ("fedu", "fedema", "fedx", "fedmae"):
            changed["objective"] = other.objective
        changed |= {"fedfed": {"extra": other.extra}, "fediot": {"site_models": other.site_models}}.get(name, {})
        assert replace(one, **changed) == other
        steps = one.method.steps(one.method.phases(1)[-1])
        assert steps == other.method.steps(other.method.phases(1)[-1]) or name == "fediot"


def test_an_installed_clone_finds_them_by_name_and_says_what_each_is() -> None:
    assert presets.get("fedu") == rivals.PRESETS["fedu"]
    assert {name for group in presets.groups_of_plugins().values() for name in group} >= rivals.PRESETS.keys()
    said = [text for group in rivals.GROUPS.values() for text in group.values()]
    assert len(set(said)) == len(said) == len(rivals.PRESETS)
    assert {plugin.name for plugin in plugins.of(presets.get("fedx"))} == {"studies.rivals"}


def test_the_tables_name_every_method_and_objective() -> None:
    used = {type(preset.method) for preset in rivals.PRESETS.values()}
    assert set(rivals.METHODS.values()) <= used
    assert set(rivals.OBJECTIVES.values()) <= {type(preset.objective) for preset in rivals.PRESETS.values()}


def test_filed_cells_of_a_rival_count_whatever_its_file_says_now_and_say_that_their_code_was_another() -> None:
    """Its content is code of this repository, as that of fedvlp is, and no other experiment."""
    results = CellResults(Path("studies/results"), "named-baselines")
    wanted = ledger.named_baselines(0)
    for name in ("fedu", "fedema", "fedx", "fedmae", "fedldawa-mgca", "fedavg"):
        one = replace(wanted[name], name=name).pinned()
        assert results.load((name, 0), one, ledger.trained) is not None, name
    one = wanted["fedu"]
    assert code_of_cell(ledger.trained, one) != code_of_cell(ledger.trained, wanted["fedavg"]) == code(ledger.trained)
