"""Where runs are kept beside FLARE's own folders, at the server and at the sites."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from nvflare.apis.fl_context import FLContext

from fedvlp.core.validate import NAME

HOME = "FEDVLP_HOME"
SIMULATED = "simulate_job"
NUMBER = re.compile(r"[0-9]{3,9}")


class PathError(ValueError):
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


def under(root: Path, name: object) -> Path:
    """``root/name`` for a run as the server calls it, "fedavg/001". Raises PathError for any other name.

    Also where a link of the site's own leads out of its folder of runs.
    """
    run, _, number = name.partition("/") if isinstance(name, str) else ("", "", "")
    path = root / run / number
    called = NAME.fullmatch(run) and NUMBER.fullmatch(number)
    if not called or not path.resolve().is_relative_to(root.resolve()):
        raise PathError("the server names a run folder outside this site's own; the task is refused")
    return path.resolve()
