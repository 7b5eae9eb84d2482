"""`fedvlp doctor --site` on real kits: each thing that is wrong is one failing line, and no line holds a patient's."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.apis.workspace import Workspace
from support import release
from support.programs import forked

from fedvlp import __version__
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.deploy import installed, site_doctor, software
from fedvlp.deploy.machine import HOME, Check
from fedvlp.deploy.site_doctor import site_checks
from fedvlp.flare.class_list import needed
from fedvlp.run.lock import only_writer

POLICIES = Path(__file__).parents[2] / "provisioning"
Kits = tuple[Path, Path]
FUNCTION = "fedvlp.core.checkpoint.replace_durably"


def provision(folder: Path, kits: str) -> subprocess.CompletedProcess[str]:
    words = ["nvflare", "provision", "-p", "project.yml", "-w", kits, "--force", "-s"]
    return forked(words, folder, os.environ)


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    """Two consortia of provisioning/project.yml, the server called localhost: same names, other root certificates."""
    folder = tmp_path_factory.mktemp("kits")
    text = (POLICIES / "project.yml").read_text().replace("fl.consortium.example", "localhost")
    (folder / "project.yml").write_text(text)
    release.written(folder / "build" / "release")
    for name in ("ours", "theirs"):
        assert not provision(folder, name).returncode
    return folder / "ours" / "fedvlp" / "prod_00", folder / "theirs" / "fedvlp" / "prod_00"


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages of this machine take a minute to compare; test_installed.py has a few."""
    monkeypatch.setattr(software, "installed_faults", lambda wheel: [])


@pytest.fixture
def bare(provisioned: Kits, tmp_path: Path) -> Path:
    """The kit of st-anna with the shipped policies, on a machine without a GPU, before there are data sets."""
    kit = tmp_path / "st-anna"
    shutil.copytree(provisioned[0] / "st-anna", kit)
    for file in (POLICIES / "site").iterdir():
        shutil.copy(file, kit / "local")
    change(kit / "local" / "fedvlp.json", lambda c: c.update(data={}))
    return kit


@pytest.fixture
def server(provisioned: Kits, tmp_path: Path) -> Path:
    """The server's kit with the shipped policies, its stores on this test's disk, its port free."""
    kit = Path(shutil.copytree(provisioned[0] / "localhost", tmp_path / "localhost"))
    for file in (POLICIES / "server").iterdir():
        text = file.read_text().replace("/var/lib/fedvlp", str(tmp_path / "store"))
        (kit / "local" / file.name).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        at = f"localhost:{probe.getsockname()[1]}"
    change(kit / "startup" / "fed_server.json", lambda c: c["servers"][0]["service"].update(target=at))
    return kit


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records") / "cxr"
    write(SyntheticCohort(sites=1, size=40, image_size=72), folder)
    return folder


@pytest.fixture
def whole(bare: Path, records: Path) -> Path:
    """The same as its engineer leaves it."""
    shutil.copy(POLICIES / "site" / "fedvlp.json", bare / "local")
    shutil.copytree(records, bare / "data" / "cxr")
    return bare


@pytest.fixture
def kit(whole: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, of which the doctor reads quickly: without software, and one image of a data set in place of eight."""
    shutil.rmtree(whole / "software")
    monkeypatch.setattr(site_doctor, "SAMPLE", 1)
    return whole


def test_the_doctor_looks_whether_flares_account_may_read_the_data(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> dict[str, Check]:
        return {check.what: check for check in site_doctor._job_user(kit)}

    assert said()["user of jobs"].ok is None
    with socket.socket(socket.AF_UNIX) as listens:
        monkeypatch.chdir(kit)
        listens.bind(site_doctor.JOBS_SOCKET)
        assert said()["user of jobs"].ok is True, "the account of jobs itself"
        monkeypatch.setattr(os, "getuid", lambda: kit.stat().st_uid + 1)
        assert said()["user of jobs"].ok is True
        found = said()["data that FLARE's account may read"]
        assert found.ok is False
        assert "pretrain" in found.found
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert said()["data that FLARE's account may read"].ok is True
        change(kit / "local" / "resources.json", lambda c: c.update(components=[]))
        assert said()["user of jobs"].ok is False


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
    return {check.what: check for check in site_checks(kit, needed)}


def failed(kit: Path) -> list[str]:
    """What is wrong, the way to the server aside."""
    return [what for what, check in found(kit).items() if check.ok is False and not what.startswith("server ")]


def test_a_site_that_is_ready_fails_nothing(whole: Path) -> None:
    checks = found(whole)
    assert [what for what, check in checks.items() if check.ok is False] == ["server reached"]
    assert checks["certificate"].found == "issued to st-anna"
    found_of_data = checks["data set pretrain"].found
    assert found_of_data.startswith("rows 40, used 8")
    assert found_of_data.endswith("; a sample: no more than 8 are looked at here, all of them by `fedvlp prepare`")
    assert checks["jobs with their own code"].found == "refused"


def test_data_that_this_account_may_not_read_are_a_failing_line_with_the_remedy(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of patients is usually its owner's alone, and a container's site is user 10001. No path is told."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/srv/cxr/JANE-DOE/pairs.csv")

    monkeypatch.setattr(TableSource, "prepare", refused)
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    assert failed(kit) == ["data set pretrain"]
    checks = found(kit)
    assert checks["data set pretrain"].found.startswith("this account (uid 10001) may not read it; give it read access")
    assert "JANE" not in checks["data set pretrain"].found


def test_the_doctor_names_the_data_sets_that_are_listed_as_public(kit: Path) -> None:
    """So that an engineer sees a data set of the hospital's own patients there."""
    assert found(kit)["public data sets"].found.startswith("none")
    change(kit / "local" / "fedvlp.json", lambda c: c.update(public=["pretrain"]))
    assert failed(kit) == []
    check = found(kit)["public data sets"]
    assert check.ok is None
    assert check.found.startswith("pretrain: a job may send something about every single record")


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
        ("resources.json", lambda c: c["components"].pop(), "messages to this site"),
        ("resources.json", lambda c: c["components"][-1]["args"].update(side="server"), "messages to this site"),
        ("resources.json", lambda c: c["class_allow_list"].append("*"), "class allow-list enforced"),
        ("resources.json", lambda c: c.update(class_list_enforcement_mode="warn"), "class allow-list enforced"),
        ("resources.json", lambda c: c.update(allow_log_streaming=True), "logs sent to the server"),
        ("resources.json", lambda c: c.pop("allow_log_streaming"), "logs sent to the server"),
        ("resources.json", lambda c: c["components"][0]["args"].update(num_of_gpus=99), "gpus offered to jobs"),
        ("authorization.json", lambda c: c["permissions"]["lead"].update(byoc="any"), "jobs with their own code"),
        ("fedvlp.json", lambda c: c["data"]["pretrain"].update(path="../x"), "data sets"),
        ("fedvlp.json", lambda c: c["data"]["pretrain"].update(path="none.csv"), "data set pretrain"),
        ("fedvlp.json", lambda c: c["data"]["pretrain"].update(report_column="text"), "data set pretrain"),
    ],
)
def test_each_wrong_setting_is_one_failing_line(file: str, edit: Any, line: str, kit: Path) -> None:
    change(kit / "local" / file, edit)
    assert failed(kit) == [line]


def test_another_release_is_told_and_fails_nothing_since_jobs_take_it(kit: Path) -> None:
    change(kit / "local" / "fedvlp.json", lambda c: c.update(version="9.9.9"))
    assert failed(kit) == []
    check = found(kit)["fedvlp of the consortium"]
    assert check.ok is None
    assert (
        f"9.9.9 agreed, {__version__} installed, which takes part where the server writes wire version 1" in check.found
    )


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


def test_no_key_is_ever_readable_for_others(provisioned: Kits) -> None:
    """Root, server, sites and people, from the moment that they are written, whatever the shell's umask: here 022."""
    keys = [
        file
        for file in provisioned[0].parents[1].rglob("*")
        if file.suffix in (".key", ".pfx") or "state" in file.parts
    ]
    assert {file.name for file in keys} >= {"client.key", "server.key", "cert.json"}
    for file in keys:
        if file.is_file():
            assert file.stat().st_mode & 0o077 == 0, file.name


def test_the_key_must_be_private_and_the_certificate_the_kits_own(kit: Path, provisioned: Kits) -> None:
    key, certificate = kit / "startup" / "client.key", kit / "startup" / "client.crt"
    os.chmod(key, 0o644)
    assert failed(kit) == ["private key"]
    assert "(chmod 600 startup/client.key)" in found(kit)["private key"].found
    os.chmod(key, 0o600)
    shutil.copy(provisioned[0] / "northgate" / "startup" / "client.crt", certificate)
    assert failed(kit) == ["certificate"], "another hospital's"
    assert found(kit)["certificate"].found == "issued to northgate; this kit is st-anna's"
    shutil.copy(provisioned[1] / "st-anna" / "startup" / "client.crt", certificate)
    assert failed(kit) == ["certificate"], "another root's"
    for name in ("client.crt", "rootCA.pem"):
        (kit / "startup" / name).unlink()
        assert "certificate" in failed(kit), "a file that is gone is a failing line too"
        assert "cannot be used" in found(kit)["server reached"].found


@pytest.mark.parametrize(
    ("name", "mode"), [("startup/client_context.tenseal", 0o640), ("local/own.pem", 0o604), ("local/own.key", 0o602)]
)
def test_no_other_key_of_the_kit_is_open(name: str, mode: int, bare: Path) -> None:
    """The shared key of encryption, and whatever begins as a private key does or is called one."""
    (bare / name).write_bytes((bare / "startup" / "client.key").read_bytes() if name.endswith(".pem") else b"key")
    os.chmod(bare / name, 0o600)
    assert failed(bare) == []
    os.chmod(bare / name, mode)
    assert failed(bare) == ["private key"]
    assert f"chmod 600 {name}" in found(bare)["private key"].found


def test_the_software_of_the_kit_is_the_consortiums_and_is_what_runs(bare: Path) -> None:
    checks = found(bare)
    assert checks["software of the kit"].found == "2 files, signed by the consortium's root"
    assert checks["fedvlp is the kit's"].ok
    assert checks["packages installed"].ok is not False
    shutil.rmtree(bare / "software")
    assert failed(bare) == []
    assert found(bare)["software of the kit"].ok is None


def test_another_fedvlp_than_the_kits_fails(
    bare: Path, provisioned: Kits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel of the consortium in which one module differs, one is new, and one is missing."""
    folder = tmp_path / "other"
    release.written(folder)
    wheel = software.wheel_of(folder)
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["fedvlp/core/seeds.py"] += b"\n"
    files["fedvlp/more.py"] = files.pop("fedvlp/py.typed")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    release.summed(folder)
    root = json.loads((provisioned[0].parents[0] / "state" / "cert.json").read_text())["root_pri_key"]
    signed = software.signature((folder / software.SUMS).read_bytes(), load_pem_private_key(root.encode(), None))
    (folder / software.SIGNATURE).write_bytes(signed)
    shutil.rmtree(bare / "software")
    shutil.copytree(folder, bare / "software")
    own = Path(software.__file__).parents[1]
    faults = list(installed.faults(wheel, tmp_path / "no other packages", own))
    monkeypatch.setattr(software, "installed_faults", lambda wheel: [*faults, "in no RECORD: more.pth"])
    assert failed(bare) == ["fedvlp is the kit's", "packages as pip installed them"]
    said = found(bare)["fedvlp is the kit's"].found
    for name in ("core/seeds.py", "more.py", "py.typed"):
        assert f"not the wheel's: fedvlp/{name}" in said
    assert "--force-reinstall fedvlp-" in said
    assert found(bare)["packages as pip installed them"].found.startswith("in no RECORD: more.pth: install the kit's")


def test_another_version_of_a_package_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "version", lambda name: "0.0" if name == "torch" else real(name))
    real = version
    check = found(bare)["packages installed"]
    assert check.ok is None, "a hospital may need another build"
    assert "torch 0.0 (" in check.found


def altered_wheel(software_folder: Path) -> None:
    wheel = software.wheel_of(software_folder)
    wheel.write_bytes(wheel.read_bytes() + b"x")


def altered_wheel_and_sums(software_folder: Path) -> None:
    altered_wheel(software_folder)
    release.summed(software_folder)


TAMPERED = {
    "wheel": altered_wheel,
    "wheel and sums": altered_wheel_and_sums,
    "lock": lambda folder: (folder / software.LOCK).write_text("torch==1.0\n"),
    "a file beside": lambda folder: (folder / "setup.py").write_text(""),
    "wheel gone": lambda folder: software.wheel_of(folder).unlink(),
    "sums gone": lambda folder: (folder / software.SUMS).unlink(),
    "signature gone": lambda folder: (folder / software.SIGNATURE).unlink(),
    "signature of nothing": lambda folder: (folder / software.SIGNATURE).write_bytes(b""),
    "a path in the sums": lambda folder: (folder / software.SUMS).write_text(f"{'0' * 64}  ../startup/client.key\n"),
}


@pytest.mark.parametrize("what", [*TAMPERED, "another root's"])
def test_software_that_the_consortium_did_not_sign_fails(
    what: str, bare: Path, server: Path, provisioned: Kits
) -> None:
    for kit in (bare, server):
        if what == "another root's":
            shutil.rmtree(kit / "software")
            shutil.copytree(provisioned[1] / kit.name / "software", kit / "software")
        else:
            TAMPERED[what](kit / "software")
        assert failed(kit) == ["software of the kit"]
        assert "fedvlp is the kit's" not in found(kit), "nothing is compared with what nobody signed"


def guide() -> str:
    """The commands of the site's guide that check the software, before any of it is installed."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", (POLICIES / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (checks,) = [block for block in blocks if "openssl" in block]
    return textwrap.dedent(checks)


@pytest.mark.parametrize("what", ["nothing", *TAMPERED, "another root's"])
def test_the_guides_own_commands_find_what_was_altered(what: str, bare: Path, provisioned: Kits) -> None:
    """With openssl and sha256sum alone. A file that nobody summed is installed by nobody: the doctor names it."""
    if what == "another root's":
        shutil.rmtree(bare / "software")
        shutil.copytree(provisioned[1] / "st-anna" / "software", bare / "software")
    elif what != "nothing":
        TAMPERED[what](bare / "software")
    done = subprocess.run(["bash", "-c", guide()], cwd=bare.parent, capture_output=True, text=True, check=False)
    assert ("Verified OK" in done.stdout and done.returncode == 0) == (what in ("nothing", "a file beside")), done


def test_without_a_release_nothing_is_provisioned(tmp_path: Path) -> None:
    """FLARE's provisioning says that it failed and leaves no kits."""
    shutil.copy(POLICIES / "project.yml", tmp_path)
    done = provision(tmp_path, "kits")
    assert done.returncode != 0
    assert "there is no readable SHA256SUMS; `make release` writes it" in done.stdout + done.stderr
    assert not list(tmp_path.glob("kits/fedvlp/prod_*/*"))


def test_every_kit_is_provisioned_with_the_perimeter(provisioned: Kits, bare: Path) -> None:
    """Before anybody copies a policy, which takes the place of FLARE's default."""
    for file in ("resources.json", "authorization.json"):
        (bare / "local" / file).unlink()
    assert found(bare)["messages to this site"].ok
    server = found(Path(shutil.copytree(provisioned[0] / "localhost", bare.parent / "localhost")))
    assert server["messages to this server, and through it to sites"].ok
    assert [kit["port for the processes of jobs"].ok for kit in (found(bare), server)] == [True, True]
    assert not server["jobs looked at before they start"].ok, "that stands in provisioning/server"
    assert not server["job store"].ok, "FLARE's default is one folder for all servers"


def test_a_servers_kit_that_is_ready_fails_nothing(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = found(server)
    assert [what for what, check in looked.items() if check.ok is False] == []
    assert looked["server"].found == "localhost"
    assert looked["certificate"].found == "issued to localhost"
    monkeypatch.setenv("NVFLARE_SECURE_LOGGING", "true")
    assert found(server)["secure logging"].ok


MESSAGES, JOBS = "messages to this server, and through it to sites", "jobs looked at before they start"
OF_RESOURCES: dict[str, tuple[Any, str]] = {
    "no perimeter": (lambda c: c["components"].pop(), MESSAGES),
    "a site's perimeter": (lambda c: c["components"][-1]["args"].pop("side"), MESSAGES),
    "a site's check of jobs": (lambda c: c["app_validator"]["args"].update(side="client"), JOBS),
    "no check of jobs": (lambda c: c.pop("app_validator"), JOBS),
    "every class": (lambda c: c.update(class_allow_list=["*"]), "class allow-list"),
    "every class beside ours": (lambda c: c["class_allow_list"].append("*"), "class allow-list enforced"),
    "a package": (lambda c: c["class_allow_list"].append("nvflare."), "class allow-list"),
    "a site's classes": (lambda c: c.update(class_allow_list=list(needed("client"))), "class allow-list"),
    "enforcement off": (lambda c: c.update(class_list_enforcement_mode="off"), "class allow-list enforced"),
    "no job store": (lambda c: c["components"][1]["args"].pop("uri_root"), "job store"),
    "job store of FLARE": (lambda c: c["components"][1]["args"].update(uri_root="/tmp/nvflare/jobs"), "job store"),
    "job store below a file": (lambda c: c["components"][1]["args"].update(uri_root="/dev/null/x"), "job store"),
    "snapshots below a file": (
        lambda c: c["snapshot_persistor"]["args"]["storage"]["args"].update(root_dir="/dev/null/x"),
        "store of snapshots",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OF_RESOURCES)
def test_a_servers_resources_are_looked_at_as_a_sites(what: str, server: Path) -> None:
    edit, line = OF_RESOURCES[what]
    change(server / "local" / "resources.json", edit)
    assert line in failed(server)


OF_ROLES = {
    "jobs with their own code": [("byoc", "any"), ("byoc", "o:site"), ("byoc", "n:submitter")],
    "shell for accounts of others": [("shell_commands", right) for right in ("any", "n:submitter", "o:submitter")],
}


@pytest.mark.parametrize("role", ["project_admin", "lead", "org_admin", "member"])
def test_no_role_brings_code_or_has_a_shell_at_a_server_or_a_site(role: str, server: Path, bare: Path) -> None:
    for kit, side in ((server, "server"), (bare, "client")):
        file = kit / "local" / "authorization.json"
        shipped = file.read_text()

        def wrong(right: Any, side: str = side, file: Path = file, shipped: str = shipped) -> dict[str, str]:
            """The failing lines where the role has this right, or these rights."""
            change(file, lambda c: c["permissions"].update({role: right}))
            looked = list(site_doctor._policies(file.parent, needed(side), side))
            file.write_text(shipped)
            return {check.what: check.found for check in looked if check.ok is False}

        for line, rights in OF_ROLES.items():
            for name, right in rights:
                said = wrong({**json.loads(shipped)["permissions"][role], name: right})
                assert list(said) == [line], (right, kit.name)
                assert role in said[line]
        assert list(wrong("any")) == list(OF_ROLES)
        assert wrong("none") == {}


def test_settings_that_flare_takes_before_those_looked_at_fail(server: Path, bare: Path) -> None:
    """By FLARE's own reading of the two kits: what it merges, in which order."""
    for kit, serves in ((server, True), (bare, False)):
        for name in ("x__resources.json", "x__p_resources.json", "x__j_resources.json", "job_resources.json"):
            file = kit / "local" / name
            file.write_text('{"class_list_enforcement_mode": "off"}')
            workspace = Workspace(str(kit))
            taken = [workspace.get_config_files_for_startup(serves, for_job) for for_job in (False, True)]
            assert str(file) in [*taken[0][2:], *taken[1][2:]], "after resources.json, whose settings it replaces"
            assert failed(kit) == ["settings beside resources.json"]
            file.unlink()


@pytest.mark.parametrize("edit", ["tls", "clear", "secure_train=false"])
def test_a_kit_without_certificates_at_both_ends_fails(edit: str, server: Path, bare: Path) -> None:
    for kit, file in ((server, "fed_server.json"), (bare, "fed_client.json")):
        if "=" in edit:
            script = kit / "startup" / "sub_start.sh"
            script.write_text(f"# {script.read_text()}\n".replace("secure_train=true", edit) + "# secure_train=true\n")
        else:
            text = (kit / "startup" / file).read_text()
            (kit / "startup" / file).write_text(text.replace('"mtls"', f'"{edit}"'))
        assert failed(kit) == ["certificates at both ends"]
        assert edit.partition("=")[0] in found(kit)["certificates at both ends"].found


def test_a_disk_without_room_fails(server: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder by itself; a folder that is not there yet is on the disk of the one where it will be."""
    lines = {
        "disk of the kit": "localhost",
        "job store": "jobs",
        "store of snapshots": "snapshots",
        "folder of runs": "runs",
    }
    monkeypatch.setenv(HOME, str(server.parent / "elsewhere" / "runs"))
    for path in ("store/jobs", "store/snapshots", "elsewhere"):
        (server.parent / path).mkdir(parents=True)
    disks = [server, server.parent / "store/jobs", server.parent / "store/snapshots", server.parent / "elsewhere"]
    real = shutil.disk_usage
    for line, disk in zip(lines, disks, strict=True):
        full = SimpleNamespace(total=1, used=1, free=4.9e9)
        with monkeypatch.context() as patched:
            patched.setattr(
                shutil, "disk_usage", lambda path, disk=disk, full=full: full if path == disk else real(path)
            )
            assert failed(server) == [line]
        with monkeypatch.context() as patched:
            patched.setattr(os, "access", lambda path, mode, disk=disk: path != disk)
            assert failed(server) == [line]
            assert f"uid {os.getuid()}) cannot write there" in found(server)[line].found
    monkeypatch.setattr(os, "access", lambda path, mode: path != server.parent / "elsewhere")
    assert failed(bare) == ["folder of runs"], "a site's, too"


def test_a_server_that_a_few_strangers_can_fill_fails(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard limit, as the start script takes all of it."""
    for most, ok in ((1024, False), (8191, False), (8192, True), (site_doctor.resource.RLIM_INFINITY, True)):
        monkeypatch.setattr(site_doctor.resource, "getrlimit", lambda what, most=most: (256, most))
        assert found(server)["open connections"].ok is ok


def test_code_from_elsewhere_than_pythons_own_folders_fails(
    server: Path, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "code that Python takes"
    for kit in (server, bare):
        for name in ("PYTHONPATH", "PYTHONUSERBASE", "LD_PRELOAD"):
            monkeypatch.setenv(name, "" if name == "LD_PRELOAD" else str(tmp_path))
            assert failed(kit) == ([] if name == "LD_PRELOAD" else [line])
            monkeypatch.delenv(name)
        (kit / "local" / "custom").mkdir()
        assert failed(kit) == [line], "FLARE imports from it"
        (kit / "local" / "custom").rmdir()
        script = kit / "startup" / "sub_start.sh"
        corrected = script.read_text()
        script.write_text(corrected + "export PYTHONPATH=/local/custom:$PYTHONPATH\n")
        assert failed(kit) == [line]
        assert "where it is started" in found(kit)[line].found
        script.write_text(corrected)
    monkeypatch.setattr(site_doctor, "_looks_in", lambda *options: [] if options else [str(tmp_path)])
    assert failed(bare) == [line], "a folder of a user, or of a file .pth"
    assert str(tmp_path) not in found(bare)[line].found


def test_no_start_script_of_a_kit_makes_pythons_path_longer(server: Path, tmp_path: Path) -> None:
    """Run as far as it says what Python gets: FLARE's own had a part that is empty, the folder where it is started."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").write_text('#!/bin/bash\necho "path=${PYTHONPATH-unset} files=$(ulimit -n)"\n')
    (programs / "python3").chmod(0o755)
    for kit in (server, server.parents[0]):
        script = server / "startup" / "sub_start.sh"
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        if kit != server:
            environment["PYTHONPATH"] = "/opt/mine"
        done = subprocess.run(
            ["bash", "-c", f"ulimit -S -n 256; bash {script} --once"], env=environment, cwd=tmp_path,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        most = min(site_doctor.DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        assert f"path={environment.get('PYTHONPATH', 'unset')} files={most}" in done.stdout


@pytest.mark.parametrize("site", ["st-anna", "localhost"])
@pytest.mark.parametrize("text", [None, "", "{}", '{"internal": {"resources": {"connection_security": "tls"}}}', "[]"])
def test_a_kit_whose_jobs_show_no_certificate_fails(
    text: str | None, site: str, provisioned: Kits, tmp_path: Path
) -> None:
    kit = Path(shutil.copytree(provisioned[0] / site, tmp_path / site))
    (kit / "local" / "comm_config.json").unlink()
    if text is not None:
        (kit / "local" / "comm_config.json").write_text(text)
    (line,) = (check for check in site_checks(kit, needed) if check.what == "port for the processes of jobs")
    assert (line.ok, "local/comm_config.json" in line.found) == (False, True)


def test_who_runs_the_kit_or_has_the_servers_port_is_told(server: Path) -> None:
    """A second server would try to open the port for ever."""
    kit = server
    with socket.create_server(("127.0.0.1", 0)) as other:
        target = f"localhost:{other.getsockname()[1]}"
        change(kit / "startup" / "fed_server.json", lambda c: c["servers"][0]["service"].update(target=target))
        looked = found(kit)
        assert (looked["processes of this kit"].found, looked["port of the server"].ok) == ("none runs", False)
        with only_writer(kit):
            looked = found(kit)
            assert f"one runs: process {os.getpid()} on" in looked["processes of this kit"].found
            assert looked["port of the server"].ok
    assert found(kit)["port of the server"].found.endswith("free")
    (kit / "writer.lock").unlink()
    (kit / "writer.lock").symlink_to("elsewhere")
    assert found(kit)["processes of this kit"].ok is False


def test_a_kit_below_a_path_that_flare_splits_cannot_start_jobs(provisioned: Kits, tmp_path: Path) -> None:
    kit = Path(shutil.copytree(provisioned[0] / "localhost", tmp_path / "Eigene Dateien" / "localhost"))
    line = next(check for check in site_checks(kit, needed) if check.what == "folder of the kit")
    assert (line.ok, "white space" in line.found) == (False, True)


def test_without_resources_there_is_nothing_to_guard(tmp_path: Path) -> None:
    """The builders in another order make no kits, in the place of open ones."""
    project = yaml.safe_load((POLICIES / "project.yml").read_text())
    project["builders"] = [entry for entry in project["builders"] if not entry["path"].endswith("StaticFileBuilder")]
    (tmp_path / "project.yml").write_text(yaml.safe_dump(project))
    done = provision(tmp_path, "kits")
    assert done.returncode != 0
    assert "name fedvlp.flare.GuardedKits after StaticFileBuilder" in done.stdout + done.stderr


@pytest.mark.parametrize(("days", "ok"), [(0, True), (340, None), (400, False), (-2, False)])
def test_the_end_of_the_certificate_is_seen_coming(
    days: int, ok: bool | None, kit: Path, server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kits hold 360 days; a clock that is behind makes a new certificate invalid, too."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=days)

    monkeypatch.setattr(site_doctor, "datetime", Clock)
    assert found(kit)["certificate valid"].ok is ok
    assert found(server)["certificate valid"].ok is ok


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
    done = forked(["fedvlp", "doctor", "--site", str(tmp_path)], tmp_path, os.environ)
    assert done.returncode == 1
    assert "FAIL  kit: no readable startup/fed_client.json" in done.stdout
