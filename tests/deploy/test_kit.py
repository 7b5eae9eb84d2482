"""What the lead sends: a kit that needs nothing of this repository, with the member's own names."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tarfile
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from nvflare.tool.deploy.deploy_commands import prepare_deployment
from support import release
from support.programs import forked
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.deploy import kit as kits
from fedvlp.deploy import software
from fedvlp.deploy.kit import KitError, make
from fedvlp.deploy.site_doctor import site_checks
from fedvlp.deploy.software import SoftwareError
from fedvlp.flare.class_list import needed

PROVISIONING = Path(__file__).parents[2] / "provisioning"
HOST, PORT = "fl.klinik-verbund.example", 9443


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """prod_00 of a consortium with other names than the example's."""
    folder = tmp_path_factory.mktemp("consortium")
    project: dict[str, Any] = yaml.safe_load((PROVISIONING / "project.yml").read_text(encoding="utf-8"))
    server, *others = project["participants"]
    clients = [person for person in others if person["type"] == "client"][:1]
    people = [person for person in others if person["type"] == "admin"][:1]
    server |= {"name": HOST, "fed_learn_port": PORT, "admin_port": PORT}
    project["participants"] = [server, {**clients[0], "name": "maria-hilf"}, *people]
    (folder / "project.yml").write_text(yaml.safe_dump(project), encoding="utf-8")
    release.written(folder / "build" / "release")
    words = ["nvflare", "provision", "-p", "project.yml", "-w", "kits", "--force", "-s"]
    assert not forked(words, folder, os.environ).returncode
    return folder / "kits" / "fedvlp" / "prod_00"


@pytest.fixture
def copied(provisioned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(provisioned, tmp_path / "prod_00"))


def unpacked(made: kits.Made, folder: Path) -> Path:
    with tarfile.open(made.archive) as archive:
        archive.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(folder)
    return folder / made.name


def links(kit: Path) -> dict[str, set[str]]:
    """The pages of a kit's guide that each page leads to, all of which are there."""
    leads = {}
    for page in sorted((kit / "guide").glob("*.md")):
        found = {target for _, target in kits.LINK.findall(page.read_text(encoding="utf-8"))}
        leads[page.name] = {t.partition("#")[0] for t in found if t[0] != "#" and not t.startswith("https://")}
        for target in leads[page.name]:
            assert (kit / "guide" / target).is_file(), f"{page.name} leads to {target}"
    return leads


LAUNCHERS = {"docker": "DockerJobLauncher", "k8s": "K8sJobLauncher", "slurm": "SlurmJobLauncher"}


@pytest.mark.parametrize("name", ["maria-hilf", HOST])
@pytest.mark.parametrize("runtime", LAUNCHERS)
def test_flare_prepares_a_kit_for_clusters_and_its_rules_stay(
    runtime: str, name: str, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files that the page shows. FLARE's command removes ``local/resources.json``."""
    monkeypatch.setattr(software, "installed_faults", lambda wheel: [])
    page = (PROVISIONING / "CLUSTERS.md").read_text(encoding="utf-8")
    (config,) = re.findall(rf"```\n(runtime: {runtime}\n.*?)```", page, re.DOTALL)
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
    make(copied / name, PROVISIONING, tmp_path / "send")
    given = {"kit": str(copied / name), "kit_flag": None, "config": str(tmp_path / "config.yaml")}
    prepare_deployment(SimpleNamespace(output=str(tmp_path / "prepared"), **given))

    kit, side = tmp_path / "prepared", "server" if name == HOST else "client"
    assert not (kit / "local" / "resources.json").exists()
    looked = {check.what: check.ok for check in site_checks(kit, needed)}
    rules = [
        what
        for what in looked
        if what.startswith(("messages", "port for", "jobs looked at", "class allow-list", "logs sent"))
    ]
    assert {looked[what] for what in rules} == {True}, looked
    assert len(rules) == (5 if name == HOST else 6)
    resources = json.loads((kit / "local" / "resources.json.default").read_text(encoding="utf-8"))
    shipped = json.loads((PROVISIONING / made_for(name) / "resources.json").read_text(encoding="utf-8"))
    assert {key: value for key, value in shipped.items() if key not in ("components", "snapshot_persistor")} == {
        key: value for key, value in resources.items() if key not in ("components", "snapshot_persistor")
    }
    launchers = [part["path"] for part in resources["components"] if part["id"].endswith("_launcher")]
    assert [path.endswith(f"{side.capitalize()}{LAUNCHERS[runtime]}") for path in launchers] == [True]
    assert "/var/lib/fedvlp" not in json.dumps(resources)
    written = {
        "docker": "startup/start_docker.sh", "k8s": "helm_chart/values.yaml", "slurm": "startup/start_slurm.sh"
    }[runtime]  # fmt: skip
    assert {"docker": "fedvlp:0.1.0", "k8s": "claimName: fedvlp-kit", "slurm": str(kit)}[runtime] in (
        kit / written
    ).read_text(encoding="utf-8")


def made_for(name: str) -> str:
    return "server" if name == HOST else "site"


@pytest.mark.parametrize(
    ("name", "units"),
    [("maria-hilf", {"fedvlp-site", "fedvlp-jobs"}), (HOST, {"fedvlp-server", "fedvlp-keep@"})],
)
def test_systemd_takes_the_units_of_a_kit_and_they_start_what_the_kit_has(
    name: str, units: set[str], copied: Path, tmp_path: Path
) -> None:
    """With this member's name. Python finds modules in the folder where it starts, which is root's alone."""
    kit = unpacked(make(copied / name, PROVISIONING, tmp_path / "send"), tmp_path)
    assert {file.stem for file in (kit / "systemd").iterdir()} == units
    (tmp_path / "opt" / "bin").mkdir(parents=True)
    for program in ("python", "fedvlp"):  # systemd wants to find them
        (tmp_path / "opt" / "bin" / program).symlink_to("/bin/true")
    for file in (kit / "systemd").iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search("st-anna|fl.consortium.example", text)
        unit = ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(text)
        service = dict(unit["Service"])
        assert (service["WorkingDirectory"], "PYTHONSAFEPATH=1" in service["Environment"].split()) == ("/", True)
        assert int(service.get("LimitNOFILE", 0)) >= 65536 or file.stem == "fedvlp-keep@"
        for path in re.findall(rf"/srv/fedvlp/{re.escape(name)}/([\w./]+)", text):
            assert (kit / path).exists() or path == "restart.fl", path
        there = text.replace("/opt/fedvlp", str(tmp_path / "opt")).replace(f"/srv/fedvlp/{name}", str(kit))
        (tmp_path / file.name).write_text(there, encoding="utf-8")
        if program := shutil.which("systemd-analyze"):
            words = [program, "verify", "--man=no", str(tmp_path / file.name)]
            said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            assert (said.returncode, said.stderr) == (0, ""), file.name


def test_the_image_leaves_to_the_runtime_what_it_starts() -> None:
    """Compose files say it, and FLARE's launchers give a command of their own, which an entry point would swallow."""
    assert "ENTRYPOINT" not in (PROVISIONING / "docker" / "Dockerfile").read_text().partition(" AS fedvlp")[2]
    for role in ("server", "site"):
        service = yaml.safe_load((PROVISIONING / "docker" / f"{role}.yml").read_text())["services"][role]
        assert "/kit/startup/sub_start.sh --once" in service["command"][2]


NOT_THERE = {
    "local/privacy-ledger-marker.json",  # by ClipAndNoise
    "local/study_runtime.yaml",  # of a kit that `nvflare deploy prepare` made
    "startup/fl_admin.sh",  # of a person's kit
}


def test_a_site_has_all_that_its_guide_names(copied: Path, tmp_path: Path) -> None:
    made = make(copied / "maria-hilf", PROVISIONING, tmp_path / "send")
    assert (made.role, made.name, made.server) == ("site", "maria-hilf", f"{HOST}:{PORT}")
    assert made.sha256 == hashlib.sha256(made.archive.read_bytes()).hexdigest()
    assert stat.S_IMODE(made.archive.stat().st_mode) == 0o600, "it holds the site's key"
    kit = unpacked(made, tmp_path / "hospital")
    for policy in (PROVISIONING / "site").iterdir():
        assert (kit / "local" / policy.name).read_bytes() == policy.read_bytes()
    guide = (kit / "guide" / "README.md").read_text(encoding="utf-8")
    for named in ("st-anna", "fl.consortium.example", "8002"):
        assert named not in guide
    assert "tar -xf maria-hilf.tar" in guide
    assert f"SERVER={HOST}" in guide
    assert f"TCP {PORT}" in guide
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (kit / "guide").glob("*.md"))
    named = set(re.findall(r"(?<![\w/.*-])(?:local|docker|startup|software|guide)/\w[\w.-]*\w", pages))
    assert len(named) > 15
    assert {file for file in named if not (kit / file).exists()} == NOT_THERE
    linked = links(kit)
    assert linked["README.md"] == {
        "CLUSTERS.md",
        "DATA_CARD.md",
        "DATA_FLOW.md",
        "ENCRYPTION.md",
        "PRIVACY.md",
        "RUNBOOK.md",
        "own-data.md",
        "security.md",
    }
    assert "README.md" in linked["security.md"], "the site's guide, by its name in the kit"
    assert (kit / "docker" / "gpu.yml").is_file()
    commands = "\n".join(re.findall(r"^ *```sh\n(.*?)^ *```", guide, re.DOTALL | re.MULTILINE))
    assert "provisioning/" not in commands
    for file in re.findall(r"-f (\S+)", commands):
        assert (kit / file).is_file(), file
    service = yaml.safe_load((kit / "docker" / "site.yml").read_text(encoding="utf-8"))["services"]["site"]
    assert (kit / "docker" / service["env_file"]).is_file()
    assert (kit / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_gate_of_a_kit_passes_to_the_consortiums_port(copied: Path, tmp_path: Path) -> None:
    kit = unpacked(make(copied / "maria-hilf", PROVISIONING, tmp_path / "send"), tmp_path / "hospital")
    listens, connects = yaml.safe_load((kit / "docker" / "site.yml").read_text())["services"]["gate"]["command"]
    assert listens.startswith(f"TCP4-LISTEN:{PORT},")
    assert re.fullmatch(rf"TCP4:\$\{{SERVER\}}:{PORT},keepalive", connects)


def test_the_server_has_its_policies(copied: Path, tmp_path: Path) -> None:
    made = make(copied / HOST, PROVISIONING, tmp_path / "send")
    assert (made.role, made.name) == ("server", HOST)
    kit = unpacked(made, tmp_path / "server")
    for name in ("resources.json", "authorization.json"):
        assert (kit / "local" / name).read_bytes() == (PROVISIONING / "server" / name).read_bytes()
    assert (kit / "local" / "site.env").is_file()
    assert {"README.md", "RUNBOOK.md"} <= links(kit)["LEAD.md"]
    ports = yaml.safe_load((kit / "docker" / "server.yml").read_text())["services"]["server"]["ports"]
    assert ports == [f"{PORT}:{PORT}"]


def test_a_policy_that_the_lead_altered_stays(copied: Path, tmp_path: Path) -> None:
    own = copied / "maria-hilf" / "local" / "fedvlp.json"
    own.write_text(json.dumps({"version": 1}))
    kit = unpacked(make(copied / "maria-hilf", PROVISIONING, tmp_path / "send"), tmp_path / "hospital")
    assert json.loads((kit / "local" / "fedvlp.json").read_text()) == {"version": 1}


def test_a_policy_that_was_corrected_after_the_first_kit_is_not_left_out_in_silence(
    copied: Path, tmp_path: Path
) -> None:
    """The first call put the old one into the kit, where it stays as one of the lead's own would: it is named."""
    provisioning = Path(shutil.copytree(PROVISIONING, tmp_path / "provisioning"))
    shutil.copytree(PROVISIONING.parent / "docs", tmp_path / "docs")
    site = copied / "maria-hilf"
    assert make(site, provisioning, tmp_path / "first").differing == ()
    resources = provisioning / "site" / "resources.json"
    resources.write_text(resources.read_text().replace("fedvlp.methods.FedAvg", "fedvlp.methods.FedProx"))
    words = ["kit", str(site), "--out", str(tmp_path / "second"), "--provisioning", str(provisioning)]
    said = CliRunner().invoke(app, words).output
    assert "kept local/resources.json of the kit, which differs from provisioning/site/resources.json" in said
    assert said.count("kept") == 1, "the other policies are the same"
    (site / "local" / "resources.json").unlink()
    made = make(site, provisioning, tmp_path / "third")
    assert made.differing == ()
    assert (unpacked(made, tmp_path / "hospital") / "local" / "resources.json").read_bytes() == resources.read_bytes()


def test_what_is_refused(copied: Path, tmp_path: Path) -> None:
    """Nothing is written then; no archive replaces one that was sent."""
    out = tmp_path / "send"
    with pytest.raises(KitError, match=r"neither startup/fed_client\.json nor"):
        make(copied / "admin@consortium.example", PROVISIONING, out)
    with pytest.raises(KitError, match="give the folder provisioning/"):
        make(copied / "maria-hilf", tmp_path, out)
    assert not out.exists()
    make(copied / "maria-hilf", PROVISIONING, out)
    with pytest.raises(KitError, match=r"maria-hilf\.tar is there already"):
        make(copied / "maria-hilf", PROVISIONING, out)


@pytest.mark.parametrize("what", ["altered", "unsigned", "none", "no server"])
def test_no_kit_with_other_software_is_sent(what: str, copied: Path, tmp_path: Path) -> None:
    kit = copied / "maria-hilf"
    if what == "altered":
        next((kit / "software").glob("*.whl")).write_bytes(b"")
    elif what == "unsigned":
        (kit / "software" / "SHA256SUMS.sig").write_bytes(b"x" * 256)
    elif what == "none":
        shutil.rmtree(kit / "software")
    else:
        (kit / "startup" / "fed_client.json").write_text("{}")
    with pytest.raises((KitError, SoftwareError)):
        make(kit, PROVISIONING, tmp_path / "send")
    assert not (tmp_path / "send").exists()


def test_the_command(copied: Path, tmp_path: Path) -> None:
    words = ["kit", str(copied / "maria-hilf"), "--out", str(tmp_path / "send"), "--provisioning", str(PROVISIONING)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    said = done.output.split()
    assert said[:4] == ["site", "maria-hilf", "reaches", f"{HOST}:{PORT}"]
    assert hashlib.sha256((tmp_path / "send" / "maria-hilf.tar").read_bytes()).hexdigest() in said
