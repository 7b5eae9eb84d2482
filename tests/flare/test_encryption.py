"""Encrypted averaging gives the plain average; the server holds no key, and what cannot be encrypted is refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from support.laboratory import METHODS
from support.toy import Toy, World, same_bytes

from fedvlp.core.checkpoint import load_tensors
from fedvlp.core.privacy import PrivacyError
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, State, Update
from fedvlp.federation.loop import Federation, QuorumLostError, Rounds
from fedvlp.federation.wire import Exchange
from fedvlp.flare import messages as wire
from fedvlp.flare.encryption import (
    CIPHERTEXT,
    Cipher,
    Decrypt,
    Encrypt,
    EncryptedController,
    EncryptedMean,
    flatten,
    length,
    refuse_unencryptable,
    unflatten,
    within,
)
from fedvlp.flare.jobs import job_files
from fedvlp.flare.messages import MOST_SAMPLES
from fedvlp.flare.task_handler import refuse_overflow
from fedvlp.methods import FedAvg, FedProx, Local
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.folder import RunFolder

pytestmark = pytest.mark.skipif(find_spec("tenseal") is None, reason="pip install 'fedvlp[he]'")
RUN = {"folder": "fedavg/001", "fingerprint": "abc", "version": "0"}
ROUNDS = Rounds(rounds=3, evaluate_every=1).of_encrypted()


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contexts that FLARE's HEBuilder makes, with the parameters of ENCRYPTION.md."""
    from nvflare.lighter.impl.he import HEBuilder

    folder = tmp_path_factory.mktemp("kit")
    builder = HEBuilder(poly_modulus_degree=4096, coeff_mod_bit_sizes=[60, 49], scale_bits=30)
    builder.initialize(None, None)
    (folder / "startup").mkdir()
    (folder / "startup" / "server_context.tenseal").write_bytes(builder.get_serialized_context())
    (folder / "startup" / "client_context.tenseal").write_bytes(builder.get_serialized_context(is_client=True))
    return folder


class Engine:
    """What the filters ask FLARE's engine for."""

    def __init__(self, kit: Path, root: Path) -> None:
        self.kit, self.root = kit, root

    def get_workspace(self) -> Engine:
        return self

    def get_startup_kit_dir(self) -> str:
        return str(self.kit / "startup")

    def get_root_dir(self) -> str:
        return str(self.root)

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """FLARE logs through events too."""


def context(kit: Path, root: Path, site: str = "a") -> FLContext:
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.ENGINE, Engine(kit, root), private=True, sticky=False)
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
    return fl_ctx


def behind_filters(world: World, kit: Path, root: Path, seen: list[Update]) -> Exchange:
    """Every site behind its Decrypt and Encrypt; ``seen``: what the server gets."""

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for name, message in messages.items():
            fl_ctx = context(kit, root, name)
            task = Decrypt().process(wire.send_broadcast(message, RUN), fl_ctx)
            update = world.site(name).handle(wire.receive_broadcast(task)[0])
            reply = Encrypt().process(wire.send_update(update), fl_ctx)
            assert wire.failure(reply) is None
            seen.append(wire.receive_update(reply, name))
            yield name, seen[-1]

    return exchange


def normed() -> Toy:
    """With batch norm, so with running statistics and an integer buffer."""
    return Toy(norm=True)


def test_a_job_names_a_file_of_the_startup_folder_and_no_path() -> None:
    """It would learn which files the server has, and have them read."""
    for name in ["/etc/hostname", "../local/x", "a/b", ".."]:
        with pytest.raises(ValueError, match=r"is that of a file in startup/, no path"):
            Cipher.load(name, FLContext())


def cipher(kit: Path, owner: str = "client") -> Cipher:
    return Cipher((kit / "startup" / f"{owner}_context.tenseal").read_bytes())


@pytest.mark.parametrize("method", [FedAvg(local_steps=2), FedProx(local_steps=2, mu=0.5)])
def test_three_encrypted_rounds_end_in_the_plain_model(method: FedAvg, kit: Path, tmp_path: Path) -> None:
    """The three sites' 8, 12 and 16 records weigh as in the plain mean; the sites keep the trained model."""
    plain = World(method, rounds=ROUNDS, model=normed).run().state
    world, seen = World(method, rounds=ROUNDS, model=normed), list[Update]()
    initial = world.server().state
    server = world.server()
    half = EncryptedMean(local_steps=2, cipher=cipher(kit, "server"))
    Federation(half, server, ROUNDS, behind_filters(world, kit, tmp_path, seen)).run()
    for site in "abc":
        trained, _ = load_tensors(tmp_path / "runs" / "fedavg" / "001" / "sites" / site / "trained.safetensors")
        assert trained.keys() == plain.keys()
        assert max(float((trained[name] - plain[name]).abs().max()) for name in plain) < 1e-6
        assert max(float((trained[name] - initial[name]).abs().max()) for name in plain) > 1e-3
    assert all(torch.equal(server.state[name], initial[name]) for name in initial), "the server has no other model"
    assert all(not update.state for update in seen)


def test_integer_buffers_are_not_averaged_and_stay() -> None:
    state = {"b": torch.tensor([[1.0, 2.0]]), "count": torch.tensor(7), "a": torch.tensor([3.0])}
    assert flatten(state).tolist() == [3.0, 1.0, 2.0]
    same_bytes(
        unflatten(torch.tensor([4.0, 5.0, 6.0]), state),
        {**state, "a": torch.tensor([4.0]), "b": torch.tensor([[5.0, 6.0]])},
    )


def test_an_interrupted_encrypted_run_goes_on_from_its_checkpoint(kit: Path, tmp_path: Path) -> None:
    server = World(FedAvg()).server()
    rows = cipher(kit).encrypt(flatten(server.state))
    server.memory = {CIPHERTEXT: rows, "encrypted_weight": torch.tensor(2.0, dtype=torch.float64)}
    server.save(tmp_path / "server.safetensors", 0)
    again, _ = Server.load(tmp_path / "server.safetensors")
    message = EncryptedMean(cipher=cipher(kit, "server")).broadcast(again, "a")
    assert torch.equal(message.aux[CIPHERTEXT], rows)
    assert message.scalars == {"encrypted_weight": 2.0}


def test_the_server_cannot_read_what_it_adds(kit: Path) -> None:
    """Nor do two encryptions of one vector look alike, nor does a ciphertext show the values."""
    values = torch.full((3000,), 0.5, dtype=torch.float64)
    first, second = cipher(kit).encrypt(values), cipher(kit).encrypt(values)
    assert (first != second).float().mean() > 0.9
    server = cipher(kit, "server")
    assert not server.secret
    added = server.add(first, second)
    with pytest.raises(PrivacyError, match="no secret key"):
        server.decrypt(added, 3000)
    assert torch.allclose(cipher(kit).decrypt(added, 3000), values * 2, atol=1e-5)


def test_sums_of_the_largest_values_do_not_wrap_around(kit: Path) -> None:
    """64 sites at the limit; the next larger value is refused."""
    mine = cipher(kit)
    values = torch.tensor([mine.limit, -mine.limit, 1.0], dtype=torch.float64)
    total = one = mine.encrypt(values)
    for _ in range(63):
        total = mine.add(total, one)
    assert torch.allclose(mine.decrypt(total, 3), values * 64, rtol=1e-6, atol=1e-3)
    with pytest.raises(PrivacyError, match="parameters hold"):
        mine.encrypt(values * 1.01)
    with pytest.raises(PrivacyError, match="parameters hold"):
        mine.encrypt(torch.tensor([float("nan")], dtype=torch.float64))


def test_what_cannot_be_encrypted_does_not_leave(kit: Path, tmp_path: Path) -> None:
    def said(state: State, aux: State, kit: Path) -> str:
        out = Encrypt().process(wire.send_update(Update("a", 0, "train", 5, state, aux)), context(kit, tmp_path))
        assert not out.get("DXO")
        return str(wire.failure(out))

    assert "only float32 ones are encrypted" in said({"n": torch.ones(2).bfloat16()}, {}, kit)
    assert "RememberReceived" in said({"w": torch.ones(1)}, {}, kit), "what it received is unknown, so its change is"
    assert "beside the model" in said({"w": torch.ones(1)}, {"rep": torch.ones(1)}, kit)
    assert "provision with HEBuilder" in said({"w": torch.ones(1)}, {}, tmp_path)


def test_a_damaged_ciphertext_is_no_model(kit: Path) -> None:
    rows = cipher(kit).encrypt(torch.ones(10, dtype=torch.float64))
    with pytest.raises(PrivacyError, match="not one of this model"):
        cipher(kit).decrypt(rows, 5000)
    rows[0, :100] = 7
    with pytest.raises(PrivacyError, match="damaged"):
        cipher(kit).decrypt(rows, 10)


# What a site sends, and what the server can see of it


def row_of(ciphertext: bytes, like: torch.Tensor) -> torch.Tensor:
    """A row [width] as a site that made the ciphertext by itself would write it."""
    row = torch.zeros_like(like)
    content = len(ciphertext).to_bytes(8, "little") + ciphertext
    row[: len(content)] = torch.frombuffer(bytearray(content[: len(row)]), dtype=torch.uint8)
    return row


def of_other_parameters(like: torch.Tensor) -> torch.Tensor:
    from nvflare.lighter.impl.he import HEBuilder

    builder = HEBuilder(poly_modulus_degree=4096, coeff_mod_bit_sizes=[60, 30], scale_bits=20)
    builder.initialize(None, None)
    rows = Cipher(builder.get_serialized_context(is_client=True)).encrypt(torch.ones(100, dtype=torch.float64))
    end = 8 + int.from_bytes(rows[0, :8].numpy().tobytes(), "little")
    return row_of(rows[0, 8:end].numpy().tobytes(), like)


def vector(kit: Path, count: int, **options: Any) -> bytes:
    mine = cipher(kit)
    return mine._tenseal.ckks_vector(mine._context, [1.0] * count, **options).serialize()


def flipped(row: torch.Tensor, bits: range) -> torch.Tensor:
    """With these bits after the row's own header the other way round."""
    row = row.clone()
    for bit in bits:
        row[8 + bit // 8] ^= 1 << bit % 8
    return row


COUNT = length(World(FedAvg()).server().state)
DAMAGE: dict[str, Callable[[torch.Tensor, Path], torch.Tensor]] = {
    "zeros": lambda row, kit: torch.zeros_like(row),
    "random bytes": lambda row, kit: torch.randint(0, 256, row.shape, dtype=torch.uint8),
    "random bytes of the right length": lambda row, kit: torch.cat([row[:8], torch.randint_like(row[8:], 256)]),
    "flipped bits": lambda row, kit: flipped(row, range(40, 400, 7)),
    "cut in half": lambda row, kit: row_of(row[8 : len(row) // 2].numpy().tobytes(), row),
    "longer than it is": lambda row, kit: torch.cat([torch.full((8,), 255, dtype=torch.uint8), row[8:]]),
    "other parameters": lambda row, kit: of_other_parameters(row),
    "another scale": lambda row, kit: row_of(vector(kit, COUNT, scale=2**20), row),
    "fewer values": lambda row, kit: row_of(vector(kit, COUNT - 1), row),
    "more values": lambda row, kit: row_of(vector(kit, COUNT + 1), row),
}


def run_with(
    world: World, kit: Path, root: Path, spoil: Callable[[str, Update], Update], rounds: Rounds = ROUNDS
) -> tuple[Server, dict[str, Decrypt]]:
    """An encrypted run in which the sites' replies arrive as ``spoil`` leaves them; each site has filters of its own.

    A task that a site's Decrypt refuses is answered as FLARE does.
    """
    decrypts = {name: Decrypt() for name in "abc"}

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for name, message in messages.items():
            fl_ctx = context(kit, root, name)
            try:
                task = decrypts[name].process(wire.send_broadcast(message, RUN), fl_ctx)
            except PrivacyError as error:
                yield name, Failure(FailureKind.FAILED, str(error))
                continue
            update = world.site(name).handle(wire.receive_broadcast(task)[0])
            reply = Encrypt().process(wire.send_update(update), fl_ctx)
            yield name, wire.failure(reply) or spoil(name, wire.receive_update(reply, name))

    server = world.server()
    half = EncryptedMean(local_steps=2, cipher=cipher(kit, "server"), rounds=rounds)
    try:
        Federation(half, server, rounds, exchange).run()
    except QuorumLostError as error:
        server.metrics["lost"] = str(error)  # type: ignore[assignment]
    return server, decrypts


@pytest.mark.parametrize(("damage", "who"), zip(DAMAGE, itertools.cycle("abc")))
def test_a_bad_ciphertext_costs_its_site_the_round_and_not_the_run(
    damage: str, who: str, kit: Path, tmp_path: Path
) -> None:
    """Security S6. Whichever of the three it is; the others' sum is as if the site had said nothing."""

    def spoil(name: str, update: Update) -> Update:
        if name != who or CIPHERTEXT not in update.aux or update.round:
            return update
        rows = update.aux[CIPHERTEXT].clone()
        rows[0] = DAMAGE[damage](rows[0], kit)
        return replace(update, aux={CIPHERTEXT: rows})

    world = World(FedAvg(local_steps=1), rounds=replace(ROUNDS, rounds=1))
    server, _ = run_with(world, kit, tmp_path, spoil, replace(ROUNDS, rounds=1))
    first, last = server.history
    assert first["dropped"].keys() == {who}
    assert "ciphertext" in first["dropped"][who]
    assert last["dropped"] == {}
    others = {name: count for name, count in {"a": 8, "b": 12, "c": 16}.items() if name != who}
    assert float(server.memory["encrypted_weight"]) == sum(others.values())


def cancelling(kit: Path) -> Callable[[str, Update], Update]:
    """Puts ciphertexts of a and b into their updates that the library refuses to add: the sum would hide nothing."""
    mine = cipher(kit)
    one = mine._tenseal.ckks_vector(mine._context, [1.0] * COUNT)
    sent = {"a": one.serialize(), "b": (-one).serialize()}

    def spoil(name: str, update: Update) -> Update:
        if name not in sent or CIPHERTEXT not in update.aux:
            return update
        return replace(update, aux={CIPHERTEXT: row_of(sent[name], update.aux[CIPHERTEXT][0])[None]})

    return spoil


def test_two_sites_whose_ciphertexts_cancel_end_nothing(kit: Path, tmp_path: Path) -> None:
    """Their sum would hide nothing, which the library refuses to make."""
    rounds = replace(ROUNDS, rounds=1)
    server, _ = run_with(World(FedAvg(local_steps=1), rounds=rounds), kit, tmp_path, cancelling(kit), rounds)
    assert len(server.history) == 2
    assert float(server.memory["encrypted_weight"]) == 8 + 16, "b is left out"


@pytest.mark.parametrize("quorum", [2, 3])
def test_a_sum_of_fewer_updates_than_the_quorum_is_none(quorum: int, kit: Path, tmp_path: Path) -> None:
    """Sites that share their noise count on a quorum of shares in it. b's ciphertexts cannot be added to a's."""
    rounds = replace(ROUNDS, rounds=1, quorum=quorum)
    server, _ = run_with(World(FedAvg(local_steps=1), rounds=rounds), kit, tmp_path, cancelling(kit), rounds)
    if quorum == 2:
        assert float(server.memory["encrypted_weight"]) == 8 + 16
    else:
        assert "the ciphertexts of 2 sites could be added, 3 needed" in str(server.metrics["lost"])
        assert not server.memory


def test_an_update_of_no_records_is_none_of_the_quorum(kit: Path, tmp_path: Path) -> None:
    """It is in no sum, and so is its share of the noise."""

    def spoil(name: str, update: Update) -> Update:
        return replace(update, num_samples=0) if name == "b" else update

    for quorum in (2, 3):
        rounds = replace(ROUNDS, rounds=1, quorum=quorum)
        world = World(FedAvg(local_steps=1), rounds=rounds)
        server, _ = run_with(world, kit, tmp_path / str(quorum), spoil, rounds)
        if quorum == 2:
            assert "of 0 training records is in no sum" in server.history[0]["dropped"]["b"]
            assert float(server.memory["encrypted_weight"]) == 8 + 16
        else:
            assert "2 valid updates, 3 needed" in str(server.metrics["lost"])
            assert not server.memory


# What each site's own end holds back


def test_a_change_beyond_the_sites_own_limits_is_not_encrypted(kit: Path, tmp_path: Path) -> None:
    """Values times 10^4, which nobody could see at the server; or shortened, where the site's file says so."""
    fl_ctx = context(kit, tmp_path)
    before = {"w": torch.full((100,), 0.5), "count": torch.tensor(3)}
    Decrypt().process(wire.send_broadcast(Broadcast(0, "train", before), RUN), fl_ctx)

    def sent(state: State, **limits: Any) -> str | torch.Tensor:
        reply = Encrypt(**limits).process(wire.send_update(Update("a", 0, "train", 8, state)), fl_ctx)
        failed = wire.failure(reply)
        if failed:
            assert not reply.get("DXO")
            return failed.text
        mine = cipher(kit)
        return mine.decrypt(wire.receive_update(reply, "a").aux[CIPHERTEXT], 100) / 8

    def moved(by: float) -> State:
        return {"w": before["w"] + by, "count": torch.tensor(4)}

    honest = sent(moved(1.0))
    assert isinstance(honest, torch.Tensor)
    assert torch.allclose(honest, torch.full((100,), 1.5, dtype=torch.float64), atol=1e-5)
    assert "PrivacyError" in str(sent({"w": before["w"] * 1e4, "count": torch.tensor(3)}))
    assert "PrivacyError" in str(sent(moved(math.nan)))
    assert "PrivacyError" in str(sent(moved(0.11), norm=1.0)), "its norm is 1.1"
    assert isinstance(sent(moved(0.09), norm=1.0), torch.Tensor)
    assert "PrivacyError" in str(sent({**moved(0.0), "w": before["w"] + torch.eye(100)[0] * 3}, largest=2.9))
    assert "PrivacyError" in str(sent({"w": before["w"]})), "another model"
    short = sent(moved(0.5), norm=1.0, largest=0.04, shorten=True)
    assert isinstance(short, torch.Tensor)
    assert torch.allclose(short, torch.full((100,), 0.54, dtype=torch.float64), atol=1e-5)


def test_the_log_of_the_site_says_how_far_training_went() -> None:
    before = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(
        PrivacyError, match=r"by a norm of 6, one of them by 3; this site encrypts changes of up to 5 and"
    ):
        within(before + 3, before, 5.0, 10.0)
    with pytest.raises(PrivacyError, match=r"up to 100 and 2: look at its data"):
        within(before + 3, before, 100.0, 2.0)
    assert torch.equal(within(before, before, 1.0, 1.0, shorten=True), before)


@pytest.mark.parametrize("limits", [{"norm": 0.0}, {"norm": math.inf}, {"largest": -1.0}, {"norm": math.nan}])
def test_limits_that_limit_nothing_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        Encrypt(**limits)  # type: ignore[arg-type]
    if "norm" in limits:
        with pytest.raises(ValueError, match="Decrypt: norm"):
            Decrypt(**limits)


BEYOND: dict[str, Callable[[Path, torch.Tensor], torch.Tensor]] = {
    "values times 10^4": lambda kit, values: cipher(kit).encrypt(values * 1e4),
    "another key": lambda kit, values: cipher(another(kit)).encrypt(values),
    "flipped coefficients": lambda kit, values: spoiled(cipher(kit).encrypt(values)),
}


def another(kit: Path) -> Path:
    """A kit of the same parameters and another key."""
    from nvflare.lighter.impl.he import HEBuilder

    builder = HEBuilder(poly_modulus_degree=4096, coeff_mod_bit_sizes=[60, 49], scale_bits=30)
    builder.initialize(None, None)
    (kit / "other" / "startup").mkdir(parents=True, exist_ok=True)
    (kit / "other" / "startup" / "client_context.tenseal").write_bytes(builder.get_serialized_context(is_client=True))
    return kit / "other"


def spoiled(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    rows[0, 20_000:20_400:8] ^= 1  # the lowest bits of some coefficients: a ciphertext of something else
    return rows


@pytest.mark.parametrize("what", BEYOND)
def test_what_only_the_key_can_see_is_seen_at_the_honest_sites(what: str, kit: Path, tmp_path: Path) -> None:
    """A site that alters its own software: the mean leaps, and every honest site refuses to go on from it."""

    def spoil(name: str, update: Update) -> Update:
        if name != "b" or CIPHERTEXT not in update.aux or update.round != 1:
            return update
        values = cipher(kit).decrypt(update.aux[CIPHERTEXT], COUNT)
        return replace(update, aux={CIPHERTEXT: BEYOND[what](kit, values)})

    server, _ = run_with(World(FedAvg(local_steps=1), rounds=ROUNDS), kit, tmp_path, spoil)
    assert server.round == 2, "the round in which it was sent is the last"
    assert "0 valid updates" in str(server.metrics["lost"])
    for site in "abc":
        assert f"{site}: the mean of the sites moved by a norm of" in str(server.metrics["lost"])


def test_a_mean_is_compared_with_that_of_its_own_run(kit: Path, tmp_path: Path) -> None:
    """Another run of the same process, and a round that is asked again."""
    decrypt, state = Decrypt(norm=1.0), {"w": torch.zeros(4)}

    def given(round: int, value: float, run: dict[str, str] = RUN) -> None:
        rows = cipher(kit).encrypt(torch.full((4,), value * 10, dtype=torch.float64))
        scalars = {"encrypted_weight": 10.0}
        task = wire.send_broadcast(Broadcast(round, "train", state, {CIPHERTEXT: rows}, scalars=scalars), run)
        decrypt.process(task, context(kit, tmp_path))

    given(1, 0.0)
    given(1, 0.0)
    given(4, 1.4)  # norm 2.8 in three rounds
    given(1, 100.0, {**RUN, "folder": "fedavg/002"})
    with pytest.raises(PrivacyError, match=r"moved by a norm of 2\.2 since round 1; .*it moves by 1 at most"):
        given(2, 101.1, {**RUN, "folder": "fedavg/002"})
    given(2, 100.4, {**RUN, "folder": "fedavg/002"})


def test_too_many_records_for_the_parameters_are_refused_before_a_round_is_trained(kit: Path, tmp_path: Path) -> None:
    """limit = 2^58 / 2^30 / 64 = 2^22; weights of 2 that may grow fourfold leave room for 2^22 / 8 records."""
    fl_ctx = context(kit, tmp_path)
    state = {"w": torch.tensor([2.0, -1.0])}
    Decrypt().process(wire.send_broadcast(Broadcast(0, "train", state), RUN), fl_ctx)
    assert fl_ctx.get_prop(MOST_SAMPLES) == 2**19
    Decrypt().process(wire.send_broadcast(Broadcast(3, "train", state), RUN), fl_ctx)
    assert fl_ctx.get_prop(MOST_SAMPLES) == 2**21, "the room for growth is for the first round to ask for"
    refuse_overflow("north", 2**19, 2**19)
    refuse_overflow("north", 10**9, None)
    with pytest.raises(PrivacyError, match=r"north has 524289 training records; .* at most 524288: provision with"):
        refuse_overflow("north", 2**19 + 1, 2**19)


MEANS = ("fedavg", "fedprox", "fedmoon", "fedx", "centralized")
"""Methods whose server half is FedAvg's."""


def test_methods_whose_server_does_more_than_a_mean_are_refused() -> None:
    for name in [name for name in METHODS if name not in MEANS]:
        with pytest.raises(ValueError, match="only a mean of whole models"):
            refuse_unencryptable(METHODS[name]())


def test_methods_whose_server_takes_a_mean_are_not() -> None:
    """FedMOON's upload is one of its own, as it remembers the model; what it sends is FedAvg's."""
    for name in MEANS:
        refuse_unencryptable(METHODS[name]())


def test_uniform_weights_are_refused() -> None:
    refuse_unencryptable(FedAvg())
    with pytest.raises(ValueError, match="has weighting 'uniform'"):
        refuse_unencryptable(FedAvg(weighting="uniform"))
    with pytest.raises(ValueError, match="Local overrides"):
        refuse_unencryptable(Local())


def test_what_needs_readable_updates_is_off_by_itself() -> None:
    """Also in a job that was written for plain updates. The sites' settings stay those that the job names."""
    chosen = presets.get("fedavg")
    assert (chosen.rounds.clip_to_median, chosen.rounds.max_share) == (5.0, 0.5)
    controller = EncryptedController(**vars(chosen))
    assert controller._rounds() == replace(chosen.rounds, clip_to_median=0.0, max_share=1.0)
    assert controller.experiment == chosen
    exported = json.loads(job_files(chosen, encrypted=True)["app/config/config_fed_server.json"])
    rounds = exported["workflows"][0]["args"]["rounds"]["args"]
    assert (rounds["clip_to_median"], rounds["max_share"], rounds["rounds"]) == (0.0, 1.0, 6)


@pytest.mark.parametrize("setting", ["averaging=trimmed", "averaging=median", "server_optimizer=adam"])
def test_what_needs_readable_updates_is_refused_where_no_value_is_seen(setting: str) -> None:
    name, _, value = setting.partition("=")
    experiment = override(presets.get("fedavg"), f"rounds.{name}", value)
    with pytest.raises(ValueError, match=f"{setting}: a server that reads no update"):
        EncryptedController(**vars(experiment))


def test_the_encrypted_controller_averages_without_a_key_and_writes_no_model(kit: Path, tmp_path: Path) -> None:
    chosen = override(presets.get("fedavg"), "method.local_steps", "7")
    controller = EncryptedController(**vars(chosen))
    controller._fl_ctx = context(kit, tmp_path)
    method = controller._method()
    assert isinstance(method, EncryptedMean)
    assert (method.local_steps, method.cipher.secret, method.rounds) == (7, False, chosen.rounds)
    folder = RunFolder.create(tmp_path / "runs", chosen)
    controller._finish(folder, {}, [])
    assert (folder.path / "summary.json").exists()
    assert not folder.model.exists()
    careless = EncryptedController(context="client_context.tenseal", **vars(chosen))
    careless._fl_ctx = controller._fl_ctx
    with pytest.raises(ValueError, match="holds the secret key, which only sites may have"):
        careless._method()
