"""Messages as FLARE Shareables: tensors in a WEIGHTS DXO (streamed by FLARE, never pickled), numbers in its meta.

A site's privacy filters therefore see exactly what leaves the site: ``dxo.data`` holds the named tensors, those of
``aux`` under ``aux/``, and ``dxo.meta["fedvlp"]`` everything else.
"""

from __future__ import annotations

from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.utils import fobs

from fedvlp.core.reasons import IN_THE_LOG, UNKNOWN, for_the_server
from fedvlp.core.types import Broadcast, Failure, FailureKind, State, Update, header
from fedvlp.federation import site
from fedvlp.flare.tensor_stream import PieceDecomposer, loaded

KEY = "fedvlp"
AUX = "aux/"
KIND, REASON = "fedvlp_failure", "fedvlp_reason"
"""Headers of an error reply: a FailureKind, and a text for people."""

CODES = frozenset(value for name, value in vars(ReturnCode).items() if name.isupper() and isinstance(value, str))
"""What FLARE itself answers."""


def register(decomposer: PieceDecomposer | None = None) -> None:
    """Teaches FLARE's serialiser tensors; without it, on both sides and before the first message, a job hangs.

    FLARE's own types first: one that is met before it is registered is taken for a plain object and loses its content.
    """
    flare_decomposers.register()
    fobs.register(decomposer or PieceDecomposer)


def _shareable(message: Broadcast | Update, meta: dict[str, Any]) -> Shareable:
    data = {**message.state, **{AUX + name: tensor for name, tensor in message.aux.items()}}
    return DXO(DataKind.WEIGHTS, data=data, meta={KEY: meta}).to_shareable()


def _parts(shareable: Shareable) -> tuple[State, State, dict[str, Any]]:
    dxo = from_shareable(shareable)
    meta = dxo.get_meta_prop(KEY)
    if not isinstance(meta, dict):
        raise ValueError("the message carries no fedvlp header; the peer runs something else")
    state = {name: tensor for name, tensor in dxo.data.items() if not name.startswith(AUX)}
    aux = {name.removeprefix(AUX): tensor for name, tensor in dxo.data.items() if name.startswith(AUX)}
    return loaded(state), dict(loaded(aux)), dict(meta)


def send_broadcast(message: Broadcast, run: dict[str, str]) -> Shareable:
    """``run`` names the run (folder, configuration fingerprint, version) so that a site refuses another one's task."""
    return _shareable(message, {**header(message), "run": run})


def receive_broadcast(shareable: Shareable) -> tuple[Broadcast, dict[str, str]]:
    """The broadcast and the run it belongs to."""
    state, aux, meta = _parts(shareable)
    run = meta.pop("run")
    return Broadcast(state=state, aux=aux, **meta), run


def send_update(update: Update) -> Shareable:
    """The site's reply; its tensors are read by FLARE before the next task begins."""
    return _shareable(update, {name: value for name, value in header(update).items() if name != "site"})


def receive_update(shareable: Shareable, site: str) -> Update:
    """The reply of ``site``: the name is the channel's, whatever the payload says.

    What an Update does not have is left out; the gate checks the rest later. Raises anything on garbage.
    """
    state, aux, meta = _parts(shareable)
    own = {name: meta[name] for name in header(Update(site, 0, "", 0)) if name != "site"}
    own["modalities"] = tuple(own["modalities"])
    return Update(site, state=state, aux=aux, **own)


def send_failure(failed: Failure | Exception) -> Shareable:
    """An error reply; of its words what the list of core/reasons.py lets leave a site."""
    failed = failed if isinstance(failed, Failure) else site.failure(failed)
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    reply.set_header(KIND, failed.kind.value)
    reply.set_header(REASON, for_the_server(failed.text))
    return reply


def failure(shareable: Shareable) -> Failure | None:
    """Why the site could not answer, or None when it did. Nothing of its words is repeated but what is on the list."""
    code = shareable.get_return_code(ReturnCode.OK)
    if code == ReturnCode.OK:
        return None
    if code == ReturnCode.TASK_DATA_FILTER_ERROR:  # nothing was trained, so asking again costs little
        text = "a filter of the site refused the task, or it lost its copy of the model; its log says which"
        return Failure(FailureKind.NOT_HELD, text)
    kind, text = shareable.get_header(KIND), shareable.get_header(REASON)
    known = kind in [known.value for known in FailureKind]
    if text is None:
        said = code if isinstance(code, str) and code in CODES else f"{UNKNOWN}: {IN_THE_LOG}"
    else:
        said = for_the_server(text)
    return Failure(FailureKind(kind) if known else FailureKind.FAILED, said)
