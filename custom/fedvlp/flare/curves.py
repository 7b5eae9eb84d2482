"""A site's curves: its figures as FLARE's analytics events, which ConvertToFedEvent carries to the server.

What a site needs for that and no more: no tensorboard, and no tensor of the reply is looked at. And what the server
takes of such events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsDataType, LogWriterName
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FedEventHeader, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.widgets.convert_to_fed_event import FED_EVENT_PREFIX
from nvflare.widgets.fed_event import FED_EVENT_TOPIC

from fedvlp.core.types import Update, curve
from fedvlp.flare import messages

FIGURES = FED_EVENT_PREFIX + ANALYTIC_EVENT_TYPE
"""The event that carries a site's figures."""


def announce(component: FLComponent, fl_ctx: FLContext, figures: Mapping[str, float], round: int) -> None:
    """Fires an analytics event of ``component`` for each of ``figures``, by the name of its curve."""
    for tag, value in figures.items():
        dxo = create_analytic_dxo(
            tag=tag,
            value=float(value),
            data_type=AnalyticsDataType.SCALAR,
            writer=LogWriterName.TORCH_TB,
            global_step=round,
        )
        send_analytic_dxo(component, dxo=dxo, fl_ctx=fl_ctx, event_type=ANALYTIC_EVENT_TYPE)


def announce_update(component: FLComponent, fl_ctx: FLContext, update: Update) -> None:
    """A site's own curves: loss terms, recall, seconds."""
    figures = {curve(tag, update.phase): value for tag, value in update.measured.items()}
    announce(component, fl_ctx, figures, update.round)


class SiteCurves(FLComponent):
    """Announces a site's metrics as they stand in the reply that leaves it: events pass by the site's filters."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.AFTER_TASK_RESULT_FILTER:
            reply = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            if messages.failure(reply) is None:
                announce_update(self, fl_ctx, messages.receive_figures(reply, fl_ctx.get_identity_name()))


def only_figures(engine: Any) -> None:
    """Has a job at the server drop every other event of a site: FLARE fires it as if it were the server's own.

    A controller calls this as the job starts.
    """
    runner = engine.run_manager.aux_runner
    dispatch = runner.dispatch

    def checked(topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        if topic == FED_EVENT_TOPIC and request.get_header(FedEventHeader.EVENT_TYPE) != FIGURES:
            return make_reply(ReturnCode.BAD_REQUEST_DATA)
        reply: Shareable = dispatch(topic=topic, request=request, fl_ctx=fl_ctx)
        return reply

    runner.dispatch = checked
