"""What ``fedvlp doctor --site KIT`` looks at: policies, data, keys, certificate and the way to the server.

Reads the startup kit as FLARE wrote it. No finding names a patient, a report or a file of theirs.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvlp import __version__
from fedvlp.core.types import WIRE_VERSIONS
from fedvlp.data.burned_in import ACCEPT, HEADER, SEARCH, can_search
from fedvlp.data.sources import FileSource
from fedvlp.deploy import software
from fedvlp.deploy.machine import FREE_GB, HOME, JOBS_SOCKET, Check, path_check
from fedvlp.deploy.named_data import SiteConfigError
from fedvlp.deploy.site_config import SiteConfig
from fedvlp.run.lock import FolderInUseError, in_use

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

FLARE = "2.9."  # server and sites run one minor version
PERIMETER = "fedvlp.flare.Perimeter"
LAUNCHER = "fedvlp.flare.SiteJobLauncher"
KEPT = ("cache", "runs", "privacy")  # folders of a kit that only jobs read and write
SERVER_FILE = "fed_server.json"  # in startup/ of the server's kit
RUNNERS = {
    "client": ("fedvlp.flare.ChildExecutor", "fedvlp.flare.SiteExecutor"),
    "server": ("fedvlp.flare.FederatedController", "fedvlp.flare.EncryptedController"),
}
"""The classes of a side, without one of which no job runs."""
SOURCES = ("LD_AUDIT", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE")
"""Variables by which every program, or every Python, runs code that nobody asked for."""
SHELL = ("none", "o:site")
"""Who may run shell commands at a site: nobody, or the site's own organisation."""
OVERRIDES = ("local/job_resources.json", "local/*__*resources.json", "startup/*__*resources.json")
"""Files of a kit whose settings FLARE takes before those of ``local/resources.json``."""
SHARED_STORE = "/tmp/nvflare"
"""FLARE's default folder of submitted jobs."""
DESCRIPTORS = 8192
"""Connections and files that FLARE's process may have open. A stranger's connection takes one until FLARE gives it up,
and 0.3 MB: with fewer descriptors 1,000 strangers keep members out, with all of them they take the memory."""
EXPIRES_DAYS = 30  # before the end of a certificate that its renewal is due
CLOCK_S = 60
KEYS = (".key", ".pfx", ".p12")  # how files of private keys end
HE_KEY = "client_context.tenseal"  # the key of homomorphic encryption that the sites share
SAMPLE = 8  # images decoded of each data set
TIMEOUT_S = 10


def site_checks(kit: Path, classes: Callable[[str], Collection[str]]) -> Iterator[Check]:
    """All findings about the startup kit of a site or of the server.

    ``classes``: those that jobs of fedvlp need at a side, "client" or "server".
    """
    yield path_check("folder of the kit", kit.resolve())
    side = "server" if (kit / "startup" / SERVER_FILE).exists() else "client"
    try:
        startup = json.loads((kit / "startup" / f"fed_{side}.json").read_text(encoding="utf-8"))
        own = startup["client"] if side == "client" else startup["servers"][0]
        name = own["fqsn"] if side == "client" else own["service"]["target"].rpartition(":")[0]
    except (OSError, ValueError, LookupError, TypeError):
        yield Check(
            "kit", False, f"no readable startup/fed_{side}.json; give the folder that holds startup/ and local/"
        )
        return
    yield Check("site" if side == "client" else "server", True, name)
    installed = version("nvflare")
    yield Check("nvflare for this kit", installed.startswith(FLARE), f"{installed} (server and sites run {FLARE}x)")
    yield from _policies(kit / "local", classes(side), side)
    yield _mutual(kit, own)
    yield _private_keys(kit, own["ssl_private_key"])
    yield from _software(kit, own["ssl_root_cert"])
    yield from _python(kit)
    yield from _certificate(kit / "startup", own, name)
    yield from _site(kit, startup) if side == "client" else _server_alone(kit, name, own)
    yield _one_process(kit)


def _site(kit: Path, startup: dict[str, Any]) -> Iterator[Check]:
    """What a site has and the server has not: a filter of what leaves, data, a way to the server."""
    yield _privacy(kit / "local" / "privacy.json")
    yield from _job_user(kit)
    yield _room("disk of the kit", kit)
    if not _hidden(kit):  # else the other account's
        yield from _data(kit / "local")
        yield _room("folder of runs", _runs(kit))
    yield from _server(kit / "startup", startup)


def _server_alone(kit: Path, name: str, own: dict[str, Any]) -> Iterator[Check]:
    """What the server has and a site has not: jobs of many, and a port that anybody may try."""
    yield _room("disk of the kit", kit)
    yield from (_room(what, folder) for what, folder in _stores(kit).items())
    yield _room("folder of runs", _runs(kit))
    yield _own_port(kit, own)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = most == resource.RLIM_INFINITY or most >= DESCRIPTORS
    said = f"at most {most} ({DESCRIPTORS} wanted)" + ("" if enough else ": raise the hard limit, as LEAD.md says")
    yield Check("open connections", enough, said)


def _read(file: Path) -> dict[str, Any]:
    """A policy as FLARE takes it: ``x.json``, else the default that came with the kit."""
    chosen = file if file.exists() else file.with_name(file.name + ".default")
    content: dict[str, Any] = json.loads(chosen.read_text(encoding="utf-8"))
    return content


def _perimeter(resources: dict[str, Any], side: str) -> Check:
    """Whether the perimeter stands on this side."""
    where = "this site" if side == "client" else "this server, and through it to sites"
    guarded = any(
        component.get("path") == PERIMETER and component.get("args", {}).get("side", "client") == side
        for component in resources.get("components", [])
    )
    need = f"{PERIMETER} with side {side!r}"
    said = "checked" if guarded else f"any account's: add a component {need} to local/resources.json"
    return Check(f"messages to {where}", guarded, said)


def _inner_port(local: Path) -> Check:
    """Whether FLARE asks the processes of its jobs for the kit's certificate."""
    try:
        asked = _read(local / "comm_config.json")["internal"]["resources"]["connection_security"]
    except (OSError, ValueError, KeyError, TypeError):
        asked = "clear"
    said = f"{asked}; FLARE does not start: local/comm_config.json comes with a provisioned kit, and says mtls"
    return Check("port for the processes of jobs", asked == "mtls", "mtls" if asked == "mtls" else said)


def _hidden(kit: Path) -> bool:
    """Whether another account than this one starts the jobs, and reads the data."""
    listens = kit / JOBS_SOCKET
    return listens.is_socket() and listens.stat().st_uid != os.getuid()


def _job_user(kit: Path) -> Iterator[Check]:
    """Whether FLARE's process, which needs none of the data, may read them."""
    what, listens = "user of jobs", kit / JOBS_SOCKET
    if not listens.is_socket():
        yield Check(what, None, "FLARE's own, which then may read the data: a second one is step 6 of the site's guide")
        return
    if not _hidden(kit):
        yield Check(what, True, f"this account, uid {os.getuid()}; run the doctor as FLARE's account too")
        return
    try:
        components = [component["path"] for component in _read(kit / "local" / "resources.json")["components"]]
        config = SiteConfig.load(kit / "local")
    except (OSError, ValueError, KeyError) as error:
        yield Check(what, False, f"local/ cannot be read by this account ({_kind(error)})")
        return
    if LAUNCHER not in components:
        yield Check(what, False, f"jobs do not ask it: name {LAUNCHER} as process_launcher in local/resources.json")
    else:
        yield Check(what, True, f"uid {listens.stat().st_uid}")
    folders = {
        folder: name
        for name, source in config.data.items()
        for folder in (vars(source)["root"], source.cache)  # each source has the folder that it reads
        if folder is not None
    }
    folders |= {kit / name: f"{name}/ of the kit" for name in KEPT}
    readable = sorted({str(name) for folder, name in folders.items() if os.access(folder, os.R_OK)})
    said = f"{', '.join(readable)}: take this account's right to read it away" if readable else "none"
    yield Check("data that FLARE's account may read", not readable, said)


def _stores(kit: Path) -> dict[str, Path]:
    """Where the server keeps submitted jobs and snapshots; a folder that nobody named is FLARE's."""
    try:
        resources = _read(kit / "local" / "resources.json")
        managers = [one["args"] for one in resources["components"] if one["id"] == "job_manager"]
        storage = resources["snapshot_persistor"]["args"]["storage"]["args"]
        return {"job store": kit / managers[0]["uri_root"], "store of snapshots": kit / storage["root_dir"]}
    except (OSError, ValueError, LookupError, TypeError):
        return {"job store": Path(SHARED_STORE)}


def _runs(kit: Path) -> Path:
    """Where this kit's process keeps runs (flare/paths.py)."""
    return Path(os.environ.get(HOME) or kit / "runs")


def _room(what: str, folder: Path) -> Check:
    """Whether this account can write into a folder, or make it, and how much fits in."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if folder.is_relative_to(SHARED_STORE):
        return Check(what, False, "FLARE's default, one folder for all servers of a machine: name another")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(what, False, f"this account (uid {os.getuid()}) cannot write there: give it a folder of its own")
    free = shutil.disk_usage(there).free / 1e9
    return Check(what, free > FREE_GB, f"{free:.0f} GB free (at least {FREE_GB} GB wanted)")


def _mutual(kit: Path, own: dict[str, Any]) -> Check:
    """Whether server and site show each other a certificate, and FLARE's process is told to look at it."""
    asked = own.get("connection_security", "mtls")
    script = kit / "startup" / "sub_start.sh"
    words = script.read_text(encoding="utf-8").split() if script.is_file() else []
    secured = {word for word in words if word.startswith("secure_train=")} == {"secure_train=true"}
    said = "mtls" if asked == "mtls" else f"connection_security is {asked!r} in startup/"
    if not secured:
        said += "; startup/sub_start.sh says another thing than secure_train=true"
    ok = asked == "mtls" and secured
    return Check("certificates at both ends", ok, said if ok else f"{said}: ask for the kit again")


def _one_process(kit: Path) -> Check:
    """Whether FLARE runs on this kit: a second process of it is refused."""
    try:
        holder = in_use(kit)
    except FolderInUseError as error:
        return Check("processes of this kit", False, str(error))
    return Check("processes of this kit", True, f"one runs: {holder}; do not start another" if holder else "none runs")


def _own_port(kit: Path, own: dict[str, Any]) -> Check:
    """Whether the server's port is taken by somebody else: FLARE would try to open it for ever."""
    what, port = "port of the server", own["service"]["target"].rpartition(":")[2]
    if not port.isdecimal():
        return Check(what, False, f"startup/{SERVER_FILE} does not say which: provision the kit again")
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", int(port))) == 0
    if taken and not in_use(kit):
        return Check(what, False, f"{port} is taken by another program: end it, or another server that runs here")
    return Check(what, True, f"{port}, {'this server listens' if taken else 'free'}")


def _job_check(resources: dict[str, Any], side: str) -> Check:
    """Whether jobs are looked at before they start."""
    check = {"path": "fedvlp.flare.JobCheck", "args": {"side": side}}
    checked = resources.get("app_validator") == check
    said = "yes" if checked else f"no: set app_validator to {check} in local/resources.json"
    return Check("jobs looked at before they start", checked, said)


def _policies(local: Path, classes: Collection[str], side: str) -> Iterator[Check]:
    """The rules of a side: which classes a job may name, whether it may bring code, what leaves by the log."""
    try:
        resources = _read(local / "resources.json")
        permissions = _read(local / "authorization.json")["permissions"]
    except (OSError, ValueError, KeyError) as error:
        yield Check("policies", False, f"local/ has no readable resources.json and authorization.json ({_kind(error)})")
        return
    allowed = resources.get("class_allow_list", [])
    yield from _classes(allowed, classes, RUNNERS[side])
    yield _job_check(resources, side)
    yield _perimeter(resources, side)
    yield _inner_port(local)
    others = sorted(f"{file.parent.name}/{file.name}" for pattern in OVERRIDES for file in local.parent.glob(pattern))
    said = f"{', '.join(others)}: FLARE takes them before local/resources.json, which alone is looked at: remove them"
    yield Check("settings beside resources.json", not others, said if others else "none")
    enforced = resources.get("class_list_enforcement_mode", "enforce") == "enforce" and "*" not in allowed
    said = "yes" if enforced else "no: take class_list_enforcement_mode and * out of local/resources.json"
    yield Check("class allow-list enforced", enforced, said)
    brings = sorted(role for role, rights in permissions.items() if _right(rights, "byoc") != "none")
    said = f"allowed to {', '.join(brings)}: set byoc to none in local/authorization.json" if brings else "refused"
    yield Check("jobs with their own code", not brings, said)
    shells = sorted(role for role, rights in permissions.items() if _right(rights, "shell_commands") not in SHELL)
    said = f"{', '.join(shells)}: set shell_commands to none, or to o:site, in local/authorization.json"
    yield Check("shell for accounts of others", not shells, said if shells else "none")
    if side == "client":
        yield from _logs(resources)
    secure = os.environ.get("NVFLARE_SECURE_LOGGING", "").lower() in ("1", "true", "t", "y", "yes")
    yield Check(
        "secure logging",
        secure or None,
        "on" if secure else "NVFLARE_SECURE_LOGGING=true is not set: load local/site.env",
    )


def _logs(resources: dict[str, Any]) -> Iterator[Check]:
    """What of a site's logs leaves, and which GPUs it offers."""
    streams = resources.get("allow_log_streaming", True)
    said = "yes: set allow_log_streaming to false in local/resources.json" if streams else "no"
    yield Check("logs sent to the server", not streams, said)
    yield _gpus(resources)


SCOPE = {"name", "properties", "task_data_filters", "task_result_filters"}  # all that FLARE reads of a scope
POLICY = {"scopes", "default_scope", "components"}  # and of the file


def _privacy(file: Path) -> Check:
    """What FLARE applies to results before they leave. It passes over what it does not know, a misspelt key above all:
    then nothing is applied, and nothing is said."""
    what = "privacy policy"
    if not file.exists():
        return Check(what, None, "no local/privacy.json: results leave as they are; ask the lead for the policy")
    try:
        policy = json.loads(file.read_text(encoding="utf-8"))
        scopes, default = policy["scopes"], policy["default_scope"]
        unknown = sorted({*policy} - POLICY | {key for scope in scopes for key in {*scope} - SCOPE})
        filters = [entry for scope in scopes for entry in scope.get("task_result_filters", [])]
        inward = [entry["path"] for entry in filters if entry.get("direction", "out").lower() not in ("out", "inout")]
        names = [entry["path"].rpartition(".")[2] for entry in filters]
        named = [scope["name"] for scope in scopes]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Check(what, False, f"local/privacy.json cannot be read ({_kind(error)})")
    if unknown:
        return Check(what, False, f"FLARE passes over {', '.join(unknown)} in local/privacy.json: correct the name")
    if inward:
        return Check(
            what, False, f"{', '.join(inward)} looks at what comes in: take its direction out of local/privacy.json"
        )
    if len(named) != 1 or default not in named:
        return Check(what, False, "local/privacy.json needs one scope, its default: with two, a job chooses the weaker")
    return Check(
        what, bool(names) or None, f"results pass {', '.join(names)}" if names else "results leave as they are"
    )


def _classes(allowed: Any, needed: Collection[str], runners: tuple[str, ...]) -> Iterator[Check]:
    """The list of classes: each entry one class, none that fedvlp's jobs do not need. A shorter list is welcome."""
    if not isinstance(allowed, list):
        yield Check("class allow-list", False, "class_allow_list of local/resources.json is no list of class names")
        return
    wide = sorted(str(entry) for entry in allowed if entry != "*" and not _is_one_class(entry))
    runs = any(entry in allowed for entry in runners)
    if wide:
        said = f"{', '.join(wide)}: not the full name of one class; `fedvlp site classes --into` writes exact names"
    elif not runs:
        said = f"has none of {', '.join(runners)}: no job of fedvlp can run; see `fedvlp site classes`"
    else:
        said = (
            f"{len(allowed)} classes, {len(set(needed) - set(allowed))} that jobs of fedvlp may name are not among them"
        )
    yield Check("class allow-list", runs and not wide, said)
    extra = sorted(set(allowed) - set(needed) - set(wide) - {"*"})
    if extra:
        yield Check("classes beside fedvlp's", None, f"{', '.join(extra)}: any job may name them as well")


def _is_one_class(entry: Any) -> bool:
    """Whether FLARE can take an entry for nothing but one class: no package, no module, no function."""
    module, _, name = str(entry).rpartition(".")
    try:
        return isinstance(getattr(importlib.import_module(module), name), type)
    except (ImportError, AttributeError, ValueError):
        return False


def _right(rights: str | dict[str, Any], name: str) -> Any:
    """A right of a role; one that is not named is denied by FLARE."""
    return rights if isinstance(rights, str) else rights.get(name, "none")


def _gpus(resources: dict[str, Any]) -> Check:
    import torch

    managers = [
        component.get("args", {})
        for component in resources.get("components", [])
        if component.get("id") == "resource_manager"
    ]
    there = torch.cuda.device_count()
    offered = sum(args.get("num_of_gpus", there) for args in managers)  # left out: what the machine has
    said = f"{offered} in local/resources.json, {there} in this machine"
    return Check(
        "gpus offered to jobs", offered <= there, said if offered <= there else f"{said}: set num_of_gpus there"
    )


def _agreed(version: str) -> Check:
    """The version that the consortium agreed on; another one takes part where its wire version is read."""
    said = f"{version} agreed, {__version__} installed"
    if version == __version__:
        return Check("fedvlp of the consortium", True, said)
    wires = " to ".join(str(number) for number in sorted({WIRE_VERSIONS[0], WIRE_VERSIONS[-1]}))
    said += f", which takes part where the server writes wire version {wires}, and is refused elsewhere"
    return Check("fedvlp of the consortium", None, f"{said}: install software/ of the kit for what was agreed")


def _data(local: Path) -> Iterator[Check]:
    """The file of data sets, and a sample of each."""
    try:
        config = SiteConfig.load(local)
    except SiteConfigError as error:
        yield Check("data sets", False, str(error))
        return
    yield Check("envelope", True, config.envelope.in_words())
    if config.version:
        yield _agreed(config.version)
    if not config.data:
        yield Check("data sets", None, "none but the built-in one; rehearsals only")
    for name, source in sorted(config.data.items()):
        try:
            counts = replace(source, cache=None).prepare(SAMPLE)[1]
        except ValueError as error:  # the sources' own: counts and numbers of rows
            yield Check(f"data set {name}", False, f"{error} (data.{name} in local/fedvlp.json)")
        except PermissionError:
            yield Check(f"data set {name}", False, f"{_not_allowed()} (data.{name} in local/fedvlp.json)")
        except Exception as error:
            yield Check(f"data set {name}", False, f"cannot be read ({_kind(error)}; data.{name} in local/fedvlp.json)")
        else:
            said = ", ".join(f"{what} {count}" for what, count in counts.items())
            sample = f"; a sample: no more than {SAMPLE} are looked at here, all of them by `fedvlp prepare`"
            yield Check(f"data set {name}", True, said + sample * (counts.get("used") == SAMPLE))
            yield _text_in_films(name, source)
    if config.public:
        said = f"{', '.join(config.public)}: a job may send something about every single record of these"
        yield Check("public data sets", None, f"{said}, so they must hold no patient of yours")
    else:
        yield Check("public data sets", True, "none; a job may send nothing about a single record")


def _text_in_films(name: str, source: FileSource) -> Check:
    """Whether anybody looks for names and dates in the pixels of a data set."""
    said = {
        SEARCH: "searched for",
        HEADER: 'only images whose header says so are left out; "burned_in": "search" looks at pixels',
        ACCEPT: "images are used whatever is burned into them",
    }[source.burned_in]
    searched = source.burned_in == SEARCH
    if searched and not can_search():
        searched, said = False, "pixels are NOT searched: pip install 'fedvlp[ocr]'"
    return Check(f"text in images of {name}", searched or None, said)


def _not_allowed() -> str:
    """What to do where the account that runs the site, in a container its user, may not read the data."""
    return f"this account (uid {os.getuid()}) may not read it; give it read access to all files and folders there"


def _private_keys(kit: Path, own: str) -> Check:
    """Whether the site's key is there, and nobody else may read or write it or any other key of the kit."""
    if not (kit / "startup" / own).exists():
        return Check("private key", False, f"no {own} in startup/: ask the consortium for the kit again")
    keys = [path for folder in ("startup", "local") for path in sorted((kit / folder).rglob("*")) if _is_key(path)]
    modes = {path.relative_to(kit).as_posix(): path.stat().st_mode & 0o777 for path in keys}
    others = 0o037 if (kit / JOBS_SOCKET).is_socket() else 0o077  # the group: the accounts of FLARE and of jobs
    open_ones = [name for name, mode in modes.items() if mode & others]
    said = ", ".join(f"{name} has mode {mode:03o}" for name, mode in modes.items())
    return Check("private key", not open_ones, said + (f" (chmod 600 {' '.join(open_ones)})" if open_ones else ""))


def _is_key(path: Path) -> bool:
    """By its name, or because it begins as a private key in PEM does."""
    if not path.is_file():
        return False
    if path.suffix in KEYS or path.name == HE_KEY:
        return True
    with path.open("rb") as file:
        return b"PRIVATE KEY-----" in file.readline(100)


def _software(kit: Path, root: str) -> Iterator[Check]:
    """Whether the kit's wheel is the consortium's, and what is installed here is that wheel and the lock beside it."""
    from cryptography import x509

    folder = kit / software.FOLDER
    if not folder.is_dir():
        yield Check("software of the kit", None, "none in software/; compare the wheel's SHA-256 with the lead's")
        return
    try:
        software.check_signature(folder, x509.load_pem_x509_certificate((kit / "startup" / root).read_bytes()))
        names = software.checked_sums(folder)
    except (OSError, ValueError) as error:
        said = str(error) if isinstance(error, software.SoftwareError) else _kind(error)
        yield Check("software of the kit", False, said)
        return
    yield Check("software of the kit", True, f"{len(names)} files, signed by the consortium's root")
    wheel = software.wheel_of(folder)
    try:
        faults = software.installed_faults(wheel)
    except (OSError, software.SoftwareError) as error:
        yield Check(
            "fedvlp is the kit's", False, str(error) if isinstance(error, software.SoftwareError) else _kind(error)
        )
        return
    own = [fault for fault in faults if " fedvlp/" in fault]
    remedy = f"pip install --no-deps --no-index --force-reinstall {wheel.name}"
    yield Check("fedvlp is the kit's", not own, f"{_few(own)}: {remedy}" if own else f"yes, {wheel.name}")
    others = [fault for fault in faults if fault not in own]
    remedy = "install the kit's software in an empty folder, as the guide says"
    yield Check("packages as pip installed them", not others, f"{_few(others)}: {remedy}" if others else "yes")
    if software.LOCK in names:
        others = software.other_versions(folder / software.LOCK)
        said = f"{_few(others)}: other versions than the kit's lock" if others else "as the kit's lock says"
        yield Check("packages installed", not others or None, said)


def _python(kit: Path) -> Iterator[Check]:
    """Whether Python takes code from elsewhere than its own folder and that of its packages."""
    given = sorted(name for name in SOURCES if os.environ.get(name))
    if (kit / "local" / "custom").exists():
        given.append("local/custom")
    script = kit / "startup" / "sub_start.sh"
    if script.is_file() and "PYTHONPATH" in script.read_text(encoding="utf-8"):
        given.append("PYTHONPATH in startup/sub_start.sh, which has the folder where it is started: ask for a new kit")
    known = {*_looks_in("-I", "-S"), *map(sysconfig.get_path, ("purelib", "platlib"))}
    known.add(str(Path(software.__file__).parents[2]))
    more = len(set(_looks_in()) - known)
    if more:
        given.append(f'{more} more of `python -c "import sys; print(sys.path)"`')
    said = f"also from {', '.join(given)}: take it away" if given else "from its own folder and that of its packages"
    yield Check("code that Python takes", not given, said)


def _looks_in(*options: str) -> list[str]:
    """The folders in which Python looks for modules, beside the one where it is started."""
    command = [sys.executable, *options, "-c", "import json, sys; print(json.dumps([*filter(None, sys.path)]))"]
    folders: list[str] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return folders


def _few(names: list[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _certificate(startup: Path, client: dict[str, Any], name: str) -> Iterator[Check]:
    """The kit's own certificate: whose it is, who signed it, whether it fits the key, how long it holds."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        own = x509.load_pem_x509_certificate((startup / client["ssl_cert"]).read_bytes())
        root = x509.load_pem_x509_certificate((startup / client["ssl_root_cert"]).read_bytes())
        key = load_pem_private_key((startup / client["ssl_private_key"]).read_bytes(), None)
        own.verify_directly_issued_by(root)
    except Exception as error:
        yield Check(
            "certificate", False, f"{_kind(error)}: certificate, key and rootCA.pem are not one kit's: ask for it again"
        )
        return
    holder = str(own.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)
    fits = own.public_key() == key.public_key() and name in {holder, *_other_names(own)}
    yield Check("certificate", fits, f"issued to {holder}" + ("" if fits else f"; this kit is {name}'s"))
    now = datetime.now(timezone.utc)
    days = (own.not_valid_after_utc - now).days
    valid = own.not_valid_before_utc <= now < own.not_valid_after_utc
    until = f"until {own.not_valid_after_utc:%Y-%m-%d}, {days} days"
    yield Check("certificate valid", valid and (days >= EXPIRES_DAYS or None), until)


def _other_names(certificate: Certificate) -> list[str]:
    """The addresses for which a server's certificate holds; a site's has none."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return names.value.get_values_for_type(x509.DNSName)


def _server(startup: Path, client: dict[str, Any]) -> Iterator[Check]:
    """The way to the server: its name, its port, its certificate, ours, and its clock if it tells the time."""
    server = client["servers"][0]
    address, _, port = server["service"]["target"].rpartition(":")
    where = f"{address}:{port}"
    try:
        context = ssl.create_default_context(cafile=str(startup / client["client"]["ssl_root_cert"]))
        context.load_cert_chain(startup / client["client"]["ssl_cert"], startup / client["client"]["ssl_private_key"])
    except OSError:  # the line about the certificate says what is wrong
        yield Check("server reached", None, f"not tried: {where} wants the kit's certificate, which cannot be used")
        return
    try:
        with socket.create_connection((address, int(port)), timeout=TIMEOUT_S) as plain:
            yield Check("server reached", True, where)
            with context.wrap_socket(plain, server_hostname=server["identity"]) as secured:
                secured.sendall(f"HEAD / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                answer = secured.recv(4096).decode("latin-1")
                yield Check("server is the consortium's", True, f"{server['identity']}, {secured.version()}")
    except socket.gaierror:
        yield Check("server reached", False, f"{address} has no address here: DNS or /etc/hosts")
    except ssl.SSLError as error:
        yield Check("server is the consortium's", False, f"TLS with {where} failed: {error.reason}")
    except OSError as error:
        yield Check("server reached", False, f"no connection to {where} ({_kind(error)}): is it up, is the port open?")
    else:
        yield from _clock(answer)


def _clock(answer: str) -> Iterator[Check]:
    dates = [line[5:].strip() for line in answer.splitlines() if line.lower().startswith("date:")]
    if dates:
        off = time.time() - parsedate_to_datetime(dates[0]).timestamp()
        yield Check("clock", abs(off) <= CLOCK_S, f"{off:+.0f} s from the server's")
    else:
        yield Check("clock", None, "the server does not tell the time; compare by hand")


def _kind(error: Exception) -> str:
    return type(error).__name__
