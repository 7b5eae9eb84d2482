"""Job folders: written from the presets as plain JSON, so that what is committed is exactly what runs.

FLARE's own exporter drops arguments that it cannot find as attributes, copies fragments of installed packages and
writes ``"*"`` filters that never apply; a job folder is three small files, so fedvlp writes them itself.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE

import fedvlp
from fedvlp.core.checkpoint import save_text
from fedvlp.core.json_file import LARGEST_JOB, read_json
from fedvlp.core.types import EVALUATE
from fedvlp.core.validate import require
from fedvlp.deploy.named_data import NamedData, SiteConfigError
from fedvlp.flare.timeouts import Timeouts
from fedvlp.run import plugins
from fedvlp.run.assembly import Assembly, refuse_strangers
from fedvlp.run.config import from_config, to_config
from fedvlp.run.experiment import POOLED, Experiment

COMMITTED = ("fedavg", "fedprox", "local", "feddra", "fedrgb", "creamfl", "pms-fm", "car-mfl")
"""The presets whose job folders are committed under jobs/."""

CONTROLLER = "fedvlp.flare.FederatedController"
ENCRYPTED_CONTROLLER = "fedvlp.flare.EncryptedController"
EXECUTOR = "fedvlp.flare.SiteExecutor"
CHILD_EXECUTOR = "fedvlp.flare.ChildExecutor"

_IN_A_JOB = re.compile(
    r"meta\.json|app/config/config_fed_(server|client)\.json|app/custom/(README\.md|\w+\.py|(fedvlp|__pycache__)/.+)"
)
"""The paths of an exported job's files: its configuration, and the code that it brings."""

NOTE = """This folder marks the job as one that brings its own code (FLARE: BYOC), which lets the simulator and a POC
load fedvlp's classes. Hospitals switch BYOC off, install fedvlp, list its classes by name in local/resources.json and
take a job without this folder: `fedvlp jobs export NAME OUT --installed`.
"""


def folder_of(name: str) -> str:
    """The folder under jobs/ of a preset: its name with "_" for "-", as ``jobs/pms_fm``."""
    return name.replace("-", "_")


def job_files(
    experiment: Experiment,
    *,
    custom: bool = True,
    sites: Sequence[str] = (),
    child: bool = False,
    processes: int = 1,
    timeouts: Timeouts | None = None,
    task_timeout: int = 0,
    encrypted: bool = False,
    gpus: int = 0,
    gpu_memory: float = 0,
) -> dict[str, str]:
    """The files of a job folder, by path. ``sites``: who gets the job, if not the cohort says.

    ``child``: each task trains in a process of its own, as real sites want it, or in so many ``processes`` together;
    ``timeouts``: other than FLARE's own; ``task_timeout``: seconds that a task may take where they do not say, 0: as
    the controller has it.
    ``encrypted``: for sites that encrypt (provisioning/ENCRYPTION.md). Raises ValueError for a method whose
    updates cannot be averaged as ciphertexts.
    ``gpus``, ``gpu_memory``: what each site reserves, the latter in GiB a GPU.
    A job names its sites: with ``@ALL`` the simulator would run two, and a hospital that joins later would be in.
    The file of a plugin goes along as custom code, unless an entry point names it. Raises PluginError where it cannot.
    Weights to start from are named with their checksum. Raises InitialWeightsError where it is not known here,
    SiteConfigError for data that does not say which sites have it or lacks the public set that the method needs, and
    ValueError where ``site_models`` names a site that does not get the job, and for a site of the name ``POOLED``.
    """
    experiment = experiment.pinned()
    _refuse_named_data(experiment)
    if encrypted:
        from fedvlp.flare.encryption import refuse_unencryptable

        refuse_unencryptable(experiment.method)
        experiment = replace(experiment, rounds=experiment.rounds.of_encrypted())
    require(POOLED not in sites, f"no site may be named {POOLED}, which stands for all records in one place; rename it")
    sites = sorted(sites) or Assembly(experiment).sites()
    refuse_strangers(experiment, sites)
    settings = {f.name: to_config(getattr(experiment, f.name)) for f in fields(experiment)}
    meta = {
        "name": experiment.name,
        "resource_spec": _reserved(sites, gpus, gpu_memory),
        "min_clients": _least_sites(experiment, len(sites)),
        "deploy_map": {"app": ["server", *sites]},
    }
    seconds = timeouts.task_timeout if timeouts else task_timeout
    limit = {"task_timeout": seconds} if seconds else {}
    waits = limit | ({"grace": timeouts.grace} if timeouts else {})
    controller = {"path": ENCRYPTED_CONTROLLER if encrypted else CONTROLLER, "args": waits | settings}
    several = {"processes": processes} if child and processes > 1 else {}
    own = limit | several if child else {}
    executor = {"path": CHILD_EXECUTOR if child else EXECUTOR, "args": own | settings}
    if _passes_on(experiment, custom, child):
        executor["args"] = {"settings": settings}
    files: dict[str, Any] = {
        "meta.json": meta,
        "app/config/config_fed_server.json": _server(controller, timeouts),
        "app/config/config_fed_client.json": _client(experiment, executor, timeouts),
    }
    texts = {path: json.dumps(content, indent=2) + "\n" for path, content in files.items()}
    return texts | _code(experiment, custom)


def _reserved(sites: Sequence[str], gpus: int, memory: float) -> dict[str, dict[str, float]]:
    """What each site's GPUResourceManager reserves. Raises ValueError for GPUs without memory, or memory without GPUs.

    FLARE takes the memory off what a GPU has left: at 0 it would give the same GPU to every job.
    """
    require(
        (gpus > 0) == (memory > 0), "--gpus and --gpu-memory belong together: FLARE reserves a GPU by its memory in GiB"
    )
    return {site: {"num_of_gpus": gpus, "mem_per_gpu_in_GiB": memory} for site in sites} if gpus else {}


def _code(experiment: Experiment, custom: bool) -> dict[str, str]:
    """The custom code of a job, by path; none unless ``custom``. Raises PluginError where the job cannot do without."""
    code = {f"app/custom/{plugin.name}.py": plugin.text for plugin in to_bring(experiment)}
    if code and not custom:
        raise plugins.PluginError(
            f"the job needs {', '.join(code)}, which a job for sites that take no code cannot bring; leave --installed "
            f"out, or install the plugin at every site as a package with an entry point in the group {plugins.GROUP}"
        )
    return {"app/custom/README.md": NOTE} | code if custom else {}


def _least_sites(experiment: Experiment, sites: int) -> int:
    """Sites without which FLARE neither begins nor continues the job: the quorum, or as many as a round asks.

    Not the quorum among those that a round asks: the run has the sites that are there when it begins, and with fewer
    than that a round would not draw.
    """
    return min(experiment.rounds.needed(sites), experiment.method.asked(sites))


def _passes_on(experiment: Experiment, custom: bool, child: bool) -> bool:
    """Whether a site's process may do without the experiment's classes: a visit of the simulator passes its task on.

    Where the site itself encodes messages it needs them; a hospital compares the classes of a job with its list when
    FLARE builds them; and it is FLARE that finds a plugin.
    """
    return custom and not child and experiment.wire.plain and not plugins.of(experiment)


def to_bring(experiment: Experiment) -> list[plugins.Plugin]:
    """The plugins whose files the job brings: those that are not installed. Raises PluginError for one in a package."""
    brought = [plugin for plugin in plugins.of(experiment) if not plugin.installed]
    for plugin in brought:
        if plugin.source is None:
            raise plugins.PluginError(
                f"plugin {plugin.name} is in a package, which a job cannot bring; put it into one file, or give the "
                f"package an entry point in the group {plugins.GROUP} and install it at every site"
            )
    return brought


def experiment_of(folder: Path) -> Experiment:
    """The experiment that a job folder asks the sites to run. Raises ValueError for a folder that is no such job."""
    try:
        client = read_json(folder / "app/config/config_fed_client.json", LARGEST_JOB)
        args = client["executors"][0]["executor"]["args"]
        args = args.get("settings", args)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise ValueError(f"{folder} is no job of fedvlp: app/config/config_fed_client.json cannot be read") from None
    names = {f.name for f in fields(Experiment)}
    return Experiment(**{name: from_config(value) for name, value in args.items() if name in names})


def _server(controller: dict[str, Any], timeouts: Timeouts | None) -> dict[str, Any]:
    return {
        "format_version": 2,
        **(timeouts.transfers() if timeouts else {}),
        "server": {"task_request_interval": 0.1},
        "workflows": [{"id": "federation", **controller}],
        "components": [
            {"id": "tensorboard", "path": "fedvlp.flare.TensorBoardReceiver", "args": {}},
            {
                "id": "metrics",
                "path": "nvflare.app_common.widgets.metrics_artifact_writer.MetricsArtifactWriter",
                "args": {},
            },
            {"id": "results", "path": "fedvlp.flare.ResultsInJob", "args": {}},
        ],
        "task_data_filters": [],
        "task_result_filters": [],
    }


def _client(experiment: Experiment, executor: dict[str, Any], timeouts: Timeouts | None) -> dict[str, Any]:
    phases = sorted({p for r in range(experiment.rounds.rounds) for p in experiment.method.phases(r)} | {EVALUATE})
    return {
        "format_version": 2,
        **(timeouts.of_site() if timeouts else {}),
        "executors": [{"tasks": phases, "executor": executor}],
        "components": [
            {"id": "curves", "path": "fedvlp.flare.SiteCurves", "args": {}},
            {
                "id": "to_server",
                "path": "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",
                "args": {"events_to_convert": ["analytix_log_stats"]},
            },
            *([] if experiment.wire.plain else [_wire_end(executor["args"])]),
        ],
        "task_data_filters": _filters(experiment, phases, "DecodeTask"),
        "task_result_filters": _filters(experiment, phases, "EncodeResult"),
    }


def _wire_end(settings: dict[str, Any]) -> dict[str, Any]:
    args = {name: settings[name] for name in ("wire", "method")}
    return {"id": "wire", "path": "fedvlp.flare.WireEnd", "args": args}


def _filters(experiment: Experiment, tasks: list[str], kind: str) -> list[dict[str, Any]]:
    """The filter of the site's end of the wire, for every task by its name: FLARE would never match ``"*"``."""
    if experiment.wire.plain:
        return []
    return [{"tasks": tasks, "filters": [{"path": f"fedvlp.flare.{kind}", "args": {}}]}]


def _refuse_named_data(experiment: Experiment) -> None:
    """Raises SiteConfigError where sites keep the data for themselves, and the experiment does not fit that."""
    data, split = experiment.data, experiment.partition
    if not isinstance(data, NamedData):
        return
    needs = experiment.method.uses_public or split.retrieve
    if needs and not data.public:
        raise SiteConfigError(
            f"{experiment.name} needs a public set that the server and all sites hold; name theirs too: "
            f"--data named:{data.name},public=NAME"
        )
    if data.public and not needs:
        raise SiteConfigError(f"{experiment.name} has no use for a public set; leave public={data.public} out")
    dealt = [name for name in ("image_only", "text_only", "public") if getattr(split, name)]
    if dealt:
        raise SiteConfigError(
            f"partition.{dealt[0]} is for records that are partitioned among sites; these keep their own. Leave it at 0"
        )


def write_job(experiment: Experiment, folder: Path, *, bundled: bool = False, **packing: Any) -> Path:
    """Writes the job into ``folder`` (replaced); ``bundled`` puts the package itself into ``app/custom``.

    ``packing``: as ``job_files`` takes it. Raises FileExistsError when ``folder`` holds anything that is not a job's.
    """
    _write(folder, job_files(experiment, **packing))
    if bundled:
        package = Path(fedvlp.__file__).parent
        target = folder / "app" / "custom" / "fedvlp"
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _write(folder: Path, files: dict[str, str]) -> None:
    _clear(folder)
    for path, text in files.items():
        save_text(folder / path, text)


def _clear(folder: Path) -> None:
    """Empties the folder of an exported job. Raises FileExistsError where it holds a file that no such job has."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not all((folder / name).is_file() for name in ("meta.json", "app/config/config_fed_server.json")):
        raise FileExistsError(
            f"{folder} is not empty and holds no FLARE job (meta.json and app/config/config_fed_server.json); choose "
            "another folder"
        )
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        signature = path.name in (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)  # of a job that was submitted
        if (path.is_symlink() or not path.is_dir()) and not signature and not _IN_A_JOB.fullmatch(name):
            raise FileExistsError(
                f"{folder} holds {name}, which is no file of an exported job and would be lost; move it, or choose "
                "another folder"
            )
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
