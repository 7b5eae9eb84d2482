"""The kit of a hospital that was provisioned by commit 7e9898b still works after its fedvlp was updated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.fuel.utils.component_builder import ComponentBuilder
from support.hostile_jobs import JOB, arrived, built

from fedvlp.core.types import Update
from fedvlp.data.sources.table import TableSource
from fedvlp.deploy.site_config import NamedData, OwnData, at_site
from fedvlp.flare.executor import SiteExecutor
from fedvlp.flare.privacy_filters import AllowMetrics
from fedvlp.run import presets

FORMER = Path(__file__).parents[1] / "run" / "former" / "site"


def test_its_list_of_classes_admits_todays_jobs(tmp_path: Path) -> None:
    """By FLARE's own loader; the list is of prefixes, which fedvlp's own check refuses in a kit of today."""
    kit = tmp_path / "kit"
    for folder in ("startup", "local"):
        (kit / folder).mkdir(parents=True)
    app = arrived(kit, "client", "feddra")
    shutil.copy(FORMER / "resources.json", kit / "local")
    assert (kit / JOB).is_dir()
    (executor,) = built(kit, "client", app).executors
    assert isinstance(executor.executor, SiteExecutor)
    assert executor.executor.experiment == presets.get("feddra")


class Builder(ComponentBuilder):
    """FLARE's own, which builds the filters of a site."""

    def get_module_scanner(self) -> None:
        return None


def test_its_filter_lets_a_sites_figures_go() -> None:
    policy = json.loads((FORMER / "privacy.json").read_text())
    ((entry,),) = [scope["task_result_filters"] for scope in policy["scopes"]]
    rule = Builder().build_component(entry)
    assert isinstance(rule, AllowMetrics)
    update = Update("a", 1, "train", 9, metrics={"loss/contrastive": 1.25, "val/mean/r1": 50.0, "seconds": 3.0})
    assert rule.filtered(update, FLContext()).metrics == update.metrics


def test_its_data_set_is_found(tmp_path: Path) -> None:
    local = tmp_path / "kit" / "local"
    local.mkdir(parents=True)
    (tmp_path / "kit" / "data" / "cxr").mkdir(parents=True)
    shutil.copy(FORMER / "fedvlp.json", local)
    wanted = replace(presets.get("feddra"), data=NamedData("pretrain"))
    found = at_site(wanted, "north", local).data
    assert isinstance(found, OwnData)
    assert isinstance(found.source, TableSource)
    assert found.source.path == str(tmp_path / "kit" / "data" / "cxr" / "pairs.csv")
