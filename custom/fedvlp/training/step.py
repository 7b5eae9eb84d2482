"""One optimiser step, with what large models need: autocast, micro-batches, several processes, clipping."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.client import Client, GradientObserver, NoLossError, Trainee
from fedvlp.core.seeds import seed, set_global
from fedvlp.core.types import Batch, Broadcast, State
from fedvlp.training import distributed
from fedvlp.training.autotune import choose
from fedvlp.training.grad_cache import LOCAL, MicroBatches
from fedvlp.training.settings import Training

logger = logging.getLogger(__name__)

IDLE = "idle"
"""Name of an empty tensor in the place of the optimiser's own, for a parameter without a gradient so far."""

REMEDY = (
    "give it images with reports, leave it out (partition.left_out), or choose a method or objective that takes what "
    "it has: car-mfl and creamfl take either half, partition.retrieve lends reports to images"
)
"""What to do for a site without records that the loss is for."""

Losses = Callable[[Batch], dict[str, Tensor]]


class Stepper:
    """The optimiser steps of one phase on a client's trainable parameters."""

    def __init__(self, client: Client, training: Training, message: Broadcast, purpose: int) -> None:
        """``message`` scales the learning rate or the loss. ``purpose``: a seed that names the phase."""
        self.client, self.training, self.purpose = client, training, purpose
        trainable = dict(client.trainable())
        self.names, self.parameters = list(trainable), list(trainable.values())
        self.optimizer = training.build(self.parameters, message.lr_scale, message.round)
        self.schedule = training.warm_up(self.optimizer)
        self.loss_scale = message.loss_scale
        self.device = client.device
        self.precision, attention = choose(training.precision, training.attention, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "float16")
        self.done = 0
        self.lengths: list[Tensor] = []  # norm of each step's gradient, as the optimiser has it; kept for an observer
        self.means = distributed.MeansInBackward(self.parameters)
        Trainee.of(client.model).set_attention(attention)
        if training.channels_last:
            client.model.to(memory_format=torch.channels_last)
        if training.compile:
            compile_towers(client.model)
        if "auto" in (training.precision, training.attention, training.device):
            logger.info("%s: %s, %s attention, on %s", client.name, self.precision, attention, self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Steps are made inside of it."""
        with self._in_parts(), self.means.watching():
            yield

    @contextmanager
    def _in_parts(self) -> Iterator[None]:
        """The model's towers see a batch in parts, where the settings ask for that."""
        gather = self.training.gather_negatives and distributed.together()
        if not gather and not (self.training.micro_batch and self.training.accumulation == "cached"):
            yield
            return
        tokens = bool(LOCAL & set(self.client.hooks.needs))
        micro = self.training.micro_batch if self.training.accumulation == "cached" else 0
        with self.client.in_micro_batches(MicroBatches(micro, gather, tokens)):
            yield

    def __call__(self, batch: Batch, losses: Losses, corrected: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        """One step on ``batch``; the terms of the loss, detached. ``corrected`` may change the finished gradients."""
        # 1. Of several processes each takes its own rows, unless all see the whole batch.
        several, gather = distributed.together(), self.training.gather_negatives
        if several:
            set_global(seed(self.purpose, self.done, 0 if gather else distributed.rank()))
        if several and not gather:
            batch = own_rows(batch)

        # 2. The gradients, averaged over the processes.
        self.optimizer.zero_grad(set_to_none=True)
        terms = self._backward(batch, losses)
        if several:
            self.means.finish()

        # 3. The method's corrections, then clipping: both in true units, so the scale of float16 is taken out first.
        self.scaler.unscale_(self.optimizer)
        if self._holds():
            with torch.no_grad():
                corrected()
        if self.training.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.training.clip_norm)
        if self.client.observer is not None:
            self._note_length()

        # 4. The step.
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.client.stepped()
        self.done += 1
        return terms

    def _note_length(self) -> None:
        self.lengths.append(_length(self.parameters))

    def _tell_lengths(self, observer: GradientObserver) -> None:
        observer.weigh(self.lengths)

    def _holds(self) -> bool:
        """Whether float16 held the gradients; if not, the scaler leaves this step out."""
        if not self.scaler.is_enabled():
            return True
        return all(bool(torch.isfinite(p.grad).all()) for p in self.parameters if p.grad is not None)

    def _backward(self, batch: Batch, losses: Losses) -> dict[str, Tensor]:
        """Gradients of the batch's loss; of plain micro-batches, of the mean of theirs."""
        total: dict[str, Tensor] = {}
        # weights cast once for all micro-batches would have their gradients summed in low precision
        autocast = {"enabled": self.precision != "float32", "cache_enabled": not self.training.micro_batch}
        done = 0
        for piece in self._pieces(batch):
            done += _size(piece)
            if distributed.together() and done == _size(batch):
                self.means.begin()  # only the last piece's backward pass completes a gradient
            # A micro-batch counts by its records, so the sum of the pieces is the mean over the batch.
            share = _size(piece) / _size(batch)
            with torch.autocast(self.device.type, self._low_precision, **autocast):
                terms = losses(piece)
            loss = self._sum(terms, batch)
            self.scaler.scale(loss * (self.loss_scale * share)).backward()
            for name, term in terms.items():
                mine = term.detach() * share
                total[name] = total[name] + mine if name in total else mine
        return total

    def _sum(self, terms: dict[str, Tensor], batch: Batch) -> Tensor:
        """The loss, []. Raises NoLossError where the objective has no term for this batch."""
        if not terms:
            raise NoLossError(
                f"{self.client.name}: the objective has no term for a batch of {', '.join(sorted(batch))}: a modality "
                f"is missing that this method does not complete; {REMEDY}",
                public="the objective has no loss for this site's records: a modality is missing that this method does "
                "not complete; give it images with reports, leave it out (partition.left_out), or choose a method that "
                "takes either half (car-mfl, creamfl)",
            )
        loss: Any = sum(terms.values())
        return loss

    def _pieces(self, batch: Batch) -> Iterator[Batch]:
        """Micro-batches of nearly equal size: a last one of one record would have no negatives, nor a variance."""
        if self.training.channels_last and "image" in batch:
            batch = {**batch, "image": batch["image"].contiguous(memory_format=torch.channels_last)}
        total = _size(batch)
        size = (self.training.micro_batch if self.training.accumulation == "plain" else 0) or total
        count = -(-total // size)
        if total % size:
            count = max(1, min(count, total // 2))
        for number in range(count):
            yield _piece(batch, total * number // count, total * (number + 1) // count)

    @property
    def _low_precision(self) -> torch.dtype:
        return torch.float16 if self.precision == "float16" else torch.bfloat16

    def agree(self) -> None:
        """Running statistics, of which every process may have its own, become their means."""
        if distributed.together():
            modules = (self.client.model, self.client.objective)
            distributed.average(b for module in modules for b in module.buffers() if b.is_floating_point())

    def end(self, history: list[dict[str, Tensor]]) -> None:
        """Frees the gradients; several processes end with the same weights, statistics and loss terms."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.client.observer is not None:
            self._tell_lengths(self.client.observer)
        self.agree()
        if distributed.together():
            distributed.average(term for terms in history for term in terms.values())

    def tensors(self) -> State:
        """The optimiser's own, named ``<parameter>/<name>``."""
        tensors: State = {}
        for index, own in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{self.names[index]}/{name}": tensor for name, tensor in own.items() if tensor is not None}
        return tensors

    def numbers(self) -> dict[str, Any]:
        """What else the next step depends on (JSON-able)."""
        return {
            "done": self.done,
            "lengths": [float(length) for length in self.lengths],
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "groups": self.optimizer.state_dict()["param_groups"],
        }

    def hand_on(self, tensors: State) -> None:
        """Adds copies of :meth:`tensors` to those of earlier phases, so that the next phase resumes from them.

        A parameter that no loss has reached so far is marked there, because its phase has warmed up all the same.
        """
        # What this phase trained takes the place of its older moments; those of other parameters stay.
        own = {name: tensor.cpu().clone() for name, tensor in self.tensors().items()}
        moved = {key.rpartition("/")[0] for key in own}
        for key in [key for key in tensors if key.rpartition("/")[0] in moved]:
            del tensors[key]
        idle = [name for name in self.names if name not in moved] if own else []
        tensors |= own | {f"{name}/{IDLE}": torch.zeros(0) for name in idle}

    def go_on(self, tensors: State) -> bool:
        """Takes over copies of what :meth:`hand_on` left, as far as it is of parameters that this phase trains.

        Returns whether all of these were trained before: then the phase needs no warm-up.
        """
        complete = self._load(tensors, self.optimizer.state_dict()["param_groups"])
        if complete:
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        return complete

    def restore(self, tensors: State, numbers: dict[str, Any]) -> None:
        """Continues the phase where :meth:`tensors` and :meth:`numbers` were taken."""
        self._load(tensors, numbers["groups"])
        self.schedule.load_state_dict(numbers["schedule"])
        self.scaler.load_state_dict(numbers["scaler"])
        self.done = numbers["done"]
        self.lengths = [torch.tensor(length) for length in numbers.get("lengths", [])]

    def _load(self, tensors: State, groups: Any) -> bool:
        """Whether there was something for every parameter."""
        numbers = {name: index for index, name in enumerate(self.names)}
        states: dict[int, State] = {}
        known: set[int] = set()
        for key, tensor in tensors.items():
            parameter, _, name = key.rpartition("/")
            index = numbers.get(parameter)
            if index is None:
                continue
            known.add(index)
            if name != IDLE:
                states.setdefault(index, {})[name] = tensor.clone()  # the optimiser works in place
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        return len(known) == len(self.names)


def _length(parameters: list[torch.nn.Parameter]) -> Tensor:
    """The length of the whole gradient, []; 0 where it is not finite, a step that float16 leaves out."""
    lengths = [torch.linalg.vector_norm(one.grad.detach().float()) for one in parameters if one.grad is not None]
    whole = torch.linalg.vector_norm(torch.stack(lengths)) if lengths else torch.zeros(())
    return torch.nan_to_num(whole, nan=0.0, posinf=0.0)


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _piece(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows of a batch, and the like share of what has another number of them: public items beside the records."""
    whole = _size(batch)
    rows = {name: t[len(t) * start // whole : len(t) * stop // whole] for name, t in batch.items()}
    return {name: tensor for name, tensor in rows.items() if len(tensor)}


def own_rows(batch: Batch) -> Batch:
    """This process's rows of a batch, whose images may be of these rows alone (``SiteData.share_images``)."""
    total = max(len(tensor) for tensor in batch.values())
    rows = distributed.my_rows(total, 2)
    return {name: tensor[rows] if len(tensor) == total else tensor for name, tensor in batch.items()}


def compile_towers(model: Any) -> None:
    """torch.compile of both encoders, in place (names of tensors stay); said and left out without a compiler.

    Towers that an earlier phase has compiled stay so: compiling again would begin with an empty cache.
    """
    towers = [tower for tower in (model.image_encoder, model.text_encoder) if tower._compiled_call_impl is None]
    if not towers:
        return
    try:
        torch.compile(torch.neg)(torch.zeros_like(next(model.parameters())))
    except Exception as error:
        logger.warning("training.compile: no working compiler here (%s); the model runs as it is", type(error).__name__)
        return
    for tower in towers:
        tower.compile()
