"""Metrics through FLARE's own events: TensorBoard on the server while the job runs, and the metrics artifact."""

from __future__ import annotations

import os

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsDataType, LogWriterName
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.widgets.streaming import create_analytic_dxo, send_analytic_dxo
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver

from fedvlp.core.types import Update
from fedvlp.flare import messages
from fedvlp.run.metrics import SERVER, Record, overall, scalars, suffix

RUN_FOLDER = "fedvlp_run_folder"
"""Sticky context property: the folder of the run, set by the controller."""


class Announcer:
    """Fires analytics events of ``component``; at a site, ConvertToFedEvent carries them to the server."""

    def __init__(self, component: FLComponent, fl_ctx: FLContext) -> None:
        self.component = component
        self.fl_ctx = fl_ctx

    def update(self, update: Update) -> None:
        """A site's own curves: loss terms, recall, seconds."""
        record = {"round": update.round, "phase": update.phase}
        for tag, value in update.measured.items():
            self._scalar(f"{tag}{suffix(record, tag)}", value, update.round)

    def record(self, record: Record) -> None:
        """The server's curves (average, worst site, weights, bytes, seconds), and the round's artifact."""
        for tag, value in scalars(record)[SERVER].items():
            self._scalar(f"{tag}{suffix(record, tag)}", value, record["round"])
        summary = overall(record)
        if summary:
            result = FLModel(metrics=summary, current_round=record["round"])
            self.fl_ctx.set_prop(AppConstants.AGGREGATION_RESULT, result, private=True, sticky=False)
            self.component.fire_event(AppEventType.AFTER_AGGREGATION, self.fl_ctx)

    def _scalar(self, tag: str, value: float, step: int) -> None:
        dxo = create_analytic_dxo(
            tag=tag,
            value=float(value),
            data_type=AnalyticsDataType.SCALAR,
            writer=LogWriterName.TORCH_TB,
            global_step=step,
        )
        send_analytic_dxo(self.component, dxo=dxo, fl_ctx=self.fl_ctx, event_type=ANALYTIC_EVENT_TYPE)


class SiteCurves(FLComponent):
    """Announces a site's metrics as they stand in the reply that leaves it: events pass by the site's filters."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.AFTER_TASK_RESULT_FILTER:
            reply = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            if messages.failure(reply) is None:
                Announcer(self, fl_ctx).update(messages.receive_update(reply, fl_ctx.get_identity_name()))


class TensorBoardReceiver(TBAnalyticsReceiver):
    """FLARE's TensorBoard receiver, writing beside the run's other results instead of into the job's own folder."""

    def initialize(self, fl_ctx: FLContext) -> None:
        """Nothing yet: the controller names the run's folder when it starts."""

    def save(self, fl_ctx: FLContext, shareable: Shareable, record_origin: str) -> None:
        folder = fl_ctx.get_prop(RUN_FOLDER)
        if folder is None:
            return
        if not self.root_log_dir:
            self.root_log_dir: str = os.path.join(folder, "tb")
            os.makedirs(self.root_log_dir, exist_ok=True)
        super().save(fl_ctx, shareable, record_origin)
