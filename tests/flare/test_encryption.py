"""Encrypted averaging gives the plain average; the server holds no key, and what cannot be encrypted is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from support.toy import Toy, World, same_bytes

from fedvlp.core.checkpoint import load_tensors
from fedvlp.core.privacy import PrivacyError
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Reply, State, Update
from fedvlp.federation.loop import Federation, Rounds
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
    refuse_unencryptable,
    unflatten,
)
from fedvlp.flare.jobs import job_files
from fedvlp.methods import METHODS, FedAvg, FedProx, Local
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.folder import RunFolder

pytestmark = pytest.mark.skipif(find_spec("tenseal") is None, reason="pip install 'fedvlp[he]'")
RUN = {"folder": "fedavg/001", "fingerprint": "abc", "version": "0"}
ROUNDS = Rounds(rounds=3, evaluate_every=1).of_encrypted()


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contexts that FLARE's HEBuilder makes, with the parameters of PRIVACY.md."""
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
    with pytest.raises(PrivacyError, match="parameters hold up to"):
        mine.encrypt(values * 1.01)
    with pytest.raises(PrivacyError, match="parameters hold up to"):
        mine.encrypt(torch.tensor([float("nan")], dtype=torch.float64))


def test_what_cannot_be_encrypted_does_not_leave(kit: Path, tmp_path: Path) -> None:
    def said(state: State, aux: State, kit: Path) -> str:
        out = Encrypt().process(wire.send_update(Update("a", 0, "train", 5, state, aux)), context(kit, tmp_path))
        assert not out.get("DXO")
        return str(wire.failure(out))

    assert "bfloat16" in said({"n": torch.ones(2).bfloat16()}, {}, kit)
    assert "beside the model" in said({"w": torch.ones(1)}, {"rep": torch.ones(1)}, kit)
    assert "provision with HEBuilder" in said({"w": torch.ones(1)}, {}, tmp_path)


def test_a_damaged_ciphertext_is_no_model(kit: Path) -> None:
    rows = cipher(kit).encrypt(torch.ones(10, dtype=torch.float64))
    with pytest.raises(PrivacyError, match="not one of this model"):
        cipher(kit).decrypt(rows, 5000)
    rows[0, :100] = 7
    with pytest.raises(PrivacyError, match="damaged"):
        cipher(kit).decrypt(rows, 10)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("fedavg", "fedprox", "centralized")])
def test_methods_whose_server_does_more_than_a_mean_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="only a mean of whole models"):
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


@pytest.mark.parametrize("averaging", ["trimmed", "median"])
def test_a_robust_average_is_refused_where_no_value_is_seen(averaging: str) -> None:
    experiment = override(presets.get("fedavg"), "rounds.averaging", averaging)
    with pytest.raises(ValueError, match=f"averaging={averaging}: a server that reads no update"):
        EncryptedController(**vars(experiment))


def test_the_encrypted_controller_averages_without_a_key_and_writes_no_model(kit: Path, tmp_path: Path) -> None:
    chosen = override(presets.get("fedavg"), "method.local_steps", "7")
    controller = EncryptedController(**vars(chosen))
    controller._fl_ctx = context(kit, tmp_path)
    method = controller._method()
    assert isinstance(method, EncryptedMean)
    assert (method.local_steps, method.cipher.secret) == (7, False)
    folder = RunFolder.create(tmp_path / "runs", chosen)
    controller._finish(folder, {}, [])
    assert (folder.path / "summary.json").exists()
    assert not folder.model.exists()
    careless = EncryptedController(context="client_context.tenseal", **vars(chosen))
    careless._fl_ctx = controller._fl_ctx
    with pytest.raises(ValueError, match="holds the secret key, which only sites may have"):
        careless._method()
