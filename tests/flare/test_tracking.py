"""Which curves are announced for a site's update and for the server's record, and where they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsData
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import EventScope, FedEventHeader, FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.widgets.fed_event import FED_EVENT_TOPIC
from support.flare_memory import Engine, MemoryFlare, toy_experiment
from support.toy import three_sites

from fedvlp.core.types import Failure, FailureKind, Update
from fedvlp.flare import messages
from fedvlp.flare.curves import SiteCurves, announce_update, only_figures
from fedvlp.flare.tracking import RUN_FOLDER, TensorBoardReceiver, announce_record

METRICS = {"loss/contrastive": 0.5, "val/mean/r1": 25.0, "seconds": 2.0}


def engine(tmp_path: Path, name: str = "site-1") -> Engine:
    return Engine(name, tmp_path, "job-1")


def curves(used: Engine) -> dict[str, tuple[float, int]]:
    """What was announced: {tag: (value, step)}."""
    found = {}
    for event, content in used.fired:
        if event == ANALYTIC_EVENT_TYPE:
            point = AnalyticsData.from_dxo(from_shareable(content))
            assert point.tag not in found, "each curve once"
            found[point.tag] = (point.value, point.step)
    return found


def update(phase: str = "align", round: int = 3) -> Update:
    return Update("site-1", round, phase, 5, metrics=METRICS)


@pytest.mark.parametrize(
    ("event", "passes"), [("fed.analytix_log_stats", True), (EventType.FATAL_SYSTEM_ERROR, False), (None, False)]
)
def test_a_site_fires_no_event_at_the_server_but_its_figures(tmp_path: Path, event: str | None, passes: bool) -> None:
    used, heard = engine(tmp_path, "server"), []

    def received(topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        heard.append(request)
        return Shareable()

    runner = used.run_manager.aux_runner
    runner.register_aux_message_handler(FED_EVENT_TOPIC, received)
    only_figures(used)
    request = Shareable()
    request.set_header(FedEventHeader.EVENT_TYPE, event)
    request.set_peer_props({ReservedKey.IDENTITY_NAME: "site-1"})
    runner.dispatch(topic=FED_EVENT_TOPIC, request=request, fl_ctx=used.new_context())
    assert (heard == [request]) == passes


def test_an_updates_losses_and_seconds_are_told_apart_by_phase(tmp_path: Path) -> None:
    """A recall is of the model that the round starts from, whatever the phase: its curve has no phase in its name."""
    used = engine(tmp_path)
    announce_update(FLComponent(), used.new_context(), update())
    assert curves(used) == {
        "loss/contrastive/align": (0.5, 3), "val/mean/r1": (25.0, 3), "seconds/align": (2.0, 3),
    }  # fmt: skip


def test_an_evaluation_continues_the_curves(tmp_path: Path) -> None:
    used = engine(tmp_path)
    announce_update(FLComponent(), used.new_context(), update("evaluate"))
    assert curves(used).keys() == METRICS.keys()


def record(**sites: dict[str, float]) -> dict[str, Any]:
    return {
        "round": 2, "phase": "joint", "seconds": 1.5, "sites": sites, "dropped": {}, "members": ["a", "b"],
        "bytes": {"bytes_down": 8, "bytes_up": 4}, "server": {"update_norm/a": 0.25},
        "memory": {"dro_weights": [0.4, 0.6]},
    }  # fmt: skip


def test_a_records_curves_are_the_servers_own_and_the_artifact_is_over_sites(tmp_path: Path) -> None:
    """Recalls 20 and 40: average 30, worst 20, disparity their standard deviation, 10."""
    used = engine(tmp_path, "server")
    results: list[FLModel] = []

    class Artifact(FLComponent):
        def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
            if event_type == AppEventType.AFTER_AGGREGATION:
                results.append(fl_ctx.get_prop(AppConstants.AGGREGATION_RESULT))

    used.components.append(Artifact())
    announce_record(FLComponent(), used.new_context(), record(a={"val/mean/r1": 20.0}, b={"val/mean/r1": 40.0}))
    seen = curves(used)
    assert seen["seconds/joint"] == (1.5, 2)
    assert seen["bytes_up/joint"] == (4.0, 2)
    assert seen["update_norm/a/joint"] == (0.25, 2)
    assert (seen["dro_weights/a"], seen["dro_weights/b"]) == ((0.4, 2), (0.6, 2))
    assert seen["val/mean/r1/average"] == (30.0, 2)
    assert seen["val/mean/r1/worst"] == (20.0, 2)
    assert "val/mean/r1" not in seen, "the sites announce their own"
    (result,) = results
    assert result.current_round == 2
    assert (result.metrics["val/mean/r1/average"], result.metrics["val/mean/r1/worst"]) == (30.0, 20.0)


def test_a_record_in_which_nothing_was_measured_is_no_artifact(tmp_path: Path) -> None:
    used = engine(tmp_path, "server")
    announce_record(FLComponent(), used.new_context(), record(a={"loss/contrastive": 1.0}))
    assert AppEventType.AFTER_AGGREGATION not in [event for event, _ in used.fired]
    assert "seconds/joint" in curves(used)


def leaving(used: Engine, reply: Shareable, event: str = EventType.AFTER_TASK_RESULT_FILTER) -> None:
    """The reply on its way out, after the site's filters."""
    fl_ctx = used.new_context()
    fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
    SiteCurves().handle_event(event, fl_ctx)


def test_a_sites_curves_are_those_of_the_reply_that_leaves_it(tmp_path: Path) -> None:
    """What a filter took out of the reply is in no event either, as events pass by the filters."""
    used = engine(tmp_path)
    leaving(used, messages.send_update(update()))
    assert curves(used)["val/mean/r1"] == (25.0, 3)


@pytest.mark.parametrize("event", [EventType.BEFORE_TASK_RESULT_FILTER, EventType.AFTER_TASK_EXECUTION])
def test_before_the_filters_nothing_is_announced(tmp_path: Path, event: str) -> None:
    used = engine(tmp_path)
    leaving(used, messages.send_update(update()), event)
    assert not used.fired


def test_a_failure_has_no_curves(tmp_path: Path) -> None:
    used = engine(tmp_path)
    leaving(used, messages.send_failure(Failure(FailureKind.FAILED, "ValueError")))
    assert not used.fired


# --- TensorBoard -------------------------------------------------------------------------------------------------


def written(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves in a folder of TensorBoard events: {tag: [(step, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class Server:
    """FLARE's server with the receiver; ``fedvlp`` names the run's folder when the controller starts."""

    def __init__(self, tmp_path: Path) -> None:
        self.engine = engine(tmp_path, "server")
        self.receiver = TensorBoardReceiver()
        self.engine.components.append(self.receiver)
        self.engine.fire_event(EventType.START_RUN, self.engine.new_context())

    def names_its_run(self, folder: Path) -> None:
        self.engine.new_context().set_prop(RUN_FOLDER, str(folder), private=True, sticky=True)

    def hears(self, site: str) -> None:
        """The update's curves as ConvertToFedEvent brings them from a site."""
        source = engine(Path(), site)
        announce_update(FLComponent(), source.new_context(), update("joint"))
        for _, content in source.fired:
            content.set_peer_props({ReservedKey.IDENTITY_NAME: site})
            fl_ctx = self.engine.new_context()
            fl_ctx.set_prop(FLContextKey.EVENT_DATA, content, private=True, sticky=False)
            fl_ctx.set_prop(FLContextKey.EVENT_SCOPE, EventScope.FEDERATION, private=True, sticky=False)
            self.engine.fire_event(f"fed.{ANALYTIC_EVENT_TYPE}", fl_ctx)

    def ends(self) -> None:
        self.engine.fire_event(EventType.END_RUN, self.engine.new_context())


def test_every_sites_curves_are_in_the_runs_own_folder(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.names_its_run(tmp_path / "runs" / "001")
    for site in ("site-1", "site-2"):
        server.hears(site)
    server.ends()
    board = tmp_path / "runs" / "001" / "tb"
    assert sorted(entry.name for entry in board.iterdir()) == ["site-1", "site-2"]
    assert written(board / "site-2") == {
        "loss/contrastive/joint": [(3, 0.5)], "val/mean/r1": [(3, 25.0)], "seconds/joint": [(3, 2.0)],
    }  # fmt: skip
    assert not (tmp_path / "job-1").exists(), "nothing in FLARE's folder of the job"


def test_before_the_run_has_a_folder_nothing_is_written(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.hears("site-1")
    server.ends()
    assert not list(tmp_path.iterdir())


def test_a_sites_name_leads_nowhere_else(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.names_its_run(tmp_path / "runs" / "001")
    server.hears("../../elsewhere")
    server.ends()
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "runs" / "elsewhere").exists()


def test_a_runs_curves_are_written_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds and the evaluation of the trained model; the recalls are of the model that a round starts from."""
    flare = MemoryFlare(tmp_path, monkeypatch, toy_experiment(), three_sites())
    receiver = TensorBoardReceiver(events=[ANALYTIC_EVENT_TYPE])
    flare.submit([receiver])
    tags = written(flare.run.path / "tb" / "server")
    assert [step for step, _ in tags["val/mean/r1/average"]] == [0, 1, 2]
    assert [step for step, _ in tags["seconds/train"]] == [0, 1]
    assert [step for step, _ in tags["update_norm/a/train"]] == [0, 1]
