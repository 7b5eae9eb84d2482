"""Methods and the like from outside: found, recorded, refused when they changed, and nothing else is ever imported."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.plugins import PULLED, forget, fresh, installed, pulled
from support.presets import SMALL
from support.toy import Fuse, forked

from fedvlp.data.sources import SOURCES
from fedvlp.federation.loop import Rounds
from fedvlp.objectives import OBJECTIVES
from fedvlp.run import plugins, presets
from fedvlp.run.config import choose, fingerprint, from_config, override, to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

CANARY = "from pathlib import Path\nPath(__file__).with_suffix('.sprung').touch()\n"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


def experiment(file: Path) -> Experiment:
    """Two small rounds of the method in ``file``."""
    method = plugins.use(file).module.Pulled(local_steps=1)
    return replace(SMALL, name="pulled", method=method, rounds=Rounds(rounds=2, evaluate_every=0))


# Named


def test_a_file_is_a_preset_and_a_configuration(tmp_path: Path) -> None:
    file = pulled(tmp_path)
    with pytest.raises(ValueError, match="unknown preset 'pulled'"):
        presets.get("pulled")
    plugin = plugins.use(file)
    chosen = override(presets.get("pulled"), "method.mu", "2")
    config = to_config(chosen)
    assert config["args"]["method"]["path"] == "pulled_method.Pulled"
    assert from_config(json.loads(json.dumps(config))) == chosen
    assert chosen.method.mu == 2.0  # type: ignore[attr-defined]
    assert plugin.digest == hashlib.blake2b(PULLED.encode(), digest_size=16).hexdigest()
    assert plugins.use(str(file)).module is plugin.module, "twice is once"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [file.name], "nothing is written beside it"


def test_a_module_that_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled(tmp_path / "lab", "ours")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = plugins.use("lab.ours")
    assert (plugin.name, plugin.source) == ("lab.ours", None), "a part of a package is installed, not copied"
    assert from_config({"path": "lab.ours.Pulled", "args": {"mu": 3.0}}).mu == 3.0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gone", None, "there is no such file"),
        ("my-method", PULLED, "'my-method' is no name of a module"),
        ("statistics", PULLED, "is the name of another module; rename"),
        ("fedvlp", PULLED, "is the name of another module; rename"),
        ("safetensors", PULLED, "there is another module 'safetensors'"),
        ("pytest_timeout", PULLED, "there is another module 'pytest_timeout'"),
        ("broken", "x = 1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("unreadable", "def", "cannot be imported: SyntaxError"),
        ("lonely", "import a_neighbour_that_is_not_there", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_file_that_is_no_plugin(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    file = tmp_path / f"{name}.py"
    if text is not None:
        file.write_text(text)
    before = sys.modules.get(name)
    with pytest.raises(plugins.PluginError, match=said):
        plugins.use(file)
    assert sys.modules.get(name) is before


def test_a_module_that_is_no_plugin() -> None:
    for name, said in [
        ("nowhere.at_all", "cannot be imported: ModuleNotFoundError"),
        ("fedvlp.methods", "that is fedvlp itself"),
    ]:
        with pytest.raises(plugins.PluginError, match=said):
            plugins.use(name)


def test_one_plugin_of_a_name(tmp_path: Path) -> None:
    plugins.use(pulled(tmp_path))
    with pytest.raises(plugins.PluginError, match="in use with other content"):
        plugins.use(pulled(tmp_path / "other", text=PULLED + "\n"))
    assert plugins.use(pulled(tmp_path / "copy")).module.__file__ == str(tmp_path / "pulled_method.py")


# Installed


def test_an_entry_point_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its preset, and its classes in a configuration; and nothing of it is imported for somebody else's."""
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site", "their_methods", PULLED)))
    presets.get("fedavg")
    from_config(to_config(presets.get("fedavg")))
    with pytest.raises(ValueError, match=r"config names 'other\.Trap'"):
        from_config({"path": "other.Trap"})
    assert "their_methods" not in sys.modules
    config = json.loads(json.dumps(to_config(presets.get("pulled"))))
    assert config["args"]["method"]["path"] == "their_methods.Pulled"
    forget()
    assert from_config(config).name == "pulled"
    assert [(p.name, p.installed, p.source) for p in plugins.of(presets.get("pulled"))] == [
        ("their_methods", True, None)
    ]


def test_an_installed_package_is_hashed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = installed(tmp_path / "site", "their_methods", "from their_methods.inner import Pulled\n")
    inner = pulled(folder / "their_methods", "inner")
    monkeypatch.syspath_prepend(str(folder))
    method = from_config({"path": "their_methods.inner.Pulled", "args": {}})
    (first,) = plugins.of(method)
    forget()
    inner.write_text(PULLED + "\n")
    (second,) = plugins.of(from_config({"path": "their_methods.inner.Pulled", "args": {}}))
    assert first.name == second.name == "their_methods"
    assert first.digest != second.digest


def test_a_broken_installed_plugin_is_named_and_does_not_break_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site", "broken_methods", "import nowhere_at_all")))
    assert presets.get("fedavg") is presets.PRESETS["fedavg"]
    with pytest.raises(plugins.PluginError, match="plugin broken_methods cannot be imported: ModuleNotFoundError"):
        presets.get("theirs")


# Tables


def test_every_table_takes_entries_of_a_plugin(tmp_path: Path) -> None:
    text = " = ".join(plugins.TABLES) + " = {'mine': dict}\n"
    plugins.use(pulled(tmp_path, "tables", text))
    for table in plugins.TABLES:
        assert choose("entry", "mine", table, {"own": str}) is dict
        assert choose("entry", "own", table, {"own": str}) is str
        with pytest.raises(ValueError, match=r"unknown entry 'min'; did you mean 'mine'\?; there are: own, .*mine"):
            choose("entry", "min", table, {"own": str})
    assert override(SMALL, "objective", "mine").objective == {}
    assert "mine" not in {**OBJECTIVES, **SOURCES}, "fedvlp's own tables stay as they are"


@pytest.mark.parametrize("named", ["fedavg", "pulled"])
def test_two_entries_of_one_name_are_refused(tmp_path: Path, named: str) -> None:
    """Whichever was meant: a plugin cannot take the place of a preset of fedvlp or of another plugin in silence."""
    plugins.use(pulled(tmp_path))
    plugins.use(pulled(tmp_path, "second", f"PRESETS = {{{named!r}: None}}\n"))
    owner = {"fedavg": "fedvlp", "pulled": "pulled_method"}[named]
    with pytest.raises(plugins.PluginError, match=f"plugin second: PRESETS has '{named}', which {owner} has as well"):
        presets.get("fedavg")


# What a file may not do


def test_a_configuration_imports_nothing_that_nobody_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a plugin that was named, and also where a run's folder calls it one and holds a file for it."""
    canary = pulled(tmp_path / "path", "canary", CANARY)
    monkeypatch.syspath_prepend(str(canary.parent))
    chosen = experiment(pulled(tmp_path))
    for path in ("canary.Trap", "canary.inner.Trap", "pulled_method_of_mine.Trap"):
        with pytest.raises(ValueError, match=f"config names '{path}'"):
            from_config({"path": path})
    run = RunFolder.create(tmp_path / "runs", chosen)
    config = json.loads(run.config.read_text())
    config["args"]["method"] = {"path": "canary.Trap", "args": {}}
    config["plugins"] = {"canary": hashlib.blake2b(CANARY.encode(), digest_size=16).hexdigest()}
    run.config.write_text(json.dumps(config))
    pulled(run.path / "plugins", "canary", CANARY)
    with pytest.raises(plugins.PluginError, match=r"begun with the plugin canary, which is neither .* it is a program"):
        run.experiment()
    assert RunFolder.latest(tmp_path / "runs", chosen) is None
    assert list(tmp_path.rglob("*.sprung")) == []
    plugins.use(canary)
    assert (canary.parent / "canary.sprung").exists(), "the trap works"


def test_a_configuration_names_a_plugins_own_classes_alone(tmp_path: Path) -> None:
    """Not what the plugin has imported from elsewhere."""
    plugins.use(pulled(tmp_path))
    for name in ("Path", "Method", "replace", "PRESETS", "gone"):
        with pytest.raises(ValueError, match=f"config names 'pulled_method.{name}'"):
            from_config({"path": f"pulled_method.{name}", "args": {}})


# Runs


def test_the_fingerprint_is_of_the_code_too(tmp_path: Path) -> None:
    prints = []
    for text in (PULLED, PULLED + "\n"):
        prints.append(fingerprint(experiment(pulled(tmp_path, text=text))))
        forget()
    assert prints[0] != prints[1]
    assert "plugins" not in RunFolder.create(tmp_path, SMALL)._config(), "fedvlp's own runs are written as they were"


def test_killed_resumed_and_never_interrupted_end_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed in a process that knows nothing, from the run's own copy: the file may have moved or changed since."""
    file = pulled(tmp_path)
    whole = RunFolder.create(tmp_path / "whole", experiment(file))
    simulate(whole.experiment(), whole)
    killed = RunFolder.create(tmp_path / "runs", experiment(file))

    def work() -> None:
        fuse, rename = Fuse(3), os.replace
        monkeypatch.setattr(os, "replace", lambda *a: (fuse(), rename(*a)))
        simulate(killed.experiment(), killed)

    assert forked(work) == -signal.SIGKILL
    assert not killed.model.exists()
    forget()
    file.write_text("raise SystemExit('edited')")
    with pytest.raises(
        plugins.PluginError, match=r"neither given nor installed here; give the run's own copy, --plugin"
    ):
        killed.experiment()
    assert killed.plugin("pulled_method").read_text() == PULLED
    plugins.use(killed.plugin("pulled_method"))
    simulate(killed.experiment(), killed)
    assert killed.model.read_bytes() == whole.model.read_bytes()


def test_other_content_is_refused_with_the_remedy(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "runs", experiment(pulled(tmp_path)))
    began = run._config()["plugins"]["pulled_method"]
    forget()
    edited = plugins.use(pulled(tmp_path, text=PULLED.replace("0.5", "0.6")))
    with pytest.raises(plugins.PluginError) as refused:
        run.experiment()
    for said in (str(run.path), "pulled_method", began, edited.digest, f"--plugin {run.plugin('pulled_method')}"):
        assert said in str(refused.value)


def test_a_run_that_does_not_say_which_content_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "runs", experiment(pulled(tmp_path)))
    config = run._config()
    del config["plugins"]
    run.config.write_text(json.dumps(config))
    with pytest.raises(plugins.PluginError, match="names classes of pulled_method and no digest of it"):
        run.experiment()


def test_the_unfinished_run_is_found_with_the_same_code_alone(tmp_path: Path) -> None:
    """What FLARE asks when a job is submitted again: its process has imported the method, and named no plugin."""
    first = RunFolder.open(tmp_path / "runs", experiment(pulled(tmp_path)))
    assert RunFolder.open(tmp_path / "runs", experiment(pulled(tmp_path))) == first
    forget()
    sys.modules.pop("pulled_method", None)
    edited = experiment(pulled(tmp_path, text=PULLED + "\n"))
    assert RunFolder.latest(tmp_path / "runs", edited) is None, "another program is another run"


def test_a_class_that_is_here_already_needs_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE imports a job's classes by the job's own path, before fedvlp sees them; they are in no table."""
    pulled(tmp_path / "custom")
    monkeypatch.syspath_prepend(str(tmp_path / "custom"))
    module: Any = importlib.import_module("pulled_method")
    chosen = replace(SMALL, name="pulled", method=module.Pulled())
    run = RunFolder.open(tmp_path / "runs", chosen)
    assert run.plugin("pulled_method").read_text() == PULLED
    assert RunFolder.open(tmp_path / "runs", chosen) == run
    with pytest.raises(ValueError, match="unknown preset 'pulled'"):
        presets.get("pulled")
    del sys.modules["pulled_method"]
