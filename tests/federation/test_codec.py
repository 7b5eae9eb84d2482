"""The wire's options: what is written is read back exactly, nothing malformed is read, and results depend neither on
what was left out, nor on a restart, nor on the way of running."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support.toy import ADAMW, Fuse, Toy, Wired, World, clone, differs, forked, pairs, same_bytes, small, three_sites
from torch import Tensor

from fedvlp.core.aggregation import payload
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Reply, State, Update, group, without_prefix
from fedvlp.federation.codec import BLOCK, PLAIN, CodecError, Wire, cast, decode, dequantise, encode, quantise
from fedvlp.federation.exchange import SequentialExchange, WorkerPool
from fedvlp.federation.loop import Rounds
from fedvlp.federation.wire import SiteEnd, site_memory
from fedvlp.methods import FedAvg, FedDRA, FedRGB
from fedvlp.methods.softpull import SoftPull

BF16 = Wire(down="bfloat16", up="int8")
INT8 = Wire(up="int8")
OPTIONS = [Wire(down="float16", up="bfloat16"), Wire(down="bfloat16", up="float16"), BF16, INT8]


def world(kind: type = FedDRA, wire: Wire = BF16, **options: Any) -> Wired:
    return Wired(small(kind), wire=wire, **options)


def bytes_of(server: Server) -> list[tuple[str, int, int]]:
    return [(r["phase"], r["bytes"]["bytes_down"], r["bytes"]["bytes_up"]) for r in server.history]


# ---- one tensor


def test_codes_by_hand() -> None:
    """Rows of 1.27, -0.5 and 0, 0 around 1: scales 1.27/127 = 0.01 and 0, codes 127, -50 and 0, 0; the value 2.266
    with 0.004 missed before is 2.27; what is missed after is what the code does not hold."""
    value, base = torch.tensor([[2.266, 0.5], [1.0, 1.0]]), torch.ones(2, 2)
    missed = torch.tensor([[0.004, 0.0], [0.0, 0.0]])
    codes, scales = quantise(value, base, missed)
    assert codes.tolist() == [[127, -50], [0, 0]]
    assert scales.tolist() == pytest.approx([0.01, 0.0])
    assert dequantise(codes, scales, base).flatten().tolist() == pytest.approx([2.27, 0.5, 1.0, 1.0])
    assert missed.abs().max() < 1e-6


SHAPES = [(5, 7), (1, 3), (3, 1), (4, 2, 3, 3), (2, BLOCK + 5), (BLOCK // 8 + 3, 16), (0, 4), (4, 0)]


@pytest.mark.parametrize(("shape", "transposed"), [*zip(SHAPES, 4 * (False, True), strict=True), (SHAPES[0], True)])
def test_what_is_missed_is_exactly_what_the_receiver_lacks(shape: tuple[int, ...], transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    value, base, before = (torch.randn(shape, generator=generator) for _ in range(3))
    if transposed:
        value = value.flatten(1).T.contiguous().T.reshape(shape) if value.dim() > 2 else value.T.contiguous().T
    missed = before * 1e-3
    wanted = missed + value
    codes, scales = quantise(value, base, missed)
    read = dequantise(codes, scales, base)
    assert torch.equal(missed, wanted - read)
    assert scales.shape == (shape[0],)
    if codes.numel():
        largest = (wanted - base).flatten(1).abs().amax(1)
        assert (missed.flatten(1).abs() <= (largest / 254 * 1.0001 + 1e-6)[:, None]).all()
        assert (codes.flatten(1).abs().amax(1) == 127).all()


def test_error_feedback_loses_nothing_over_time() -> None:
    """A value far below the row's scale is rounded away each time, and arrives all the same: 20 x 0.1, not 0."""
    missed: State = {}
    arrived = torch.zeros(1, 2)
    for _ in range(20):
        base = {"w": torch.zeros(1, 2)}
        sent = encode({"w": torch.tensor([[127.0, 0.1]])}, base, BF16, missed)
        arrived += decode(sent, base, BF16)["w"]
    assert arrived[0, 1].item() == pytest.approx(2.0, abs=0.5)
    assert (arrived[0, 1] + missed["w"][0, 1]).item() == pytest.approx(2.0, abs=1e-5)


def test_denormal_differences_are_rounded_to_nothing() -> None:
    codes, scales = quantise(torch.full((1, 3), 1e-42), torch.zeros(1, 3), torch.zeros(1, 3))
    assert not codes.any()
    assert torch.isfinite(dequantise(codes, scales, torch.zeros(1, 3))).all()


def test_what_waits_on_disk_is_decoded_when_it_is_asked_for() -> None:
    value, base = ({"w": torch.randn(5, 3), "v": torch.randn(4, 2, 2), "b": torch.randn(5)} for _ in range(2))
    halved = {name: cast(name, tensor, "bfloat16") for name, tensor in base.items()}
    for wire, held in itertools.product(OPTIONS, (base, halved)):
        sent = encode(value, base, wire, {})
        view = decode(MappingProxyType(sent), held, wire)
        assert not isinstance(view, dict)
        same_bytes(dict(view), decode(sent, held, wire))
        assert len(view) == 3


def test_an_update_arrives_as_it_was_but_for_rounding() -> None:
    """Values around 3 that moved by up to 0.1: in bfloat16 a weight is off by 2^-8 of it, a change by less."""
    for wire in OPTIONS:
        generator = torch.Generator().manual_seed(0)
        base = {"w": 3 + torch.rand(4, 5, generator=generator)}
        value = {"w": base["w"] + 0.1 * torch.rand(4, 5, generator=generator)}
        off = (decode(encode(value, base, wire, {}), base, wire)["w"] - value["w"]).abs().max().item()
        assert off <= (0.1 / 127 if wire.up == "int8" else 4 / 256)


def test_vectors_integers_and_strangers_travel_as_they_are() -> None:
    for wire in OPTIONS:
        value = {
            "bias": torch.randn(5), "scalar": torch.tensor(0.1), "steps": torch.tensor([[3, 4]]),
            "wide": torch.randn(2, 2, dtype=torch.float64), "own": torch.randn(3, 3), "w": torch.randn(3, 3),
        }  # fmt: skip
        base = {name: torch.zeros_like(tensor) for name, tensor in value.items() if name != "own"}
        read = decode(encode(value, base, wire, {}), base, wire)
        assert not torch.equal(read.pop("w"), value["w"]) or wire.up == "float32"
        same_bytes(read, {name: tensor for name, tensor in value.items() if name != "w"})


GOOD = {"w": torch.ones(2, 3, dtype=torch.int8), "w:scale": torch.ones(2)}
BASE = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}


def test_malformed_codes_are_refused_by_name() -> None:
    for changes, said in [
        ({"w": torch.ones(2, 3)}, r"w came as \(2, 3\) torch.float32, expected \(2, 3\) torch.int8"),
        ({"w": torch.ones(3, 2, dtype=torch.int8)}, r"w came as \(3, 2\)"),
        ({"w": "text"}, "w came as a str"),
        ({"w:scale": None}, "w came without its scales"),
        ({"w": None}, "w:scale came without codes"),
        ({"w:scale": torch.ones(3)}, r"w:scale came as \(3,\)"),
        ({"w:scale": torch.ones(2, dtype=torch.float64)}, "w:scale came as .* torch.float64"),
        ({"w:scale": torch.tensor([1.0, math.nan])}, "negative, NaN or infinite"),
        ({"w:scale": torch.tensor([1.0, math.inf])}, "negative, NaN or infinite"),
        ({"w:scale": torch.tensor([1.0, -1.0])}, "negative, NaN or infinite"),
    ]:
        came = {name: tensor for name, tensor in {**GOOD, **changes}.items() if tensor is not None}
        with pytest.raises(CodecError, match=said):
            decode(came, BASE, BF16)
        with pytest.raises(CodecError, match=said):  # on disk they are refused as early
            decode(MappingProxyType(came), BASE, BF16)


def test_a_row_that_did_not_change_has_scale_0() -> None:
    came = {**GOOD, "w:scale": torch.tensor([0.0, 0.5])}
    assert decode(came, BASE, BF16)["w"].tolist() == [[0.0] * 3, [0.5] * 3]


def test_no_scale_is_negative_zero() -> None:
    """Either would do, and every processor must send the same bits."""
    for row in ([0.0, 0.0], [-0.0, 0.0]):
        assert quantise(torch.tensor([row]), torch.zeros(1, 2), torch.zeros(1, 2))[1].signbit().tolist() == [False]


def test_a_tensor_of_the_sites_own_may_be_called_scale() -> None:
    """Only what belongs to a tensor that is coded is taken for scales."""
    own = {"own:scale": torch.randn(3), "b:scale": torch.randn(2)}
    for wire in (PLAIN, BF16):
        same_bytes(decode(own, BASE, wire), own)


@pytest.mark.parametrize("up", ["float32", "bfloat16", "float16"])
def test_another_type_than_agreed_is_refused(up: str) -> None:
    with pytest.raises(CodecError, match="expected"):
        decode({"w": torch.zeros(2, 3, dtype=torch.float64)}, BASE, Wire(up=up))
    with pytest.raises(CodecError):
        decode(GOOD, BASE, Wire(up=up))


def test_values_that_do_not_fit_are_named() -> None:
    with pytest.raises(CodecError, match="w has values that float16 does not hold"):
        encode({"w": torch.tensor([[0.0, 1e6, 0.0], [0.0, 0.0, 0.0]])}, BASE, Wire(up="float16"), {})
    with pytest.raises(FloatingPointError, match="w has values that are NaN"):
        encode({"w": torch.tensor([[0.0, 1.0, 2.0], [0.0, math.nan, 0.0]])}, BASE, BF16, {})


def test_options_that_make_no_sense_are_refused() -> None:
    for options, said in [
        ({"up": "int4"}, "int4"),
        ({"down": "x"}, "x"),
        ({"down": "int8"}, "wire.down is 'int8'; choose one of float32, bfloat16, float16"),
    ]:
        with pytest.raises(ValueError, match=said):
            Wire(**options)


# ---- a federation


def test_the_default_sends_the_very_tensors_and_counts_them() -> None:
    plain = world(wire=PLAIN)

    server = plain.run(SequentialExchange(partial(World.site, plain)))
    same_bytes(server.state, World(small(FedDRA)).run().state)
    whole = payload(Broadcast(0, "", plain.server().state))
    align = sum(4 * t.numel() for n, t in server.state.items() if group(n) != "encoder")
    assert bytes_of(server) == [("align", 3 * whole, 3 * align), ("joint", 3 * whole, 3 * whole)] * 2


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        (FedDRA, BF16),
        (FedDRA, Wire(down="float16", up="bfloat16")),
        (FedRGB, INT8),
    ],
)
def test_forked_workers_and_folders_give_the_same_bytes(kind: type, wire: Wire, tmp_path: Path) -> None:
    one = world(kind, wire, model=partial(Toy, norm=True)).run()
    other = world(kind, wire, model=partial(Toy, norm=True), folder=tmp_path)
    with WorkerPool(other.site, tuple("abc"), 2) as workers:
        result = other.run(workers)
    same_bytes(one.state, result.state)
    assert bytes_of(one) == bytes_of(result)
    assert not one.history[-1]["dropped"]
    if wire.up != "float32" or wire.down != "float32":
        assert differs(one.state, world(kind, PLAIN, model=partial(Toy, norm=True)).run().state)


def test_bytes_by_hand() -> None:
    """Toy: encoder weights 24 + 20, alignment and head weights 4 x 16, six biases of 4. In the wire's types a phase
    goes down whole, 2 x 108 + 96 bytes a site; up go, after align, 64 codes with 4 x 4 scales of 4 bytes and 64 bytes
    of biases, and after joint all 108 with 6 x 4 scales."""
    align, joint, again, last = bytes_of(world(wire=BF16).run())
    assert align == ("align", 3 * (2 * 108 + 96), 3 * (64 + 64 + 64))
    assert joint == ("joint", 3 * (2 * 108 + 96), 3 * (108 + 96 + 96))
    assert (again, last) == (align, joint)


def test_an_update_in_another_form_is_dropped_and_named() -> None:
    wired = world(FedAvg)

    def garbled(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in exchange(messages):
            if site == "b" and isinstance(reply, Update):
                reply = replace(reply, state={n: t * math.nan if ":scale" in n else t for n, t in reply.state.items()})
            yield site, reply

    exchange = SequentialExchange(wired.site)
    server = wired.run(garbled)
    assert [sorted(r["dropped"]) for r in server.history] == [["b"]] * 2
    assert ":scale has scales that are negative, NaN or infinite" in server.history[0]["dropped"]["b"]


@pytest.mark.parametrize(("wire", "at"), [(BF16, 8), (INT8, 17)])
def test_killed_and_resumed_gives_the_same_bytes(wire: Wire, at: int, tmp_path: Path) -> None:
    """Two rounds of (1 + 2) steps at three sites: 18 batches; residuals are as they were."""
    fuse = Fuse(at)
    data = three_sites()
    for site in data.values():
        site.tick = fuse
    broken = world(wire=wire, folder=tmp_path, data=data)
    assert forked(lambda: broken.run() and None) == -9
    whole = world(wire=wire).run()
    resumed = world(wire=wire, folder=tmp_path).run()
    same_bytes(resumed.state, whole.state)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_repeated_task_gives_the_same_bytes(on_disk: bool, tmp_path: Path) -> None:
    end = SiteEnd(BF16, FedAvg(), site_memory(tmp_path if on_disk else None))
    generator = torch.Generator().manual_seed(0)

    def answered(round: int, value: Tensor) -> State:
        end.decode(Broadcast(round, "train", {"w": torch.zeros(3, 4)}))
        return end.encode(Update("a", round, "train", 1, {"w": value})).state

    values = [torch.randn(3, 4, generator=generator) for _ in range(2)]
    answered(0, values[0])
    once = answered(1, values[1])
    same_bytes(answered(1, values[1]), once)
    assert differs(answered(2, values[1]), once), "what was missed before counts"


def test_each_site_may_be_sent_another_model_and_its_codes_are_of_that_one() -> None:
    """b is sent a model of weights larger by 1; read against another site's, its update would be off by 1."""

    @dataclass(frozen=True)
    class Personal(FedAvg):
        def broadcast(self, server: Server, site: str) -> Broadcast:
            message = super().broadcast(server, site)
            return replace(message, state={n: t + (site == "b") for n, t in message.state.items()})

    plain, coded = (Wired(Personal(local_steps=1), wire=wire).run().state for wire in (PLAIN, INT8))
    assert all(torch.allclose(plain[name], tensor, atol=0.02) for name, tensor in coded.items())


def test_each_model_of_a_site_has_what_its_own_codes_left_out(tmp_path: Path) -> None:
    """The site's own model takes no step and stays as it is, whatever the codes of the global one left out."""

    @dataclass(frozen=True)
    class Resting(SoftPull):
        def steps(self, phase: str) -> int:
            return 0 if phase == "personal" else self.local_steps

    rounds = Rounds(rounds=3, evaluate_every=0)
    one = Wired(Resting(local_steps=2, softpull=1.0), training=ADAMW, rounds=rounds, folder=tmp_path, wire=INT8)
    initial = clone(one.server().state)
    server = one.run()
    same_bytes(server.remembered("personal/a", initial), initial)
    assert differs(server.state, initial)
    memory = site_memory(tmp_path / "sites" / "a").newest()
    left = {prefix: without_prefix(memory, prefix) for prefix in ("missed/", "missed:personal/")}
    assert left["missed/"].keys() == left["missed:personal/"].keys()
    assert any(tensor.any() for tensor in left["missed/"].values())
    assert not any(tensor.any() for tensor in left["missed:personal/"].values())


def test_half_precision_models_are_refused() -> None:
    half = world(wire=BF16)
    federation, _ = half.federation()
    federation.server.state = {n: t.bfloat16() for n, t in federation.server.state.items()}
    with pytest.raises(ValueError, match="half precision"):
        federation.run()


def test_8_bit_training_ends_close_to_float32() -> None:
    data = {name: pairs(index, 8 + 4 * index) for index, name in enumerate("abc")}
    runs = {w: world(FedAvg, w, data=data).run().state for w in (PLAIN, INT8, BF16)}
    start = world(FedAvg).server().state
    moved = norm(runs[PLAIN], start)
    assert norm(runs[PLAIN], runs[INT8]) < 0.02 * moved
    assert norm(runs[PLAIN], runs[BF16]) < 0.2 * moved  # bfloat16 rounds weights, not differences


def norm(left: State, right: State) -> float:
    def total(tensors: list[Tensor]) -> float:
        return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))

    return total([left[name] - right[name] for name in clone(left)])
