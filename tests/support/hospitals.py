"""provisioning/ as hospitals use it, on loopback: its project.yml and policies, three hospitals, a lead, a member."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from nvflare.fuel.flare_api.api_spec import NoConnection
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.run.folder import RunFolder
from support import release
from support.provisioned import BIN, Consortium, free_port, until

PROVISIONING = Path(__file__).parents[2] / "provisioning"
SITES = ("site-1", "site-2", "site-3")
"""As committed jobs call them; the public set of some of these belongs to records that have a site."""
LEAD, MEMBER, ADMIN = (f"{user}@consortium.example" for user in ("lead", "member", "admin"))

ENCRYPTION = {
    "path": "nvflare.lighter.impl.he.HEBuilder",
    "args": {"poly_modulus_degree": 4096, "coeff_mod_bit_sizes": [60, 49], "scale_bits": 30},
}
"""The builder that ENCRYPTION.md adds for sites that encrypt."""

AT_ONCE = 3
"""Jobs that the server runs at a time: much of a small job is FLARE's waiting."""


class Hospitals(Consortium):
    """Three of the five hospitals with a table of images each; only names, ports and folders are this machine's."""

    def __init__(self, folder: Path, sites: tuple[str, ...] = SITES) -> None:
        super().__init__(folder, sites)
        self.port = free_port()
        self.preflight: subprocess.CompletedProcess[str]
        self.kits = folder / "ws" / "fedvlp" / "prod_00"

    def __enter__(self) -> Hospitals:
        self.folder.mkdir(parents=True)
        self.provision("ws", self.sites)
        self._server_policies()
        for seed, site in enumerate(self.sites):
            self._site_policies(site)
            write(SyntheticCohort(sites=1, size=240, image_size=72, seed=seed), self.kits / site / "data" / "cxr")
        self.start("localhost")
        until(self._listening, "the server listens")
        # before the site runs: the check joins with the site's kit, and a site that has joined would be put out
        self.preflight = run(self, "nvflare", "preflight-check", "-p", str(self.kits / self.sites[0]))
        for site in self.sites:
            self.start(site)
        return self

    def _listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def provision(self, workspace: str, sites: tuple[str, ...]) -> None:
        project = yaml.safe_load((PROVISIONING / "project.yml").read_text())
        server = project["participants"][0]
        server["name"] = "localhost"  # FLARE binds a server of that name to loopback
        server["fed_learn_port"] = server["admin_port"] = self.port
        clients = [entry for entry in project["participants"] if entry["type"] == "client"]
        others = [entry for entry in project["participants"] if entry["type"] != "client"]
        called = [{**entry, "name": site} for entry, site in zip(clients, sites, strict=False)]
        project["participants"] = [*others, *called]
        if find_spec("tenseal"):
            project["builders"].insert(-1, ENCRYPTION)  # before the one that signs
        software = self.folder / "build" / "release"  # as project.yml says, from where provisioning runs
        if not software.exists():
            release.written(software)
        file = self.folder / f"{workspace}.yml"
        file.write_text(yaml.safe_dump(project))
        command = [BIN / "nvflare", "provision", "-p", file, "-w", workspace, "--force", "-s"]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=300)

    def _server_policies(self) -> None:
        """Of the server only resources.json: it lets custom code pass, so that the sites' refusal is what is seen."""
        text = (PROVISIONING / "server" / "resources.json").read_text()
        assert "/var/lib/fedvlp" in text
        resources = json.loads(text.replace("/var/lib/fedvlp", str(self.folder / "store")))
        scheduler = next(part for part in resources["components"] if part["id"] == "job_scheduler")
        scheduler["args"]["max_jobs"] = AT_ONCE
        (self.kits / "localhost" / "local" / "resources.json").write_text(json.dumps(resources))

    def _site_policies(self, site: str) -> None:
        """provisioning/site into local/, as it is shipped: for any machine."""
        local = self.kits / site / "local"
        for file in (PROVISIONING / "site").iterdir():
            shutil.copy(file, local)

    def adopt(self, name: str, **changes: Any) -> None:
        """Every site copies a policy over its privacy.json; ``changes`` are arguments of its first result filter.

        A job's process reads the file when it begins.
        """
        policy = json.loads((PROVISIONING / "site" / name).read_text())
        policy["scopes"][0]["task_result_filters"][0]["args"] |= changes
        for site in self.sites:
            (self.kits / site / "local" / "privacy.json").write_text(json.dumps(policy))

    def newest(self, preset: str) -> RunFolder:
        """The server's last run of this name."""
        return RunFolder(max(entry for entry in (self.runs() / preset).iterdir() if entry.is_dir()))


def opened(here: Hospitals, user: str = ADMIN) -> Session:
    return new_secure_session(user, str(here.kits / user), timeout=60)


def joined(here: Hospitals) -> set[str]:
    """Names of the sites that the server knows."""
    try:
        session = opened(here)
    except Exception:  # the server is not up yet
        return set()
    try:
        return {client.name for client in session.get_system_info().client_info}
    finally:
        session.close()


def run(here: Hospitals, *command: str, user: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A command as in provisioning/LEAD.md, in the name of ``user``."""
    kit = ["--startup-kit", str(here.kits / user)] if user else []
    own = {"HOME": str(here.folder), "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(
        [BIN / command[0], *command[1:], *kit], cwd=here.folder, env={**os.environ, **own, **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def submitted(here: Hospitals, jobs: Mapping[str, Path]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The lead's jobs by a name each, all submitted before the first one is waited for: id, and how it ended."""
    session = opened(here, LEAD)
    try:
        ids = {name: session.submit_job(str(job)) for name, job in jobs.items()}
        return {
            name: (job_id, until(partial(_outcome, session, job_id), f"{name} has ended", 800))
            for name, job_id in ids.items()
        }
    finally:
        session.close()


def _outcome(session: Session, job_id: str) -> dict[str, Any]:
    """How a job ended; empty until FLARE has written all of it: first that it ended, then what each site said."""
    time.sleep(0.5)
    try:
        meta: dict[str, Any] = session.get_job_meta(job_id)
    except NoConnection:  # a busy server
        return {}
    return meta if meta["status"].startswith("FINISHED") and "job_deploy_detail" in meta else {}
