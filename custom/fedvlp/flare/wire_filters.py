"""A site's end of the wire in FLARE: job filters that decode tasks and encode results (federation/wire.py).

FLARE applies the site's own filters before the job's, so what they see of a result are the tensors themselves. A
result that is no update of float tensors (encrypted, say) is refused here.
"""

from __future__ import annotations

from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from fedvlp.core.method import Method
from fedvlp.federation.codec import CodecError, Wire
from fedvlp.federation.wire import SiteEnd, site_memory
from fedvlp.flare import messages
from fedvlp.flare.paths import SitePaths, folder_at_site

COMPONENT = "wire"
"""Id of the component that the two filters share."""


class WireEnd(FLComponent):
    """The site's end of the wire of one job; what it keeps is in the run's folder at the site."""

    def __init__(self, wire: Wire, method: Method) -> None:
        super().__init__()
        self.options = wire
        self.method = method
        self._end: SiteEnd | None = None
        self._run: tuple[str, str | None] | None = None  # folder and id

    def of(self, run: dict[str, str], fl_ctx: FLContext) -> SiteEnd:
        """The end for ``run``, as the server says it (flare/messages.py)."""
        named = run["folder"], run.get("id")
        if self._end is None or named != self._run:
            own = folder_at_site(SitePaths.of(fl_ctx), run)
            self._end = SiteEnd(self.options, self.method, site_memory(own))
            self._run = named
        return self._end

    def current(self) -> SiteEnd:
        """The end that decoded this task."""
        if self._end is None:
            raise CodecError("a result came before any task")
        return self._end


def _shared(fl_ctx: FLContext) -> WireEnd:
    component = fl_ctx.get_engine().get_component(COMPONENT)
    if not isinstance(component, WireEnd):
        raise CodecError(f"the job's client configuration lacks the component {COMPONENT!r}")
    return component


class DecodeTask(Filter):
    """task_data filter: the broadcast as the executor knows it. An error makes FLARE answer TASK_DATA_FILTER_ERROR."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        message, run = messages.receive_broadcast(shareable)
        decoded = messages.send_broadcast(_shared(fl_ctx).of(run, fl_ctx).decode(message), run)
        return from_shareable(decoded).update_shareable(shareable)


class EncodeResult(Filter):
    """task_result filter: the update for the way up; an error reply passes as it is."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return shareable
        update = messages.receive_update(shareable, fl_ctx.get_identity_name())
        encoded = messages.send_update(_shared(fl_ctx).current().encode(update))
        return from_shareable(encoded).update_shareable(shareable)
