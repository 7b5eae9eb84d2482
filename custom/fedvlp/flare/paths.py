"""Where runs are kept beside FLARE's own folders, at the server and at the sites."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nvflare.apis.fl_context import FLContext

from fedvlp.core.site_error import SiteError
from fedvlp.core.validate import NAME
from fedvlp.deploy.machine import HOME, whole_in_command
from fedvlp.run import lock

log = logging.getLogger(__name__)

SIMULATED = "simulate_job"
NUMBER = re.compile(r"[0-9]{3,9}")
RUN_ID = re.compile(r"[0-9a-f]{32}")

OF_RUN = "run_id.txt"
"""In a site's folder of a run: the id of the run whose memories are there."""

RECORDS = "records.txt"
"""In the same folder: the fingerprint of the records with which the site's process began last."""

LAST_ONE_ENDS = 60.0
"""Seconds that a task waits for another process at this site, which ends soon or leaves its task after the step."""

TRAINED = "trained.safetensors"
"""In a site's folder of an encrypted run: the model that it ended with."""


class PathError(SiteError, ValueError):
    """A path leads out of the folder that is meant for it."""


@dataclass(frozen=True)
class SitePaths:
    """Which site this is, its folder of runs, and the folder of its own settings (FLARE's ``local``)."""

    site: str
    runs: str
    local: str

    @staticmethod
    def of(fl_ctx: FLContext) -> SitePaths:
        """The place of the site whose job this process runs."""
        local = fl_ctx.get_engine().get_workspace().get_site_config_dir()
        return SitePaths(fl_ctx.get_identity_name(), str(runs_root(fl_ctx)), str(Path(local).absolute()))


def runs_root(fl_ctx: FLContext) -> Path:
    """``$FEDVLP_HOME``; else ``runs`` beside the simulator's workspace (which it empties), or in the site's own one."""
    if os.environ.get(HOME):
        return Path(os.environ[HOME]).absolute()
    workspace = Path(fl_ctx.get_engine().get_workspace().get_root_dir()).absolute()
    if fl_ctx.get_job_id() == SIMULATED:
        return workspace.parent.parent / "runs"  # the workspace is <given>/server or <given>/<site>
    return workspace / "runs"


def refuse_split_workspace() -> None:
    """Raises ValueError in a simulator whose sites cannot start, for the path of its workspace.

    It would wait minutes for them, and end with the exit code 0. Where a server's components are built, that of the
    simulator works in <workspace>/server. Once they are built, nothing ends it before it has waited.
    """
    here = Path.cwd()
    if (here / SIMULATED).is_dir() and not whole_in_command(here.parent):
        raise ValueError(
            "FLARE's simulator cannot start sites below a folder whose path has white space, quotation marks, '#' or "
            "'\\': its commands are split there. Give it another workspace: nvflare simulator JOB -w /tmp/workspace"
        )


def under(root: Path, name: object) -> Path:
    """``root/name`` for a run as the server calls it, "fedavg/001". Raises PathError for any other name.

    Also where a link of the site's own leads out of its folder of runs.
    """
    run, _, number = name.partition("/") if isinstance(name, str) else ("", "", "")
    path = root / run / number
    called = NAME.fullmatch(run) and NUMBER.fullmatch(number)
    if not called or not path.resolve().is_relative_to(root.resolve()):
        raise PathError(public="the server names a run folder outside this site's own; the task is refused")
    return path.resolve()


def folder_at_site(paths: SitePaths, run: Mapping[str, str]) -> Path:
    """The site's own folder of the run as the server names it, without memories of another run.

    A server whose runs were removed gives their names to others: what the site remembers under such a name would
    enter another model. A trained model stays until the next one takes its place. A server of an older fedvlp gives
    no id, and nothing is compared. Raises PathError for a name or an id of another form, and where a process of another
    run still works there.
    """
    own = under(Path(paths.runs), run["folder"]) / "sites" / paths.site
    number, note = run.get("id"), own / OF_RUN
    if number is None:
        return own
    if not isinstance(number, str) or not RUN_ID.fullmatch(number):
        raise PathError("the server gives its run an id that is not 32 hexadecimal digits; the task is refused")
    end = time.monotonic() + LAST_ONE_ENDS
    while _read(note) != number:  # processes of a site that train together come at once: one of them begins
        try:
            with lock.only_writer(own, 0.5):
                if _read(note) != number:
                    _begin_anew(own, number)
        except lock.FolderInUseError:
            if time.monotonic() < end:
                continue
            raise PathError(
                f"another process at {paths.site} still works on a run of this name after {LAST_ONE_ENDS:g} s; wait "
                "for it to end, or end it there: the site is asked again in a later round"
            ) from None
    return own


def note_records(own: Path, fingerprint: str) -> None:
    """Notes what the site's records are, and warns where they were others earlier in the run of the folder ``own``.

    A patient may have left meanwhile, so the run continues; how many there are is compared at the server.
    """
    from fedvlp.core.checkpoint import save_text

    before = _read(own / RECORDS)
    if before and before != fingerprint:
        log.warning(
            "the records, or what decodes them, have changed since this site began run %s (fingerprint %s then, %s "
            "now): from here on it trains on the new ones. If nobody meant that, put the files back",
            "/".join(own.parts[-4:-2]),
            before[:12],
            fingerprint[:12],
        )
    if before != fingerprint:
        save_text(own / RECORDS, fingerprint)


def _read(note: Path) -> str:
    return note.read_text(encoding="utf-8") if note.exists() else ""


def _begin_anew(own: Path, number: str) -> None:
    """Removes what was remembered of another run, and notes the id of this one."""
    from fedvlp.core.checkpoint import save_text  # brings torch, which a visit of FLARE's simulator does without

    for old in own.glob("*"):
        if old.is_dir():
            shutil.rmtree(old)
        elif old.name not in (TRAINED, lock.FILE):
            old.unlink()
    save_text(own / OF_RUN, number)
