"""Messages as FLARE Shareables: tensors in a WEIGHTS DXO (streamed by FLARE, never pickled), numbers in its meta.

A site's privacy filters therefore see exactly what leaves the site: ``dxo.data`` holds the named tensors, those of
``aux`` under ``aux/``, and ``dxo.meta["fedvlp"]`` everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.utils import fobs

from fedvlp.core.site_error import one_line
from fedvlp.core.types import Broadcast, Failure, FailureKind, State, Update, header

if TYPE_CHECKING:  # torch, which a process that only passes messages on does without
    from nvflare.fuel.utils.fobs.decomposer import Decomposer

KEY = "fedvlp"
AUX = "aux/"
KIND, REASON = "fedvlp_failure", "fedvlp_reason"
"""Headers of an error reply: a FailureKind, and a text for people."""

BEHIND = "fedvlp_behind"
"""Property of a task's context: how many records its answer rests on, for the site's outgoing filters."""

MOST_SAMPLES = "fedvlp_most_samples"
"""Property of a task's context: how many records of a site the encryption of its answer has room for."""

SITE, FAILURE, COUNTED = "fedvlp_site", "fedvlp_failure", "fedvlp_counted"
"""Between a job's process and its child: what the child is told beside the task, why it has no update, and how many
records its update rests on."""

CHILD_LOST = (
    "the training process ended or fell silent before it answered (killed for lack of memory, crashed or hung); this "
    "site's log has its last lines. A smaller training.batch_size needs less memory"
)
"""What a site says of a training process that is gone."""

CODES = frozenset(value for name, value in vars(ReturnCode).items() if name.isupper() and isinstance(value, str))
"""What FLARE itself answers."""


def register(decomposer: Decomposer | None = None) -> None:
    """Teaches FLARE's serialiser tensors; without it, on both sides and before the first message, a job hangs.

    FLARE's own types first: one that is met before it is registered is taken for a plain object and loses its content.
    """
    flare_decomposers.register()
    if decomposer is None:
        from fedvlp.flare.tensor_stream import PieceDecomposer

        decomposer = PieceDecomposer()
    fobs.register(decomposer)


def _shareable(message: Broadcast | Update, meta: dict[str, Any]) -> Shareable:
    data = {**message.state, **{AUX + name: tensor for name, tensor in message.aux.items()}}
    return DXO(DataKind.WEIGHTS, data=data, meta={KEY: meta}).to_shareable()


def header_of(dxo: DXO) -> dict[str, Any]:
    """All of a message but its tensors. Raises ValueError where it is none of fedvlp's."""
    meta = dxo.get_meta_prop(KEY)
    if not isinstance(meta, dict):
        raise ValueError("the message carries no fedvlp header; the peer runs something else")
    return dict(meta)


def _parts(shareable: Shareable) -> tuple[State, State, dict[str, Any]]:
    from fedvlp.flare.tensor_stream import loaded

    dxo = from_shareable(shareable)
    meta = header_of(dxo)
    state = {name: tensor for name, tensor in dxo.data.items() if not name.startswith(AUX)}
    aux = {name.removeprefix(AUX): tensor for name, tensor in dxo.data.items() if name.startswith(AUX)}
    return loaded(state), dict(loaded(aux)), meta


def send_broadcast(message: Broadcast, run: dict[str, str]) -> Shareable:
    """``run`` names the run (folder, configuration fingerprint, version) so that a site refuses another one's task.

    With its ``id`` the site tells it from an earlier run in a folder of that name (flare/paths.py).
    """
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
    return Update(site, state=state, aux=aux, **_own(meta))


def receive_figures(shareable: Shareable, site: str) -> Update:
    """The same without its tensors, which are not looked at."""
    return Update(site, **_own(header_of(from_shareable(shareable))))


def _own(meta: dict[str, Any]) -> dict[str, Any]:
    own = {name: meta[name] for name in header(Update("", 0, "", 0)) if name != "site"}
    own["modalities"] = tuple(own["modalities"])
    return own


def send_failure(failed: Failure | Exception) -> Shareable:
    """An error reply, with the public words of the failure alone (core/site_error.py)."""
    if not isinstance(failed, Failure):
        from fedvlp.federation import site

        failed = site.failure(failed)
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    reply.set_header(KIND, failed.kind.value)
    reply.set_header(REASON, one_line(failed.public))
    return reply


def failure(shareable: Shareable) -> Failure | None:
    """Why the site could not answer, or None when it did. Its words are repeated where they are one plain line."""
    code = shareable.get_return_code(ReturnCode.OK)
    if code == ReturnCode.OK:
        return None
    if code == ReturnCode.TASK_DATA_FILTER_ERROR:
        text = "a filter of the site refused the task; its log says which"
        return Failure(FailureKind.FAILED, text, text)
    kind, text = shareable.get_header(KIND), shareable.get_header(REASON)
    known = kind in [known.value for known in FailureKind]
    wordless = text is None and isinstance(code, str) and code in CODES
    said = code if wordless else one_line(text)
    return Failure(FailureKind(kind) if known else FailureKind.FAILED, said, said)
