"""The site's door to FLARE: turns a task into a call of core.site.Site. No line here knows a method's name."""

from __future__ import annotations

from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fedvlp import __version__
from fedvlp.config import fingerprint
from fedvlp.core.method import Aborted
from fedvlp.core.site import Site, reason
from fedvlp.experiment import Assembly, Experiment
from fedvlp.flare import wire
from fedvlp.flare.places import runs_root, under
from fedvlp.flare.tracking import Announcer


class RefusedError(ValueError):
    """The task does not belong to the experiment that this site was given."""


class SiteExecutor(Executor):
    """Trains in the job's process at a site. What a site remembers is on disk, so a restarted process goes on."""

    def __init__(self, **experiment: Any) -> None:
        """``experiment`` are the fields of ``presets.Experiment``, the same as the controller's."""
        super().__init__()
        wire.register()  # before the first task is fetched
        self.experiment = Experiment(**experiment)
        self._site: Site | None = None
        self._folder = ""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        try:
            message, run = wire.receive_broadcast(shareable)
            self._refuse_other(run)
            site = self._prepared(run["folder"], fl_ctx)
            update = site.handle(message, should_stop=lambda: abort_signal.triggered)
        except Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception as error:
            self.log_error(fl_ctx, f"{task_name} failed: {reason(error)}")
            return wire.send_failure(error)
        Announcer(self, fl_ctx).update(update)
        return wire.send_update(update)

    def _refuse_other(self, run: dict[str, str]) -> None:
        mine = {"fingerprint": fingerprint(self.experiment), "version": __version__}
        for what, value in mine.items():
            if run.get(what) != value:
                raise RefusedError(
                    f"the server's {what} is {run.get(what)}, this site's is {value}: "
                    "server and site must run the same job and the same fedvlp"
                )

    def _prepared(self, folder: str, fl_ctx: FLContext) -> Site:
        """The site of this process, built at its first task of a run."""
        if self._site is None or folder != self._folder:
            import torch

            torch.set_num_threads(self.experiment.training.threads)
            path = under(runs_root(fl_ctx), folder)
            self._site = Assembly(self.experiment, path).site(fl_ctx.get_identity_name())
            self._folder = folder
        return self._site
