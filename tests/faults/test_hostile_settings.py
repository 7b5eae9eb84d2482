"""Spec faults, rows 27, 28 and 29: paths, names and classes that a job, or a mistake, puts where they do not belong.

The places are found, not listed: every text of every job that fedvlp exports, every field of every source of files.
FLARE's own loader builds the job as its process would; an audit hook of Python's sees each file that is then opened.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import SiteType
from nvflare.apis.signal import Signal
from nvflare.fuel.common.excepts import ComponentNotAuthorized
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.private.fed.app.fl_app_validator import FLAppValidator
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.security.security import FLAuthorizer
from support.flare_memory import Engine, site_executor
from support.hostile_jobs import JOB, POLICIES, arrived, built

from fedvlp.core.types import Broadcast
from fedvlp.data.sources import SOURCES
from fedvlp.deploy.named_data import NamedData, SiteConfigError
from fedvlp.deploy.site_config import SiteConfig, at_site, with_own_towers
from fedvlp.flare import messages
from fedvlp.flare.job_check import CONFIGS, JobCheck
from fedvlp.flare.jobs import COMMITTED, job_files
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import identity
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder

OUTSIDE = "outside-of-the-kit"
PASSWD = {"pairs.csv": "image,report\nx.png,Jane Doe\n", "config.json": "{}", "vocab.txt": "jane\ndoe\n"}


# --- what is opened ----------------------------------------------------------------------------------------------

_opened: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event in ("open", "os.listdir", "os.scandir") and arguments:
        _opened.append(str(arguments[0]))


@contextmanager
def opened() -> Iterator[list[str]]:
    """Every file and folder that this process opens meanwhile. A hook of Python's stays for good, so there is one."""
    global _opened
    if not getattr(sys, "_fedvlp_hook", False):
        sys.addaudithook(_hook)
        sys._fedvlp_hook = True  # type: ignore[attr-defined]
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


def read_outside(seen: list[str], folder: Path) -> list[str]:
    """Those of the files that lie in the folder that no job may know of, by whatever name they were opened."""
    return [name for name in seen if OUTSIDE in name or (Path(name).is_absolute() and _is_below(Path(name), folder))]


def _is_below(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder)
    except (OSError, ValueError, RuntimeError):
        return False


# --- a hospital --------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the kit with a table, a tower and an image, as another hospital's data could lie there."""
    folder = tmp_path / OUTSIDE
    folder.mkdir()
    for name, text in PASSWD.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def kit(tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A provisioned kit, in which FLARE's processes run; links that lead out lie wherever a name could find them."""
    kit = tmp_path / "kit"
    for folder in ("startup", "local", "data", "models", "runs"):
        (kit / folder).mkdir(parents=True)
        (kit / folder / "link").symlink_to(outside)
    (kit / "link").symlink_to(outside)
    for name in ("fed_client.json", "fed_server.json"):
        (kit / "startup" / name).write_text("{}")
    (kit / "local" / "fedvlp.json").write_text('{"envelope": {"least_records": 2}}')
    monkeypatch.setattr(AuditService, "add_event", lambda **line: None)
    monkeypatch.chdir(kit)
    return kit


def hostile(outside: Path) -> tuple[str, ...]:
    return (f"../{OUTSIDE}", str(outside), "link", f"local-dir:{outside}", str(outside / "pairs.csv"))


# --- row 27: paths in jobs ---------------------------------------------------------------------------------------


def places(node: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(class, setting, its dictionary) of every setting of a job that is a text, or may be one."""
    if isinstance(node, list):
        for value in node:
            yield from places(value)
    if isinstance(node, dict):
        if "path" in node and isinstance(node.get("args"), dict):
            for name, value in node["args"].items():
                if value is None or isinstance(value, str):
                    yield node["path"], name, node["args"]
        for value in node.values():
            yield from places(value)


def all_places(side: str) -> dict[tuple[str, str], str]:
    """(class, setting) -> a preset whose job has it."""
    found: dict[tuple[str, str], str] = {}
    for preset in COMMITTED:
        config = json.loads(job_files(presets.get(preset), custom=False)[f"app/config/{CONFIGS[side]}"])
        for kind, name, _ in places(config):
            found.setdefault((kind, name), preset)
    return found


def put(kind: str, name: str, text: str) -> Callable[[dict[str, Any]], None]:
    """Puts a text into this setting, wherever the job has it."""

    def edit(config: dict[str, Any]) -> None:
        for where, setting, args in places(config):
            if (where, setting) == (kind, name):
                args[setting] = text

    return edit


def runs(side: str, config: Any, kit: Path) -> str:
    """What the job's process then does at this machine, as far as it opens anything; why it stops, or ""."""
    if side == "server":
        try:
            experiment = with_own_towers(config.workflows[0].controller.experiment, kit)
            RunFolder.open(kit / "runs", experiment)
            Assembly(experiment).server(("site-1",))
        except Exception as error:
            return type(error).__name__
        return ""
    executor = config.executors[0].executor
    experiment = executor.experiment
    run = identity(experiment, f"{experiment.name}/001")
    stranger = {"no-tensor-of-any-model": torch.zeros(1)}  # so that the site is put together, and then trains nothing
    task = messages.send_broadcast(Broadcast(0, experiment.method.phases(0)[0], stranger), run)
    reply = executor.execute("train", task, Engine("site-1", kit, JOB).new_context(), Signal())
    failed = messages.failure(reply)
    return failed.text if failed else ""


@pytest.mark.parametrize("side", ["client", "server"])
def test_row_27_no_text_of_a_job_opens_a_file_outside_of_the_kit(side: str, kit: Path, outside: Path) -> None:
    """Most settings are refused when they are built. The towers, which are names, are tried with every kind of path;
    a job that is built is run as far as its data and models, and watched."""
    found = all_places(side)
    assert len(found) > 30
    ran = set()
    for (kind, name), preset in found.items():
        for text in hostile(outside) if name.endswith("_tower") else hostile(outside)[:1]:
            shutil.rmtree(kit / JOB, ignore_errors=True)
            with opened() as seen:
                app = arrived(kit, side, preset, put(kind, name, text))
                assert JobCheck(side).validate(str(app)) == ("", {}), "the classes are those of honest jobs"
                try:
                    config = built(kit, side, app)
                except Exception:  # FLARE wraps what the class said, or fails to write it down
                    config = None
                if config is not None:
                    ran.add(name)
                    why = runs(side, config, kit)
                    assert why or not name.endswith("_tower")
            assert read_outside(seen, outside) == [], (kind, name, text)
    assert ran >= {"image_tower", "text_tower"}
    assert not {"name", "weighting", "optimizer"} & ran, "which are refused by the classes themselves"


# --- row 27: paths in a site's own file, and in its tables -------------------------------------------------------


def file_fields() -> list[tuple[str, str]]:
    """(source, setting) of every path that a site's own file may hold."""
    own = {"root", "cache"}
    return [(source, f.name) for source, kind in sorted(SOURCES.items()) for f in fields(kind)
            if f.metadata.get("below_root") or f.name in own]  # fmt: skip


def test_row_27_no_setting_of_a_site_leads_out(kit: Path, outside: Path) -> None:
    """By parents, from the root of the disk, in Windows' ways, through a link to a folder, to a file, and to a link.

    The first settings are tried with every way out, the others with two each.
    """
    for below in (kit, kit / "data", kit / "data" / "cxr"):
        below.mkdir(exist_ok=True)
        (below / "chain").unlink(missing_ok=True)
        (below / "file").unlink(missing_ok=True)
        (below / "chain").symlink_to("link")
        (below / "file").symlink_to(outside / "pairs.csv")
        if not (below / "link").exists():
            (below / "link").symlink_to(outside)
    away = (
        f"../../{OUTSIDE}", "..", "cxr/../../..", str(outside), "/", "C:\\films", "\\\\server\\films", "link",
        "link/pairs.csv", "chain/pairs.csv", "file", f"x/../../../{OUTSIDE}/pairs.csv",
    )  # fmt: skip
    fields_ = file_fields()
    assert len(fields_) > 40
    tried = [(source, setting, text) for number, (source, setting) in enumerate(fields_)
             for text in (away if number < 4 else away[number % 6 :: 6])]  # fmt: skip
    for source, setting, text in tried:
        if text == "cxr/../../..":  # of a root or a cache this would be a folder of the kit's own
            text = {"root": "cxr/../..", "cache": "data/../.."}.get(setting, text)
        entry = {"source": source, "root": "cxr", "path": "t.csv", setting: text}
        (kit / "local" / "fedvlp.json").write_text(json.dumps({"data": {"pretrain": entry}}))
        with (
            opened() as seen,
            pytest.raises(SiteConfigError, match="leads out of the root it belongs under") as refused,
        ):
            SiteConfig.load(kit / "local")
        assert OUTSIDE not in str(refused.value), text
        assert str(kit) not in str(refused.value)
        assert read_outside(seen, outside) == [], text


# --- row 28: other sites' data -----------------------------------------------------------------------------------


def test_row_28_a_job_names_a_data_set_of_this_site_and_no_other(kit: Path, tmp_path: Path, outside: Path) -> None:
    """Two hospitals on one disk. The name of the other's data set, or a way to it, is refused at both ends."""
    other = tmp_path / "st-bartholomew"
    for place, name in ((kit, "pretrain"), (other, "icu")):
        (place / "local").mkdir(parents=True, exist_ok=True)
        entry = {"source": "table", "root": name, "path": "pairs.csv"}
        (place / "local" / "fedvlp.json").write_text(json.dumps({"data": {name: entry}}))
        shutil.copytree(outside, place / "data" / name)

    def asked(name: str) -> Experiment:
        return replace(presets.get("fedavg"), data=NamedData(name))

    assert at_site(asked("icu"), "st-bartholomew", other / "local").data.site == "st-bartholomew"  # type: ignore[attr-defined]
    with opened() as seen, pytest.raises(SiteConfigError, match="site st-anna offers no data set 'icu'") as refused:
        at_site(asked("icu"), "st-anna", kit / "local")
    assert not [name for name in seen if "st-bartholomew" in name]
    assert "bartholomew" not in str(refused.value)
    for name in ("../st-bartholomew/icu", "st-bartholomew/icu", str(other / "data" / "icu"), "icu/../pretrain", "ICU"):
        job = put("fedvlp.deploy.NamedData", "name", name)
        named = {"change": lambda e: replace(e, data=NamedData("pretrain")), "sites": ("st-anna",)}
        app = arrived(kit, "client", edit=job, **named)  # type: ignore[arg-type]
        with opened() as seen, pytest.raises((ValueError, TypeError)):  # FLARE cannot write down what was not built
            built(kit, "client", app)
        assert not [opened_name for opened_name in seen if "st-bartholomew" in opened_name]
        shutil.rmtree(kit / JOB)


@pytest.mark.parametrize(
    "folder", ["link/001", "fedavg/link", "../runs/fedavg/001", "fedavg/001/../../..", "", "/", "."]
)
def test_row_28_the_servers_name_for_a_run_opens_no_other_folder(folder: str, kit: Path, outside: Path) -> None:
    """What the server says of its run is the one name of a file that it chooses; links in the site's own folder of
    runs lead nowhere either."""
    (kit / "runs" / "fedavg").mkdir()
    (kit / "runs" / "fedavg" / "link").symlink_to(outside)
    (kit / "runs" / "fedavg" / "002").symlink_to(outside)
    experiment = presets.get("fedavg")
    for name in (folder, "fedavg/002"):
        run = identity(experiment, name)
        task = messages.send_broadcast(Broadcast(0, "train", {"w": torch.zeros(1)}), run)
        before = sorted(outside.iterdir())
        with opened() as seen:
            reply = site_executor(experiment).execute("train", task, Engine("site-1", kit, JOB).new_context(), Signal())
        assert "PathError: the server names a run folder outside this site's own" in str(messages.failure(reply))
        assert read_outside(seen, outside) == []
        assert sorted(outside.iterdir()) == before


# --- row 29: code and classes ------------------------------------------------------------------------------------

Edit = Callable[[dict[str, Any]], None]
PROGRAM = {"execution_mode": "external_process", "command": "touch CANARY"}
BY_NAME: dict[str, Edit] = {
    "a component": lambda c: c["components"].append({"id": "x", "name": "JobLogStreamer", "args": {}}),
    "a component without arguments": lambda c: c["components"].append({"id": "x", "name": "JobLogStreamer"}),
    "an executor": lambda c: c["executors"][0].update(executor={"name": "ClientAPIExecutor", "args": PROGRAM}),
    "fedvlp's own executor": lambda c: c["executors"][0].update(executor={"name": "SiteExecutor", "args": {}}),
    "a filter": lambda c: c.update(
        task_result_filters=[{"tasks": ["train"], "filters": [{"name": "PercentilePrivacy", "args": {}}]}]
    ),
    "a path that is empty": lambda c: c["components"].append({"id": "x", "path": "", "name": "JobLogStreamer"}),
    "a path that is no text": lambda c: c["components"].append({"id": "x", "path": ["subprocess.Popen"], "args": {}}),
    "inside of an argument": lambda c: c["executors"][0]["executor"]["args"].update(
        extra={"name": "ClientAPIExecutor", "args": PROGRAM}
    ),
    "another spelling of the key": lambda c: c["components"].append({"id": "x", "Path": "subprocess.Popen"}),
}


@pytest.mark.parametrize("where", BY_NAME)
def test_row_29_a_part_by_name_is_refused_before_the_job_starts_and_by_flare(
    where: str, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE finds a class by its bare name in any of its packages; a list of paths says nothing of such a name."""
    lines: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: lines.append(line))
    app = arrived(kit, "client", edit=BY_NAME[where])
    why, found = JobCheck("client").validate(str(app))
    assert why
    assert found == {}
    assert [line["action"] for line in lines] == ["job_refused"]
    assert "local/resources.json" in why
    with pytest.raises((ComponentNotAuthorized, TypeError, ValueError)):
        built(kit, "client", app)
    assert not list(kit.rglob("CANARY"))


def test_row_29_the_words_say_which_class_and_which_file_to_edit(kit: Path) -> None:
    app = arrived(kit, "client", edit=BY_NAME["a component"])
    config = json.loads((app / "config" / CONFIGS["client"]).read_text())
    config["components"][-1] = {"id": "x", "path": "nvflare.app_common.widgets.validation_json_generator.X", "args": {}}
    (app / "config" / CONFIGS["client"]).write_text(json.dumps(config))
    why = JobCheck("client").validate(str(app))[0]
    assert "class 'nvflare.app_common.widgets.validation_json_generator.X'" in why
    assert "class_allow_list in local/resources.json" in why


@pytest.fixture
def flares_rule(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], tuple[bool, str]]:
    """What FLARE's process at a hospital decides of an app that arrived, with the shipped policy, for a role."""
    validator = FLAppValidator(site_type=SiteType.CLIENT, custom_validators=[JobCheck("client")])
    monkeypatch.setattr(AppAuthzService, "app_validator", validator)
    authorizer = FLAuthorizer("st-anna", json.loads((POLICIES["client"] / "authorization.json").read_text()))
    monkeypatch.setattr(AuthorizationService, "the_authorizer", authorizer)

    def decide(app: Path, role: str) -> tuple[bool, str]:
        done: tuple[bool, str] = AppAuthzService.authorize(str(app), "lead@consortium.example", "consortium", role, {})
        return done

    return decide


@pytest.mark.parametrize(
    ("name", "role"),
    [("custom/evil.py", "lead"), ("custom/fedvlp/__init__.py", "project_admin"), ("custom/README.md", "org_admin"),
     ("custom/evil.py", "member")],
)  # fmt: skip
def test_row_29_custom_code_is_refused_to_every_role(
    name: str, role: str, kit: Path, flares_rule: Callable[[Path, str], tuple[bool, str]]
) -> None:
    """By FLARE's own authorization, before its process starts one for the job; without the folder the job is taken."""
    app = arrived(kit, "client")
    assert flares_rule(app, role) == (True, "")
    (app / name).parent.mkdir(parents=True, exist_ok=True)
    (app / name).write_text("raise SystemExit('it ran')")
    assert flares_rule(app, role) == (False, "BYOC not permitted")


def test_row_29_flares_process_asks_the_check_of_jobs_too(
    kit: Path, flares_rule: Callable[[Path, str], tuple[bool, str]]
) -> None:
    well, why = flares_rule(arrived(kit, "client", edit=BY_NAME["an executor"]), "lead")
    assert not well
    assert "the name of a class without its path" in why
