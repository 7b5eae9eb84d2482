"""The look at a job before it starts, part by part, with jobs of a few lines; test_class_list.py has whole ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.sec.audit import AuditService
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE

from fedvlp.flare import job_check
from fedvlp.flare.job_check import LONGEST, JobCheck, named, without_path

JOB = "0c7d1f2a-0000-4000-8000-000000000002"
CLASS = "fedvlp.flare.Listed"
LISTED = {"id": "a", "path": CLASS, "args": {}}
NO_PATH = {"id": "x", "args": {}}
HONEST: dict[str, Any] = {
    "format_version": 2,
    "components": [LISTED, {"id": "b", "class_path": "fedvlp.flare.Listed", "name": "b", "args": {}}],
    "workflows": [LISTED],
    "executors": [{"tasks": ["train"], "executor": {**LISTED, "args": {"x": ["x", {"name": "x"}], "y": {"args": 1}}}}],
    "task_data_filters": [{"tasks": ["train"], "filters": [LISTED]}],
    "task_result_filters": [{"tasks": ["train"], "filters": [LISTED, LISTED]}],
}  # fmt: skip


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What is written into the audit log."""
    written: list[dict[str, str]] = []
    monkeypatch.setattr(AuditService, "add_event", lambda **line: written.append(line))
    return written


def app_of(kit: Path, config: Any = HONEST, side: str = "client", allowed: tuple[str, ...] = (CLASS,)) -> Path:
    """A job in a kit whose list has these classes."""
    (kit / "local").mkdir(parents=True, exist_ok=True)
    (kit / "local" / "resources.json").write_text(json.dumps({"class_allow_list": allowed}))
    app = kit / JOB / "app_here"
    (app / "config").mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (app / "config" / f"config_fed_{side}.json").write_text(text)
    return app


def test_every_path_of_a_class_is_found_wherever_it_stands() -> None:
    config = {"path": "a", "x": [{"class_path": "b", "path": "c", "args": {"y": {"path": {"path": 7}}}}, "path", 1]}
    assert list(named(config)) == ["a", "c", "b", {"path": 7}, 7]
    assert list(named("path")) == []


@pytest.mark.parametrize("place", ["components", "workflows"])
def test_a_component_without_a_path_is_seen(place: str) -> None:
    """Beside one that has one."""
    assert not without_path(HONEST)
    assert not without_path({})
    assert without_path({**HONEST, place: [LISTED, NO_PATH]})


def test_an_executor_or_a_filter_without_a_path_is_seen() -> None:
    assert without_path({**HONEST, "executors": [*HONEST["executors"], {"tasks": ["x"], "executor": NO_PATH}]})
    for chain in ("task_data_filters", "task_result_filters"):
        assert without_path({**HONEST, chain: [{"tasks": ["x"], "filters": [LISTED]}, {"filters": [LISTED, NO_PATH]}]})


@pytest.mark.parametrize(
    "argument",
    [
        {"name": "Popen", "args": {}},
        [1, "x", {"name": "Popen", "args": {}}],
        {"x": 1, "deeper": {"name": "Popen", "args": {}}, "y": 2},
        {"name": "x", "args": {"inner": {"name": "Popen", "args": {}}}, "path": "fedvlp.flare.Listed"},
    ],
)
def test_a_name_in_the_place_of_a_path_is_seen_among_arguments(argument: Any, tmp_path: Path) -> None:
    """FLARE would look for the name in its packages, and the list has no names."""
    config = {**HONEST, "components": [{**LISTED, "args": {"before": 1, "part": argument, "after": "x"}}]}
    assert without_path(config)
    why, kept = JobCheck("client").validate(str(app_of(tmp_path, config)))
    assert why.startswith("a component gives the name of a class without its path,")
    assert kept == {}


def test_what_only_looks_like_a_name_is_let_be(tmp_path: Path, lines: list[dict[str, str]]) -> None:
    for argument in [
        {"name": "x"}, {"args": {}}, {"args": 1, "other": 2}, ["name", "args"], "name",
        {"name": "x", "args": {}, "path": "fedvlp.flare.Listed"},
        {"name": "x", "args": {}, "class_path": "fedvlp.flare.Listed"},
    ]:  # fmt: skip
        config = {**HONEST, "components": [{**LISTED, "args": {"part": argument}}]}
        assert JobCheck("client").validate(str(app_of(tmp_path, config))) == ("", {})
        assert lines == []


@pytest.mark.parametrize("side", ["client", "server"])
def test_each_side_reads_its_own_configuration(side: str, tmp_path: Path, lines: list[dict[str, str]]) -> None:
    app = app_of(tmp_path, side=side)
    assert JobCheck(side).validate(str(app)) == ("", {})
    app_of(tmp_path, {"components": [{"path": "a.Other"}]}, "server" if side == "client" else "client")
    assert JobCheck(side).validate(str(app)) == ("", {}), "the other side looks at the other one"
    app_of(tmp_path, {"components": [{"path": "a.Other"}]}, side)
    why, _ = JobCheck(side).validate(str(app))
    assert why.startswith("class 'a.Other' is not on this site's list of classes, class_allow_list in local/")
    assert [(line["action"], line["ref"]) for line in lines] == [("job_refused", JOB)]
    assert lines[0]["msg"] == f"job {JOB} refused: {why}"


def test_a_check_that_was_not_told_is_of_a_site() -> None:
    assert JobCheck().side == "client"


@pytest.mark.parametrize(
    ("file", "taken"),
    [
        (NVFLARE_SIG_FILE, True), (f"config/{NVFLARE_SIG_FILE}", True), (NVFLARE_SUBMITTER_CRT_FILE, True),
        ("custom/README.md", True), ("custom/deeper/x.py", True), ("config/config_fed_server.json", True),
        ("customs/x.py", False), ("x.json", False), ("config/more.json", False), ("config_fed_client.json", False),
    ],
)  # fmt: skip
def test_the_files_of_a_job(file: str, taken: bool, tmp_path: Path) -> None:
    """Its two configurations where they belong, signatures anywhere, and ``custom``, which ``byoc`` decides on."""
    app = app_of(tmp_path)
    (app / file).parent.mkdir(parents=True, exist_ok=True)
    (app / file).write_text("{}")
    why = "" if taken else "the job holds a file that is no part of a job of fedvlp"
    assert JobCheck("client").validate(str(app)) == (why, {})


@pytest.mark.parametrize(("text", "kind"), [("{", "JSONDecodeError"), ("[]", "AttributeError")])
def test_a_configuration_that_is_none_is_refused(text: str, kind: str, tmp_path: Path) -> None:
    assert JobCheck("client").validate(str(app_of(tmp_path, text))) == (f"the job cannot be read ({kind})", {})


@pytest.mark.parametrize(
    ("side", "path", "right", "wrong"),
    [
        (
            "client", "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",
            {"events_to_convert": ["analytix_log_stats"]},
            [
                {"events_to_convert": ["analytix_log_stats", "_error_log_available"]},
                {"events_to_convert": ["analytix_log_stats"], "fed_event_prefix": "x."}, {},
            ],
        ),
        ("server", "fedvlp.flare.TensorBoardReceiver", {}, [{"events": ["fed._error_log_available"]}]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["path", "class_path"])
def test_a_job_cannot_have_the_lines_of_a_sites_log_sent_as_events(
    side: str, path: str, right: Any, wrong: list[Any], key: str, tmp_path: Path, lines: list[dict[str, str]]
) -> None:
    """FLARE fires an event for every error that is logged, with its text, which may name a file or a data set."""
    whole = app_of(tmp_path, {"components": [{"id": "x", key: path, "args": right}]}, side, (path,))
    assert JobCheck(side).validate(str(whole)) == ("", {})
    for arguments in wrong:
        for config in ({"id": "x", key: path, "args": arguments}, {"path": path, "args": {"x": [{key: path}]}}):
            if config.get("args") == arguments or right:
                app = app_of(tmp_path, {"components": [config]}, side, (path,))
                why, _ = JobCheck(side).validate(str(app))
                assert why == f"class {path!r} has other arguments than a job of fedvlp gives it"


def test_without_a_list_nothing_is_allowed(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    (tmp_path / "local" / "resources.json").write_text("{}")
    assert JobCheck("client").validate(str(app))[0].startswith(f"class '{LISTED['path']}' is not on this site's list")


def test_a_class_path_is_quoted_up_to_a_length(tmp_path: Path) -> None:
    for length, quoted in ((LONGEST, True), (LONGEST + 1, False)):
        path = "a." + "b" * (length - 2)
        why = JobCheck("client").validate(str(app_of(tmp_path, {"components": [{"path": path}]})))[0]
        assert (path in why) is quoted
    assert LONGEST == 200


def test_what_is_no_class_path_is_refused_and_not_repeated(tmp_path: Path) -> None:
    for path in [7, None, ["a.B"], {"path": "a.B"}, "a", "a b.C", "a.B\n"]:
        why = JobCheck("client").validate(str(app_of(tmp_path, {"components": [{"path": path}]}, allowed=("a.B",))))[0]
        assert why.startswith("class of a path that is no class name is not on this site's list")


def test_who_sent_a_job_is_checked_with_the_root_of_the_kit(
    tmp_path: Path, lines: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def verify(folder: str, root: str) -> tuple[bool, list[tuple[str, str]]]:
        asked.append((folder, root))
        return True, [("lead@x", "one"), ("other@x", "two")]

    monkeypatch.setattr(job_check, "verify_folder_signature_and_get_signers", verify)
    app = app_of(tmp_path, {"components": [{"path": "a.Other"}]})
    JobCheck("client").validate(str(app))
    assert asked == [(str(app), str(tmp_path / "startup" / "rootCA.pem"))]
    assert [line["user"] for line in lines] == ["lead@x, other@x"]
