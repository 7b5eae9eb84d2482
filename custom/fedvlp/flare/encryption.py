"""FedAvg over ciphertexts (CKKS; Cheon et al., 2017, https://eprint.iacr.org/2016/421): the server never sees a model.

Every site sends ``num_samples * weights`` encrypted, the server adds ciphertexts, every site decrypts the sum and
divides it by the total number of samples. Only additions are needed, so small parameters of CKKS do. All sites share
one secret key, which FLARE's HEBuilder puts into their kits and not into the server's: a site that hands it to the
server gives away everybody's updates.

The server cannot look at what it adds. So each site keeps its own change within a norm before it encrypts it, and looks
at every mean that comes back: one that moved farther than such changes can move it is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor

from fedvlp.core.aggregation import MEAN, Aggregator
from fedvlp.core.checkpoint import save_json, save_tensors
from fedvlp.core.method import Method, Schedule, ServerHooks, overridden
from fedvlp.core.optimizers import NONE
from fedvlp.core.privacy import PrivacyError
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, Broadcast, Expected, State, Update
from fedvlp.core.validate import require
from fedvlp.federation.loop import QuorumLostError, Rounds
from fedvlp.flare import messages
from fedvlp.flare.controller import FederatedController
from fedvlp.flare.messages import MOST_SAMPLES
from fedvlp.flare.paths import TRAINED, runs_root, under
from fedvlp.flare.privacy_filters import RECEIVED, UpdateFilter, received
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import Record, summary

CIPHERTEXT = "ciphertext"
WEIGHT = "encrypted_weight"
MAX_SITES = 64
HEADER = 8  # bytes of a row that say how long its ciphertext is
NORM = 100.0  # of a change in one round: 50 steps are 2.5 in a demo, and 12 at most with AdamW at 2e-5 on 150 M values
LARGEST = 30.0  # change of one value; a weight moves by far less, a running variance may begin far off
GROWTH = 4.0  # times that the largest weight may grow in a run whose sums are sure to fit

logger = logging.getLogger(__name__)


class Cipher:
    """Vectors as CKKS ciphertexts, ``slots`` values each, in rows [rows, width] uint8 of a fixed size."""

    def __init__(self, context: bytes) -> None:
        """``context``: a TenSEAL context; without its secret key only :meth:`add` works."""
        try:
            import tenseal
        except ImportError:
            raise PrivacyError(
                public="homomorphic encryption is not installed here: pip install 'fedvlp[he]'"
            ) from None
        self._tenseal = tenseal
        self._context = tenseal.context_from(context)
        first = self._context.seal_context().data.first_context_data()
        self._level = self._context.seal_context().data.first_parms_id()
        degree = first.parms().poly_modulus_degree()
        self.slots = degree // 2
        self.width = HEADER + 16 * degree * (first.chain_index() + 1) + 1024  # two polynomials, uncompressed
        self.secret = bool(self._context.has_secret_key())
        #: largest absolute value of one site's plaintext, so that the sum of MAX_SITES cannot wrap around
        self.limit = 2.0 ** (first.total_coeff_modulus_bit_count() - 2) / self._context.global_scale / MAX_SITES

    @staticmethod
    def load(name: str, fl_ctx: FLContext) -> Cipher:
        """From the startup folder of this kit, where provisioning puts it. Raises PrivacyError where there is none.

        ``name`` may come from a job, so it is of a file in that folder, never a path.
        """
        plain = Path(name).name == name != ".."
        require(plain, "the name of an encryption context is that of a file in startup/, no path")
        file = Path(fl_ctx.get_engine().get_workspace().get_startup_kit_dir()) / name
        if not file.is_file():
            raise PrivacyError(
                f"this kit has no startup/{name}: provision with HEBuilder",
                public="this kit has no key for encryption: provision with HEBuilder",
            )
        return Cipher(file.read_bytes())

    def rows(self, count: int) -> int:
        """Ciphertexts that ``count`` values take."""
        return -(-count // self.slots)

    def encrypt(self, values: Tensor) -> Tensor:
        """Float64 [n] to uint8 [rows, width]. Raises PrivacyError for a value that cannot be encrypted faithfully."""
        largest = float(values.abs().max()) if len(values) else 0.0
        if not largest <= self.limit:
            raise PrivacyError(
                f"a weight times num_samples is {largest:.3g}; the encryption's parameters hold {self.limit:.3g}: "
                "provision with a smaller scale_bits, or train this site on fewer records",
                public=(
                    "a weight times num_samples is beyond the {limit:.3g} that the encryption's parameters hold: "
                    "provision with a smaller scale_bits"
                ),
                limit=self.limit,
            )
        vectors = (self._tenseal.ckks_vector(self._context, chunk.numpy()) for chunk in values.split(self.slots))
        return self._packed((vector.serialize() for vector in vectors), self.rows(len(values)))

    def check(self, rows: Tensor, count: int) -> None:
        """Raises PrivacyError unless each of ``rows`` is a ciphertext that :meth:`add` can take for ``count`` values.

        What was encrypted under another key of the same parameters, and which values, cannot be seen here.
        """
        scale = self._context.global_scale
        for index, vector in enumerate(self._vectors(rows)):
            values = min(self.slots, count - index * self.slots)
            ciphertexts = vector.ciphertext()
            if vector.size() != values or len(ciphertexts) != 1:
                raise PrivacyError(f"a ciphertext holds {vector.size()} values, expected {values}")
            (one,) = ciphertexts
            known = one.size() == 2 and one.scale == scale and one.parms_id() == self._level
            if not known or one.is_transparent():
                raise PrivacyError("a ciphertext was made with other parameters, or is transparent (not encrypted)")

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """The ciphertexts of the sum."""
        pairs = zip(self._vectors(left), self._vectors(right), strict=True)
        return self._packed(((one + other).serialize() for one, other in pairs), len(left))

    def decrypt(self, rows: Tensor, count: int) -> Tensor:
        """Uint8 [rows, width] to float64 [count]."""
        if not self.secret or len(rows) != self.rows(count):
            raise PrivacyError("the ciphertext is not one of this model, or this kit has no secret key")
        vectors = [np.asarray(vector.decrypt(), dtype=np.float64) for vector in self._vectors(rows)]
        return torch.from_numpy(np.concatenate(vectors))[:count]

    def _vectors(self, rows: Tensor) -> Iterable[Any]:
        for row in rows.numpy():
            end = HEADER + int.from_bytes(row[:HEADER].tobytes(), "little")
            try:
                yield self._tenseal.ckks_vector_from(self._context, row[HEADER:end].tobytes())
            except Exception:  # TenSEAL raises anything on damaged bytes
                raise PrivacyError("a ciphertext is damaged or was made with other parameters") from None

    def _packed(self, ciphertexts: Iterable[bytes], count: int) -> Tensor:
        rows = torch.zeros(count, self.width, dtype=torch.uint8)
        for row, ciphertext in zip(rows.numpy(), ciphertexts, strict=True):
            row[: HEADER + len(ciphertext)] = np.frombuffer(
                len(ciphertext).to_bytes(HEADER, "little") + ciphertext, dtype=np.uint8
            )
        return rows


def averaged(state: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that are averaged, in order; integer buffers are not, and stay where they are."""
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise PrivacyError(
                f"{name} is {tensor.dtype}; of floating-point tensors only float32 ones are encrypted",
                public="of floating-point tensors only float32 ones are encrypted, and the model has others",
            )
    return sorted(name for name, tensor in state.items() if tensor.is_floating_point())


def length(state: Mapping[str, Tensor]) -> int:
    """How many values are averaged."""
    return sum(state[name].numel() for name in averaged(state))


def flatten(state: Mapping[str, Tensor]) -> Tensor:
    """The values that are averaged, as float64 [n]."""
    return torch.cat([state[name].detach().cpu().reshape(-1).double() for name in averaged(state)])


def unflatten(values: Tensor, like: Mapping[str, Tensor]) -> State:
    """The inverse of :func:`flatten`; shapes, and the tensors that are not averaged, as in ``like``."""
    names = averaged(like)
    flat = values.split([like[name].numel() for name in names])
    mean = {name: tensor.float().reshape(like[name].shape) for name, tensor in zip(names, flat, strict=True)}
    return {**like, **mean}


def refuse_unencryptable(method: Method) -> None:
    """Raises ValueError unless the method's server half is FedAvg's, with weights n_k: a sum is all that is added."""
    changed = overridden(method, Schedule, ServerHooks)
    if type(method).upload is not Method.upload and not method.sends_plainly:
        changed.append("upload")
    if changed or method.weighting != "samples":
        why = f"overrides {', '.join(changed)}" if changed else f"has weighting {method.weighting!r}"
        raise ValueError(
            f"{type(method).__name__} {why}; only a mean of whole models weighted by samples can be encrypted: "
            "FedAvg, FedProx or FedMOON with method.weighting=samples"
        )


@dataclass(frozen=True)
class EncryptedMean(Method):
    """The server half: ``server.state`` stays the untrained model, the trained one is a ciphertext in its memory."""

    cipher: Cipher = field(kw_only=True)
    rounds: Rounds = field(kw_only=True, default_factory=Rounds)  # whose quorum the sum must have

    def start(self, server: Server) -> None:
        require(len(server.sites) <= MAX_SITES, f"{len(server.sites)} sites; ciphertexts hold the sum of {MAX_SITES}")

    def broadcast(self, server: Server, site: str) -> Broadcast:
        total = server.memory.get(WEIGHT)
        aux = {} if total is None else {CIPHERTEXT: server.memory[CIPHERTEXT]}
        scalars = {} if total is None else {WEIGHT: float(total)}
        return Broadcast(server.round, server.phase, server.state, aux, scalars=scalars)

    def expects(self, server: Server, site: str) -> Expected:
        rows = self.cipher.rows(length(server.state))
        return Expected(aux={CIPHERTEXT: torch.empty(rows, self.cipher.width, dtype=torch.uint8)})

    def objection(self, server: Server, update: Update) -> str | None:
        if CIPHERTEXT in update.aux:
            if not update.num_samples:
                return "an encrypted update of 0 training records is in no sum; the quorum does not count it"
            try:
                self.cipher.check(update.aux[CIPHERTEXT], length(server.state))
            except PrivacyError as error:
                return str(error)
        return None

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return CiphertextSum(self.cipher, server, self.rounds.needed(len(self.asks(server))))


class CiphertextSum:
    """The encrypted sum of the sites' weights times samples, and the plain sum of their samples.

    Of fewer than ``needed`` updates there is none: every site decrypts the sum, and that of one site is its model.
    """

    def __init__(self, cipher: Cipher, server: Server, needed: int) -> None:
        self._cipher = cipher
        self._server = server
        self._needed = needed
        self._rows = torch.empty(0)
        self._samples = 0
        self._added = 0

    def add(self, update: Update) -> None:
        sent = update.aux[CIPHERTEXT]
        try:
            self._rows = self._cipher.add(self._rows, sent) if self._samples else sent.clone()
        except Exception as error:  # two sites can agree on ciphertexts whose sum is none
            logger.warning("%s: its ciphertexts cannot be added (%s); left out", update.site, type(error).__name__)
            return
        self._samples += update.num_samples
        self._added += 1

    def commit(self) -> None:
        """Raises QuorumLostError where fewer updates than the quorum are in the sum: some could not be added."""
        if self._added < self._needed:
            raise QuorumLostError(
                f"round {self._server.round} phase {self._server.phase}: the ciphertexts of {self._added} sites could "
                f"be added, {self._needed} needed. The model is as it was before this phase; the server's log names "
                "the sites that are left out. Resume the run once these sites are repaired"
            )
        weight = torch.tensor(float(self._samples), dtype=torch.float64)
        self._server.memory = {CIPHERTEXT: self._rows, WEIGHT: weight}


def within(values: Tensor, before: Tensor, norm: float, largest: float, shorten: bool = False) -> Tensor:
    """``values`` [n], if they went from ``before`` [n] by at most an L2 norm of ``norm`` and none by over ``largest``.

    Otherwise PrivacyError, or with ``shorten`` the point on the way that does; float64.
    """
    change = values - before
    length, most = float(change.norm()), float(change.abs().max()) if len(change) else 0.0
    if not math.isfinite(length):
        raise PrivacyError(public="the update holds NaN or infinite values; lower training.lr or look at the data")
    if length <= norm and most <= largest:
        return values
    if not shorten:
        raise PrivacyError(
            f"training moved the weights by a norm of {length:.3g}, one of them by {most:.3g}; this site encrypts "
            f"changes of up to {norm:g} and {largest:g}: look at its data and at training.lr, or set norm and largest "
            "of Encrypt in its local/privacy.json",
            public=(
                "training moved the weights by more than this site encrypts: a norm of {norm:g}, one of them "
                "by {largest:g}"
            ),
            norm=norm,
            largest=largest,
        )
    return before + change * min(norm / length, largest / most)


class Encrypt(UpdateFilter):
    """task_result filter of a site: the weights leave as ciphertexts, or not at all. List it after ClipAndNoise.

    The server cannot see how far an update goes, so this site does: a change with an L2 norm over ``norm``, or of one
    value by over ``largest``, is refused, or shortened where ``shorten`` says so. ``Decrypt`` must be listed too.
    """

    def __init__(
        self,
        context: str = "client_context.tenseal",
        norm: float = NORM,
        largest: float = LARGEST,
        shorten: bool = False,
    ) -> None:
        super().__init__()
        for name, value in {"norm": norm, "largest": largest}.items():
            require(0 < value < math.inf, f"Encrypt: {name} is {value}; it must be positive and finite")
        self.context = context
        self.norm = norm
        self.largest = largest
        self.shorten = shorten

    def filtered(self, update: Update, fl_ctx: FLContext) -> Update:
        if update.aux:
            raise PrivacyError(public="the method sends tensors beside the model, which are not encrypted here")
        if not update.state:
            return update
        cipher = Cipher.load(self.context, fl_ctx)
        after, before = flatten(update.state), received(fl_ctx)
        if before.keys() != update.state.keys():
            raise PrivacyError(public="the update has other tensors than the task brought, so its change is unknown")
        values = within(after, flatten(before), self.norm, self.largest, self.shorten)
        return replace(update, state={}, aux={CIPHERTEXT: cipher.encrypt(values * update.num_samples)})


class Decrypt(Filter):
    """task_data filter of a site: turns the encrypted sum back into the mean, and keeps the trained model at the site.

    The last broadcast's model is ``sites/<site>/trained.safetensors`` in the run's folder at the site. A mean that went
    farther than ``norm`` a round from the last one that this process saw is refused: if every site's change is within
    ``norm``, so is the mean's, and somebody sent values beyond it, or ciphertexts of another key.
    """

    def __init__(self, context: str = "client_context.tenseal", norm: float = NORM) -> None:
        super().__init__()
        require(0 < norm < math.inf, f"Decrypt: norm is {norm}; it must be positive and finite")
        self.context = context
        self.norm = norm
        self._seen: tuple[str, int, Tensor] | None = None  # run, round and the mean [n] that it began with

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        message, run = messages.receive_broadcast(shareable)
        cipher = Cipher.load(self.context, fl_ctx)
        if CIPHERTEXT not in message.aux:
            self._remember(message, run["folder"], flatten(message.state), cipher, fl_ctx)
            return shareable
        mean = cipher.decrypt(message.aux[CIPHERTEXT], length(message.state)) / message.scalars[WEIGHT]
        self._refuse_leap(message.round, run["folder"], mean)
        state = unflatten(mean, message.state)
        self._remember(replace(message, state=state), run["folder"], mean, cipher, fl_ctx)
        if message.phase == EVALUATE:
            folder = under(runs_root(fl_ctx), run["folder"]) / "sites" / fl_ctx.get_identity_name()
            save_tensors(folder / TRAINED, state)
        scalars = {name: value for name, value in message.scalars.items() if name != WEIGHT}
        plain = replace(message, state=state, aux={}, scalars=scalars)
        return from_shareable(messages.send_broadcast(plain, run)).update_shareable(shareable)

    def _refuse_leap(self, round: int, run: str, mean: Tensor) -> None:
        """Raises PrivacyError for a mean that honest changes cannot have led to."""
        if not bool(torch.isfinite(mean).all()):
            raise PrivacyError("the mean of the sites holds NaN or infinite values; nothing is trained on it")
        if self._seen is None or self._seen[0] != run:
            return
        _, before, known = self._seen
        went, most = float((mean - known).norm()), self.norm * max(1, round - before)
        if not went <= most * 1.001:  # what encryption and float32 add is below a thousandth
            raise PrivacyError(
                f"the mean of the sites moved by a norm of {went:.3g} since round {before}; if every site encrypts "
                f"changes of up to {self.norm:g}, it moves by {most:g} at most. A site sent what it should not, or has "
                "another key or norm: put the run back (`fedvlp jobs rollback`) and leave that site out"
            )

    def _remember(self, message: Broadcast, run: str, mean: Tensor, cipher: Cipher, fl_ctx: FLContext) -> None:
        """What this task's answer is compared with, and how many records fit into its ciphertexts."""
        self._seen = (run, message.round, mean.float())
        before = {name: tensor.detach().clone() for name, tensor in message.state.items()}
        fl_ctx.set_prop(RECEIVED, before, private=True, sticky=False)
        largest = float(mean.abs().max()) * (1.0 if message.round else GROWTH)
        most = int(cipher.limit / largest) if largest else None
        fl_ctx.set_prop(MOST_SAMPLES, most, private=True, sticky=False)


class EncryptedController(FederatedController):
    """The controller of an encrypted run. The server has no model to write: the sites keep it (see ``Decrypt``)."""

    def __init__(self, context: str = "server_context.tenseal", **settings: Any) -> None:
        super().__init__(**settings)
        self.context = context
        refuse_unencryptable(self.experiment.method)
        averaging = self.experiment.rounds.averaging
        require(averaging == MEAN, f"rounds.averaging={averaging}: a server that reads no update can but add; set mean")
        optimizer = self.experiment.rounds.server_optimizer
        require(
            optimizer == NONE,
            f"rounds.server_optimizer={optimizer}: a server that reads no update has no change to follow; set none",
        )
        require(self.experiment.rounds.evaluate_every > 0, "rounds.evaluate_every is 0: no site would get the model")

    def _method(self) -> Method:
        assert self._fl_ctx is not None
        cipher = Cipher.load(self.context, self._fl_ctx)
        require(not cipher.secret, f"startup/{self.context} holds the secret key, which only sites may have")
        return EncryptedMean(
            local_steps=self.experiment.method.local_steps, cipher=cipher, rounds=self.experiment.rounds
        )

    def _rounds(self) -> Rounds:
        return super()._rounds().of_encrypted()

    def _finish(self, folder: RunFolder, state: State, history: list[Record]) -> None:
        save_json(folder.path / "summary.json", summary(history))
        self.log_info(self._fl_ctx, "trained model: at the sites, in the run's folder there, sites/<site>/")
