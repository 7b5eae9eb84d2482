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

from fedvlp.core.types import Broadcast, State, Update
from fedvlp.federation.site import reason
from fedvlp.federation.wire import NotHeldError
from fedvlp.flare.tensor_stream import PieceDecomposer, loaded

KEY = "fedvlp"
AUX = "aux/"
REASON = "fedvlp_reason"


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
    return loaded(state), dict(loaded(aux)), meta


def send_broadcast(message: Broadcast, run: dict[str, str]) -> Shareable:
    """``run`` names the run (folder, configuration fingerprint, version) so that a site refuses another one's task."""
    meta = {"round": message.round, "phase": message.phase, "scalars": dict(message.scalars), "run": run}
    return _shareable(message, meta)


def receive_broadcast(shareable: Shareable) -> tuple[Broadcast, dict[str, str]]:
    """The broadcast and the run it belongs to."""
    state, aux, meta = _parts(shareable)
    return Broadcast(meta["round"], meta["phase"], state, aux, meta["scalars"]), meta["run"]


def send_update(update: Update) -> Shareable:
    """The site's reply; its tensors are read by FLARE before the next task begins."""
    meta = {
        "round": update.round,
        "phase": update.phase,
        "num_samples": update.num_samples,
        "metrics": dict(update.metrics),
        "modalities": list(update.modalities),
        "public_id": update.public_id,
    }
    return _shareable(update, meta)


def receive_update(shareable: Shareable, site: str) -> Update:
    """The reply of ``site``: the name is the channel's, whatever the payload says. Its values are checked later."""
    state, aux, meta = _parts(shareable)
    held, metrics, public_id = tuple(meta["modalities"]), dict(meta["metrics"]), meta["public_id"]
    if not all(isinstance(name, str) for name in (*held, *metrics)) or type(public_id) is not int:
        raise ValueError("the header of the reply has values of another kind")
    return Update(site, meta["round"], meta["phase"], meta["num_samples"], state, aux, metrics, held, public_id)


def send_failure(error: Exception | str) -> Shareable:
    """An error reply; a text is one that :func:`core.site.reason` made in another process."""
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    reply.set_header(REASON, error if isinstance(error, str) else reason(error))
    return reply


def failure(shareable: Shareable) -> str | None:
    """Why the site could not answer, or None when it did."""
    code = shareable.get_return_code(ReturnCode.OK)
    if code == ReturnCode.TASK_DATA_FILTER_ERROR:  # nothing was trained
        return (
            f"{NotHeldError.__name__}: a filter of the site refused the task, or it lost its copy; its log says which"
        )
    return None if code == ReturnCode.OK else str(shareable.get_header(REASON, code))
