"""Checks a job at a site or the server before any process is started for it: FLARE's ``app_validator``.

FLARE compares the classes of a job with ``class_allow_list`` when the job's process builds them, and writes no audit
line when it refuses. ``JobCheck`` reads the same list when the job arrives, takes every entry for one exact class, and
writes who sent the job, which job it was and what it named. It runs in FLARE's own process of the site, which starts
those of the jobs and never trains: nothing heavy is imported here.

FLARE unpacks and parses a job before it asks ``JobCheck``. ``unfit_archive`` therefore looks at the archive first: the
server's at submission, a site's before it is unpacked (flare/perimeter.py). It leaves FLARE nothing but JSON to parse:
the other formats read more files, addresses and the environment while they are parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from nvflare.apis.app_validation import AppValidator
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.utils.config import ConfigFormat
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE
from nvflare.lighter.utils import verify_folder_signature_and_get_signers

from fedvlp.core import validate
from fedvlp.core.json_file import LARGEST_JOB, read_json

CONFIGS = {"client": "config_fed_client.json", "server": "config_fed_server.json"}
"""What each side builds of a job."""

LIST = "class_allow_list"

WHERE = f"{LIST} in local/resources.json"
"""Which file the site's engineer edits."""

REFUSED = "job_refused"
"""The action of the audit line."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent": {"events_to_convert": ["analytix_log_stats"]},
    "fedvlp.flare.TensorBoardReceiver": {},
}
"""The arguments that a job must give these classes: FLARE also makes events of the lines of a site's log, which may
name files, and these two would carry them to the lead, past every filter of the site."""

CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")
LONGEST = 200  # characters of a class path that is quoted


def named(config: Any) -> Iterator[Any]:
    """What a job's configuration gives as the path of a class, wherever it stands."""
    if isinstance(config, dict):
        yield from (config[key] for key in ("path", "class_path") if key in config)
        for value in config.values():
            yield from named(value)
    elif isinstance(config, list):
        for value in config:
            yield from named(value)


def otherwise_built(config: Any) -> Iterator[str]:
    """The classes of ``ARGUMENTS`` to which a job gives other arguments, wherever they stand."""
    if isinstance(config, dict):
        for path in (config[key] for key in ("path", "class_path") if key in config):
            if isinstance(path, str) and path in ARGUMENTS and config.get("args", {}) != ARGUMENTS[path]:
                yield path
    for value in config.values() if isinstance(config, dict) else config if isinstance(config, list) else ():
        yield from otherwise_built(value)


def without_path(config: dict[str, Any]) -> bool:
    """Whether a job has a component without the path of a class; FLARE would look for a bare name in its packages."""
    built = [*config.get("components", []), *config.get("workflows", [])]
    built += [entry.get("executor") for entry in config.get("executors", [])]
    for chain in ("task_data_filters", "task_result_filters"):
        built += [component for entry in config.get(chain, []) for component in entry.get("filters", [])]
    return any("path" not in component and "class_path" not in component for component in built) or _by_name(config)


def _by_name(value: Any) -> bool:
    """Whether a dictionary anywhere has arguments and a name, and no path."""
    if isinstance(value, list):
        return any(map(_by_name, value))
    if not isinstance(value, dict):
        return False
    named = "name" in value and "args" in value and "path" not in value and "class_path" not in value
    return named or any(map(_by_name, value.values()))


READ = ("meta.json", *CONFIGS.values())
"""The files of a job that FLARE parses."""

FORMATS = tuple(ConfigFormat.config_ext_formats())
"""How the names of files end that FLARE takes for configurations, ".conf" for one."""

LARGEST_ARCHIVE, BLOCK = 64 << 20, 4096
"""Bytes of all files of a job, and those that a file takes however small it is."""


def unfit_archive(archive: bytes | str) -> str:
    """Why a job's archive (or the file with it) is not to be unpacked and parsed; "" for a job as FLARE packs it.

    FLARE compresses none of them, so what they hold is no larger than they are.
    """
    try:
        with ZipFile(BytesIO(archive) if isinstance(archive, bytes) else archive) as job:
            entries = job.infolist()
    except (OSError, ValueError, TypeError, BadZipFile, NotImplementedError):
        return "the job is no archive that can be read"
    if any(entry.compress_type != ZIP_STORED for entry in entries):
        return "the job is compressed; FLARE's own commands submit it as it is"
    largest = max((entry.file_size for entry in entries), default=0)
    if largest > LARGEST_JOB:
        return f"a file of the job has {largest:,} bytes; at most {LARGEST_JOB:,} are read"
    if sum(max(entry.file_size, BLOCK) for entry in entries) > LARGEST_ARCHIVE:
        return f"the job has {len(entries):,} files; all of them may take {LARGEST_ARCHIVE:,} bytes"
    if any(_read_otherwise(entry.filename) for entry in entries):
        return f"the job has another configuration than {', '.join(READ)}; FLARE would read more than it says"
    return ""


def _read_otherwise(file: str) -> bool:
    """Whether FLARE may take a file of a job for a configuration that is none of ``READ``.

    What a ``custom`` folder has beside them is the job's own code, which ``byoc`` is asked for.
    """
    *folders, name = file.split("/")
    own = "custom" in folders and name.partition(".")[0] not in {known.partition(".")[0] for known in READ}
    return name.lower().endswith(FORMATS) and name not in (*READ, NVFLARE_SIG_FILE) and not own


RESOURCES = frozenset({"num_of_gpus", "mem_per_gpu_in_GiB", "num_of_cpus", "memory"})
"""What a job may ask of a site's machine."""


LONGEST_NAME = 64  # characters of a job's name, which consoles and logs show


def unfit_meta(meta: dict[str, Any]) -> str:
    """Why a job of this ``meta.json`` is not run; "" for one that leaves to a site in what its process runs.

    FLARE's launchers for Docker, Kubernetes and Slurm take a container image from the job: any program, with the site's
    data, past the list of classes.
    """
    name = meta.get("name")
    if not (isinstance(name, str) and name.strip() and len(name) <= LONGEST_NAME and name.isprintable()):
        return f"the job's name in meta.json is to be 1 to {LONGEST_NAME} printable characters"
    asked = meta.get("resource_spec") or {}
    plain = isinstance(asked, dict) and all(isinstance(own, dict) and own.keys() <= RESOURCES for own in asked.values())
    if plain and not meta.get("launcher_spec"):
        return ""
    return f"the job says in what it runs; it may ask for {', '.join(sorted(RESOURCES))} in resource_spec alone"


def bound_submissions() -> None:
    """Makes the server refuse what is unfit when it is submitted. FLARE has no hook before it parses a job."""
    from nvflare.private.fed.server import job_cmds  # the server's alone
    from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

    class Bounded(JobMetaValidator):
        def validate(self, job_name: str, job_data: bytes) -> tuple[bool, str, dict[str, Any]]:
            if why := unfit_archive(job_data):
                return False, why, {}
            try:
                valid, said, meta = super().validate(job_name, job_data)
            except Exception as error:  # what FLARE's validator takes for granted
                said = f"meta.json of the job is not as FLARE reads it ({type(error).__name__}): sites, numbers, names"
                return False, said, {}
            why = unfit_meta(meta) if valid else ""
            return (False, why, meta) if why else (valid, validate.printable(said), meta)

    job_cmds.JobMetaValidator = Bounded


class JobRefusedError(ValueError):
    """The job holds what this site does not take. The text goes to the lead and into the audit log."""


class JobCheck(AppValidator):
    """``app_validator`` of ``local/resources.json``; ``side`` is "client" at a site, "server" at the server.

    A job's app may hold FLARE's two configurations and their signatures, and nothing else: other files could be a
    second configuration, which FLARE might read in the place of the one that was looked at. A ``custom`` folder is
    left to ``byoc`` in ``local/authorization.json``.
    """

    def __init__(self, side: str = "client") -> None:
        super().__init__()
        if side not in CONFIGS:
            raise ValueError(f"JobCheck: side is {side!r}; it is one of {', '.join(CONFIGS)}")
        self.side = side

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """FLARE's hook: why the app in ``app_folder`` is refused, or ""; and nothing that FLARE should keep of it."""
        app = Path(app_folder)
        try:
            self._check(app)
        except JobRefusedError as refusal:
            return self._refused(app, str(refusal)), {}
        except Exception as error:  # whatever is wrong with it: what cannot be read is not run
            return self._refused(app, f"the job cannot be read ({type(error).__name__})"), {}
        return "", {}

    def _check(self, app: Path) -> None:
        """Raises JobRefusedError for a file or a class that is not expected."""
        config = app / "config"
        expected = {config / name for name in CONFIGS.values()}
        for file in app.rglob("*"):
            signature = file.name in (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)
            brought = file.is_relative_to(app / "custom")
            if file != config and file not in expected and not signature and not brought:
                raise JobRefusedError("the job holds a file that is no part of a job of fedvlp")
        allowed = _allowed(app.parents[1] / "local")
        content = read_json(config / CONFIGS[self.side], LARGEST_JOB)
        for path in named(content):
            if not isinstance(path, str) or path not in allowed:
                raise JobRefusedError(f"class {_quoted(path)} is not on this site's list of classes, {WHERE}")
        for path in otherwise_built(content):
            raise JobRefusedError(f"class {_quoted(path)} has other arguments than a job of fedvlp gives it")
        if without_path(content):
            raise JobRefusedError(
                f"a component gives the name of a class without its path, and the list has paths alone, {WHERE}"
            )

    def _refused(self, app: Path, why: str) -> str:
        """Writes the audit line; returns what the lead is told."""
        job = app.parent.name
        AuditService.add_event(user=_lead(app), action=REFUSED, ref=job, msg=f"job {job} refused: {why}")
        return why


def _allowed(local: Path) -> frozenset[str]:
    """The list in this site's ``resources.json``. Without one nothing is allowed."""
    file = local / "resources.json"
    entries = json.loads(file.read_text(encoding="utf-8")).get(LIST, [])
    return frozenset(entries)


def _quoted(path: Any) -> str:
    """A class path as the log may hold it: what is none could be any text, lines of a forged log included."""
    if isinstance(path, str) and len(path) <= LONGEST and CLASS.fullmatch(path):
        return repr(path)
    return "of a path that is no class name"


def _lead(app: Path) -> str:
    """Who signed the job, by a certificate of the consortium's root."""
    root = app.parents[1] / "startup" / "rootCA.pem"
    verified, signers = verify_folder_signature_and_get_signers(str(app), str(root))
    return ", ".join(name for name, *_ in signers) if verified and signers else "unknown"
