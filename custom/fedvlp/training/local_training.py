"""The one training loop, for every method: a phase's optimiser steps on a site's data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.device import prefetched
from fedvlp.core.method import Method, SiteHooks, overridden
from fedvlp.core.optimizers import one_pass
from fedvlp.core.seeds import seed
from fedvlp.core.site_error import NotFiniteError
from fedvlp.core.types import Batch, Broadcast, State
from fedvlp.training import distributed, dp_sgd
from fedvlp.training.phase_checkpoint import PhaseCheckpoint
from fedvlp.training.settings import Training
from fedvlp.training.step import Stepper


class Aborted(Exception):  # noqa: N818
    """The run was asked to stop; nothing of this task is kept."""


def train(
    method: Method,
    client: Client,
    message: Broadcast,
    training: Training,
    should_stop: Callable[[], bool],
    unfinished: PhaseCheckpoint | None = None,
    optimizer: State | None = None,
) -> dict[str, float]:
    """The one training loop: the phase's steps on this site's data. Returns the mean of every loss term.

    ``message`` may scale the learning rate (``lr_scale``) or the loss (``loss_scale``). Raises Aborted between
    steps when asked to stop, NotFiniteError naming the term and the step when a loss is not finite. With
    ``unfinished`` it resumes this very task where it was interrupted, and ends with the same bytes. ``optimizer``: the
    optimiser's tensors of earlier phases, in which those of this phase take their place.

    On a GPU the host queues steps and never waits for one: loss terms stay there until the phase ends.
    """
    # 1. How long, what is trained, and every seed of the phase.
    if training.local_epochs:
        passes = training.local_epochs * one_pass(client.data.num_train, training.batch_size)
        method = replace(method, local_steps=passes)
    client.set_trainable(lambda name: method.trains(name, message.phase))
    phases = method.phases(message.round)
    index = phases.index(message.phase) if message.phase in phases else message.phase  # the server's own training
    seeds = {name: seed(client.seed, client.name, message.round, index, name) for name in ("batches", "ranks", "views")}

    # 2. The optimiser, which may continue from what earlier phases left.
    step = (dp_sgd.PrivateStepper if training.dp_noise else Stepper)(client, training, message, seeds["ranks"])
    share_images(method, client, training)
    warms_up = not (optimizer and step.go_on(optimizer))

    # 3. The batches, and what the objective draws for each of them.
    generator, views = (torch.Generator().manual_seed(seeds[name]) for name in ("batches", "views"))
    batches = client.drawn(batches_of(method, client, message, training, generator, warms_up), views)

    def losses(batch: Batch) -> dict[str, Tensor]:
        return method.losses(client, method.complete(client, batch, message), message)

    def corrected() -> None:
        method.after_backward(client, message)

    # 4. The steps. A phase that was interrupted draws the batches that it has had, and drops them.
    history: list[dict[str, Tensor]] = []
    if unfinished and unfinished.steps:
        deque(islice(batches, unfinished.steps), maxlen=0)
        history = unfinished.restore(client, step)
    with step.running():
        for batch in prefetched(batches, client.device):
            if should_stop():
                raise Aborted(f"{client.name}: stopped in round {message.round} phase {message.phase}")
            history.append(step(batch, losses, corrected))
            method.after_step(client, message)
            if unfinished:
                unfinished.save(client, step, history)

    # 5. What the next phase continues from, and the mean of every loss term.
    step.end(history)
    if optimizer is not None:
        step.hand_on(optimizer)
    return mean_terms(history, client.name, message)


def batches_of(
    method: Method, client: Client, message: Broadcast, training: Training, generator: torch.Generator, warms_up: bool
) -> Iterator[Batch]:
    """The batches of a phase: the method's, or Poisson samples under record-level privacy, and more for a warm-up."""
    if training.dp_noise:
        dp_sgd.refuse_settings(method, training)
        dp_sgd.refuse_modules(client)
        batches = dp_sgd.batches(client, method.steps(message.phase), training)
    else:
        batches = method.batches(client, message, training.batch_size, generator)
    return prolonged(batches, client, training, generator) if warms_up and training.make_up_warmup else batches


def share_images(method: Method, client: Client, training: Training) -> None:
    """With a loss for each rank, let each rank load only its rows' images.

    A method or an objective that changes a batch before its rows are divided gets the whole batch.
    """
    apart = distributed.together() and not training.gather_negatives
    whole = client.hooks.draws or "batches" in overridden(method, SiteHooks)
    client.data.share_images(partial(distributed.my_rows, least=2) if apart and not whole else None)


def prolonged(
    batches: Iterator[Batch], client: Client, training: Training, generator: torch.Generator
) -> Iterator[Batch]:
    """The batches, and after them as many of the client's own records as make up for the warm-up."""
    steps = 0
    for batch in batches:
        steps += 1
        yield batch
    yield from client.data.train_batches(training.made_up(steps), training.batch_size, generator)


def mean_terms(history: list[dict[str, Tensor]], site: str, message: Broadcast) -> dict[str, float]:
    """Mean of each loss term over the steps; a non-finite one is an error that names its step."""
    means = {}
    for name in dict.fromkeys(name for terms in history for name in terms):
        values = torch.stack([terms[name] for terms in history if name in terms])
        # Read here for the first time: on a GPU every look would make the host wait.
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            step = int((~finite).nonzero()[0, 0])
            raise NotFiniteError(
                f"{site}: loss term {name!r} is {values[step].item()} at step {step} of round {message.round} phase "
                f"{message.phase}. Lower training.lr or look at this site's data; the server drops this update.",
                public=(
                    "a loss is no finite number at step {step} of round {round}. Lower training.lr or look at "
                    "this site's data"
                ),
                step=step,
                round=message.round,
            )
        means[name] = float(values.mean())
    return means
