"""What a site does with a task, whichever process it runs in: refuses another run's, answers with core.site.Site."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedvlp import __version__
from fedvlp.core.crafted import Start, check_crafted, start_of
from fedvlp.core.gate import check_broadcast, plain
from fedvlp.core.privacy import PrivacyError
from fedvlp.core.site_error import SiteError, may_leave
from fedvlp.core.types import EVALUATE, WIRE_VERSIONS, Broadcast, State, Update
from fedvlp.data.cache import forget_oldest
from fedvlp.deploy.envelope import Behind, Envelope, Watched
from fedvlp.deploy.site_config import SYNTHETIC, accepts_phi_risk, at_site, caches_at, envelope_at
from fedvlp.evaluation.audit.one_update import strongest
from fedvlp.evaluation.intervals import Interval
from fedvlp.federation.site import Site
from fedvlp.flare.paths import LAST_ONE_ENDS, SitePaths, folder_at_site, note_records
from fedvlp.models.initial import InitialWeightsError
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import fingerprint
from fedvlp.run.experiment import Experiment
from fedvlp.run.lock import FolderInUseError, only_writer
from fedvlp.training import distributed

logger = logging.getLogger(__name__)


class RefusedError(SiteError, ValueError):
    """The task does not belong to the experiment that this site was given, or is of no form that its server sends."""


class TaskHandler:
    """Answers tasks of one experiment at one site. The site is built at the first task of a run."""

    def __init__(
        self, experiment: Experiment, paths: SitePaths, assemble: Callable[..., Assembly] | None = None
    ) -> None:
        """``assemble``: makes the assembly of an experiment, a run's folder and the accepted risk (run/assembly.py)."""
        self.experiment = experiment
        self.paths = paths
        self._assemble = assemble
        self.behind: Behind | None = None  # records behind the last answer, where the site has an envelope
        self._site: Site | None = None
        self._run: tuple[str, str | None] | None = None  # folder and id
        self._records: tuple[Path, str] | None = None  # the site's folder and records of a run that is new here
        self._start: Start | None = None  # of the model that the run starts from, as this site builds it

    def answer(
        self,
        message: Broadcast,
        run: dict[str, str],
        should_stop: Callable[[], bool],
        most_samples: int | None = None,
    ) -> Update:
        """The update; ``run`` is what the server says of its run (flare/messages.py).

        Raises RefusedError for a task of another experiment, of no form, or with a crafted model, EnvelopeError for
        what this site lets no job do, PrivacyError where the site has more than ``most_samples`` training records,
        before it trains.
        """
        refuse_other(self.experiment, run)
        problem = check_broadcast(message, self.experiment.method.phases)
        rounds = self.experiment.rounds.rounds
        if not problem and message.round + (message.phase != EVALUATE) > rounds:
            problem = f"it is for round {message.round}, and the run has {rounds}, from 0 on"
        if problem:
            raise RefusedError(
                f"the task is none of this experiment: {problem}", public="the task is none of this experiment"
            )
        envelope = envelope_at(Path(self.paths.local).parent)
        if envelope is not None:
            envelope.admit(self.experiment)
        site = self._prepared(run, envelope)
        with alone(site):
            if self._records and distributed.rank() == 0:
                note_records(*self._records)
            self._records = None
            return self._answered(site, message, should_stop, envelope, most_samples)

    def _answered(
        self,
        site: Site,
        message: Broadcast,
        should_stop: Callable[[], bool],
        envelope: Envelope | None,
        most_samples: int | None,
    ) -> Update:
        """The update, within what this site lets a job do."""
        self._refuse_crafted(message, site)
        refuse_overflow(self.paths.site, site.client.data.num_train, most_samples)
        if envelope is None:
            return site.handle(message, should_stop)
        named, evaluate = getattr(self.experiment.data, "name", SYNTHETIC), site.evaluate
        data = site.client.data = site.client.observer = Watched(site.client.data, site.client.hooks.targets)
        site.evaluate = envelope.only_allowed(evaluate, named)
        try:
            update = site.handle(message, envelope.in_time(should_stop))
        finally:
            site.client.data, site.client.observer, site.evaluate = data.unwatched, None, evaluate
        self.behind = data.behind(named)
        passed = envelope.passed(update, self.behind)
        if envelope.most_membership < 100 and (passed.state or passed.aux):
            envelope.refuse_telling(self._told(message, passed, data.trained))
        return passed

    def _told(self, message: Broadcast, update: Update, trained: Iterable[int]) -> Interval:
        """The membership-inference AUC of an update, which is also logged.

        Tensors that stay at the site are as they are after training. Raises UnmeasuredError: then nothing leaves.
        """
        assert self._site is not None
        client = self._site.client
        here = {name: tensor.detach().clone() for name, tensor in client.state().items()}
        before = here | {name: tensor for name, tensor in client.here(message.state).items() if name in here}
        try:
            row = strongest(client, before, update.state, trained)
        finally:
            client.load(here)  # the update's tensors may be the model's own
        logger.info("outgoing: membership of the update %s by %s, of %s", row.area.unsigned(), row.attack, row.members)
        return row.area

    def _refuse_crafted(self, message: Broadcast, site: Site) -> None:
        """Raises RefusedError for a model that looks made to single out records (core/crafted.py)."""
        if self._start is None:
            self._start = start_of(self._initial(site))
        problem = check_crafted(message.state, self._start)
        if problem:
            raise RefusedError(
                f"{self.paths.site} does not train the received model: {problem}. Ask who runs the server what it sent",
                public=(
                    "this site does not train the received model: it looks made to single out records. Ask who "
                    "runs the server what it sent"
                ),
            )

    def _initial(self, site: Site) -> State:
        """The model that the run starts from; a random one where this site has not the weights of ``model.init``."""
        try:
            return site.client.initial() if site.client.initial else site.client.state()
        except InitialWeightsError:
            return site.client.state()  # its first task: nothing is loaded yet

    def _prepared(self, run: dict[str, str], envelope: Envelope | None = None) -> Site:
        named = run["folder"], run.get("id")
        if self._site is None or named != self._run:
            import torch

            torch.set_num_threads(self.experiment.training.threads)
            local, own = Path(self.paths.local), folder_at_site(self.paths, run)
            experiment = at_site(self.experiment, self.paths.site, local)
            if envelope is not None:
                envelope.refuse_large(experiment, self.paths.site, distributed.processes())
            assembly = (self._assemble or Assembly)(experiment, own.parent.parent, accepts_phi_risk(local))
            self._site = assembly.site(self.paths.site)
            if envelope is not None and distributed.rank() == 0:
                forget_oldest(caches_at(local), int(envelope.cache_gb * 1e9))
            self._records = own, assembly.cohort.fingerprint
            self._run, self._start = named, None
        return self._site


@contextmanager
def alone(site: Site) -> Iterator[None]:
    """Keeps other processes from the site's memory for the time of a task; of several that share it, rank 0 does.

    A process of the job before may still be at a task, whose memory would take the place of what this job remembers.
    Between tasks nobody holds it: in the simulator several workers answer for a site in turn.
    Raises RefusedError where the other does not end in time.
    """
    with ExitStack() as held:
        if site.memory.folder is not None and distributed.rank() == 0:
            try:
                held.enter_context(only_writer(site.memory.folder, LAST_ONE_ENDS))
            except FolderInUseError as error:
                logger.error("%s", error)
                raise RefusedError(
                    f"another process at {site.client.name} still works on this run after {LAST_ONE_ENDS:g} s, as "
                    "one of an earlier job may; the log of the site says which. Wait for it to end, or end it there: "
                    "the site is asked again in a later round"
                ) from None
        yield


def refuse_overflow(site: str, samples: int, most: int | None) -> None:
    """Raises PrivacyError where ``samples`` times the model's weights would not fit into a ciphertext."""
    if most is not None and samples > most:
        raise PrivacyError(
            f"{site} has {samples} training records; with weights as large as this model's, the parameters of the "
            f"encryption hold the sum of at most {most}: provision with a smaller scale_bits or larger "
            "coeff_mod_bit_sizes (HEBuilder in project.yml), or offer the job fewer records",
            public=(
                "this site has {samples} training records; with weights as large as this model's, the "
                "parameters of the encryption hold the sum of at most {most}: provision with a smaller "
                "scale_bits or larger coeff_mod_bit_sizes (HEBuilder in project.yml), or offer the job fewer "
                "records"
            ),
            samples=samples,
            most=most,
        )


def refuse_other(experiment: Experiment, run: dict[str, str]) -> None:
    """Raises RefusedError if the server runs another experiment, or a version whose messages this site cannot read."""
    wire, version = run.get("wire"), run.get("version")
    if wire not in [str(known) for known in WIRE_VERSIONS]:
        raise RefusedError(
            f"the server writes wire version {plain(wire)} (fedvlp {plain(version)}), this site reads "
            f"{WIRE_VERSIONS[0]} to {WIRE_VERSIONS[-1]} (fedvlp {__version__}): install one fedvlp at both",
            public="the server writes wire version {wire} (fedvlp {version}), this site reads {first} to {last} "
            "(fedvlp {own}): install one fedvlp at both"
            if may_leave(wire) and may_leave(version)
            else "the server writes another wire version, this site reads {first} to {last} (fedvlp {own}): install "
            "one fedvlp at both",
            wire=wire if may_leave(wire) else 0,
            version=version if may_leave(version) else 0,
            first=WIRE_VERSIONS[0],
            last=WIRE_VERSIONS[-1],
            own=__version__,
        )
    mine = fingerprint(experiment)
    if run.get("fingerprint") != mine:
        raise RefusedError(
            f"the server's fingerprint is {plain(run.get('fingerprint'))}, this site's is {mine}: "
            "server and site must run the same job",
            public="the server's fingerprint is not this site's, {mine}: server and site must run the same job",
            mine=mine,
        )
