"""A provisioned system of three hospitals: what an honest lead gets done under each policy, a hostile one does not.

One start of the system serves all tests, in their order; the last one shuts it down. The sites begin with the policies
as they are shipped; the policies for noise and for encryption are copied over later, as PRIVACY.md says.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.fuel.flare_api.api_spec import AuthorizationError, JobNotFound, JobNotRunning
from support.hospitals import ADMIN, LEAD, MEMBER, SITES, Hospitals, joined, opened, run, submitted
from support.provisioned import processes, until
from support.short_jobs import committed
from typer.testing import CliRunner

from fedvlp.cli import app as cli
from fedvlp.core.checkpoint import load_tensors
from fedvlp.core.server_state import Server
from fedvlp.deploy.named_data import NamedData
from fedvlp.flare.jobs import write_job
from fedvlp.flare.privacy_budget import epsilon
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

pytestmark = pytest.mark.slow(seconds=330)

COMPLETED = "FINISHED:COMPLETED"
NOISE, DELTA = 8.0, 1e-5  # of the shipped privacy-dp.json
PAIR = SITES[:2]
"""Sites of a job for which a third one would prove nothing."""
TWO = {"data__sites": 2, "data__size": 400, "partition__sites": 2, "extra__sites": 2}
"""Settings of such a job."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    with Hospitals(tmp_path_factory.mktemp("hospitals") / "consortium") as hospitals:
        until(lambda: joined(hospitals) == set(SITES), "all sites have joined")
        yield hospitals


# Honest jobs


def small() -> Experiment:
    """FedAvg of one round over the data set that each site calls "pretrain"."""
    return replace(committed("fedavg", **TWO), data=NamedData("pretrain"))


def exported(here: Hospitals, name: str, **packing: Any) -> Path:
    """A job of it, as real sites run it."""
    return write_job(small(), here.folder / name, sites=PAIR, **{"custom": False, "child": True, **packing})


def test_preflight_and_doctor_find_the_site_ready(here: Hospitals) -> None:
    done = here.preflight
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert "FAILED" not in done.stdout
    site = str(here.kits / "site-1")
    found = CliRunner().invoke(cli, ["doctor", "--site", site], env={"NVFLARE_SECURE_LOGGING": "true"})
    assert found.exit_code == 0, found.output
    for line in (
        "ok    site: site-1", "ok    jobs with their own code: refused", "ok    secure logging: on",
        "ok    envelope: jobs may run any experiment; an update rests on at least 64 distinct records",
        "ok    data set pretrain: rows 240, used 8", "ok    certificate: issued to site-1",
        "ok    server is the consortium's: localhost, TLSv1.3", "ok    clock:",
    ):  # fmt: skip
        assert line in found.output, found.output


def test_the_lead_submits_monitors_and_takes_the_model_home(here: Hospitals) -> None:
    job = exported(here, "fedavg")
    done = run(here, "nvflare", "job", "submit", "-j", str(job), user=LEAD)
    assert done.returncode == 0, done.stdout + done.stderr
    job_id = re.findall(r"job_id: (\S+)", done.stdout)[0]
    done = run(here, "nvflare", "job", "monitor", job_id, "--interval", "5", user=LEAD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FINISHED:COMPLETED" in done.stdout
    done = run(here, "nvflare", "job", "download", job_id, "-o", "home", user=LEAD)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(here.folder / "home" / job_id / "workspace" / "fedvlp")
    assert json.loads((folder.path / "run_status.json").read_text())["status"] == "finished"
    for record in folder.history():
        assert not record["dropped"], "every site answered in every phase, filters and all"
        assert sorted(record["sites"]) == sorted(PAIR)
    assert "loss/contrastive" in folder.history()[0]["sites"]["site-1"]
    assert any("val/mean/r1" in record["sites"]["site-1"] for record in folder.history())
    trained, begun = load_tensors(folder.model)[0], Assembly(small()).server(PAIR).state
    kept = [name for name, tensor in trained.items() if torch.equal(tensor, begun[name])]
    assert kept == ["text_encoder.words.weight"], "words stay as they came, all else was trained"
    assert {"site-1", "site-2"} <= {entry.name for entry in (folder.path / "tb").iterdir()}
    table = CliRunner().invoke(cli, ["report", str(folder.path)])
    assert table.exit_code == 0, table.output
    assert re.search(r"fedavg .*\d", table.output)


def test_a_member_may_not_submit(here: Hospitals) -> None:
    session = opened(here, MEMBER)
    try:
        with pytest.raises(AuthorizationError, match="authoriz"):
            session.submit_job(str(exported(here, "fedavg")))
    finally:
        session.close()
    session = opened(here)
    try:
        assert all(job["submitter_name"] != MEMBER for job in session.list_jobs(detailed=True))
    finally:
        session.close()


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
SAVES = "fedvlp.core.checkpoint.save_text"


def off_the_list(here: Hospitals) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Attack, class, and arguments that did harm to an early version: write the canary, or move a key.

    The file that the key is moved to has a name that FLARE can take for the path of a class.
    """
    canary, key = str(here.folder / "canary"), str(here.kits / "site-1" / "startup" / "client.key")
    program = {"execution_mode": "external_process", "command": ["touch", canary], "launch_once": True}
    yield "program", CLIENT_API, program
    yield "script", CLIENT_API, {"execution_mode": "in_process", "task_script_path": canary}
    yield "function", MOVES, {"temporary": key, "path": "fedvlp.moved"}


def with_part(attack: str, part: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """The part in the place of the executor; a function as one more component."""

    def edit(config: dict[str, Any]) -> None:
        if attack == "function":
            config["components"].insert(0, {"id": "x", **part})
        else:
            config["executors"][0]["executor"] = part

    return edit


def a_file_at_the_server(here: Hospitals) -> Callable[[dict[str, Any]], None]:
    args = {"path": str(here.folder / "canary"), "text": "x"}
    return lambda config: config["components"].insert(0, {"id": "x", "path": SAVES, "args": args})


@pytest.fixture(scope="module")
def refused(here: Hospitals) -> dict[str, tuple[str, dict[str, Any]]]:
    """What became of hostile jobs, with the policies as shipped: the id of each, and how it ended."""
    jobs = {
        name: hostile(here, name, "client", with_part(name, {"path": path, "args": args}))
        for name, path, args in off_the_list(here)
    }
    jobs["file at the server"] = hostile(here, "server", "server", a_file_at_the_server(here))
    few = override(small(), "training.batch_size", "2")
    jobs["two records"] = write_job(few, here.folder / "few", sites=SITES[:1], custom=False, child=True)
    jobs["own code"] = exported(here, "byoc", custom=True)
    return submitted(here, jobs)


def test_a_site_refuses_a_job_with_custom_code(refused: dict[str, tuple[str, dict[str, Any]]]) -> None:
    _, meta = refused["own code"]
    detail = " ".join(meta["job_deploy_detail"])
    for site in PAIR:
        assert f"{site}: NVFLARE_ERROR: BYOC not permitted" in detail, meta


def test_a_site_refuses_a_class_that_is_not_on_its_list(
    here: Hospitals, refused: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    """Without a process of the job, and with a line in its audit log: who sent it, which job, which class."""
    for name, path, _ in off_the_list(here):
        job_id, meta = refused[name]
        assert meta["status"] != COMPLETED
        detail = " ".join(meta["job_deploy_detail"])
        for site in PAIR:
            assert f"{site}: NVFLARE_ERROR: class {path!r} is not on this site's list of classes" in detail
            lines = [line for line in (here.kits / site / "audit.log").read_text().splitlines() if job_id in line]
            refusal = next(line for line in lines if "job_refused" in line)
            assert f"[U:{LEAD}]" in refusal
            assert path in refusal
            assert not (here.kits / site / job_id).exists(), "no process of it began"
    assert not (here.folder / "canary").exists()
    assert (here.kits / "site-1" / "startup" / "client.key").exists()


def test_a_site_sends_no_update_of_two_records(here: Hospitals, refused: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """The training child and the filters of a site are real."""
    assert refused["two records"][1]["status"] != COMPLETED
    newest = here.newest("fedavg")
    assert "EnvelopeError: the effective sample size of the update is 2 records" in status_of(newest)["reason"]
    assert newest.history() == []


def test_the_server_refuses_a_class_that_is_not_on_its_list(
    here: Hospitals, refused: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    job_id, meta = refused["file at the server"]
    assert meta["status"] != COMPLETED
    assert f"class {SAVES!r} is not on this site's list" in " ".join(meta["job_deploy_detail"])
    log = (here.kits / "localhost" / "audit.log").read_text().splitlines()
    assert any(job_id in line and "job_refused" in line and LEAD in line for line in log)
    assert not (here.folder / "canary").exists()


# The presets of the committed jobs, under each policy


def status_of(folder: RunFolder) -> dict[str, Any]:
    """What the run itself says of its end."""
    status: dict[str, Any] = json.loads((folder.path / "run_status.json").read_text())
    return status


def ended_well(here: Hospitals, experiments: Mapping[str, Experiment], **packing: Any) -> dict[str, RunFolder]:
    """The runs of jobs that ended as they should: every site answered in every phase."""
    jobs = {
        name: write_job(experiment, here.folder / f"honest-{name}", custom=False, **packing)
        for name, experiment in experiments.items()
    }
    folders = {}
    for name, (_, meta) in submitted(here, jobs).items():
        folder = folders[name] = here.newest(name)
        assert meta["status"] == COMPLETED, (name, status_of(folder))
        assert status_of(folder)["status"] == "finished"
        for record in folder.history():
            assert record["dropped"] == {}, name
            assert sorted(record["sites"]) == list(Assembly(experiments[name]).sites()), name
    return folders


def test_what_presets_send_passes_the_shipped_policy(here: Hospitals) -> None:
    """The presets of which nothing like it runs elsewhere with real sites.

    FedAvg's job was the lead's, above, FedProx and Local run below, and FedDRA in the POC. Every committed preset meets
    the policy in test_policies.py, without processes.
    """
    chosen = {name: committed(name, **TWO) for name in ("fedrgb", "pms-fm")}
    chosen["car-mfl"] = committed("car-mfl", **TWO, partition__image_only=1)
    chosen["creamfl"] = committed("creamfl")  # pairs, images and reports, at a site each
    folders = ended_well(here, chosen)
    for name, folder in folders.items():
        assert folder.model.exists(), name
        figures = folder.history()[0]["sites"]["site-1"]
        assert any(figure.startswith("loss/") for figure in figures), name
        assert all(float(f"{value:.3g}") == value for value in figures.values()), "three digits leave"


NOISY: dict[str, Experiment] = {
    name: committed(name, **TWO, model__head_norm="layer", rounds__rounds=rounds)
    for name, rounds in (("fedprox", 3), ("local", 1), ("feddra", 1))
}
"""Jobs for sites that add noise."""


@pytest.fixture(scope="module")
def with_noise(here: Hospitals) -> dict[str, RunFolder]:
    """Their runs, side by side, at sites whose budget has room for two releases."""
    here.adopt("privacy-dp.json", epsilon=epsilon({NOISE: 2}, DELTA) + 1e-6)
    jobs = {
        name: write_job(experiment, here.folder / f"noisy-{name}", custom=False) for name, experiment in NOISY.items()
    }
    ended = submitted(here, jobs)
    assert {name for name, (_, meta) in ended.items() if meta["status"] == COMPLETED} == {"local"}
    return {name: here.newest(name) for name in NOISY}


@pytest.mark.skipif(find_spec("opacus") is None, reason="pip install 'fedvlp[privacy]'")
def test_under_noise_presets_without_exact_figures_run_and_others_are_refused(
    here: Hospitals, with_noise: dict[str, RunFolder]
) -> None:
    for name in ("fedprox", "local"):
        history = with_noise[name].history()
        assert all(record["dropped"] == {} for record in history[:2]), name
        told = {figure for record in history for site in PAIR for figure in record["sites"][site]}
        assert told <= {"privacy/epsilon", "seconds"}, "no figure without noise"
        assert ("privacy/epsilon" in told) == (name != "local"), "Local sends nothing"
    assert status_of(with_noise["local"])["status"] == "finished"
    outcome = status_of(with_noise["feddra"])
    assert outcome["status"] == "stopped"
    assert "PrivacyError: the method sends exact figures of this site's records; take one without" in outcome["reason"]
    assert with_noise["feddra"].history() == []


@pytest.mark.skipif(find_spec("opacus") is None, reason="pip install 'fedvlp[privacy]'")
def test_every_site_adds_noise_tells_epsilon_and_stops_at_its_budget(
    here: Hospitals, with_noise: dict[str, RunFolder]
) -> None:
    """The job has three rounds: the third is refused, the run can go on. Local and FedDRA have used up nothing."""
    folder = with_noise["fedprox"]
    history = folder.history()
    assert len(history) == 2
    for count, record in enumerate(history, start=1):
        for site in PAIR:
            assert record["sites"][site].keys() <= {"privacy/epsilon", "seconds"}, "no figure without noise"
            assert record["sites"][site]["privacy/epsilon"] == pytest.approx(epsilon({NOISE: count}, DELTA), rel=1e-9)
    for site in PAIR:
        ledger = json.loads((here.kits / site / "privacy" / "ledger.json").read_text())
        assert [(entry["data"], entry["noise_multiplier"]) for entry in ledger] == [("pretrain", NOISE)] * 2
    outcome = status_of(folder)
    assert outcome["status"] == "stopped"
    assert "budget" in outcome["reason"]

    plain = Assembly(NOISY["fedprox"]).server(PAIR).state
    server, _ = Server.load(folder.checkpoint)
    moved = torch.cat([(server.state[name] - plain[name]).reshape(-1) for name in plain])
    counts = list(server.samples.values())
    expected = NOISE * math.sqrt(2 * sum(count**2 for count in counts)) / sum(counts)  # two rounds, weights n_k/n
    assert float(moved.std()) == pytest.approx(expected, rel=0.01), "of the mean of two sites' noise"


@pytest.mark.skipif(find_spec("tenseal") is None, reason="pip install 'fedvlp[he]'")
def test_encrypted_sites_keep_the_plain_model_and_the_server_has_none(here: Hospitals, tmp_path: Path) -> None:
    """FedProx, which is averaged as FedAvg is, and whose sites train from the mean that they have decrypted.

    Both are in tests/flare/test_encryption.py, without processes.
    """
    here.adopt("privacy-he.json")
    chosen = {"fedprox": committed("fedprox", **TWO, rounds__rounds=2)}
    for name, folder in ended_well(here, chosen, encrypted=True).items():
        engine = RunFolder.create(tmp_path / "engine", chosen[name])
        simulate(chosen[name], engine)
        plain, _ = load_tensors(engine.model)
        for site in PAIR:
            own = here.runs(site) / name / folder.path.name / "sites" / site / "trained.safetensors"
            mean, _ = load_tensors(own)
            assert mean.keys() == plain.keys()
            for tensor_name, tensor in plain.items():
                torch.testing.assert_close(mean[tensor_name], tensor, rtol=0, atol=1e-4)
        assert not folder.model.exists()


# What the operator is told, who is turned away, and the end


def test_a_site_that_is_killed_is_named_by_console_file_and_command_within_one_phase(here: Hospitals) -> None:
    """And the run's end says since when it was missing, whatever FLARE calls it: failed, here, as a client is dead."""
    here.adopt("privacy.json")
    longer = committed("fedavg", **TWO, rounds__rounds=8, method__local_steps=4)
    job = write_job(replace(longer, data=NamedData("pretrain")), here.folder / "killed", sites=SITES, custom=False)
    config = job / "app" / "config" / "config_fed_server.json"
    content = json.loads(config.read_text())
    content["workflows"][0]["args"]["grace"] = 5
    config.write_text(json.dumps(content))
    lead = opened(here, LEAD)
    try:
        job_id = lead.submit_job(str(job))
        until(lambda: told(lead, job_id).get("round", 0) >= 1, "the second round is complete")
        for process in processes(str(here.kits / SITES[2])):
            process.kill()
        began = told(lead, job_id)["phases_done"]
        seen = until(lambda: (said := told(lead, job_id)).get("dropped") and said, "the site is dropped")
        assert seen["phases_done"] <= began + 2, "the phase in which it was killed, or the next one"
        since = seen["sites"][SITES[2]]["absent_since"]
        assert seen["summary"].endswith(f"without site-3 from round {since}")
        assert status_of(here.newest("fedavg"))["sites"][SITES[2]]["absent_since"] == since
        assert re.search(r"site-3 dropped in round \d, train", str(lead.show_errors(job_id, "server")))  # the last one
        command = ["jobs", "status", job_id, "--kit", str(here.kits / LEAD)]
        shown = CliRunner().invoke(cli, command)
        assert (shown.exit_code, f"without site-3 from round {since}" in shown.output) == (3, True), shown.output
        until(lambda: lead.get_job_status(job_id).startswith("FINISHED"), "the job has ended", 400)
        shown = CliRunner().invoke(cli, command)
        assert shown.exit_code == 3
        assert shown.stdout.startswith(f"completed without site-3 from round {since}\n")
    finally:
        lead.close()
    (here.kits / SITES[2] / "daemon_pid.fl").unlink()  # of a process that is ended, but that nobody has waited for
    here.start(SITES[2])
    until(lambda: joined(here) == set(SITES), "the site is back")


def told(lead: Any, job_id: str) -> dict[str, Any]:
    """What ``show_stats`` says of the run; empty while the job starts."""
    try:
        return dict((lead.show_stats(job_id, "server") or {}).get("server", {}).get("progress") or {})
    except (JobNotRunning, JobNotFound):
        return {}


def test_a_job_of_200_mb_is_refused_at_submission(here: Hospitals) -> None:
    job = exported(here, "large")
    with (job / "app" / "config" / "config_fed_server.json").open("a") as file:
        file.write(" " * 200_000_000)
    lead = opened(here, LEAD)
    try:
        with pytest.raises(Exception, match=r"a file of the job has 200,\d{3},\d{3} bytes; at most 4,194,304 are read"):
            lead.submit_job(str(job))
    finally:
        lead.close()


@pytest.mark.parametrize("kit", ["localhost", SITES[0]])
def test_a_second_process_of_one_kit_ends_at_once(here: Hospitals, kit: str) -> None:
    side = "server" if kit == "localhost" else "client"
    program = [sys.executable, "-m", f"nvflare.private.fed.app.{side}.{side}_train", "-m", str(here.kits / kit)]
    options = ["-s", f"fed_{side}.json", "--set", "secure_train=true", f"uid={kit}", "org=x", "config_folder=config"]
    done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"not started: the kit of {kit} is in use: process {here.parent(kit).pid} on " in done.stdout + done.stderr
    assert joined(here) == set(SITES)


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
    assert joined(here) == set(SITES)


def test_shutdown_leaves_no_process(here: Hospitals) -> None:
    done = run(here, "nvflare", "system", "shutdown", "all", "--force", "--timeout", "240", user=ADMIN)
    assert done.returncode == 0, done.stdout + done.stderr
    until(lambda: not processes(str(here.kits)), "every process of the consortium has ended", 60)
