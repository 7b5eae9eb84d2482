"""FLARE's own metrics of a process, sent to a StatsD collector on this machine. Only where a kit asks for it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReservedTopic
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.data_event.data_bus import DataBus
from nvflare.metrics.job_metrics_collector import JobMetricsCollector
from nvflare.metrics.metrics_keys import MetricKeys, MetricTypes
from nvflare.metrics.system_metrics_collector import SysMetricsCollector

KINDS = {MetricTypes.COUNTER: "c", MetricTypes.GAUGE: "g"}


class StatsD(FLComponent):
    """A component of ``local/resources.json``: how often and how long FLARE's own process does what.

    FLARE's own sender needs the package datadog. What is sent are names of FLARE's events, counts and seconds.

    Args:
        site: the name under which the figures are kept.
        address: where the collector listens, by UDP; this machine unless another is named.
        port: its port; 9125 is that of Prometheus's ``statsd_exporter``.
    """

    def __init__(self, site: str, address: str = "127.0.0.1", port: int = 9125) -> None:
        super().__init__()
        self._to = (address, port)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._collectors = [kind(tags={"site": site}) for kind in (SysMetricsCollector, JobMetricsCollector)]
        DataBus().subscribe([ReservedTopic.APP_METRICS], self._send)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        for collector in self._collectors:
            collector.handle_event(event_type, fl_ctx)

    def _send(self, topic: str, metrics: Sequence[Mapping[str, Any]], bus: DataBus) -> None:
        for metric in metrics:
            tags = ",".join(f"{name}:{value}" for name, value in metric[MetricKeys.tags].items())
            kind = KINDS[metric[MetricKeys.type]]
            line = f"flare_{metric[MetricKeys.metric_name].lstrip('_')}:{metric[MetricKeys.value]}|{kind}|#{tags}"
            with suppress(OSError):  # nobody collects: FLARE goes on
                self._socket.sendto(line.encode(), self._to)
