"""Noise that sites share: of the sum it is what epsilon was booked for, also where sites drop out."""

from __future__ import annotations

import json
import math
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext

from fedvlp.core.privacy import clip_and_noise, share_of
from fedvlp.core.types import State, Update
from fedvlp.deploy.envelope import Behind
from fedvlp.flare import messages
from fedvlp.flare.encryption import CIPHERTEXT, Cipher, flatten
from fedvlp.flare.messages import BEHIND
from fedvlp.flare.noise_shares import NoiseAndEncrypt
from fedvlp.flare.privacy_filters import RECEIVED, ClipAndNoise

pytestmark = [
    pytest.mark.skipif(find_spec("tenseal") is None, reason="pip install 'fedvlp[he]'"),
    pytest.mark.skipif(find_spec("opacus") is None, reason="pip install 'fedvlp[privacy]'"),
]
VALUES = 20_000
BEFORE: State = {"image_head.w": torch.full((VALUES,), 0.25)}
SAMPLES = {"a": 40, "b": 10, "c": 25, "d": 33}
SETTINGS: dict[str, Any] = {
    "clip": 0.5, "noise_multiplier": 4.0, "honest": 2, "samples": 40, "epsilon": 8.0, "delta": 1e-5, "dataset": "chest"
}  # fmt: skip


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contexts that FLARE's HEBuilder makes, with the parameters of ENCRYPTION.md."""
    from nvflare.lighter.impl.he import HEBuilder

    folder = tmp_path_factory.mktemp("keys")
    builder = HEBuilder(poly_modulus_degree=4096, coeff_mod_bit_sizes=[60, 49], scale_bits=30)
    builder.initialize(None, None)
    (folder / "server_context.tenseal").write_bytes(builder.get_serialized_context())
    (folder / "client_context.tenseal").write_bytes(builder.get_serialized_context(is_client=True))
    return folder


class Engine:
    """What the filters ask FLARE's engine for."""

    def __init__(self, keys: Path, root: Path) -> None:
        self.keys, self.root = keys, root

    def get_workspace(self) -> Engine:
        return self

    def get_startup_kit_dir(self) -> str:
        return str(self.keys)

    def get_root_dir(self) -> str:
        return str(self.root)

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """FLARE logs through events too."""


def at(site: str, keys: Path, tmp_path: Path, least_quorum: int = 3) -> FLContext:
    """A provisioned site whose envelope lets no round be of fewer sites."""
    root = tmp_path / site
    (root / "startup").mkdir(parents=True, exist_ok=True)
    (root / "local").mkdir(exist_ok=True)
    (root / "startup" / "fed_client.json").write_text("{}")
    (root / "local" / "fedvlp.json").write_text(json.dumps({"envelope": {"least_quorum": least_quorum}}))
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.ENGINE, Engine(keys, root), private=True, sticky=False)
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
    fl_ctx.set_prop(RECEIVED, BEFORE, private=True, sticky=False)
    fl_ctx.set_prop(BEHIND, Behind(500), private=True, sticky=False)
    return fl_ctx


def trained(site: str, **changes: Any) -> Update:
    """A change of length 0.5 in one value: what clipping leaves as it is."""
    moved = BEFORE["image_head.w"].clone()
    moved["abcd".index(site)] += 0.5
    return Update(site, 1, "train", **{"num_samples": SAMPLES[site], "state": {"image_head.w": moved}, **changes})


def sent(site: str, keys: Path, tmp_path: Path, **settings: Any) -> Update:
    reply = NoiseAndEncrypt(**{**SETTINGS, **settings}).process(
        messages.send_update(trained(site)), at(site, keys, tmp_path)
    )
    assert messages.failure(reply) is None, messages.failure(reply)
    return messages.receive_update(reply, site)


def refused(keys: Path, tmp_path: Path, least_quorum: int = 3, settings: Any = None, **changes: Any) -> str:
    fl_ctx = at("a", keys, tmp_path, least_quorum)
    reply = NoiseAndEncrypt(**{**SETTINGS, **(settings or {})}).process(
        messages.send_update(trained("a", **changes)), fl_ctx
    )
    assert not reply.get("DXO")
    assert not (tmp_path / "a" / "privacy").exists(), "a refusal costs no budget"
    return str(messages.failure(reply))


@pytest.mark.parametrize("present", ["abcd", "abc"])
def test_the_sum_has_the_noise_that_is_booked_whoever_drops_out(present: str, keys: Path, tmp_path: Path) -> None:
    """Quorum 3, honest 2: without the share of the site that reads the sum, sqrt(present - 1) shares are left of it.

    That is never less than noise_multiplier * clip * samples = 80; the changes add up as they are.
    """
    from fedvlp.flare.privacy_budget import epsilon

    updates = [sent(site, keys, tmp_path) for site in present]
    server = Cipher((keys / "server_context.tenseal").read_bytes())
    total = updates[0].aux[CIPHERTEXT]
    for update in updates[1:]:
        server.check(update.aux[CIPHERTEXT], VALUES)
        total = server.add(total, update.aux[CIPHERTEXT])
    weight = sum(SAMPLES[site] for site in present)
    values = Cipher((keys / "client_context.tenseal").read_bytes()).decrypt(total, VALUES)
    noise = values - 0.25 * weight
    share = 80 / math.sqrt(2)
    assert float(noise.std()) == pytest.approx(share * math.sqrt(len(present)), rel=0.03)
    assert share * math.sqrt(len(present) - 1) >= 80
    assert abs(float(noise.mean())) < 5 * float(noise.std()) / math.sqrt(VALUES)
    for update in updates:
        assert not update.state, "nothing but the ciphertext leaves"
        assert update.metrics["privacy/epsilon"] == epsilon({4.0: 1}, 1e-5)


def test_no_site_moves_the_sum_by_more_than_the_noise_is_made_for(keys: Path, tmp_path: Path) -> None:
    """A change a thousand times too long counts, times the site's records, no more than clip * samples."""
    huge = {"image_head.w": BEFORE["image_head.w"] + 1e3}
    clipped = clip_and_noise(huge, BEFORE, SETTINGS["clip"], 1e-12)
    length = float((flatten(clipped) - flatten(BEFORE)).norm()) * SAMPLES["a"]
    assert length == pytest.approx(SETTINGS["clip"] * SETTINGS["samples"], rel=1e-3)
    assert "is made for 1 to 39 at each site" in refused(keys, tmp_path, settings={"samples": 39})
    assert "is made for 1 to 40 at each site" in refused(keys, tmp_path, num_samples=0)


def test_a_site_counts_on_no_shares_that_a_round_may_lack(keys: Path, tmp_path: Path) -> None:
    """Two honest shares beside the reader's need a quorum of three; without a limit of its own a site sends nothing."""
    assert "the noise counts on 2 shares beside the reader's" in refused(keys, tmp_path, least_quorum=2)
    assert "envelope.least_quorum is 0" in refused(keys, tmp_path, least_quorum=0)


def test_shares_add_up() -> None:
    assert share_of(4.0, 1) == 4.0
    assert math.sqrt(9) * share_of(4.0, 9) == pytest.approx(4.0)


def test_epsilon_of_the_sum_is_opacus_for_the_whole_noise(keys: Path, tmp_path: Path) -> None:
    """The Gaussian mechanism without sampling, noise 4 in units of half the sensitivity, three releases of one site."""
    from opacus.accountants import RDPAccountant

    told = [sent("a", keys, tmp_path).metrics["privacy/epsilon"] for _ in range(3)]
    theirs = RDPAccountant()
    for _ in range(3):
        theirs.step(noise_multiplier=2.0, sample_rate=1.0)
    assert told[-1] == pytest.approx(theirs.get_epsilon(delta=1e-5), rel=0.02)
    assert told == sorted(told)


def shipped(policy: str, update: Update, fl_ctx: FLContext, *first: Any) -> Update:
    """What the outgoing filters of a shipped policy let go, after those that somebody listed before them."""
    file = Path(__file__).parents[2] / "provisioning" / "site" / policy
    reply = messages.send_update(update)
    made = [
        getattr(import_module("fedvlp.flare"), entry["path"].rpartition(".")[2])(**entry["args"])
        for entry in json.loads(file.read_text())["scopes"][0]["task_result_filters"]
    ]
    for rule in (*first, *made):
        reply = rule.process(reply, fl_ctx)
    assert messages.failure(reply) is None, messages.failure(reply)
    return messages.receive_update(reply, update.site)


FIGURES = {"loss/contrastive": 1.25, "val/mean/r1": 30.0, "probe/loss": 2.0, "seconds": 3.0}


def test_beside_the_shared_noise_no_figure_of_the_records_leaves(keys: Path, tmp_path: Path) -> None:
    """Exact losses in the clear would take back what the noise of the sum hides."""
    update = shipped("privacy-dp-he.json", trained("a", metrics=FIGURES), at("a", keys, tmp_path, least_quorum=4))
    assert update.aux.keys() == {CIPHERTEXT}
    assert update.metrics.keys() == {"seconds", "privacy/epsilon"}


def test_what_noise_costs_leaves_under_encryption(keys: Path, tmp_path: Path) -> None:
    """Of a job with record-level noise, and with ClipAndNoise before the policy's own filters."""
    behind = Behind(500, {"loss": 500, "probe": 500})
    costs = {"loss/contrastive": 1.25, "privacy/record_epsilon": 2.0}
    for first in ((), (ClipAndNoise(0.1, 4.0, 8.0, 1e-5, "chest"),)):
        fl_ctx = at("a", keys, tmp_path)
        fl_ctx.set_prop(BEHIND, behind, private=True, sticky=False)
        update = shipped("privacy-he.json", trained("a", metrics=costs), fl_ctx, *first)
        assert update.metrics.keys() == costs.keys() | ({"privacy/epsilon"} if first else set())


def test_what_noise_does_not_cover_stays(keys: Path, tmp_path: Path) -> None:
    assert "beside the model" in refused(keys, tmp_path, aux={"rep": torch.ones(2)})
    assert "exact figures" in refused(keys, tmp_path, scalars={"loss": 7.3})
    assert "batch statistic" in refused(keys, tmp_path, state={"image_head.running_mean": torch.ones(2)})
    evaluated = NoiseAndEncrypt(**SETTINGS).process(
        messages.send_update(trained("a", state={})), at("a", keys, tmp_path)
    )
    assert messages.receive_update(evaluated, "a").aux == {}


@pytest.mark.parametrize(("name", "value"), [("honest", 0), ("samples", 0), ("noise_multiplier", 0.0)])
def test_settings_without_privacy_are_refused_at_the_start(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        NoiseAndEncrypt(**{**SETTINGS, name: value})
