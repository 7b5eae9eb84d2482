"""`--config FILE`: what a file says is what the same words on the command line say; mistakes in it name the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedvlp.cli.overrides import ConfigFile, configured, read_config_file
from fedvlp.cli.run_commands import asked_for
from fedvlp.run import presets
from fedvlp.run.config import to_config

TOML = """
preset = "feddra"
data = "label-skew"
sites = 3
objective = "mgca"
"objective.temperature" = 0.2
norm_statistics = "site"

[method]
rho = 0.5
local_steps = 7

[training]
make_up_warmup = true
"""


def written(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_says_what_the_command_line_says(tmp_path: Path) -> None:
    file = read_config_file(written(tmp_path, TOML))
    settings = ["objective=mgca", "objective.temperature=0.2", "norm_statistics=site", "method.rho=0.5"]
    settings += ["method.local_steps=7", "training.make_up_warmup=true"]
    assert list(file.settings) == settings
    assert configured(file.base(None), file.data, file.sites, list(file.settings)) == configured(
        "feddra", "label-skew", 3, settings
    )


def test_a_setting_of_the_command_line_comes_after_those_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, TOML)
    file, options = read_config_file(path), ["method.rho=0.1"]
    later = asked_for(None, path, None, 2, None, None, options, None)
    assert later.method.rho == 0.1
    assert later == configured("feddra", "label-skew", 2, [*file.settings, *options])
    other = asked_for(None, path, "scanner-shift", None, None, None, options, None)
    assert other == configured("feddra", "scanner-shift", 3, [*file.settings, *options])
    assert file.base("fedrgb") == "fedrgb", "the preset of the command line comes first"


def test_the_config_of_a_run_is_its_experiment(tmp_path: Path) -> None:
    experiment = configured("creamfl", None, 4, ["rounds.seed=7"])
    file = read_config_file(written(tmp_path, json.dumps(to_config(experiment)), "config.json"))
    assert file.base(None) == experiment
    assert configured(file.base(None), None, None, ["rounds.rounds=1"]).rounds.seed == 7
    with pytest.raises(ValueError, match="leave the preset 'fedavg' out"):
        file.base("fedavg")


def test_settings_of_the_data_may_stand_in_a_section(tmp_path: Path) -> None:
    """As those of any other group; ``data`` is also what --data takes, and a section was taken for that."""
    for text in ("[data]\nsize = 160", "data.size = 160"):
        file = read_config_file(written(tmp_path, f'preset = "fedavg"\n{text}'))
        assert (file.data, file.settings) == (None, ("data.size=160",))
        assert configured(file.base(None), file.data, None, list(file.settings)) == configured(
            "fedavg", None, None, ["data.size=160"]
        )


def test_without_a_preset_one_is_asked_for() -> None:
    with pytest.raises(ValueError, match="no preset; name one"):
        ConfigFile().base(None)


MISTAKES = {
    "preset = ": r"mine\.toml: Invalid value \(at end of document\)",
    "preset = 7": r"mine\.toml: preset is 7; expected a str, as --preset takes it",
    "sites = 'two'": r"mine\.toml: sites is 'two'; expected a int",
    "[method]\nrho = 1979-05-27": r"mine\.toml: method\.rho is a date; expected a number, text, true, false or a list",
}


def test_a_mistake_names_the_file_and_what_it_expects(tmp_path: Path) -> None:
    for text in MISTAKES:
        with pytest.raises(ValueError, match=MISTAKES[text]):
            read_config_file(written(tmp_path, text))


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'mine\.yaml'; expected a file that ends in \.toml"):
        read_config_file(written(tmp_path, "a: 1", "mine.yaml"))
    with pytest.raises(ValueError, match=r"gone\.toml: No such file"):
        read_config_file(tmp_path / "gone.toml")
    (tmp_path / "latin.toml").write_bytes('name = "Köln"'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.toml: it is no UTF-8 text"):
        read_config_file(tmp_path / "latin.toml")
    with pytest.raises(ValueError, match=r"config\.json: no experiment; expected the config\.json in the folder of"):
        read_config_file(written(tmp_path, json.dumps(to_config(presets.get("fedavg").model)), "config.json"))


def test_a_setting_that_does_not_exist_is_refused_with_the_nearest(tmp_path: Path) -> None:
    file = read_config_file(written(tmp_path, 'preset = "feddra"\n[method]\nrhoo = 1'))
    with pytest.raises(ValueError, match="unknown setting 'rhoo'; did you mean 'rho'"):
        configured(file.base(None), None, None, list(file.settings))
