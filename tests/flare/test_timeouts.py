"""The timeouts of a job fit each other and reach both sides of it under the names that FLARE reads."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_constant import ConfigVarName
from nvflare.apis.shareable import Shareable
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.core.client import named_state
from fedvlp.flare.jobs import job_files
from fedvlp.flare.retrying_cell import RETRIED_FOR
from fedvlp.flare.tensor_stream import PIECE, SETTING
from fedvlp.flare.timeouts import SMALLEST, Timeouts, model_bytes
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly


def test_758_mb_at_20_mbit_by_hand() -> None:
    """20e6 / 8 / 3 = 833,333 bytes a second when it is slow: 909.6 s for all of it, 5 s for a piece of 4,166,666."""
    assert asdict(Timeouts.of(758 * 10**6, 20.0)) == {
        "piece": 4_166_666,
        "tensor_streaming_per_request_timeout": pytest.approx(20.0),
        "tensor_min_download_timeout": pytest.approx(1220.0),  # twice 600, and a request
        "get_task_timeout": pytest.approx(20.0),
        "submit_task_result_timeout": pytest.approx(1509.6),  # with a pause of 600
        "task_timeout": 6620,  # an hour of training and 2 * 1509.6, rounded up
        "grace": pytest.approx(1819.2),
    }


@given(st.integers(1, 10**11), st.floats(0.1, 1e5), st.floats(0.0, 1e5))
def test_each_outlasts_what_it_bounds(size: int, link: float, training: float) -> None:
    t = Timeouts.of(size, link, training)
    transfer, piece = (count * 8 / (link * 1e6) for count in (size, t.piece))
    assert SMALLEST <= t.piece <= PIECE
    assert t.piece == SMALLEST or 3 * piece <= 5.0 * (1 + 1e-9), "it has arrived before FLARE sends it again"
    assert t.tensor_streaming_per_request_timeout >= 15.0 + piece
    assert t.tensor_min_download_timeout > RETRIED_FOR + t.tensor_streaming_per_request_timeout, (
        "asked again, it is there"
    )
    assert t.submit_task_result_timeout >= max(300.0, transfer + RETRIED_FOR)
    assert t.task_timeout >= training + 2 * t.submit_task_result_timeout
    assert t.grace >= 2 * transfer, "a site on the slowest link is later than one next to the server by both ways"
    Task("train", Shareable(), timeout=t.task_timeout)


def test_what_a_lost_message_costs_does_not_grow_with_the_model() -> None:
    small, large = (Timeouts.of(size, 20.0) for size in (10**7, 10**10))
    assert small.tensor_streaming_per_request_timeout == large.tensor_streaming_per_request_timeout < 60
    assert small.get_task_timeout == large.get_task_timeout < 60


@pytest.mark.parametrize("link", [0.0, -1.0])
def test_a_link_without_speed_is_refused(link: float) -> None:
    with pytest.raises(ValueError, match="give a positive number"):
        Timeouts.of(1, link)


def test_they_reach_server_sites_controller_and_children() -> None:
    t = Timeouts.of(10**9, 10.0)
    files = {path: json.loads(text) for path, text in job_files(presets.get("fedavg"), child=True, timeouts=t).items()
             if path.endswith(".json")}  # fmt: skip
    server, client = (files[f"app/config/config_fed_{side}.json"] for side in ("server", "client"))
    for side in (server, client):
        assert side[f"tensor_{ConfigVarName.STREAMING_PER_REQUEST_TIMEOUT}"] == t.tensor_streaming_per_request_timeout
        assert side[f"tensor_{ConfigVarName.MIN_DOWNLOAD_TIMEOUT}"] == t.tensor_min_download_timeout
        assert side[SETTING] == t.piece
        assert side[f"tensor_{ConfigVarName.DOWNLOAD_CHUNK_SIZE}"] == t.piece
    assert client[ConfigVarName.GET_TASK_TIMEOUT] == t.get_task_timeout
    assert client[ConfigVarName.SUBMIT_TASK_RESULT_TIMEOUT] == t.submit_task_result_timeout
    controller, child = server["workflows"][0]["args"], client["executors"][0]["executor"]
    assert (controller["task_timeout"], controller["grace"]) == (t.task_timeout, t.grace)
    assert child["path"] == "fedvlp.flare.ChildExecutor"
    assert child["args"]["task_timeout"] == t.task_timeout


@pytest.mark.filterwarnings("error")
def test_the_size_of_published_towers_says_nothing_about_their_vocabulary() -> None:
    """It is found with random weights: the job's own tokenizer is none of its business."""
    paper = presets.get("feddra-paper")
    small = replace(paper, model=replace(paper.model, image_tower="tiny", text_layers=1))
    assert model_bytes(small) > 4 * 28_996 * 768


LINK = ["--link-mbit", "50"]


@pytest.mark.parametrize("link", [[], LINK], ids=["", "link"])
@pytest.mark.parametrize("child", [[], ["--child"]], ids=["", "child"])
def test_a_phase_may_take_longer_than_an_hour(link: list[str], child: list[str], tmp_path: Path) -> None:
    """As `fedvlp jobs export --task-minutes 300` writes it: 5 hours, and with a link both ways of the model."""
    size = model_bytes(presets.get("fedavg"))
    seconds = Timeouts.of(size, 50.0, 18_000.0).task_timeout if link else 18_000
    assert seconds == 18_000 or seconds >= 18_000 + 2 * 600
    assert limits(tmp_path, ["--task-minutes", "300", *link, *child]) == (seconds, seconds if child else None)


@pytest.mark.parametrize(
    ("server", "each", "said"),
    [
        ([], 50.0, "timeouts: 50 Mbit/s a site, 250 at the server with all 5; if its line has less, give --server-"),
        (["--server-mbit", "100"], 20.0, "timeouts: 20 Mbit/s a site, 100 at the server with all 5\n"),
        (["--server-mbit", "1000"], 50.0, "timeouts: 50 Mbit/s a site, 250 at the server with all 5\n"),
    ],
)
def test_all_sites_share_the_servers_line(server: list[str], each: float, said: str, tmp_path: Path) -> None:
    """The five sites of the preset begin a phase together: 100 Mbit/s are 20 for each of them."""
    done = CliRunner().invoke(app, ["jobs", "export", "fedavg", str(tmp_path / "job"), *LINK, *server])
    assert said in done.stderr
    config = json.loads((tmp_path / "job/app/config/config_fed_server.json").read_text())
    expected = Timeouts.of(model_bytes(presets.get("fedavg")), each)
    assert config["workflows"][0]["args"]["task_timeout"] == expected.task_timeout
    assert config[SETTING] == expected.piece


def test_a_servers_line_alone_and_data_without_sites_are_refused(tmp_path: Path) -> None:
    words = ["jobs", "export", "fedavg", str(tmp_path / "job")]
    assert "needs --link-mbit" in str(CliRunner().invoke(app, [*words, "--server-mbit", "100"]).exception)
    without = str(CliRunner().invoke(app, [*words, "--data", "named:pretrain"]).exception)
    assert without == str(CliRunner().invoke(app, [*words, "--data", "named:pretrain", *LINK]).exception)
    assert "--at" in without


def test_a_job_without_either_leaves_the_limits_to_the_controller(tmp_path: Path) -> None:
    assert limits(tmp_path, ["--child"]) == (None, None)
    hour = Timeouts.of(model_bytes(presets.get("fedavg")), 50.0).task_timeout
    assert limits(tmp_path, [*LINK, "--child"]) == (hour, hour)


def limits(folder: Path, options: list[str]) -> tuple[int | None, int | None]:
    """Seconds that a task may take at the controller and at the child executor of an exported job; None: not said."""
    done = CliRunner().invoke(app, ["jobs", "export", "fedavg", str(folder / "job"), *options])
    assert done.exit_code == 0, done.output
    server, client = (
        json.loads((folder / "job/app/config" / f"config_fed_{side}.json").read_text()) for side in ("server", "client")
    )
    controller, executor = server["workflows"][0]["args"], client["executors"][0]["executor"]["args"]
    return controller.get("task_timeout"), executor.get("task_timeout")


def test_the_size_is_that_of_all_tensors_that_travel() -> None:
    experiment = presets.get("fedavg")
    state = named_state(*Assembly(experiment).modules())
    assert model_bytes(experiment) == sum(t.numel() * t.element_size() for t in state.values())
