"""What the options of the command line make of a preset."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedvlp.cli.overrides import configured
from fedvlp.data.synthetic.cohort import COHORTS


def test_a_named_cohort_brings_its_sites_and_keeps_the_presets_film_size() -> None:
    chosen = configured("pms-fm", "label-skew", None, None)
    assert chosen.data == replace(COHORTS["label-skew"], image_size=72)
    assert (chosen.partition.sites, chosen.extra.sites) == (5, 5)
    fewer = configured("fedavg", "label-skew", 3, ["data.size=9000"])
    assert (fewer.data.sites, fewer.data.size, fewer.partition.sites) == (3, 9000, 3)
    with pytest.raises(ValueError, match="synthetic, label-skew, scanner-shift or table:"):
        configured("fedavg", "label-swek", None, None)
