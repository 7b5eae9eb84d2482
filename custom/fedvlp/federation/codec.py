"""Fewer bytes: how a tensor is written for the wire (federation/wire.py), and read back. Pure functions of tensors.

Only float32 tensors of two dimensions or more are coded, the bulk of a model; vectors and scalars (biases, norms,
temperatures), integers and other types travel as they are. An 8-bit tensor ``w`` [R, ...] is two tensors: codes ``w``
(int8) and one scale per row, ``w:scale`` [R] (float32): value = code * scale.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlp.core.site_error import NotFiniteError
from fedvlp.core.types import LazyState, State
from fedvlp.core.validate import require

SCALE = ":scale"
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = FLOATS | {"int8": torch.int8}
HALVES = (torch.bfloat16, torch.float16)
BLOCK = 1 << 17
"""Values that are coded at a time: they stay in the cache."""

TINY = torch.finfo(torch.float32).tiny


class CodecError(ValueError):
    """A tensor does not fit the wire's type, or what came is not what the options of this run write."""


@dataclass(frozen=True)
class Wire:
    """How tensors travel; the default sends every tensor as it is. Server and sites have the same options.

    An update is of the model that the site received, which is the model after the way down, rounding included.
    """

    down: str = "float32"  # to the sites: float32 | bfloat16 | float16
    up: str = "float32"  # from the sites: float32 | bfloat16 | float16 | int8 (changes, with error feedback)

    def __post_init__(self) -> None:
        for way, kinds in (("down", FLOATS), ("up", DTYPES)):
            chosen = getattr(self, way)
            require(chosen in kinds, f"wire.{way} is {chosen!r}; choose one of {', '.join(kinds)}")

    @property
    def plain(self) -> bool:
        """Whether nothing is changed on the way."""
        return self == PLAIN


PLAIN = Wire()


def coded(tensor: Tensor) -> bool:
    """Whether a tensor of the model is written in the wire's type."""
    return tensor.dtype == torch.float32 and tensor.dim() >= 2


def cast(name: str, tensor: Tensor, kind: str) -> Tensor:
    """A tensor in the wire's floating-point type. Raises CodecError beyond float16's range."""
    if not coded(tensor) or kind == "float32":
        return tensor
    narrow = tensor.to(DTYPES[kind])
    if kind == "float16" and not bool(torch.isfinite(narrow).all()):
        raise CodecError(f"{name} has values that float16 does not hold (beyond 65504); choose bfloat16")
    return narrow


def widen(tensor: Tensor) -> Tensor:
    """A tensor that :func:`cast` wrote, in float32 again."""
    return tensor.float() if tensor.dtype in HALVES else tensor


@torch.no_grad()
def quantise(value: Tensor, base: Tensor, missed: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``value - base`` [R, ...], each row scaled to its largest absolute value.

    ``missed`` is what earlier codes left out: it is added first, and is then what these leave out (error feedback,
    Seide et al., 2014), exactly: the value minus what :func:`dequantise` returns.
    """
    codes = torch.empty(value.shape, dtype=torch.int8)
    scales = torch.zeros(len(value))
    work = torch.empty(0)
    for rows, start, code, scale, error in _blocks(value, base, codes, scales, missed):
        if not work.numel():
            work = torch.empty(rows.shape)
        delta = work[: len(rows)]
        # 1. What is to be coded: the value, and what earlier codes left out of it.
        torch.sub(error.add_(rows), start, out=delta)
        # 2. Codes: the largest absolute value of a row becomes 127. It is found in two reads: to write the absolute
        # values would cost the cache another block.
        torch.maximum(delta.amax(1), delta.amin(1).neg_(), out=scale).abs_().div_(127)
        small = (scale > TINY).logical_not_()  # a row that rounds to nothing has codes of 0
        inverse = scale.reciprocal().masked_fill_(small, 0)
        code.copy_(delta.mul_(inverse[:, None]).round_())
        # 3. What the receiver will read, and what is left for the next time.
        _decode(delta, code, scale, start)
        error.sub_(delta)
    return codes, scales


@torch.no_grad()
def dequantise(codes: Tensor, scales: Tensor, base: Tensor) -> Tensor:
    """``base + codes * scales`` in float32, the same bits wherever it is computed."""
    value = torch.empty(codes.shape)
    for out, code, scale, start in _blocks(value, codes, scales, base):
        _decode(out, code, scale, start)
    return value


def _decode(out: Tensor, code: Tensor, scale: Tensor, start: Tensor) -> None:
    """Product and sum are rounded one after the other, which no processor may fuse."""
    out.copy_(code).mul_(scale[:, None]).add_(start)


def _blocks(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of tensors [R, ...] as matrices, and of vectors [R], side by side."""
    if first.numel() == 0:
        return iter(())
    height = max(1, BLOCK * len(first) // first.numel())
    matrices = (t if t.dim() == 1 else t.reshape(len(t), -1) for t in (first, *others))
    return zip(*(t.split(height) for t in matrices), strict=True)


def encode(value: State, base: Mapping[str, Tensor], wire: Wire, missed: State) -> State:
    """An update for the way up; ``base`` is what the site received, ``missed`` what 8-bit codes left out so far.

    ``missed`` is updated in place. A tensor that the site was not sent has no base and travels as it is.
    """
    out: State = {}
    for name, tensor in value.items():
        start = base.get(name)
        # As it is; or its change in 8-bit codes with a scale a row; or in a narrower float.
        if start is None or not coded(tensor) or start.shape != tensor.shape:
            out[name] = tensor
        elif wire.up == "int8":
            if name not in missed:
                missed[name] = torch.zeros(tensor.shape)
            out[name], out[name + SCALE] = quantise(tensor.detach(), start, missed[name])
            if not bool(torch.isfinite(out[name + SCALE]).all()):
                raise NotFiniteError(
                    f"{name} has values that are NaN or infinite after training",
                    public="a tensor has values that are NaN or infinite after training",
                )
        else:
            out[name] = cast(name, tensor, wire.up)
    return out


def decode(came: Mapping[str, Tensor], base: Mapping[str, Tensor], wire: Wire) -> State:
    """The update that :func:`encode` wrote; where ``came`` waits on disk, a view that decodes what is asked for.

    Names, shapes and values of the result are for ``core.aggregation.check`` to judge. Raises CodecError naming a
    tensor that is not of the agreed form.
    """
    view = _Decoded(came, base, wire)
    return dict(view) if isinstance(came, dict) else typing.cast("State", view)


class _Decoded(LazyState):
    """Tensors decoded whenever they are asked for; their form is checked here, once."""

    def __init__(self, came: Mapping[str, Tensor], base: Mapping[str, Tensor], wire: Wire) -> None:
        self._came, self._base, self._wire = came, base, wire
        super().__init__(name for name, tensor in came.items() if self._holds_values(name, tensor))

    def _written(self, name: str) -> Tensor | None:
        """What the site received under this name, where that is written in the wire's type."""
        start = self._base.get(name)
        return start if start is not None and (start.dtype in HALVES or coded(start)) else None

    def _holds_values(self, name: str, tensor: Tensor) -> bool:
        """Whether it is no tensor of scales. Raises CodecError."""
        start = self._written(name)
        if start is None:
            codes = name.removesuffix(SCALE)
            if codes != name and self._written(codes) is not None:
                if codes not in self._came or self._wire.up != "int8":
                    raise CodecError(f"{name} came without codes")
                return False
        elif self._wire.up == "int8":
            _refuse_codes(name, tensor, self._came.get(name + SCALE), start.shape)
        else:
            _refuse_form(name, tensor, start.shape, DTYPES[self._wire.up])
        return True

    def __getitem__(self, name: str) -> Tensor:
        tensor, start = self._came[name], self._written(name)
        if start is None:
            return tensor
        if self._wire.up == "int8":
            return dequantise(tensor, self._came[name + SCALE], widen(start))
        return widen(tensor)


def _refuse_codes(name: str, codes: Tensor, scales: Tensor | None, shape: torch.Size) -> None:
    """Raises CodecError unless codes and scales are of the agreed form, the scales finite and not negative."""
    _refuse_form(name, codes, shape, torch.int8)
    if scales is None:
        raise CodecError(f"{name} came without its scales ({name + SCALE})")
    _refuse_form(name + SCALE, scales, shape[:1], torch.float32)
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise CodecError(f"{name + SCALE} has scales that are negative, NaN or infinite")


def _refuse_form(name: str, tensor: object, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raises CodecError unless ``tensor`` is a tensor of this shape and type."""
    if not isinstance(tensor, Tensor):
        raise CodecError(f"{name} came as a {type(tensor).__name__}, expected a tensor")
    if tensor.shape != shape or tensor.dtype != dtype:
        raise CodecError(f"{name} came as {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(shape)} {dtype}")
