"""Metrics through FLARE's own events: TensorBoard on the server while the job runs, and the metrics artifact."""

from __future__ import annotations

import os

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver

from fedvlp.core.types import curve
from fedvlp.flare.curves import announce
from fedvlp.run.metrics import SERVER, Record, overall, scalars

RUN_FOLDER = "fedvlp_run_folder"
"""Sticky context property: the folder of the run, set by the controller."""


def announce_record(component: FLComponent, fl_ctx: FLContext, record: Record) -> None:
    """The server's curves (average, worst site, weights, bytes, seconds), and the round's artifact."""
    figures = {curve(tag, record["phase"]): value for tag, value in scalars(record)[SERVER].items()}
    announce(component, fl_ctx, figures, record["round"])
    summary = overall(record)
    if summary:
        result = FLModel(metrics=summary, current_round=record["round"])
        fl_ctx.set_prop(AppConstants.AGGREGATION_RESULT, result, private=True, sticky=False)
        component.fire_event(AppEventType.AFTER_AGGREGATION, fl_ctx)


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
