"""What a hospital copies: FLARE reads it, it lets every committed job run and nobody's own code."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvflare.fuel.sec.authz import Authorizer, AuthzContext, Person

from fedvlp import __version__
from fedvlp.deploy.site_config import SiteConfig

ROOT = Path(__file__).parents[2]
PROVISIONING = ROOT / "provisioning"
SITE, SERVER = PROVISIONING / "site", PROVISIONING / "server"


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("policy", [SITE, SERVER])
def test_who_may_do_what(policy: Path) -> None:
    """FLARE's own reading of authorization.json at a site of the organisation st_anna."""
    authorizer = Authorizer("st_anna")
    assert not authorizer.load_policy(read(policy / "authorization.json"))

    def may(role: str, right: str, org: str = "consortium") -> bool:
        allowed, _ = authorizer.authorize(
            AuthzContext(right, Person("x", org, role), Person("y", "consortium", "lead"))
        )
        return bool(allowed)

    for role in ("project_admin", "lead", "org_admin", "member"):
        assert not may(role, "byoc"), role
        assert may(role, "view")
    assert may("lead", "submit_job")
    assert not may("member", "submit_job")
    assert not may("org_admin", "submit_job")
    assert may("org_admin", "shell_commands", org="st_anna"), "a hospital's own administrator reads its logs"
    assert not may("org_admin", "shell_commands", org="northgate"), "another hospital's does not"
    assert not may("lead", "shell_commands")
    assert not may("project_admin", "shell_commands")


def test_nothing_streams_to_the_server_and_no_store_is_shared() -> None:
    assert read(SITE / "resources.json")["allow_log_streaming"] is False
    assert "NVFLARE_SECURE_LOGGING=true" in (SITE / "site.env").read_text().splitlines()
    assert "/tmp" not in (SERVER / "resources.json").read_text(), "FLARE's default is one folder for all servers"


POLICIES = ("privacy.json", "privacy-dp.json", "privacy-he.json")


def test_every_policy_that_is_shipped_is_looked_at() -> None:
    assert {file.name for file in SITE.glob("privacy*.json")} == set(POLICIES)


def test_every_filter_of_the_privacy_policies_can_be_built() -> None:
    for name in POLICIES:
        policy = read(SITE / name)
        assert policy["default_scope"] in [scope["name"] for scope in policy["scopes"]]
        assert len(policy["scopes"]) == 1, "with two, a job could choose the weaker"
        scope = policy["scopes"][0]
        entries = [*scope["task_data_filters"], *scope["task_result_filters"], *policy.get("components", [])]
        assert entries
        for entry in entries:
            module, _, kind = entry["path"].rpartition(".")
            assert module == "fedvlp.flare"
            getattr(import_module(module), kind)(**entry["args"])


def test_what_figures_leave_under_each_policy() -> None:
    """Under noise none that is computed from records; else with three digits. What noise costs leaves under each."""
    for name in POLICIES:
        filters = read(SITE / name)["scopes"][0]["task_result_filters"]
        rule = next(entry["args"] for entry in filters if entry["path"] == "fedvlp.flare.AllowMetrics")
        assert {"privacy/epsilon", "privacy/record_epsilon"} < set(rule["names"])
        if name == "privacy-dp.json":
            assert rule == {"names": ["seconds", "privacy/epsilon", "privacy/record_epsilon"], "drop": True}
        else:
            assert rule["digits"] == 3


def test_the_sites_example_is_valid_and_of_this_version() -> None:
    config = SiteConfig.load(SITE)
    assert config.version == __version__
    assert list(config.data) == ["pretrain"]
    assert not config.accept_phi_risk


def project() -> Any:
    return yaml.safe_load((PROVISIONING / "project.yml").read_text(encoding="utf-8"))


def test_the_consortium_has_five_hospitals_and_all_roles() -> None:
    people = project()["participants"]
    assert [p["type"] for p in people].count("server") == 1
    hospitals = {p["org"] for p in people if p["type"] == "client"}
    assert len(hospitals) == 5
    roles = {p["role"] for p in people if p["type"] == "admin"}
    assert roles == {"project_admin", "lead", "member", "org_admin"}
    assert {p["org"] for p in people if p.get("role") == "org_admin"} == hospitals, "each hospital administers itself"
