"""The containers of a hospital: what they may do, and that a site's reaches the server's port and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import site_network

from fedvlp.deploy.site_doctor import DESCRIPTORS
from fedvlp.flare import job_user

DOCKER = Path(__file__).parents[2] / "provisioning" / "docker"
ROOT = DOCKER.parents[1]
PROJECT = yaml.safe_load((ROOT / "provisioning" / "project.yml").read_text(encoding="utf-8"))
(SERVER,) = [person for person in PROJECT["participants"] if person["type"] == "server"]


def site() -> dict[str, Any]:
    """provisioning/docker/site.yml of a hospital of the consortium."""
    return site_network.interpolated(DOCKER / "site.yml", SERVER=SERVER["name"], KIT="/srv/kit", DATA="/srv/data")


DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def instructions(word: str) -> list[str]:
    """What follows an instruction of the Dockerfile, for each of its kind."""
    return re.findall(rf"^{word} +(.*)$", DOCKERFILE, re.MULTILINE)


SERVICES = {
    f"{name}.yml: {service}": what
    for name in ("site", "server")
    for service, what in yaml.safe_load((DOCKER / f"{name}.yml").read_text(encoding="utf-8"))["services"].items()
}


def test_no_container_has_rights_or_writes_into_its_image() -> None:
    for name in SERVICES:
        service = SERVICES[name]
        assert service["cap_drop"] == ["ALL"]
        assert service["mem_limit"]
        assert service["pids_limit"] > 0
        assert name.endswith("gate") or service["ulimits"]["nofile"] == DESCRIPTORS
        assert "cap_add" not in service
        assert not service.get("privileged")
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["init"], "as process 1 FLARE would not hear that it is to stop"
        assert service.keys().isdisjoint({"pid", "ipc", "userns_mode", "devices"})
        assert service.get("network_mode", "service:jobs") == "service:jobs"
        assert not str(service.get("user", "10001")).startswith(("0", "root"))


def test_a_site_without_a_gpu_can_start() -> None:
    """A reservation that the machine cannot serve would keep the container from starting: it is a file of its own."""
    assert not [name for name, service in site()["services"].items() if "deploy" in service]
    beside = yaml.safe_load((DOCKER / "gpu.yml").read_text(encoding="utf-8"))
    assert beside["services"].keys() == {"site", "jobs"}, "nothing else gets a device"
    for service in beside["services"].values():
        assert service.keys() == {"deploy"}, "nor does it get anything else"


def test_nothing_listens_but_the_server() -> None:
    assert {name for name, service in SERVICES.items() if "ports" in service or "expose" in service} == {
        "server.yml: server"
    }


def test_jobs_alone_read_the_data_and_as_a_user_of_their_own() -> None:
    services = site()["services"]
    modes = {
        name: {volume.split(":")[1]: volume.split(":")[2:] for volume in service.get("volumes", [])}
        for name, service in services.items()
    }
    assert modes == {"site": {"/kit": []}, "jobs": {"/kit": [], "/data": ["ro"]}, "gate": {}}
    user, group = services["jobs"]["user"].split(":")
    assert "user" not in services["site"], "as the image says"
    assert f"groupadd --gid {group} " in DOCKERFILE
    assert f"useradd --uid {user} --gid {group} " in DOCKERFILE
    assert user != group, "the two share the group of the image's user"
    assert services["jobs"]["entrypoint"][1:] == ["-I", "-m", job_user.__name__, "/kit"]
    assert services["site"]["command"][-1].startswith("umask 007; ")


def test_a_sites_only_way_out_is_the_gate() -> None:
    """By the file; the test below shows what such networks do."""
    compose = site()
    assert compose["services"]["jobs"]["networks"] == ["site"]
    assert compose["networks"]["site"]["internal"] is True
    opened = {name for name, network in compose["networks"].items() if not (network or {}).get("internal")}
    assert opened == {"outside"}
    assert set(compose["services"]["gate"]["networks"]) == {"site", "outside"}
    assert compose["services"]["site"]["network_mode"] == "service:jobs", "one network for the two"
    assert compose["services"]["jobs"]["dns"] == ["127.0.0.1"], "names could carry data out"
    port = SERVER["fed_learn_port"]
    assert port == SERVER["admin_port"], "one gate is enough"
    listens, connects = compose["services"]["gate"]["command"]
    assert re.match(rf"TCP4-LISTEN:{port},", listens)
    assert re.match(rf"TCP4:{re.escape(SERVER['name'])}:{port}(,|$)", connects)


SAME: Callable[[Any], None] = lambda compose: None  # noqa: E731
OPENED: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "as it is": (SAME, set()),
    "a network with a route": (
        lambda compose: compose["networks"]["site"].pop("internal"),
        {
            "the server's port, past the gate", "another port of the server", "another machine", "a name server",
            "a service of the host", "a service of the host, on its other network",
        },
    ),
    "the host has an address in it": (
        lambda compose: compose["networks"]["site"].pop("driver_opts"), {"a service of the host"},
    ),
    "the gate passes packets on": (
        lambda compose: compose["services"]["gate"]["sysctls"].pop("net.ipv4.ip_forward"),
        {"another machine, with the gate as router"},
    ),
}  # fmt: skip
"""What is changed in the file: what the site then reaches beside the server's port."""


@pytest.fixture(scope="module")
def reached() -> dict[str, dict[str, bool]]:
    """What a process at a site reaches, for each of OPENED; side by side, since they mostly wait for nobody."""
    if reason := site_network.lacking():
        pytest.skip(reason)
    files = []
    for edit, _ in OPENED.values():
        compose = site()
        edit(compose)
        files.append(compose)
    with ThreadPoolExecutor() as together:
        return dict(zip(OPENED, together.map(site_network.answers, files), strict=True))


@pytest.mark.parametrize("name", OPENED)
def test_a_process_at_a_site_reaches_the_servers_port_and_nothing_else(
    name: str, reached: dict[str, dict[str, bool]]
) -> None:
    """In network namespaces of this machine that are built as the file says, with its gate; each guard is missed."""
    _, beside = OPENED[name]
    found = reached[name]
    assert {what for what, answered in found.items() if answered} == {"the server's port, by its name"} | beside
    assert len(found) == 9


def test_the_base_is_taken_by_its_digest_alone() -> None:
    """``image@`` with nothing behind is no reference to anything: the build ends, whatever the tag."""
    assert instructions("FROM")
    for base in instructions("FROM"):
        assert re.fullmatch(r"\$\{BASE\}@\$\{DIGEST\} AS \w+", base)
    (default,) = [words for words in instructions("ARG") if words.startswith("DIGEST")]
    assert re.fullmatch(r"DIGEST(=sha256:[0-9a-f]{64})?", default)


def test_the_image_asks_one_index_and_takes_what_the_lock_names() -> None:
    installs = [words for words in instructions("RUN") if "pip install" in words]
    assert "extra-index-url" not in DOCKERFILE
    *fetched, own = installs
    assert "-r requirements.txt" in fetched[0]
    for command in fetched:
        assert command.count('--index-url "$INDEX"') == 1
        for words in ("--require-hashes", "--no-deps", "--only-binary :all:", "PIP_CONFIG_FILE=/dev/null"):
            assert words in command
    for words in ("--no-index", "--no-deps", "fedvlp-*.whl"):
        assert words in own, "fedvlp itself is the signed wheel, and nothing is fetched"
    assert not instructions("ADD")


def test_the_container_files_name_what_is_there() -> None:
    """In the kit that is sent: the build sees its signed software and nothing else of it, no key and no policy."""
    copied = [name for line in instructions("COPY") for name in line.split()[:-1]]
    assert copied == ["requirements.txt", "fedvlp-*.whl"]
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert [line for line in allowed if not line.startswith("#")] == ["*", *(f"!{name}" for name in copied)]
    stages = {base.split()[-1] for base in instructions("FROM")}
    for service in SERVICES.values():
        build = service["build"]
        assert (build["context"], build["dockerfile"]) == ("../software", "../docker/Dockerfile")
        assert build["args"].keys() == {"DIGEST"}
        assert build.get("target", "fedvlp") in stages
        assert service.get("env_file", "../local/site.env") == "../local/site.env"
    for name in ("site.yml: site", "server.yml: server"):
        assert SERVICES[name]["restart"] == "on-failure", "what the console shuts down stays down"


def test_the_command_that_a_file_shows_sets_all_that_it_needs() -> None:
    """`sudo` passes on no variable that was exported, and without the digest `FROM python:3.11-slim@` is no image."""
    for name in ["server", "site"]:
        text = (DOCKER / f"{name}.yml").read_text(encoding="utf-8")
        head = " ".join(line.removeprefix("#").removesuffix("\\") for line in text.splitlines() if line.startswith("#"))
        (command,) = re.findall(r"sudo ([^#]*?)docker compose -f (\S+) up", head)
        assert command[1] == f"docker/{name}.yml"
        needed = {found for found, default in re.findall(r"\$\{(\w+)(?::-([^}]*)|[^}]*)\}", text) if not default}
        assert {"KIT", "DIGEST"} <= needed
        assert needed == set(re.findall(r"(\w+)=\S+", command[0]))
