"""torch's own optimisers, without torch._dynamo.

Every optimiser of torch imports that compiler to mark its methods as not to be compiled, when it is built and at every
step: 2 seconds of processor time and 150 MB in each process that trains, for nothing where only towers are compiled.
Here the same methods are called without the mark, so the arithmetic is torch's, to the last bit.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer


class _Unmarked(Optimizer):
    """The methods that torch marks, as they are without the mark."""

    add_param_group: Any = inspect.unwrap(Optimizer.add_param_group)
    state_dict: Any = inspect.unwrap(Optimizer.state_dict)
    load_state_dict: Any = inspect.unwrap(Optimizer.load_state_dict)
    zero_grad: Any = inspect.unwrap(Optimizer.zero_grad)


def _eager(step: Any) -> Any:
    """An optimiser's ``step`` without the mark; torch switches gradients off together with it."""
    return torch.no_grad()(inspect.unwrap(step))


class Adam(_Unmarked, torch.optim.Adam):
    """torch.optim.Adam."""

    step = _eager(torch.optim.Adam.step)


class AdamW(_Unmarked, torch.optim.AdamW):
    """torch.optim.AdamW."""

    step = _eager(torch.optim.AdamW.step)


class SGD(_Unmarked, torch.optim.SGD):
    """torch.optim.SGD."""

    step = _eager(torch.optim.SGD.step)
