"""A real consortium on this machine's loopback: provisioned kits, mutual TLS, FLARE's own start scripts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from nvflare.fuel.flare_api.flare_api import Session

from fedvlp.flare.job_status import ResubmitError, session

FEW = {"least_records": 16, "least_per_figure": 2}
"""Limits of the sites of tests whose jobs take a few steps; those of test_provisioned.py have the shipped ones."""
BIN = Path(sys.executable).parent
POLICIES = Path(__file__).parents[2] / "provisioning"
LEAD = "lead@lead.org"
PROJECT = """api_version: 3
name: vlp
participants:
  - {{name: localhost, type: server, org: lead, fed_learn_port: {port}, admin_port: {admin}}}
{sites}
  - {{name: {lead}, type: admin, org: lead, role: lead}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  - {{path: nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config}}}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


def until(condition: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
    """What ``condition`` returns, as soon as it is true; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.25)  # a look at all processes takes 10 ms
    raise AssertionError(f"not within {seconds} s: {what}")


def processes(*words: str) -> list[psutil.Process]:
    """The running processes whose command line or working folder holds every word, e.g. a folder of this test."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        text = " ".join([*(process.info["cmdline"] or ()), process.info["cwd"] or ""])
        if process.info["status"] != psutil.STATUS_ZOMBIE and all(word in text for word in words):
            found.append(process)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connected(here: Consortium, since: float = 0.0) -> bool:
    """Whether the server answers and has heard of all sites after the time ``since``."""
    try:
        with session(here.lead) as opened:
            heard = [client.last_connect_time for client in opened.get_system_info().client_info]
            return len(heard) == len(here.sites) and min(heard) > since
    except ResubmitError:
        return False


def ended(opened: Session, job_id: str) -> str:
    """How FLARE says that the job ended."""
    return until(lambda: (s := opened.get_job_status(job_id)).startswith("FINISHED") and s, "the job has ended")


class Consortium:
    """A context manager: provisions and starts a server and sites in ``folder``; ends every process it started."""

    def __init__(
        self, folder: Path, sites: tuple[str, ...] = ("site-1", "site-2"), project: str = PROJECT
    ) -> None:  # fmt: skip
        self.folder, self.sites, self.project = folder, sites, project
        self.kits = folder / "ws" / "vlp" / "prod_00"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Consortium:
        self.folder.mkdir(parents=True)
        entries = "\n".join(f"  - {{name: {site}, type: client, org: hospital}}" for site in self.sites)
        text = self.project.format(port=free_port(), admin=free_port(), sites=entries, lead=LEAD)
        (self.folder / "project.yml").write_text(text)
        command = [BIN / "nvflare", "provision", "-p", "project.yml", "-w", "ws", "--force", "-s"]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=300)
        self._configure()
        for name in ("localhost", *self.sites):
            self.start(name)
        return self

    def _configure(self) -> None:
        """The shipped rules for jobs, as a hospital copies them; the job store lies in this test's folder."""
        for name in ("localhost", *self.sites):
            local = self.kits / name / "local"
            resources = json.loads((local / "resources.json.default").read_text())
            policies = POLICIES / ("server" if name == "localhost" else "site")
            shipped = json.loads((policies / "resources.json").read_text())
            rules = ("class_allow_list", "app_validator", "allow_log_streaming")
            resources |= {rule: shipped[rule] for rule in rules if rule in shipped}
            for component in resources["components"]:
                if component["id"] == "job_manager":
                    component["args"]["uri_root"] = str(self.folder / "jobs")
            if "snapshot_persistor" in resources:
                resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(self.folder / "snapshots")
            (local / "resources.json").write_text(json.dumps(resources))
            (local / "fedvlp.json").write_text(json.dumps({"envelope": FEW}))

    def start(self, name: str) -> None:
        """Runs the start script of a kit: a watchdog that restarts FLARE when it dies."""
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environment.pop("FEDVLP_HOME", None)
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        script = ["bash", str(self.kits / name / "startup" / "sub_start.sh")]
        self._daemons.append(
            subprocess.Popen(script, env=environment, stdout=log, stderr=log, start_new_session=True)
        )  # fmt: skip

    def parent(self, name: str) -> psutil.Process:
        """The FLARE process that the watchdog of ``name`` keeps alive."""
        module = "server_train" if name == "localhost" else "client_train"
        return until(lambda: processes(str(self.kits / name), module), f"{name} runs")[0]

    def children(self, site: str) -> list[psutil.Process]:
        """The processes in which this site's tasks are answered; other tests have sites of that name, too."""
        kit = str(self.kits / site)
        return [*processes("fedvlp.flare.relay", kit), *processes("fedvlp.flare.child", kit)]

    @property
    def lead(self) -> Path:
        """The startup kit of the lead."""
        return self.kits / LEAD

    def runs(self, name: str = "localhost") -> Path:
        return self.kits / name / "runs"

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            for log in sorted(self.folder.glob("*.log")):
                print(f"--- the end of {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        for daemon in self._daemons:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        for process in processes(str(self.folder)):
            process.kill()
        until(lambda: not processes(str(self.folder)), "all processes have ended", 20)
