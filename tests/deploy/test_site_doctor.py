"""`fedvlp doctor --site` on real kits: each thing that is wrong is one failing line, and no line holds a patient's."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.deploy import site_doctor
from fedvlp.deploy.machine import Check
from fedvlp.deploy.site_doctor import site_checks
from fedvlp.flare.class_list import needed

BIN = Path(sys.executable).parent
POLICIES = Path(__file__).parents[2] / "provisioning"
Kits = tuple[Path, Path]
FUNCTION = "fedvlp.core.checkpoint.replace_durably"


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    """Two consortia of provisioning/project.yml, the server called localhost: same names, other root certificates."""
    folder = tmp_path_factory.mktemp("kits")
    text = (POLICIES / "project.yml").read_text().replace("fl.consortium.example", "localhost")
    (folder / "project.yml").write_text(text)
    for name in ("ours", "theirs"):
        command = [BIN / "nvflare", "provision", "-p", "project.yml", "-w", name, "--force", "-s"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120, umask=0o077)  # as LEAD.md
    return folder / "ours" / "fedvlp" / "prod_00", folder / "theirs" / "fedvlp" / "prod_00"


@pytest.fixture
def kit(provisioned: Kits, tmp_path: Path) -> Path:
    """The kit of st-anna as its engineer leaves it, on a machine without a GPU."""
    kit = tmp_path / "st-anna"
    shutil.copytree(provisioned[0] / "st-anna", kit)
    for file in (POLICIES / "site").iterdir():
        shutil.copy(file, kit / "local")
    change(kit / "local" / "resources.json", lambda c: c["components"][0]["args"].update(num_of_gpus=0))
    write(SyntheticCohort(sites=1, size=40, image_size=72), kit / "data" / "cxr")
    return kit


def change(file: Path, edit: Any) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


@contextmanager
def listening(kits: Path, kit: Path) -> Iterator[None]:
    """A server with the certificate of ``kits``, which answers a request or two as FLARE's web server does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    startup = kits / "localhost" / "startup"
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.load_verify_locations(startup / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as plain:
        port = plain.getsockname()[1]
        change(
            kit / "startup" / "fed_client.json", lambda c: c["servers"][0]["service"].update(target=f"localhost:{port}")
        )

        def serve() -> None:
            try:
                connection, _ = plain.accept()
                with context.wrap_socket(connection, server_side=True) as secured:
                    secured.recv(1024)
                    secured.sendall(b"HTTP/1.1 404 Not Found\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n")
            except OSError:  # turned away by the client
                pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(10)


def found(kit: Path) -> dict[str, Check]:
    return {check.what: check for check in site_checks(kit, needed("client"))}


def failed(kit: Path) -> list[str]:
    """What is wrong, the server aside."""
    return [what for what, check in found(kit).items() if check.ok is False and not what.startswith("server")]


def test_a_site_that_is_ready_fails_nothing(kit: Path) -> None:
    assert failed(kit) == []
    checks = found(kit)
    assert checks["certificate"].found == "issued to st-anna"
    assert checks["data set pretrain"].found.startswith("rows 40, used 8")
    assert checks["jobs with their own code"].found == "refused"


@pytest.mark.parametrize(
    ("file", "edit", "line"),
    [
        ("resources.json", lambda c: c["class_allow_list"].append("nvflare."), "class allow-list"),
        ("resources.json", lambda c: c["class_allow_list"].append("fedvlp"), "class allow-list"),
        ("resources.json", lambda c: c["class_allow_list"].append("fedvlp.core.checkpoint"), "class allow-list"),
        ("resources.json", lambda c: c["class_allow_list"].append(FUNCTION), "class allow-list"),
        ("resources.json", lambda c: c.update(class_allow_list=["fedvlp.methods.FedAvg"]), "class allow-list"),
        ("resources.json", lambda c: c.update(class_allow_list="fedvlp.methods.FedAvg"), "class allow-list"),
        ("resources.json", lambda c: c.pop("class_allow_list"), "class allow-list"),
        ("resources.json", lambda c: c.pop("app_validator"), "jobs looked at before they start"),
        (
            "resources.json",
            lambda c: c["app_validator"]["args"].update(side="server"),
            "jobs looked at before they start",
        ),
        ("resources.json", lambda c: c["class_allow_list"].append("*"), "class allow-list enforced"),
        ("resources.json", lambda c: c.update(class_list_enforcement_mode="warn"), "class allow-list enforced"),
        ("resources.json", lambda c: c.update(allow_log_streaming=True), "logs sent to the server"),
        ("resources.json", lambda c: c.pop("allow_log_streaming"), "logs sent to the server"),
        ("resources.json", lambda c: c["components"][0]["args"].update(num_of_gpus=99), "gpus offered to jobs"),
        ("authorization.json", lambda c: c["permissions"]["lead"].update(byoc="any"), "jobs with their own code"),
        ("authorization.json", lambda c: c["permissions"].update(project_admin="any"), "jobs with their own code"),
        ("fedvlp.json", lambda c: c.update(version="9.9.9"), "fedvlp of the consortium"),
        ("fedvlp.json", lambda c: c["data"]["pretrain"].update(path="../x"), "data sets"),
        ("fedvlp.json", lambda c: c["data"]["pretrain"].update(path="none.csv"), "data set pretrain"),
        ("fedvlp.json", lambda c: c["data"]["pretrain"].update(report_column="text"), "data set pretrain"),
    ],
)
def test_each_wrong_setting_is_one_failing_line(file: str, edit: Any, line: str, kit: Path) -> None:
    change(kit / "local" / file, edit)
    assert failed(kit) == [line]


def test_a_hospital_may_narrow_its_list(kit: Path) -> None:
    """To the classes of the one preset that it agreed to."""
    few = ["fedvlp.flare.ChildExecutor", "fedvlp.methods.FedAvg", "fedvlp.Training"]
    change(kit / "local" / "resources.json", lambda c: c.update(class_allow_list=few))
    assert failed(kit) == []
    said = found(kit)["class allow-list"].found
    assert said == f"3 classes, {len(needed('client')) - 3} that jobs of fedvlp may name are not among them"


def test_a_list_with_more_than_fedvlps_jobs_need_names_each_class(kit: Path) -> None:
    """An exact name may be on purpose; the engineer should know of every one."""
    runs_programs = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"
    change(
        kit / "local" / "resources.json", lambda c: c["class_allow_list"].extend([runs_programs, "json.JSONDecoder"])
    )
    assert failed(kit) == []
    check = found(kit)["classes beside fedvlp's"]
    assert check.ok is None
    assert check.found == f"json.JSONDecoder, {runs_programs}: any job may name them as well"


def test_without_policies_flares_defaults_are_judged(kit: Path) -> None:
    """As the kit comes: custom code is allowed, fedvlp's classes are not, logs stream."""
    for name in ("resources.json", "authorization.json"):
        (kit / "local" / name).unlink()
    assert {"class allow-list", "jobs with their own code"} <= set(failed(kit))


def test_no_key_is_ever_readable_for_others_as_the_lead_provisions(provisioned: Kits) -> None:
    """Root, server, sites and people, from the moment that they are written: LEAD.md says `umask 077` before."""
    keys = [
        file
        for file in provisioned[0].parents[1].rglob("*")
        if file.suffix in (".key", ".pfx") or "state" in file.parts
    ]
    assert {file.name for file in keys} >= {"client.key", "server.key", "cert.json"}
    for file in keys:
        if file.is_file():
            assert file.stat().st_mode & 0o077 == 0, file.name
    assert "$ umask 077\n$ nvflare provision" in (POLICIES / "LEAD.md").read_text()


def test_the_key_must_be_private_and_the_certificate_the_kits_own(kit: Path, provisioned: Kits) -> None:
    key, certificate = kit / "startup" / "client.key", kit / "startup" / "client.crt"
    os.chmod(key, 0o644)
    assert failed(kit) == ["private key"]
    assert "chmod 600" in found(kit)["private key"].found
    os.chmod(key, 0o600)
    shutil.copy(provisioned[0] / "northgate" / "startup" / "client.crt", certificate)
    assert failed(kit) == ["certificate"], "another hospital's"
    assert found(kit)["certificate"].found == "issued to northgate; this kit is st-anna's"
    shutil.copy(provisioned[1] / "st-anna" / "startup" / "client.crt", certificate)
    assert failed(kit) == ["certificate"], "another root's"


@pytest.mark.parametrize(("days", "ok"), [(0, True), (340, None), (400, False), (-2, False)])
def test_the_end_of_the_certificate_is_seen_coming(
    days: int, ok: bool | None, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kits hold 360 days; a clock that is behind makes a new certificate invalid, too."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=days)

    monkeypatch.setattr(site_doctor, "datetime", Clock)
    assert found(kit)["certificate valid"].ok is ok


def test_the_server_is_reached_and_known_by_its_certificate(kit: Path, provisioned: Kits) -> None:
    with listening(provisioned[0], kit):
        checks = found(kit)
    assert checks["server reached"].ok
    assert checks["server is the consortium's"].ok
    assert checks["clock"].ok is False, "that server says it is 1970"
    with listening(provisioned[1], kit):
        checks = found(kit)
    assert checks["server is the consortium's"].ok is False
    assert "CERTIFICATE_VERIFY_FAILED" in checks["server is the consortium's"].found
    assert found(kit)["server reached"].ok is False, "nobody listens any more"


def test_no_line_holds_what_is_in_the_table(kit: Path) -> None:
    """A broken table: counts and numbers of rows, no report, no name of a file, no patient."""
    table = kit / "data" / "cxr" / "pairs.csv"
    header, *rows = table.read_text().splitlines()
    table.write_text("\n".join([header, *(row.replace(".png", "-JANE-DOE.png") for row in rows)]))
    line = found(kit)["data set pretrain"]
    assert line.ok is False
    assert "missing image 40" in line.found
    everything = " ".join(f"{check.what} {check.found}" for check in found(kit).values())
    assert "JANE" not in everything
    assert str(kit) not in everything
    assert "pairs.csv" not in everything


def test_a_folder_that_is_no_kit(tmp_path: Path) -> None:
    done = subprocess.run([BIN / "fedvlp", "doctor", "--site", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAIL  kit: no readable startup/fed_client.json" in done.stdout
