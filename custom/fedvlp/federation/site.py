"""One site's side of a run: answers a broadcast with an update. The engine, FLARE and a child process all call this."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Protocol

import torch
from torch import Tensor

from fedvlp.core import metric_keys, norm_statistics
from fedvlp.core.client import OBJECTIVE, Client
from fedvlp.core.device import to_host
from fedvlp.core.disk import fullest, is_full
from fedvlp.core.method import Method, SiteHooks, overridden
from fedvlp.core.seeds import seed, set_global
from fedvlp.core.site_error import UNTOLD, UNWRITABLE, SiteError
from fedvlp.core.types import EVALUATE, Broadcast, Failure, FailureKind, State, Update
from fedvlp.federation.site_memory import SiteMemory, task_of
from fedvlp.training import autotune, distributed, dp_sgd
from fedvlp.training.local_training import train
from fedvlp.training.phase_checkpoint import PhaseCheckpoint, identity
from fedvlp.training.settings import Training

MOMENTS = "optimizer"
"""Folder, in that of a site's memory, of the optimiser's tensors where they are kept (``training.optimizer_state``)."""


TRAINEE = "trainee/"
"""Beginning of the names, in that folder, of the tensors of another model than the first (``Method.trainee``)."""


FEWEST = "privacy/fewest_records"
"""In a site's memory, where training is record-level private: the fewest training records of any task so far, []."""


class PublicSetError(SiteError, ValueError):
    """Server and site do not hold the same public set."""


def reason(error: Exception) -> str:
    """Why a task failed, for this machine's log: only fedvlp's own errors are worded for that; of others the type.

    The text of a foreign exception may hold a patient's words.
    """
    if _no_memory(error):
        return f"{type(error).__name__}: this site's memory is too small; lower training.batch_size"
    ours = type(error).__module__.startswith("fedvlp")
    if is_full(error) and not ours:
        return f"{type(error).__name__}: {fullest([Path.cwd(), Path(gettempdir())])}"
    if _no_file(error):
        why = os.strerror(getattr(error, "errno", 0))
        return (
            f"{type(error).__name__}: {why}; this account must read its data and write runs, cache and privacy of the "
            "kit: free space or make them so, and the site is asked again in a later round"
        )
    return f"{type(error).__name__}: {error}" if ours else type(error).__name__


def _model_of(key: str) -> tuple[str, str]:
    """Of a name in that folder the model, and the optimiser's own name of the tensor: ``<parameter>/<name>``."""
    if not key.startswith(TRAINEE):
        return "model", key
    model, _, name = key.removeprefix(TRAINEE).partition("/")
    return model, name


def failure(error: Exception) -> Failure:
    """The reply of a site whose task ended in ``error``."""
    said = reason(error)
    if isinstance(error, SiteError):
        return Failure(error.kind, said, error.public)
    if is_full(error):
        return Failure(FailureKind.FAILED, said, f"{type(error).__name__}: a disk of the site is full")
    return Failure(FailureKind.FAILED, said, said if _no_memory(error) or _no_file(error) else UNTOLD)


def _no_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))


def _no_file(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in UNWRITABLE


class Evaluate(Protocol):
    """Measures the client's current model on this site's held-out records (evaluation/, given by presets)."""

    def __call__(self, client: Client, splits: tuple[str, ...]) -> dict[str, float]: ...


class Account(Protocol):
    """Epsilon of one of ``records`` training records after ``steps`` steps of record-level training."""

    def __call__(self, training: Training, records: int, steps: int) -> float: ...


class Site:
    """A site: its client, its method and its memory."""

    def __init__(
        self,
        client: Client,
        method: Method,
        training: Training,
        memory: SiteMemory,
        evaluate: Evaluate | None = None,
        account: Account | None = None,
    ) -> None:
        self.client = client
        self.method = method
        self.training = training
        self.memory = memory
        self.note_processor = (
            False  # whether updates have ``processor_seconds``, which no hospital's list of metrics has
        )
        self.moments = SiteMemory(memory.folder / MOMENTS if memory.folder else None)
        self.evaluate = evaluate
        self.account = account

    def handle(self, message: Broadcast, should_stop: Callable[[], bool] = lambda: False) -> Update:
        """Receives, measures the received model, trains, and returns the update. Nothing is kept if it raises."""
        began, processor = time.perf_counter(), time.process_time()
        client, method = self.client, self.method

        # 1. The task, on this site's device, and its place in the run: round, and index of the phase.
        self._refuse_other_public_set(message)
        message = replace(message, state=client.here(message.state), aux=client.here(message.aux))
        task = task_of(method.phases, message)
        with torch.random.fork_rng(devices=[]):
            set_global(seed(client.seed, client.name, *task))

            # 2. What this site remembers from before this very task: a repeated task starts from the same state.
            remembered = client.here(self.memory.before(task))
            private = self._fewest(remembered.pop(FEWEST, None), message)
            client.memory, own = norm_statistics.split(remembered)
            mine = norm_statistics.own(own, method.trainee(message.phase))
            measured = self._reads_statistics(message)
            message = replace(message, state=norm_statistics.complete(client, message.state, mine, measured))
            moments = self._moments(message, task)
            unfinished = self._unfinished(message, moments or {})

            # 3. The received model is loaded, and measured once a round, before anything is trained.
            method.receive(client, message)
            if client.own_norm and measured:
                norm_statistics.estimate(client)
            first = task[1] == 0 or message.phase == EVALUATE
            scalars, metrics, evaluating = self._measure(message) if first else ({}, {}, 0.0)

            # 4. Training. Whatever happens, the method's own models leave the device.
            state: State = {}
            try:
                if message.phase != EVALUATE:
                    training = autotune.fixed(self.training, client.device, self.memory.folder)
                    terms = train(method, client, message, training, should_stop, unfinished, moments)
                    metrics |= {metric_keys.loss(name): value for name, value in terms.items()}
                    metrics |= self._spent(message, task[1], private)
                    state = to_host(method.upload(client, message))
            finally:
                client.release()

            # 5. What stays here is separated from what travels, and is on disk before the update leaves.
            own |= self._staying(message, state)
            state = {name: tensor for name, tensor in state.items() if name not in client.site_only}
            self._remember(task, message.phase, client.memory | own | private, moments)
            if unfinished:
                unfinished.remove()

        # 6. The update.
        metrics[metric_keys.SECONDS] = time.perf_counter() - began
        if self.note_processor and message.phase != EVALUATE:
            metrics[metric_keys.PROCESSOR_SECONDS] = time.process_time() - processor - evaluating
        return Update(
            client.name,
            message.round,
            message.phase,
            client.data.num_train,
            state,
            scalars=scalars,
            metrics=metrics,
            modalities=client.modalities,
            public_id=client.public_id,
        )

    def _reads_statistics(self, message: Broadcast) -> bool:
        """Whether anything reads the running statistics of the received model.

        An evaluation does, and a method's own hooks may: anchors, a probe. FedAvg's training normalises by its batches.
        """
        own = any(name.startswith(OBJECTIVE) for name in self.client.site_only)
        return bool(message.phase == EVALUATE or message.evaluate or own or overridden(self.method, SiteHooks))

    def _remember(self, task: tuple[int, int], phase: str, remembered: State, moments: State | None) -> None:
        """Keeps what the next task begins with: the site's memory, and the optimiser's where the settings ask for it.

        Of several processes that train together one does.
        """
        if distributed.rank() != 0:
            return
        if remembered:
            self.memory.after(task, to_host(remembered))
        if moments:
            others = {n: t for n, t in self.moments.before(task).items() if not self._is_of(phase, n)}
            self.moments.after(task, others | self._named(phase, moments))

    def _staying(self, message: Broadcast, uploaded: State) -> State:
        """The normalisation that stays here: what would be uploaded; after the last evaluation, what was measured."""
        evaluated = message.phase == EVALUATE
        model = norm_statistics.SERVED if evaluated else self.method.trainee(message.phase)
        source = message.state if evaluated else uploaded
        stays = {name: source[name] for name in sorted(self.client.site_only & source.keys())}
        return norm_statistics.remembered(stays, model)

    def _fewest(self, before: Tensor | None, message: Broadcast) -> State:
        """What record-level training remembers of how many training records there were; nothing for other training."""
        if not self.training.dp_noise:
            return {}
        known = [] if before is None else [int(before)]
        if message.phase != EVALUATE:
            known.append(self.client.data.num_train)
        return {FEWEST: torch.tensor(min(known))} if known else {}

    def _spent(self, message: Broadcast, index: int, private: State) -> dict[str, float]:
        """What the run has cost a record of this site in privacy, this phase included: at most.

        The fewer records there are, the likelier is each to be drawn: all steps count as if there had been as few as
        ever in the run, since a site's records may grow in the middle of it.
        """
        if not private or self.account is None:
            return {}
        steps = dp_sgd.steps(self.method, message.round, index)
        return {metric_keys.RECORD_EPSILON: self.account(self.training, int(private[FEWEST]), steps)}

    def _moments(self, message: Broadcast, task: tuple[int, int]) -> State | None:
        """The optimiser's tensors as they were before a task that trains, where the settings keep them; else None."""
        if self.training.optimizer_state != "keep" or message.phase == EVALUATE:
            return None
        before, phase = self.moments.before(task), message.phase
        return {_model_of(name)[1]: tensor for name, tensor in before.items() if self._is_of(phase, name)}

    def _is_of(self, phase: str, key: str) -> bool:
        """Whether a phase continues from the kept tensor of this name: each model has its own."""
        model, name = _model_of(key)
        return model == self.method.moments(name.rpartition("/")[0], phase)

    def _named(self, phase: str, moments: State) -> State:
        """The optimiser's tensors after a phase, as they are kept."""
        named = {}
        for name, tensor in moments.items():
            model = self.method.moments(name.rpartition("/")[0], phase)
            if model:
                named[name if model == "model" else f"{TRAINEE}{model}/{name}"] = tensor
        return named

    def _unfinished(self, message: Broadcast, moments: State) -> PhaseCheckpoint | None:
        """Where a long phase is kept while it lasts, if the settings ask for that and the site has a folder."""
        every, folder = self.training.checkpoint_steps, self.memory.folder
        if not every or folder is None or message.phase == EVALUATE:
            return None
        memory = self.client.memory | {f"{MOMENTS}/{name}": tensor for name, tensor in moments.items()}
        task = identity(message, memory, (self.method, self.training))
        return PhaseCheckpoint(folder / "unfinished.safetensors", task, every)

    def _refuse_other_public_set(self, message: Broadcast) -> None:
        expected, mine = message.public_id, self.client.public_id
        if expected is not None and expected != mine:
            raise PublicSetError(
                f"{self.client.name}: the ids of this site's public set have the hash {mine:012x}, the server's "
                f"{expected:012x}; both must hold the same records in the same order",
                public=(
                    "the ids of this site's public set have the hash {mine:012x}, the server's {expected:012x}; "
                    "both must hold the same records in the same order"
                ),
                mine=mine,
                expected=expected,
            )

    def _measure(self, message: Broadcast) -> tuple[dict[str, float], dict[str, float], float]:
        """The method's scalars, and metrics: its figures and, where asked for, the evaluation of the received model.

        Then the seconds of processor time that the evaluation took.
        """
        client, method = self.client, self.method
        client.model.eval()
        client.objective.eval()
        with torch.no_grad():
            probed = method.probe(client, message) if method.probes() else {}
            scalars = {name: value for name, value in probed.items() if name in method.probes()}
            figures = {name: value for name, value in probed.items() if name not in scalars}
            figures |= method.figures(client, message)
            metrics = {metric_keys.probe(name): value for name, value in figures.items()}
            began = time.process_time()
            if message.evaluate and self.evaluate is not None:
                metrics |= self.evaluate(client, ("val", "test")[: message.evaluate])
        return scalars, metrics, time.process_time() - began
