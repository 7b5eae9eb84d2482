"""The gate through which every reply of a site passes before the server uses it: types, lengths, ranges and tensors.

A reply may be wrong in any way, by accident or on purpose. FLARE itself lets NaN through, broadcasts a (1,) tensor into
(3,) and counts 0 or negative samples as 1. A site has a gate for the server's tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedvlp.core.change import is_finite
from fedvlp.core.types import EVALUATE, MODALITIES, Broadcast, Expected, Update
from fedvlp.core.validate import is_number

LARGEST_METRIC = 1e12
"""A reported loss or recall beyond this is nonsense that would overflow statistics over sites."""

MOST_METRICS = 1000
"""Figures in one reply; a model judged on 14 findings by two splits reports some dozens."""

LONGEST_NAME = 200
"""Characters of a metric's name."""

MOST_ROUNDS = 10**9
"""A round's number is below it."""

PLAIN_NAME = re.compile(rf"[\w.:/-]{{1,{LONGEST_NAME}}}", re.ASCII)
"""A name that an answer may repeat; any other could be a patient's, or forge a line of a log."""

METRIC_NAME = re.compile(rf"(?=\w)[\w .:/@()+,%-]{{1,{LONGEST_NAME}}}")
"""The form of a figure's name: a letter or a digit, then what a table, a page or a spreadsheet takes for plain text."""

ROUNDING = 0.01
"""What the length of a unit vector may lose as float16 or bfloat16."""

PUBLIC_IDS = 2**53
"""Every id of a public set is smaller, so that it is exact as a float too."""


def check(
    update: Update,
    *,
    site: str,
    round: int,
    phase: str,
    expected: Expected,
    max_samples: int,
    probes: tuple[str, ...] = (),
    finite: Callable[[str, Tensor], bool] = lambda name, tensor: is_finite(tensor),
) -> str | None:
    """Why this reply of ``site`` must be dropped, or None.

    It must carry exactly the tensors of ``expected``, finite, and exactly the scalars named in ``probes``. ``finite``
    looks whether the values of a tensor of the state are finite, and may measure what it reads (core/change.py).
    """
    if update.site != site:
        return f"it names another site than the channel it came through (expected {site})"
    if type(update.round) is not int or (update.round, update.phase) != (round, phase):
        return f"it is for round {_shown(update.round)} phase {_shown(update.phase)}, expected {round} {phase!r}"
    return (
        _check_header(update, max_samples)
        or _check_scalars(update, probes)
        or _check_metrics(update)
        or check_tensors(update.state, expected.state, finite)
        or check_tensors(update.aux, expected.aux)
    )


def _check_header(update: Update, max_samples: int) -> str | None:
    samples, held, public_id = update.num_samples, update.modalities, update.public_id
    if type(samples) is not int or not 0 <= samples <= max_samples:
        return f"num_samples is {_shown(samples)}, expected a whole number from 0 to {max_samples:,}"
    if not isinstance(held, tuple) or sum(name in held for name in MODALITIES) != len(held):
        return f"modalities is {_shown(held)}, expected some of {', '.join(MODALITIES)}, each once"
    if type(public_id) is not int or not 0 <= public_id < PUBLIC_IDS:
        return f"public_id is {_shown(public_id)}, expected a whole number from 0 to 2^53"
    return None


def _check_scalars(update: Update, probes: tuple[str, ...]) -> str | None:
    """A scalar may be nan (the site cannot know it) but not be left out: the method would continue without it."""
    scalars = update.scalars
    if not isinstance(scalars, dict):
        return f"scalars is a {type(scalars).__name__}, expected a dictionary"
    missing = [name for name in probes if name not in scalars]
    if missing:
        return (
            f"it lacks the scalar {missing[0]!r}, which the method needs; see what this site's filters take out, or "
            "choose a method that does without it"
        )
    if len(scalars) > len(probes):
        return f"it has {len(scalars) - len(probes)} scalar(s) that the method does not know"
    for name, value in scalars.items():
        if not is_number(value) or abs(value) > LARGEST_METRIC:
            return f"scalar {_named(name)} is {_shown(value)}, expected a number up to {LARGEST_METRIC:g}, or nan"
    return None


def _check_metrics(update: Update) -> str | None:
    metrics = update.metrics
    if not isinstance(metrics, dict) or len(metrics) > MOST_METRICS:
        return f"metrics is {_shown(metrics)}, expected a dictionary of at most {MOST_METRICS} figures"
    for name, value in metrics.items():
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            return (
                f"the name of a metric is {_shown(name)}, expected at most {LONGEST_NAME} letters, digits, spaces and "
                "characters of .:/@()+,%-_"
            )
        if not is_number(value) or not abs(value) <= LARGEST_METRIC:
            return f"metric {_named(name)} is {_shown(value)}, expected a finite number up to {LARGEST_METRIC:g}"
    return None


def check_tensors(
    state: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    finite: Callable[[str, Tensor], bool] = lambda name, tensor: is_finite(tensor),
) -> str | None:
    """Why ``state`` does not have exactly the names, shapes and dtypes of ``reference`` with finite values, or None."""
    if not isinstance(state, Mapping):
        return f"its tensors are a {type(state).__name__}, expected a dictionary"
    for label, names in (("missing", reference.keys() - state.keys()), ("unexpected", state.keys() - reference.keys())):
        if names:
            listed = ", ".join(sorted(plain(name) for name in names)[:3])
            return f"{len(names)} {label} tensor(s), e.g. {listed}"
    for name, expected in reference.items():
        seen = state[name]  # once: what waits on disk is read, and decoded, whenever it is asked for
        if not isinstance(seen, Tensor):
            return f"{name} is a {type(seen).__name__}, expected a tensor"
        if seen.layout != expected.layout or seen.device != expected.device:
            return f"{name} is {seen.layout} on {seen.device}, expected {expected.layout} on {expected.device}"
        if seen.shape != expected.shape or seen.dtype != expected.dtype:
            return f"{name} is {tuple(seen.shape)} {seen.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        problem = _check_values(name, seen, finite)
        if problem:
            return problem
    return None


def _check_values(
    name: str, tensor: Tensor, finite: Callable[[str, Tensor], bool] = lambda name, tensor: is_finite(tensor)
) -> str | None:
    """Counts NaN and infinite values, refuses a negative running variance, which makes every output NaN; or None."""
    if not finite(name, tensor):
        return f"{name} has {int((~torch.isfinite(tensor)).sum())} value(s) that are NaN or infinite"
    if name.endswith(".running_var") and bool((tensor < 0).any()):
        return f"{name} has a negative variance"
    return None


def objection_to_rows(name: str, rows: Tensor) -> str | None:
    """Why ``rows`` [N, d] are not the unit vectors as which every model here represents records, or None.

    A longer one would count for more than others.
    """
    off = float((torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32) - 1).abs().max())
    if not off <= ROUNDING:
        return f"{name}: a row's length differs from 1 by {off:.3g}, expected unit vectors"
    return None


def check_broadcast(message: Broadcast, phases: Callable[[int], tuple[str, ...]]) -> str | None:
    """Why a site must refuse this task of the server, or None; ``phases`` are those of the site's own method.

    Whether its tensors fit the model is for ``Client.load`` to say.
    """
    numbers = {
        "round": (message.round, MOST_ROUNDS),
        "evaluate": (message.evaluate, 2),
        "public_id": (0 if message.public_id is None else message.public_id, PUBLIC_IDS),
    }
    for name, (value, most) in numbers.items():
        if type(value) is not int or not 0 <= value <= most:
            return f"{name} is {_shown(value)}, expected a whole number from 0 to {most}"
    if type(message.phase) is not str or message.phase not in (*phases(message.round), EVALUATE):
        return f"the phase is {_shown(message.phase)}, expected one of {', '.join((*phases(message.round), EVALUATE))}"
    for name, scale in (("lr_scale", message.lr_scale), ("loss_scale", message.loss_scale)):
        if not is_number(scale) or not 0 <= scale <= LARGEST_METRIC:
            return f"{name} is {_shown(scale)}, expected a number from 0 to {LARGEST_METRIC:g}"
    return _check_sent_scalars(message.scalars) or _check_sent_tensors(message)


def _check_sent_scalars(scalars: object) -> str | None:
    if not isinstance(scalars, dict) or len(scalars) > MOST_METRICS:
        return f"scalars is {_shown(scalars)}, expected a dictionary of at most {MOST_METRICS} numbers"
    for name, value in scalars.items():
        if plain(name) != name or not is_number(value):
            return f"scalar {_named(name)} is {_shown(value)}, expected a plain name and a number"
    return None


def _check_sent_tensors(message: Broadcast) -> str | None:
    """Names are plain, so that an error may repeat them; values of the model are finite, a method's may be nan."""
    for tensors in (message.state, message.aux):
        if not isinstance(tensors, Mapping):
            return f"its tensors are a {type(tensors).__name__}, expected a dictionary"
        for name, tensor in tensors.items():
            if plain(name) != name:
                return f"the name of a tensor is {_shown(name)}, expected a plain one"
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
                return f"{name} is a {type(tensor).__name__}, expected a dense tensor"
    return next((why for name, t in message.state.items() if (why := _check_values(name, t))), None)


def plain(name: object) -> str:
    """The name where it is plain text, otherwise its type and length: an answer repeats no other text."""
    return name if isinstance(name, str) and PLAIN_NAME.fullmatch(name) else _shown(name)


def _named(name: object) -> str:
    """The name in quotation marks, if it is plain."""
    return repr(name) if plain(name) == name else f"named by {plain(name)}"


def _shown(value: object) -> str:
    """A number as it is; of anything else, which may be a patient's words, what it is and how long."""
    if value is None or isinstance(value, (int, float)):
        return repr(value)[:40]
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (str, tuple, dict)) else "")
