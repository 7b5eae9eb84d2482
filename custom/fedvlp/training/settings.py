"""How a site trains, whatever the method: optimiser, precision, batches larger than memory, device."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import nn

from fedvlp.core.optimizers import SGD, AdamW, cosine
from fedvlp.core.site_error import SiteError
from fedvlp.core.validate import require

CHOICES = {
    "optimizer": ("adamw", "sgd"),
    "optimizer_state": ("reset", "keep"),
    "precision": ("float32", "bfloat16", "float16", "auto"),
    "attention": ("sdpa", "explicit", "auto"),
    "accumulation": ("cached", "plain"),
    "device": ("cpu", "cuda", "auto"),
}


class DeviceError(SiteError, RuntimeError):
    """The device that the settings ask for is not there."""


def take_gpu(worker: int) -> None:
    """Gives this process, number ``worker`` of several on this machine, one of the visible GPUs, in turn.

    Under torchrun and in their children every process has its own already.
    """
    if (count := torch.cuda.device_count()) and "LOCAL_RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = str(worker % count)


@dataclass(frozen=True)
class Training:
    """How a site trains, whatever the method: spec 2.1 (AdamW; by default no schedule, a fresh optimiser in a phase).

    ``auto`` takes what a probe of about a second finds fastest on the machine (training/autotune.py), or its GPU if it
    has one: two machines may then differ in more than the last bits. Everything else gives the same bytes everywhere.
    """

    batch_size: int = 32  # of a site's optimiser step, over all of its processes
    optimizer: str = "adamw"  # adamw | sgd
    lr: float = 2e-5  # learning rate, at least 0
    weight_decay: float = 0.05  # decoupled under adamw
    beta1: float = 0.9  # decay of the mean of gradients, adamw only
    beta2: float = 0.999  # decay of the mean of squared gradients, adamw only
    momentum: float = 0.0  # sgd only
    optimizer_state: str = "reset"  # at the end of a site's phase: reset (spec 2.1) | keep (moments stay at the site)
    warmup_steps: int = 0  # linear warm-up in every phase; a fresh AdamW's first steps are full-sized in every
    #                        coordinate, which undoes an average of models that are still close to random
    make_up_warmup: bool = False  # a phase that warms up takes as many steps more as that takes away (spec 4.4)
    local_epochs: int = 0  # passes over a site's own records in the place of method.local_steps; 0 = local_steps
    cosine_rounds: int = 0  # T_max of the cosine schedule of the learning rate, in rounds; 0 = constant
    threads: int = 1  # CPU threads per process; fixed, because another number gives other last bits
    precision: str = "float32"  # float32 | bfloat16 | float16 (autocast; weights and losses stay float32) | auto
    attention: str = "sdpa"  # sdpa (fused) | explicit (matrix products: faster in bfloat16 on CPUs) | auto
    compile: bool = False  # torch.compile of both towers, where the machine has a compiler
    channels_last: bool = False  # memory format of images and convolutions
    clip_norm: float = 0.0  # largest norm of the gradient of all trained parameters together; 0 = any
    dp_noise: float = 0.0  # record-level differential privacy (training/dp_sgd.py): the noise's standard deviation in
    #                        units of what one record can change; 0 = none
    dp_clip: float = 1.0  # largest norm of a group's gradient under dp_noise
    dp_group: int = 8  # records, on average, of the groups whose gradients are shortened; at least 2
    dp_delta: float = 1e-5  # delta of the epsilon that is reported, below 1; choose it below one over a site's records
    micro_batch: int = 0  # rows that go through the towers at a time, for batches larger than memory; 0 = all
    accumulation: str = "cached"  # of micro-batches: cached (gradient caching: loss and negatives of the whole batch,
    #                               exactly, for a second forward pass) | plain (each has its own loss and negatives)
    cache_features: bool = False  # towers that do not change see each record once, cropped at the centre, and not at
    #                               every step: frozen ones (model.adapters=lora, adapter_rank=0), and received ones
    #                               under FedDRA, FedRGB and FedMOON (training/frozen_features.py)
    gather_negatives: bool = False  # over several processes: False: each has its own loss and negatives, as in the
    #                                 papers' code; True: those of the whole batch, exactly
    device: str = "cpu"  # cpu | cuda | auto
    checkpoint_steps: int = 0  # a site killed in a phase resumes at the last multiple of so many steps; 0 = from 0

    def __post_init__(self) -> None:
        require(self.batch_size >= 2, f"training.batch_size is {self.batch_size}; a contrastive batch needs at least 2")
        for name, known in CHOICES.items():
            value = getattr(self, name)
            require(value in known, f"training.{name} is {value!r}; choose {' or '.join(known)}")
        require(0 <= self.lr < math.inf, f"training.lr is {self.lr}; a finite number that is not negative")
        require(self.weight_decay >= 0, f"training.weight_decay is {self.weight_decay}; it must not be negative")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"training.{name} is {value}; it must be in [0, 1)")
        require(self.threads >= 1, f"training.threads is {self.threads}; at least 1")
        require(0 <= self.dp_noise < math.inf, f"training.dp_noise is {self.dp_noise}; 0 = no privacy of records")
        require(0 < self.dp_clip < math.inf, f"training.dp_clip is {self.dp_clip}; it must be positive and finite")
        require(self.dp_group >= 2, f"training.dp_group is {self.dp_group}; a contrastive group needs at least 2")
        require(0 < self.dp_delta < 1, f"training.dp_delta is {self.dp_delta}; it must be in (0, 1)")
        require(0 <= self.clip_norm < math.inf, f"training.clip_norm is {self.clip_norm}; 0 = no clipping")
        for name in ("warmup_steps", "micro_batch", "checkpoint_steps", "local_epochs", "cosine_rounds"):
            value = getattr(self, name)
            require(value >= 0, f"training.{name} is {value}; 0 = none")

    def warm_up(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The phase's learning-rate schedule: linear over ``warmup_steps``, then constant."""
        steps = max(1, self.warmup_steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))

    def full_rate(self, steps: int) -> float:
        """What ``steps`` of a phase that warms up are worth in steps at the full learning rate."""
        rising = max(1, self.warmup_steps)
        return steps * (steps + 1) / (2 * rising) if steps < rising else steps - (rising - 1) / 2

    def made_up(self, steps: int) -> int:
        """Steps that a phase of ``steps`` takes in addition: the fewest that make it worth ``steps`` at the full rate.

        0 unless ``make_up_warmup``. A warm-up of k takes (k - 1)/2 steps away; an even k leaves half a step too many.
        """
        rising = max(1, self.warmup_steps)
        if not self.make_up_warmup or not steps:
            return 0
        total = steps + rising // 2  # steps - (rising - 1)/2 after the warm-up
        if total < rising:  # within it: the least n with n (n + 1)/2 >= steps * rising
            total = (math.isqrt(8 * steps * rising + 1) - 1) // 2
            total += total * (total + 1) < 2 * steps * rising
        return total - steps

    def build(self, parameters: list[nn.Parameter], scale: float, round: int = 0) -> torch.optim.Optimizer:
        """A fresh optimiser with learning rate ``lr * scale`` and the schedule's factor of the ``round``."""
        scale *= cosine(round, self.cosine_rounds)
        if self.optimizer == "sgd":
            return SGD(parameters, lr=self.lr * scale, momentum=self.momentum, weight_decay=self.weight_decay)
        betas = (self.beta1, self.beta2)
        return AdamW(parameters, lr=self.lr * scale, betas=betas, weight_decay=self.weight_decay, fused=True)

    def torch_device(self) -> torch.device:
        """The device of this process: of several, each has the GPU of its local rank. Raises DeviceError."""
        if self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise DeviceError(
                public=(
                    "training.device is cuda, and torch finds no GPU on this machine; set it to auto or cpu, or "
                    "fix the driver (nvidia-smi shows what it sees)"
                )
            )
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
