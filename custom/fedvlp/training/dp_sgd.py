"""DP-SGD (Abadi et al., 2016, https://arxiv.org/abs/1607.00133) for losses of whole batches, as contrastive ones are.

The unit is one record: an image-text pair (of a patient's several pairs, each alone). A contrastive loss is no sum over
pairs, so no pair has a gradient of its own to clip. Here the loss is decoupled into groups. In every step

1. each of the site's n records is drawn with probability q = batch_size / n, independently (Poisson sampling);
2. each drawn record chooses one of K = batch_size / dp_group groups, uniformly and independently;
3. g_k = gradient of the method's loss on group k alone, shortened to the length C = dp_clip; 0 for a group below 2;
4. the optimiser is given (sum_k g_k + N(0, (2 C dp_noise)^2)) / K.

One record more or less changes what one group holds and no other, so the sum changes by |g_k - g'_k| <= 2 C: step 4 is
the Gaussian mechanism of noise multiplier dp_noise on a Poisson sample, which run/cautions.py adds up. This
holds for any loss that sees a group alone, of any objective. Smaller groups give more gradients, each with fewer
negatives; the noise is the same. What is drawn and the noise come from the operating system, not from the run's seed,
which everybody knows: two runs differ. The number of records is disclosed, as is usual, and so are metrics on val
and test.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fedvlp.core.client import Client, GradientObserver, NoLossError
from fedvlp.core.method import Method, SiteHooks, overridden
from fedvlp.core.privacy import gaussian
from fedvlp.core.types import Batch, Broadcast
from fedvlp.training import distributed
from fedvlp.training.settings import Training
from fedvlp.training.step import Losses, Stepper

logger = logging.getLogger(__name__)

GROUP = "dp_group"
"""Key of a batch: the group of each record, [B] int64."""

COVERED = {"losses", "trains", "shares", "steps", "phases"}
"""Hooks of a site by which a method may differ from FedAvg: none reads records but in the loss."""


NEUTRAL = {"micro_batch": 0, "checkpoint_steps": 0, "make_up_warmup": False, "local_epochs": 0, "precision": "float32"}
"""Settings of training that must be so."""


class RecordPrivacyError(ValueError):
    """Record-level differential privacy cannot be had with these settings, or on this machine."""


def refuse_settings(method: Method, training: Training) -> None:
    """Raises RecordPrivacyError for a method that sends what the noise does not cover, or settings that it lacks."""
    name, probes = type(method).__name__, method.probes()
    uncalled = set() if probes else {"probe"}
    other = sorted(set(overridden(method, SiteHooks)) - COVERED - uncalled)
    said = []
    if probes:
        said.append(
            f"{name} sends exact figures of the records ({', '.join(probes)}); set method.rho=0, or choose fedavg"
        )
    if other:
        said.append(
            f"{name} reads records elsewhere than in its loss ({', '.join(other)}); choose fedavg, fedprox, or feddra "
            "with method.rho=0"
        )
    for setting, neutral in NEUTRAL.items():
        value = getattr(training, setting)
        if value != neutral:
            said.append(f"training.{setting} is {value}; set it to {neutral}")
    if said:
        raise RecordPrivacyError(f"training.dp_noise: {said[0]}")


def refuse_modules(client: Client) -> None:
    """Raises RecordPrivacyError for a model or an objective that keeps more of records than trained weights."""
    modules: list[nn.Module] = [*client.model.modules(), *client.objective.modules()]
    untrained = client.objective.state_dict().keys() - {name for name, _ in client.objective.named_parameters()}
    wrong = {
        "statistics of batch normalisation are exact; set model.head_norm=layer": any(
            isinstance(module, BatchNorm) and module.training for module in modules
        ),
        "the objective keeps more than trained weights; choose another": bool(untrained),
        "the objective draws views of its own; choose another": client.hooks.draws,
        "its groups have whole reports; set objective.sentences=false": "sentences" in client.hooks.needs,
        "several processes at a site share no noise; use one": distributed.together(),
    }
    for text in (text for text, seen in wrong.items() if seen):
        raise RecordPrivacyError(f"{client.name}: training.dp_noise: {text}")


def rate(training: Training, records: int) -> float:
    """q: the probability of a record to be drawn in a step."""
    return min(1.0, training.batch_size / records)


def steps(method: Method, round: int, phase: int) -> int:
    """Steps of a site from the first round to the ``phase``-th of this one, which is counted too."""
    done = sum(method.steps(name) for name in method.phases(round)[: phase + 1])
    for earlier in range(round):
        done += sum(method.steps(name) for name in method.phases(earlier))
    return done


def batches(client: Client, steps: int, training: Training) -> Iterator[Batch]:
    """Poisson samples of the site's training records, with groups; images are cropped at the centre."""
    records = client.data.num_train
    groups = max(1, training.batch_size // training.dp_group)
    for _ in range(steps):
        # Each record is drawn by itself, with probability q: only then does the accountant's amplification hold.
        rows = torch.from_numpy(np.flatnonzero(uniform(records) < rate(training, records)))
        group = torch.from_numpy((uniform(len(rows)) * groups).astype(np.int64))
        drawn = client.data.batches("train", max(1, len(rows)), drop_last=False, rows=rows)
        sample, *others = [*drawn] or [{}]
        if others:  # part of a sample would be no Poisson sample
            raise NoLossError(
                public="differential privacy of records needs a site whose training records all have an image and a "
                "report, or all lack the same one; leave the others out, or make them a site of their own"
            )
        yield {**sample, GROUP: group}


def uniform(count: int) -> np.ndarray:
    """[count] float64 in [0, 1) from the operating system's cryptographic generator (core/privacy.py says why)."""
    bits: np.ndarray = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    return bits.astype(np.float64) / 2.0**53


class PrivateStepper(Stepper):
    """Steps 3 and 4 of a batch with groups. It returns no loss terms: they would be exact.

    An observer at the site, if there is one, gets which records each group had and how long its shortened
    gradient was, before the noise: a job that asks for next to no noise must not hide that a few records are behind all
    of an update (deploy/envelope.py). These lengths are exact, and stay at the site.
    """

    def __init__(self, client: Client, training: Training, message: Broadcast, purpose: int) -> None:
        super().__init__(client, training, message, purpose)
        self.rows: list[Tensor] = []  # of every group that had a gradient

    def _backward(self, batch: Batch, losses: Losses) -> dict[str, Tensor]:
        group, training = batch[GROUP], self.training
        rest = {name: tensor for name, tensor in batch.items() if name != GROUP}
        groups = max(1, training.batch_size // training.dp_group)
        sums = [torch.zeros_like(parameter) for parameter in self.parameters]
        # Step 3: the gradient of each group alone, shortened to C.
        for number in range(groups):
            rows = (group == number).nonzero()[:, 0]
            if len(rows) < 2:
                continue
            self.optimizer.zero_grad(set_to_none=True)
            terms = losses({name: tensor[rows.to(tensor.device)] for name, tensor in rest.items()})
            (self._sum(terms, rest) * self.loss_scale).backward()
            gradients, length = self._shortened()
            if self.client.observer is not None:
                self.rows.append(rest["row"][rows.to(rest["row"].device)])
                self.lengths.append(torch.tensor(length))
            for total, shortened in zip(sums, gradients, strict=True):
                if shortened is not None:
                    total += shortened
        # Step 4: noise for the sum, whose sensitivity is 2 C.
        deviation = 2 * training.dp_clip * training.dp_noise
        for parameter, total in zip(self.parameters, sums, strict=True):  # also of those that no loss has reached
            noise = gaussian(total.numel()).to(total.dtype).reshape(total.shape).to(total.device)
            parameter.grad = (total + deviation * noise) / groups
        return {}

    def _note_length(self) -> None:
        """Nothing: the length of a step's gradient is that of its noise."""

    def _tell_lengths(self, observer: GradientObserver) -> None:
        observer.weigh(self.lengths, self.rows)

    def _shortened(self) -> tuple[list[Tensor | None], float]:
        """The gradients, together of at most the length ``dp_clip``, and that length; none where not finite."""
        gradients = [parameter.grad for parameter in self.parameters]
        # The length over all parameters together, not of each.
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in gradients if one is not None))
        if not math.isfinite(norm):
            logger.warning("%s: the loss of a group is not finite; the group is left out", self.client.name)
            return [None] * len(gradients), 0.0
        scale = min(1.0, self.training.dp_clip / norm) if norm else 1.0
        return [None if one is None else one * scale for one in gradients], norm * scale
