"""What the lead takes home: the run's folder inside the job's own, which is what ``nvflare job download`` fetches."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from fedvlp.core.checkpoint import CheckpointError, load_header
from fedvlp.core.snapshots import APART
from fedvlp.flare.paths import SIMULATED
from fedvlp.flare.tracking import RUN_FOLDER
from fedvlp.run.folder import RunFolder

HOME = "fedvlp"
"""Folder of the run inside the downloaded ``workspace``."""


class ResultsInJob(FLComponent):
    """Copies the run into the job at its end, however that came; the last component, so that curves are complete.

    The server keeps its copy, from which the same job resumes. The simulator's results need no way home.
    It takes no longer than it must: FLARE has ended the job at the sites by then, and still calls it running.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        folder = fl_ctx.get_prop(RUN_FOLDER)
        if event_type != EventType.END_RUN or folder is None or fl_ctx.get_job_id() == SIMULATED:
            return
        target = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id())) / HOME
        try:
            shutil.copytree(folder, target, ignore=_of_earlier_rounds, copy_function=_linked_or_copied)
        except (OSError, CheckpointError) as error:  # a full disk: the run is still whole where it was made
            self.log_error(fl_ctx, f"results not copied ({type(error).__name__}); they are in the server's runs folder")


def _linked_or_copied(source: str, target: str) -> None:
    """A second name for a file of tensors, which nobody writes in place once it is whole; a copy of any other file."""
    if source.endswith(".safetensors"):
        with suppress(OSError):  # another disk, or no links there
            os.link(source, target)
            return
    shutil.copy2(source, target)


def _of_earlier_rounds(folder: str, names: list[str]) -> list[str]:
    """What stays at the server: earlier checkpoints, files that the newest does not name, what was in transfer."""
    if Path(folder).name != APART:
        return [name for name in names if name in ("spool", "rounds")]
    checkpoint = RunFolder(Path(folder).parent.parent).checkpoint
    named = load_header(checkpoint).get(APART, {}).values() if checkpoint.exists() else ()
    return [name for name in names if name not in named]
