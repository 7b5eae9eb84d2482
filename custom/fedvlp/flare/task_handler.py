"""What a site does with a task, whichever process it runs in: refuses another run's, answers with core.site.Site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedvlp import __version__
from fedvlp.core.types import Broadcast, Update
from fedvlp.deploy.site_config import accepts_phi_risk, at_site
from fedvlp.federation.site import Site
from fedvlp.flare.paths import SitePaths, under
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import fingerprint
from fedvlp.run.experiment import Experiment


class RefusedError(ValueError):
    """The task does not belong to the experiment that this site was given."""


class TaskHandler:
    """Answers tasks of one experiment at one site. The site is built at the first task of a run."""

    def __init__(self, experiment: Experiment, paths: SitePaths) -> None:
        self.experiment = experiment
        self.paths = paths
        self._site: Site | None = None
        self._folder = ""

    def answer(self, message: Broadcast, run: dict[str, str], should_stop: Callable[[], bool]) -> Update:
        """The update; ``run`` is what the server says of its run (flare/messages.py)."""
        refuse_other(self.experiment, run)
        return self._prepared(run["folder"]).handle(message, should_stop)

    def _prepared(self, folder: str) -> Site:
        if self._site is None or folder != self._folder:
            import torch

            torch.set_num_threads(self.experiment.training.threads)
            local, path = Path(self.paths.local), under(Path(self.paths.runs), folder)
            experiment = at_site(self.experiment, self.paths.site, local)
            self._site = Assembly(experiment, path, accepts_phi_risk(local)).site(self.paths.site)
            self._folder = folder
        return self._site


def refuse_other(experiment: Experiment, run: dict[str, str]) -> None:
    """Raises RefusedError unless the server runs this very experiment with this very fedvlp."""
    mine = {"fingerprint": fingerprint(experiment), "version": __version__}
    for what, value in mine.items():
        if run.get(what) != value:
            raise RefusedError(
                f"the server's {what} is {run.get(what)}, this site's is {value}: "
                "server and site must run the same job and the same fedvlp"
            )
