"""FLARE's own metrics leave a process as StatsD, and only there."""

from __future__ import annotations

import socket

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext

from fedvlp.flare.statsd import StatsD


def test_events_are_counted_and_timed() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as collector:
        collector.bind(("127.0.0.1", 0))
        collector.settimeout(60)
        component = StatsD("site-1", port=collector.getsockname()[1])
        component.handle_event(EventType.CLIENT_DISCONNECTED, FLContext())
        assert collector.recv(1000) == b"flare_client_disconnected_count:1|c|#site:site-1"
        component.handle_event(EventType.START_RUN, FLContext())
        component.handle_event(EventType.END_RUN, FLContext())
        lines = [collector.recv(1000).decode() for _ in range(3)]
    assert lines[0].startswith("flare_start_run_count:1|c|#site:site-1,job_id:")
    assert lines[2].startswith("flare_run_time_taken:")
    assert "|g|#site:site-1" in lines[2]
    component.handle_event(EventType.START_RUN, FLContext())  # nobody listens any more
