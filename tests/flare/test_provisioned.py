"""provisioning/ as hospitals use it, on loopback: project.yml, the site policies, a lead, a member; start to shutdown.

One start of the system serves all tests, in their order; the last one shuts it down.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from support.counting import KEY, people, traces
from support.provisioned import BIN, Consortium, free_port, processes, until

from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.deploy.site_config import NamedData
from fedvlp.flare.jobs import write_job, write_overlap_job
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder

pytestmark = pytest.mark.slow(seconds=200)

PROVISIONING = Path(__file__).parents[2] / "provisioning"
SITES = ("northgate", "st-anna")
LEAD, MEMBER, ADMIN = (f"{user}@consortium.example" for user in ("lead", "member", "admin"))


class Hospitals(Consortium):
    """Two of the five hospitals with a table of films each; only names, ports and folders are moved to this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SITES)
        self.port = free_port()
        self.preflight: subprocess.CompletedProcess[str]
        self.kits = folder / "ws" / "fedvlp" / "prod_00"

    def __enter__(self) -> Hospitals:
        self.folder.mkdir(parents=True)
        self.provision("ws", SITES)
        self._server_policies()
        for seed, site in enumerate(SITES):
            self._site_policies(site)
            write(SyntheticCohort(sites=1, size=240, image_size=72, seed=seed), self.kits / site / "data" / "cxr")
        self.start("localhost")
        until(self._listening, "the server listens")
        # before the site runs: the check joins with the site's kit, and a site that has joined would be put out
        self.preflight = run(self, "nvflare", "preflight-check", "-p", str(self.kits / "st-anna"))
        for site in SITES:
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
        project["participants"] = [
            entry for entry in project["participants"] if entry["type"] != "client" or entry["name"] in sites
        ]
        file = self.folder / f"{workspace}.yml"
        file.write_text(yaml.safe_dump(project))
        command = [BIN / "nvflare", "provision", "-p", file, "-w", workspace, "--force", "-s"]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=120)

    def _server_policies(self) -> None:
        """Of the server only resources.json: it lets custom code pass, so that the sites' refusal is what is seen."""
        text = (PROVISIONING / "server" / "resources.json").read_text()
        assert "/var/lib/fedvlp" in text
        target = self.kits / "localhost" / "local" / "resources.json"
        target.write_text(text.replace("/var/lib/fedvlp", str(self.folder / "store")))

    def _site_policies(self, site: str) -> None:
        """provisioning/site into local/, for a machine without a GPU."""
        local = self.kits / site / "local"
        for file in (PROVISIONING / "site").iterdir():
            shutil.copy(file, local)
        resources = json.loads((local / "resources.json").read_text())
        resources["components"][0]["args"] |= {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0}
        (local / "resources.json").write_text(json.dumps(resources))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    with Hospitals(tmp_path_factory.mktemp("hospitals") / "consortium") as hospitals:
        until(lambda: joined(hospitals) == set(SITES), "both sites have joined")
        yield hospitals


def opened(here: Hospitals, user: str = ADMIN) -> Session:
    return new_secure_session(user, str(here.kits / user), timeout=20)


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
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def small() -> Experiment:
    """FedAvg of one round over the data set that each site calls "pretrain"."""
    experiment = presets.get("fedavg")
    settings = {"rounds.rounds": 1, "method.local_steps": 4, "training.batch_size": 16}  # 64 records
    for key, value in settings.items():
        experiment = override(experiment, key, str(value))
    return replace(experiment, data=NamedData("pretrain"))


def exported(here: Hospitals, name: str, **packing: Any) -> Path:
    """A job of it, as real sites run it."""
    return write_job(small(), here.folder / name, sites=SITES, **{"custom": False, "child": True, **packing})


def submitted(here: Hospitals, job: Path) -> tuple[str, dict[str, Any]]:
    """The lead's job: its id and how it ended."""
    session = opened(here, LEAD)
    try:
        job_id = session.submit_job(str(job))
        _, meta = session.monitor_job_and_return_job_meta(job_id, 120, 1)
        assert meta is not None, "the job did not end"
        return job_id, meta
    finally:
        session.close()


def test_preflight_and_doctor_find_the_site_ready(here: Hospitals) -> None:
    done = here.preflight
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert "FAILED" not in done.stdout
    done = run(here, "fedvlp", "doctor", "--site", str(here.kits / "st-anna"), NVFLARE_SECURE_LOGGING="true")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "ok    site: st-anna", "ok    jobs with their own code: refused", "ok    secure logging: on",
        "ok    envelope: jobs may run any experiment; an update rests on at least 64 distinct records",
        "ok    data set pretrain: rows 240, used 8", "ok    certificate: issued to st-anna",
        "ok    server is the consortium's: localhost, TLSv1.3", "ok    clock:",
    ):  # fmt: skip
        assert line in done.stdout, done.stdout


def test_the_lead_submits_monitors_and_takes_the_model_home(here: Hospitals) -> None:
    job = exported(here, "fedavg")
    done = run(here, "nvflare", "job", "submit", "-j", str(job), user=LEAD)
    assert done.returncode == 0, done.stdout + done.stderr
    job_id = re.findall(r"job_id: (\S+)", done.stdout)[0]
    done = run(here, "nvflare", "job", "monitor", job_id, "--interval", "10", user=LEAD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FINISHED:COMPLETED" in done.stdout
    done = run(here, "nvflare", "job", "download", job_id, "-o", "home", user=LEAD)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(here.folder / "home" / job_id / "workspace" / "fedvlp")
    assert json.loads((folder.path / "run_status.json").read_text())["status"] == "finished"
    for record in folder.history():
        assert sorted(record["sites"]) == sorted(SITES), "every site answered in every phase, filters and all"
    assert "loss/contrastive" in folder.history()[0]["sites"]["st-anna"]
    assert any("val/mean/r1" in record["sites"]["st-anna"] for record in folder.history())
    assert folder.model.exists()
    assert {"st-anna", "northgate"} <= {entry.name for entry in (folder.path / "tb").iterdir()}
    done = run(here, "fedvlp", "report", str(folder.path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"fedavg .*\d", done.stdout)


def test_a_member_may_not_submit(here: Hospitals) -> None:
    done = run(here, "nvflare", "job", "submit", "-j", str(exported(here, "fedavg")), user=MEMBER)
    assert done.returncode != 0
    assert "not authorized" in (done.stdout + done.stderr).lower()
    session = opened(here)
    try:
        assert all(job["submitter_name"] != MEMBER for job in session.list_jobs(detailed=True))
    finally:
        session.close()


def test_a_site_refuses_a_job_with_custom_code(here: Hospitals) -> None:
    _, meta = submitted(here, exported(here, "byoc", custom=True))
    detail = " ".join(meta["job_deploy_detail"])
    for site in SITES:
        assert f"{site}: NVFLARE_ERROR: BYOC not permitted" in detail, meta


def hostile(here: Hospitals, name: str, side: str, edit: Callable[[dict[str, Any]], None]) -> Path:
    """An honest job, one of whose configurations is changed."""
    job = exported(here, name)
    file = job / "app" / "config" / f"config_fed_{side}.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))
    return job


CLIENT_API = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"
MOVES = "fedvlp.core.checkpoint.replace_durably"


@pytest.mark.parametrize("attack", ["a program", "a script", "a function"])
def test_a_site_refuses_a_class_that_is_not_on_its_list(attack: str, here: Hospitals) -> None:
    """Without a process of the job, and with a line in its audit log: who sent it, which job, which class."""
    canary, key = here.folder / "canary", here.kits / "st-anna" / "startup" / "client.key"
    paths = {"a program": CLIENT_API, "a script": CLIENT_API, "a function": MOVES}
    settings = {
        "a program": {"execution_mode": "external_process", "command": ["touch", str(canary)], "launch_once": True},
        "a script": {"execution_mode": "in_process", "task_script_path": str(canary)},
        "a function": {"temporary": str(key), "path": str(canary)},
    }
    part = {"path": paths[attack], "args": settings[attack]}

    def edit(config: dict[str, Any]) -> None:
        if attack == "a function":
            config["components"].insert(0, {"id": "x", **part})
        else:
            config["executors"][0]["executor"] = part

    job_id, meta = submitted(here, hostile(here, attack.replace(" ", "-"), "client", edit))
    assert meta["status"] != "FINISHED:COMPLETED"
    detail = " ".join(meta["job_deploy_detail"])
    for site in SITES:
        assert f"{site}: NVFLARE_ERROR: class {paths[attack]!r} is not on this site's list of classes" in detail
        lines = [line for line in (here.kits / site / "audit.log").read_text().splitlines() if job_id in line]
        refusal = next(line for line in lines if "job_refused" in line)
        assert f"[U:{LEAD}]" in refusal
        assert paths[attack] in refusal
        assert not (here.kits / site / job_id).exists(), "no process of it began"
    assert not canary.exists()
    assert key.exists()


def test_a_site_sends_no_update_of_two_records(here: Hospitals) -> None:
    """With the policies as shipped; the training child and the filters of a site are real."""
    experiment = replace(small(), method=replace(presets.get("fedavg").method, local_steps=1))
    job = write_job(
        override(experiment, "training.batch_size", "2"), here.folder / "few", sites=SITES, custom=False, child=True
    )
    _, meta = submitted(here, job)
    assert meta["status"] != "FINISHED:COMPLETED"
    newest = RunFolder(max((here.kits / "localhost" / "runs" / "fedavg").iterdir()))
    status = json.loads((newest.path / "run_status.json").read_text())
    assert "EnvelopeError: the update rests on 2 distinct records" in status["reason"]
    assert newest.history() == []


def test_the_server_refuses_a_class_that_is_not_on_its_list(here: Hospitals) -> None:
    canary = here.folder / "canary"
    part = {"id": "x", "path": "fedvlp.core.checkpoint.save_text", "args": {"path": str(canary), "text": "x"}}
    job_id, meta = submitted(here, hostile(here, "server", "server", lambda c: c["components"].insert(0, part)))
    assert meta["status"] != "FINISHED:COMPLETED"
    assert "class 'fedvlp.core.checkpoint.save_text' is not on this site's list" in " ".join(meta["job_deploy_detail"])
    log = (here.kits / "localhost" / "audit.log").read_text().splitlines()
    assert any(job_id in line and "job_refused" in line and LEAD in line for line in log)
    assert not canary.exists()


def test_shared_patients_are_counted_where_both_sites_let_them_be(here: Hospitals) -> None:
    """First one site has not opted in: it is named, and nothing is counted. Then both have, and 12 are shared."""
    patients = {"northgate": people(range(70)), "st-anna": people(range(58, 133))}
    for site, own in patients.items():
        (here.kits / site / "data" / "registry.csv").write_text("\n".join(["patient_id", *own]))
        (here.kits / site / "local" / "overlap.key").write_text(KEY)
        (here.kits / site / "local" / "overlap.key").chmod(0o600)
    job = write_overlap_job("patient-overlap", NamedData("registry"), SITES, here.folder / "overlap", custom=False)
    lets_be_counted(here, "northgate")
    _, meta = submitted(here, job)
    assert meta["status"] != "FINISHED:COMPLETED"
    lets_be_counted(here, "st-anna")
    job_id, meta = submitted(here, job)
    assert meta["status"] == "FINISHED:COMPLETED", meta
    done = run(here, "nvflare", "job", "download", job_id, "-o", "counted", user=LEAD)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(here, "fedvlp", "jobs", "overlap", f"counted/{job_id}")
    assert done.stdout.splitlines() == ["northgate and st-anna share 12 of 70 / 75 patients"]
    for site in SITES:
        lines = [line for line in (here.kits / site / "audit.log").read_text().splitlines() if job_id in line]
        assert any("overlap_asked" in line and f"[U:{LEAD}]" in line for line in lines)
    refused = (here.kits / "localhost" / "log.txt").read_text(errors="replace")
    refused += "".join(path.read_text() for path in (here.kits / "st-anna").glob("*/audit.log"))
    assert "refused: OverlapError: this site lets no patients be counted" in refused
    servers = [here.kits / "localhost", here.folder / "store", here.folder / "counted", here.folder / "localhost.log"]
    files = [file for root in servers for file in (root, *root.rglob("*")) if file.is_file()]
    content = b"".join(file.read_bytes() for file in files)
    assert b"patient-overlap" in content, "the search saw the job"
    assert [trace for trace in traces({*patients["northgate"], *patients["st-anna"]}) if trace in content] == []


def lets_be_counted(here: Hospitals, site: str) -> None:
    """The engineer's entries in the site's own file."""
    file = here.kits / site / "local" / "fedvlp.json"
    content = json.loads(file.read_text())
    content["data"]["registry"] = {"source": "table", "path": "registry.csv"}
    content["overlap"] = {"data": ["registry"], "sites": [other for other in SITES if other != site]}
    file.write_text(json.dumps(content))


def test_a_site_of_another_root_cannot_join(here: Hospitals) -> None:
    """A kit for lakeview with the same project, names and port, but of somebody else's certificate authority."""
    here.provision("forged", ("lakeview",))
    home, here.kits = here.kits, here.folder / "forged" / "fedvlp" / "prod_00"
    try:
        here.start("lakeview")
        log = here.folder / "lakeview.log"
        until(lambda: "CERTIFICATE_VERIFY_FAILED" in log.read_text(), "the forged site is turned away")
    finally:
        here.kits = home
    time.sleep(2)
    assert joined(here) == set(SITES)


def test_shutdown_leaves_no_process(here: Hospitals) -> None:
    done = run(here, "nvflare", "system", "shutdown", "all", "--force", user=ADMIN)
    assert done.returncode == 0, done.stdout + done.stderr
    until(lambda: not processes(str(here.kits)), "every process of the consortium has ended", 60)
