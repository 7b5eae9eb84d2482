"""The shipped lists of classes, read by FLARE's own loader: honest jobs are built, hostile ones before nothing is."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.common.excepts import ComponentNotAuthorized, ConfigError
from nvflare.fuel.sec.audit import AuditService
from support.hostile_jobs import JOB, POLICIES, Edit, arrived, built, component, executor, in_executor, reachable
from typer.testing import CliRunner

from fedvlp.cli import app as cli
from fedvlp.core import names
from fedvlp.deploy.named_data import NamedData
from fedvlp.flare import job_check
from fedvlp.flare.class_list import needed, write
from fedvlp.flare.job_check import CONFIGS, JobCheck
from fedvlp.flare.jobs import COMMITTED
from fedvlp.flare.timeouts import Timeouts
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit's folder; ``policy`` copies one side's resources.json into it."""
    (tmp_path / "kit" / "startup").mkdir(parents=True)
    (tmp_path / "kit" / "local").mkdir()
    return tmp_path / "kit"


def in_list(config: dict[str, Any]) -> None:
    """A class inside of a list, which FLARE hands on unbuilt and fedvlp builds."""
    hidden = {"path": "fedvlp.data.TableSource", "args": {"path": "x.csv"}}
    config["executors"][0]["executor"]["args"]["site_models"] = [["site-1", hidden]]


def job_filter(config: dict[str, Any]) -> None:
    """The site's own filter, in a job, with a ledger where the lead wants it: it would write any file of the site."""
    args = {"clip": 1.0, "noise_multiplier": 1.0, "epsilon": 1.0, "delta": 1e-5, "dataset": "x", "ledger": "CANARY"}
    entry = {"tasks": ["train"], "filters": [{"path": "fedvlp.flare.ClipAndNoise", "args": args}]}
    config["task_result_filters"] = [entry]


CLIENT_API = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"
SAVE = "fedvlp.core.checkpoint.save_text"
OTHER_KEY = {"id": "x", "class_path": "subprocess.Popen", "args": {"args": "ls"}}
FILES = {"path": "fedvlp.data.TableSource", "args": {"path": "/etc/passwd"}}
HOSTILE: dict[str, tuple[str, Edit]] = {
    "a program at the site": (
        "client", executor(CLIENT_API, execution_mode="external_process", command="touch CANARY")
    ),
    "a script in the job's process": (
        "client", executor(CLIENT_API, execution_mode="in_process", task_script_path="CANARY")
    ),
    "a class of the standard library": ("client", component("subprocess.Popen", args=["touch", "CANARY"])),
    "a function of fedvlp that moves files": (
        "client", component("fedvlp.core.checkpoint.replace_durably", temporary="SECRET", path="fedvlp.moved")
    ),
    "a function of fedvlp that writes files": (
        "client", component(SAVE, path="CANARY", text="x")
    ),
    "a function that a module of fedvlp imports": (
        "client", component("fedvlp.core.checkpoint.save_file", tensors={}, filename="CANARY")
    ),
    "a method of a listed class": ("client", component("fedvlp.flare.SiteExecutor.execute")),
    "a function as an argument": (
        "client",
        in_executor(extra={"path": SAVE, "args": {"path": "CANARY", "text": "x"}}),
    ),
    "under FLARE's other key": (
        "client",
        lambda config: config["components"].append(OTHER_KEY),
    ),
    "a class in a list": ("client", in_list),
    "a filter of the site's own": ("client", job_filter),
    "a source of files": ("client", in_executor(data=FILES)),
    "a path put together from variables": (
        "client", lambda config: config.update(v="subprocess.Popen") or component("{v}", args="ls")(config)
    ),
    "a log that streams to the server": (
        "client", component("nvflare.app_common.logging.job_log_streamer.JobLogStreamer")
    ),
    "a file at the server": ("server", component(SAVE, path="CANARY", text="x")),
    "a program at the server": ("server", component("subprocess.Popen", args=["touch", "CANARY"])),
    "a tracking address at the server": (
        "server",
        component("nvflare.app_opt.tracking.mlflow.mlflow_receiver.MLflowReceiver", tracking_uri="CANARY"),
    ),
}  # fmt: skip


def aimed(edit: Edit, kit: Path) -> Edit:
    """The same attack with files of this test."""

    def do(config: dict[str, Any]) -> None:
        edit(config)
        text = json.dumps(config).replace("CANARY", str(kit / "canary")).replace("SECRET", str(kit / "secret"))
        config |= json.loads(text)

    return do


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_job_is_refused_before_it_starts_with_an_audit_line(
    attack: str, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does FLARE's own loader build it with the shipped list, had the job got as far as a process."""
    lines: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: lines.append(line))
    side, edit = HOSTILE[attack]
    (kit / "secret").write_text("a key")
    app = arrived(kit, side, edit=aimed(edit, kit))
    why, found = JobCheck(side).validate(str(app))
    assert "is not on this site's list of classes" in why
    assert found == {}
    assert [(line["action"], line["ref"]) for line in lines] == [("job_refused", JOB)]
    assert JOB in lines[0]["msg"]
    assert why in lines[0]["msg"]
    if attack == "a method of a listed class":  # FLARE lets it pass its list, and then finds no such module
        with pytest.raises(ConfigError, match=r"Can't load class fedvlp\.flare\.SiteExecutor\.execute"):
            built(kit, side, app)
    else:
        with pytest.raises(ComponentNotAuthorized, match="not in allow_list"):
            built(kit, side, app)
    assert not (kit / "canary").exists()
    assert (kit / "secret").exists()


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow(seconds=25))])
@pytest.mark.parametrize("side", ["client", "server"])
def test_nothing_else_of_the_package_can_be_named(
    side: str, every: int, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that FLARE could call in fedvlp's modules, only what is on the list passes either check: classes.

    ``every``: of the others, one in so many is tried.
    """
    monkeypatch.setattr(AuditService, "add_event", lambda **line: None)
    app = arrived(kit, side)
    file = app / "config" / CONFIGS[side]
    honest = json.loads(file.read_text())
    workspace = Workspace(str(kit), "here", "config")
    candidates = sorted({*reachable(), *names.PUBLIC})
    assert len(candidates) > 1500
    on_it = needed(side)
    others = [path for path in candidates if path not in on_it]
    for path in [*on_it, *others[::every]]:
        part = {"id": "x", "path": path, "args": {}}
        if path in on_it:
            ComponentPathAuthorizer().authorize_component_config(part, workspace=workspace)
            continue
        with pytest.raises(UnsafeComponentError, match="not in allow_list"):
            ComponentPathAuthorizer().authorize_component_config(part, workspace=workspace)
        file.write_text(json.dumps({**honest, "components": [part]}))
        assert path in JobCheck(side).validate(str(app))[0]


@pytest.mark.parametrize("preset", COMMITTED)
@pytest.mark.parametrize("side", ["client", "server"])
def test_an_honest_job_passes_both(preset: str, side: str, kit: Path) -> None:
    app = arrived(kit, side, preset)
    assert JobCheck(side).validate(str(app)) == ("", {})
    config = built(kit, side, app)
    runs = config.executors[0].executor if side == "client" else config.workflows[0].controller
    assert runs.experiment == presets.get(preset)


OPTIONS: dict[str, tuple[dict[str, Any], Callable[[Experiment], Experiment]]] = {
    "--child --processes": ({"child": True, "processes": 2}, lambda e: e),
    "--link-mbit": ({"timeouts": Timeouts.of(10**8, 50.0), "child": True}, lambda e: e),
    "--child --task-minutes": ({"child": True, "task_timeout": 18_000}, lambda e: e),
    "--encrypted": ({"encrypted": True}, lambda e: replace(e, rounds=e.rounds.of_encrypted())),
    "--set wire": ({}, lambda e: override(e, "wire.up", "float16")),
    "--data named": ({"sites": ("st-anna",)}, lambda e: replace(e, data=NamedData("pretrain"))),
    "--set objective": ({}, lambda e: override(e, "objective", "mgca")),
}


@pytest.mark.parametrize(("option", "side"), zip(OPTIONS, itertools.cycle(("client", "server"))))
def test_a_job_with_an_option_of_the_export_passes_both(option: str, side: str, kit: Path) -> None:
    packing, change = OPTIONS[option]
    app = arrived(kit, side, change=change, **packing)
    assert JobCheck(side).validate(str(app)) == ("", {})
    config = built(kit, side, app)
    runs = config.executors[0].executor if side == "client" else config.workflows[0].controller
    assert runs.experiment == change(presets.get("fedavg"))


@pytest.mark.parametrize("side", ["client", "server"])
def test_the_shipped_list_is_what_the_jobs_need(side: str) -> None:
    shipped = json.loads((POLICIES[side] / "resources.json").read_text())
    assert shipped["class_allow_list"] == list(needed(side)), "run `fedvlp site classes --into`, with --server for that"
    assert shipped["app_validator"] == {"path": "fedvlp.flare.JobCheck", "args": {"side": side}}


@pytest.mark.parametrize("side", ["client", "server"])
def test_every_entry_is_one_class_and_few_are_flares(side: str) -> None:
    entries = needed(side)
    for entry in entries:
        if entry in names.PUBLIC:
            assert isinstance(names.load(entry), type), entry
    others = [entry for entry in entries if entry not in names.PUBLIC]
    assert len(others) == 1, others
    assert others[0].startswith("nvflare.app_common.widgets.")
    assert not {"fedvlp.flare.ClipAndNoise", "fedvlp.flare.Encrypt", "fedvlp.data.TableSource"} & set(entries)


@pytest.mark.parametrize(
    ("file", "text"),
    [("config/config_fed_client.conf", "{}"), ("config/x.json", "{}"), ("run.sh", "true"), ("deeper/a/b.py", "")],
)
def test_a_file_that_is_no_part_of_a_job_is_refused(file: str, text: str, kit: Path) -> None:
    """FLARE reads other formats and other names as well: a second configuration could be the one that it takes."""
    app = arrived(kit, "client")
    (app / file).parent.mkdir(parents=True, exist_ok=True)
    (app / file).write_text(text)
    why, _ = JobCheck("client").validate(str(app))
    assert why == "the job holds a file that is no part of a job of fedvlp"


@pytest.mark.parametrize("path", ["x\n[E:1][U:admin][A:all.well]", "a" * 300 + ".b", "..", 7, None, ["a.b"], {"a": 1}])
def test_no_text_of_the_job_forges_a_line_of_the_audit_log(
    path: Any, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: lines.append(line))
    app = arrived(kit, "client", edit=component(path))
    why, _ = JobCheck("client").validate(str(app))
    assert why
    assert "\n" not in "".join(lines[0].values())
    assert "admin" not in lines[0]["msg"], "nor one that reads like one"
    assert len(lines[0]["msg"]) < 300


@pytest.mark.parametrize(
    ("verified", "signers", "said"),
    [(True, [("lead@x", "cert")], "lead@x"), (False, [("mallory", "cert")], "unknown"), (True, [], "unknown")],
)
def test_only_a_signature_that_holds_says_who_sent_a_job(
    verified: bool, signers: list[tuple[str, str]], said: str, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE's own verification of the job's folder; test_provisioned.py has a real one."""
    lines: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: lines.append(line))
    monkeypatch.setattr(job_check, "verify_folder_signature_and_get_signers", lambda app, root: (verified, signers))
    JobCheck("client").validate(str(arrived(kit, "client", edit=component("subprocess.Popen"))))
    assert [line["user"] for line in lines] == [said]


def test_an_unsigned_job_is_nobodys(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: lines.append(line))
    JobCheck("client").validate(str(arrived(kit, "client", edit=component("subprocess.Popen"))))
    assert [line["user"] for line in lines] == ["unknown"]


def test_a_policy_for_another_side_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="side is 'site'; it is one of client, server"):
        JobCheck("site")


def test_what_cannot_be_read_is_refused(kit: Path) -> None:
    app = arrived(kit, "client")
    (app / "config" / CONFIGS["client"]).write_text("[" * 100_000)
    assert JobCheck("client").validate(str(app))[0].startswith("the job cannot be read")
    app = arrived(kit, "client")
    (kit / "local" / "resources.json").unlink()
    assert JobCheck("client").validate(str(app))[0] == "the job cannot be read (FileNotFoundError)"


@pytest.mark.parametrize(("options", "side"), [([], "client"), (["--server"], "server")])
def test_the_list_is_printed(options: list[str], side: str) -> None:
    done = CliRunner().invoke(cli, ["site", "classes", *options])
    assert done.exit_code == 0
    assert done.output.split() == list(needed(side))


def test_the_list_is_written_into_a_policy_and_into_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "resources.json"
    shutil.copy(POLICIES["client"] / "resources.json", file)
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"class_allow_list": ["fedvlp."]}))
    assert write("client", file) == ["fedvlp."]
    assert json.loads(file.read_text()) == content
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}')
    with pytest.raises(ValueError, match="has no components"):
        write("client", other)
    assert other.read_text() == '{"a": 1}'


def test_what_writing_the_list_removes_is_said(tmp_path: Path) -> None:
    """A class of a plugin, above all, which the operator added on purpose."""
    file = tmp_path / "resources.json"
    content = json.loads((POLICIES["server"] / "resources.json").read_text())
    file.write_text(json.dumps(content | {"class_allow_list": [*needed("server"), "lab_methods.MyMethod"]}))
    done = CliRunner().invoke(cli, ["site", "classes", "--server", "--into", str(file)], catch_exceptions=False)
    assert "do not need them: lab_methods.MyMethod. Add again what you want" in done.output
    again = CliRunner().invoke(cli, ["site", "classes", "--server", "--into", str(file)], catch_exceptions=False)
    assert "removed" not in again.output
