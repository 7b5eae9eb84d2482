"""What `fedvlp settings` lists: every setting that `--set` takes, with its meaning."""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter

from fedvlp.run import presets
from fedvlp.run.config import fields_of, override
from fedvlp.run.presets import Setting, _comments, _comments_in, settings_of


def by_key(name: str) -> dict[str, Setting]:
    return {setting.key: setting for setting in settings_of(presets.get(name))}


def test_every_setting_that_is_listed_has_a_meaning_and_can_be_set_to_what_it_is() -> None:
    """And the experiment is the same then."""
    for name in presets.PRESETS:
        experiment = presets.get(name)
        every = settings_of(experiment)
        assert len({setting.key for setting in every}) == len(every) > 60
        assert [setting.key for setting in every if "." in setting.key and not setting.meaning] == []
        for setting in every:
            if type(attrgetter(setting.key)(experiment)) in (bool, int, float):
                assert override(experiment, setting.key, json.dumps(setting.value)) == experiment, setting.key
        assert {setting.key.partition(".")[0] for setting in every} == {*fields_of(experiment)} - {"name"}


def test_a_setting_has_its_value_its_default_and_its_meaning() -> None:
    feddra = by_key("feddra")
    assert feddra["method.align_steps"].value == 10
    assert feddra["method.align_steps"].default == 20
    assert feddra["method.mu"].meaning.startswith("weight of the global constraint L_C (eq. 1), >= 0")
    assert feddra["method"].value == "FedDRA"
    assert {"convirt", "gloria", "mgca", "medclip"} <= set(feddra["objective"].choices)
    assert "site_models" in feddra
    assert feddra["method.weighting"].meaning == "lines 3 and 5: 1/N", "the method's own, not its base's"


def test_a_comment_goes_on_or_stands_above() -> None:
    source = '''
@dataclass
class Kind:
    """Text: with a colon."""

    one: int = 1  # the first,
    #               and more of it
    # of the second,
    # in two lines
    second: tuple[str, ...] = ()
    third: str = "x"

    def method(self) -> None:
        pass  # no field
'''
    assert _comments_in(source) == {"one": "the first, and more of it", "second": "of the second, in two lines"}


def test_a_class_has_the_meanings_of_its_bases() -> None:
    @dataclass(frozen=True)
    class Mine(type(presets.get("feddra").method)):  # type: ignore[misc]
        mine: int = 1  # my own

    assert _comments(Mine)["mine"] == "my own"
    assert "radius" in _comments(Mine)["rho"]
