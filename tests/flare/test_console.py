"""Every command that FLARE's server registers, hidden ones too, and who may give it by the shipped rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from nvflare.apis.job_def import JobMetaKey
from nvflare.app_common.streamers.file_streamer import FileStreamer
from nvflare.fuel.f3.cellnet.defs import MessagePropKey
from nvflare.fuel.f3.message import Message
from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.server import sess
from nvflare.fuel.hci.server.authz import AuthzFilter
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.hci.server.reg import ServerCommandRegister
from nvflare.fuel.sec.audit import Auditor, AuditService
from nvflare.fuel.sec.authz import AuthorizationService, AuthzContext, Person
from nvflare.private.fed.server.admin import FedAdminServer
from nvflare.private.fed.server.server_cmd_modules import ServerCommandModules
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.security.security import FLAuthorizer
from nvflare.widgets.info_collector import InfoCollector

from fedvlp.flare import audit_log
from fedvlp.flare.console import OPEN, CommandRate, bound_commands

PROVISIONING = Path(__file__).parents[2] / "provisioning"
JOB = "0c7d1f2a-0000-4000-8000-000000000002"
ROLES = {  # role: name, organisation
    "project_admin": ("admin", "consortium"),
    "lead": ("lead", "consortium"),
    "another lead": ("other", "consortium"),
    "org_admin": ("it", "northgate"),
    "member": ("member", "consortium"),
}
ARGUMENTS = {"configure_site_log": ["server", "INFO"], "configure_job_log": [JOB, "server", "INFO"]}
"""Of the commands that take other ones than a job and "server"."""

EVERYBODY, LEADS = frozenset(ROLES), frozenset({"project_admin", "lead"})
ADMIN = frozenset({"project_admin"})
MEANT = {
    # what the rules call view
    **dict.fromkeys(("check_status", "show_scopes", "list_jobs", "get_job_meta"), EVERYBODY),
    **dict.fromkeys(("show_stats", "show_errors", "reset_errors"), EVERYBODY),
    "submit_job": LEADS | {"another lead"},
    **dict.fromkeys(("clone_job", "abort_job", "delete_job", "download_job", "configure_job_log"), LEADS),
    # operate: at the server the consortium's own people, at a site (not asked here) its own organisation's
    **dict.fromkeys(
        ("sys_info", "configure_site_log", "report_resources", "disable_client", "enable_client", "shutdown", "restart",
         "report_env", "remove_client"),
        LEADS | {"another lead"},
    ),
    **dict.fromkeys(("dead", "admin_check_status", "remove_study"), ADMIN),
    # FLARE asks the role itself, and then who is in the study
    **dict.fromkeys(
        ("register_study", "add_study_site", "remove_study_site", "show_study", "add_study_user", "remove_study_user"),
        ADMIN | {"org_admin"},
    ),
    "list_studies": EVERYBODY,
}  # fmt: skip
"""Who may give which command at the server; nobody any other one."""


OPERATE = ("sys_info", "configure_site_log", "report_resources", "report_env", "shutdown", "restart")
SHELL = ("cat", "grep", "head", "ls", "pwd", "tail")  # which no site's perimeter lets through unless it says so
OPERATE_ITSELF = ("remove_client", "disable_client", "enable_client")  # of FLARE's server alone, no site is asked
AT_SITES = {
    **dict.fromkeys(("check_status", "show_scopes", "list_jobs", "get_job_meta"), EVERYBODY | {"its own org_admin"}),
    **dict.fromkeys(("show_stats", "show_errors", "reset_errors"), EVERYBODY | {"its own org_admin"}),
    **dict.fromkeys((*OPERATE, *OPERATE_ITSELF), ADMIN | {"its own org_admin"}),
    **dict.fromkeys(SHELL, frozenset({"its own org_admin"})),
    "submit_job": LEADS | {"another lead"},
    **dict.fromkeys(("abort_job", "delete_job", "download_job", "configure_job_log", "clone_job"), LEADS),
}
"""Whom a hospital's own rules let ask it, of a job that the lead submitted; the lead is of another organisation."""


def rules(side: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((PROVISIONING / side / "authorization.json").read_text())
    return content


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FedAdminServer]:
    """FLARE's own server of the console, with all modules that FLARE registers."""
    patch = pytest.MonkeyPatch()
    patch.setattr(ServerCommandRegister, "finalize", ServerCommandRegister.finalize)
    patch.setattr(AuditService, "get_auditor", lambda: Auditor(str(tmp_path / "audit.log")))
    patch.setattr(FileStreamer, "register_stream_processing", lambda **_: None)
    patch.setattr(sess.SessionManager, "monitor_sessions", lambda self: None)
    bound_commands()
    job = SimpleNamespace(meta={
        JobMetaKey.SUBMITTER_NAME: "lead", JobMetaKey.SUBMITTER_ORG: "consortium", JobMetaKey.SUBMITTER_ROLE: "lead"
    })  # fmt: skip
    engine = MagicMock(spec=ServerEngine)
    engine.job_def_manager = Mock()
    engine.job_def_manager.get_job.return_value = job
    engine.get_widget.return_value = Mock(spec=InfoCollector)
    engine.run_processes = {JOB: {}}
    engine.validate_targets.return_value = ([SimpleNamespace(name="site-1", token="t")], [])
    made = FedAdminServer(Mock(), engine, ServerCommandModules.cmd_modules, "/nowhere", "/nowhere")
    patch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("consortium", rules("server")))
    yield made
    made.cmd_reg.close()
    patch.undo()


def commands(server: FedAdminServer) -> dict[str, Any]:
    return {name: entry for scope in server.cmd_reg.scopes.values() for name, entry in scope.entries.items()}


def may(server: FedAdminServer, command: str, role: str) -> bool:
    """What FLARE's own filter says to a command about the lead's job, or at the server."""
    conn = Connection(props={ConnProps.ADMIN_SERVER: server})
    conn.app_ctx = server.sai
    name, org = ROLES[role]
    conn.set_props({
        ConnProps.USER_NAME: name, ConnProps.USER_ORG: org, ConnProps.CMD_ENTRY: commands(server)[command],
        ConnProps.USER_ROLE: role.removeprefix("another "), ConnProps.ACTIVE_STUDY: "default",
    })  # fmt: skip
    of_a_job = commands(server)[command].scope.name in ("job_mgmt", "info")
    targets = [JOB, "server"] if of_a_job else ["server"]
    return bool(AuthzFilter().pre_command(conn, [command, *ARGUMENTS.get(command, targets)]))


def test_an_account_gives_so_many_commands(
    server: FedAdminServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """600 at once, then 5 a second; another account has its own."""
    clock, lines = [0.0], []
    monkeypatch.setattr(audit_log.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(AuditService, "add_event", lambda **line: lines.append(line))
    rate = next(part for part in server.cmd_reg.filters if isinstance(part, CommandRate))

    def done(count: int, user: str = "", certificate: str = "") -> int:
        conn = Connection(props={ConnProps.USER_NAME: user, ConnProps.REQUEST: Message()})
        conn.get_prop(ConnProps.REQUEST).set_prop(MessagePropKey.COMMON_NAME, certificate)
        return sum(rate.pre_command(conn, ["show_scopes"]) for _ in range(count))

    assert done(700, "member") == 600
    assert done(10, "lead") == 10
    assert done(700, certificate="it") == 600, "who has not logged in, by the certificate"
    clock[0] += 2.0
    assert done(20, "member") == 10
    assert [line["user"] for line in lines[:100]] == ["member"] * 100
    assert all("600 commands at once" in line["msg"] for line in lines)
    assert server.cmd_reg.filters.index(rate) == 1, "after the login, before authorization and audit"


def test_no_command_is_without_authorization(server: FedAdminServer) -> None:
    assert {name for name, entry in commands(server).items() if entry.authz_func is None} == OPEN
    unguarded = {spec.name for spec in server.net_mgr.get_spec().cmd_specs if not spec.authz_func}
    assert "speed" in unguarded, "FLARE authorizes its diagnostics now: this guard may go"
    assert len(commands(server)) > 40, "FLARE's modules are all here"
    for scope, hidden in [("cellnet", "peers"), ("cellnet", "speed"), ("sess", "list_sessions")]:
        for called in (hidden, f"{scope}.{hidden}"):
            assert server.cmd_reg.get_command_entries(called) == []


def test_every_command_is_given_by_those_for_whom_it_is_meant(server: FedAdminServer) -> None:
    """Of a job that the lead submitted."""
    asked = commands(server).keys() - OPEN
    given = {name: {role for role in ROLES if may(server, name, role)} for name in asked}
    assert given == {name: set(MEANT.get(name, ())) for name in asked}
    assert MEANT.keys() <= given.keys(), "FLARE has no longer such a command"


def test_a_site_asks_its_own_rules_for_each_of_them(server: FedAdminServer) -> None:
    """FLARE's server leaves it to the sites where a command is for them."""
    site = FLAuthorizer("st_anna", rules("site"))
    submitter = Person("lead", "consortium", "lead")
    people = ROLES | {"its own org_admin": ("it", "st_anna")}

    def may_ask(command: str, who: str) -> bool:
        name, org = people[who]
        person = Person(name, org, who.removeprefix("another ").removeprefix("its own "))
        return bool(site.authorize(AuthzContext(command, person, submitter))[0])

    asked = commands(server).keys() - OPEN
    given = {name: {who for who in people if may_ask(name, who)} for name in asked}
    assert given == {name: set(AT_SITES.get(name, ())) for name in asked}
