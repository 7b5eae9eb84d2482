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
from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.server import sess
from nvflare.fuel.hci.server.authz import AuthzFilter
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.hci.server.reg import ServerCommandRegister
from nvflare.fuel.sec.audit import Auditor, AuditService
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.private.fed.server.admin import FedAdminServer
from nvflare.private.fed.server.server_cmd_modules import ServerCommandModules
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.security.security import FLAuthorizer
from nvflare.widgets.info_collector import InfoCollector

from fedvlp.flare.console import OPEN, authorized_alone

POLICY = Path(__file__).parents[2] / "provisioning" / "server" / "authorization.json"
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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FedAdminServer]:
    """FLARE's own server of the console, with all modules that FLARE registers."""
    patch = pytest.MonkeyPatch()
    patch.setattr(ServerCommandRegister, "finalize", ServerCommandRegister.finalize)
    patch.setattr(AuditService, "get_auditor", lambda: Auditor(str(tmp_path / "audit.log")))
    patch.setattr(FileStreamer, "register_stream_processing", lambda **_: None)
    patch.setattr(sess.SessionManager, "monitor_sessions", lambda self: None)
    authorized_alone()
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
    patch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("consortium", json.loads(POLICY.read_text())))
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
