"""What the options of the command line make of a preset."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.laboratory import OUR_SOURCES, SOURCES
from support.larger import creamfl
from support.presets import MODEL
from support.published import COLLECTIONS
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.cli.overrides import configured, seeds_of
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import COHORTS, SyntheticCohort
from fedvlp.deploy.named_data import NamedData
from fedvlp.models.initial import save_initial
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import from_config, to_config
from fedvlp.run.fitting import absolute
from fedvlp.run.folder import RunFolder
from fedvlp.run.site_sources import PatientSites
from studies.collections.creamfl_collections import JoinedSource


def test_seeds_are_from_the_first_to_the_last_with_both() -> None:
    for text, seeds in {"0-4": [0, 1, 2, 3, 4], "3": [3], "0": [0], "7-7": [7], "8-11": [8, 9, 10, 11]}.items():
        assert list(seeds_of(text)) == seeds
    for text in ("2-1", "", "-3", "3-", "1-2-3", "a", "1.5", " 1"):
        with pytest.raises(ValueError, match="give FIRST-LAST"):
            seeds_of(text)


def test_a_named_cohort_brings_its_sites_and_keeps_the_presets_film_size() -> None:
    chosen = configured("pms-fm", "label-skew", None, None)
    assert chosen.data == replace(COHORTS["label-skew"], image_size=72)
    assert (chosen.partition.sites, chosen.extra.sites) == (5, 5)
    fewer = configured("fedavg", "label-skew", 3, ["data.size=9000"])
    assert (fewer.data.sites, fewer.data.size, fewer.partition.sites) == (3, 9000, 3)
    with pytest.raises(ValueError, match="synthetic, label-skew, scanner-shift or table:"):
        configured("fedavg", "label-swek", None, None)


def test_synthetic_is_the_presets_own_cohort_whatever_the_base_has(tmp_path: Path) -> None:
    """Beside another run's configuration or on its terms, the run trained on that run's data, a table here, instead."""
    table = tmp_path / "pairs.csv"
    table.write_text("image,report\nx.png,no effusion seen\n")
    own = presets.get("fedavg").data
    for data in (f"table:{table}", "label-skew"):
        other = configured("fedavg", data, None, None)
        run = RunFolder.create(tmp_path, other).path
        assert configured(other, "synthetic", None, None).data == own
        assert configured("fedavg", "synthetic", None, None, like=run).data == own
        assert configured(other, None, None, None).data == other.data != own
    renamed = replace(configured("fedavg", "label-skew", None, None), name="mine")
    assert configured(renamed, "synthetic", 3, None).data == SyntheticCohort(image_size=72, sites=3)
    assert configured("fedavg", "synthetic", None, None) == configured("fedavg", None, None, None)


# Data sets of files


def test_sites_of_a_table_are_not_dealt_anew_in_silence(tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("image,report,Site\nx.png,no effusion seen,north\n")
    with pytest.raises(ValueError, match="--sites 7: the table has a column 'site', which says whose each row is"):
        configured("fedavg", f"table:{table}", 7, None)
    assert configured("fedavg", f"table:{table}", 7, ["data.site_column="]).partition.sites == 7
    table.write_text("image,report\nx.png,no effusion seen\n")
    assert configured("fedavg", f"table:{table}", 7, None).partition.sites == 7


def test_no_modality_of_own_records_is_dropped_unless_asked(tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("image,report\nx.png,no effusion seen\n")
    drawn = configured("creamfl", None, None, None).partition
    assert (drawn.image_only, drawn.text_only) == (2, 1)
    own_public = [f"north=table:{table}", f"public=table:{table}"]
    for data, at, public in ((f"table:{table}", None, drawn.public), (None, own_public, 0.0)):
        own = configured("creamfl", data, None, None, at).partition
        assert (own.image_only, own.text_only) == (0, 0)
        assert own.public == public, "a public set of one's own is not drawn from the sites' records too"
    asked = configured("creamfl", f"table:{table}", None, ["partition.image_only=1"]).partition
    assert (asked.image_only, asked.text_only) == (1, 0)


def folder_of(name: str, root: Path) -> Path:
    """A folder with the fixture of a collection."""
    root.mkdir()
    COLLECTIONS[name](root)
    return root


@pytest.mark.parametrize("name", cases(COLLECTIONS, often=OUR_SOURCES))
def test_a_source_and_its_folder_are_a_data_set_with_images(name: str, tmp_path: Path) -> None:
    """Decoded with the preset's margin around what the model sees, into the cache that is asked for."""
    root = folder_of(name, tmp_path / "root")
    data = configured("fedavg", f"{name}:{root}", None, None, cache=tmp_path / "cache").data
    assert data == SOURCES[name].at(root, image_size=72, cache=str(tmp_path / "cache"))
    assert data.root is not None


def test_a_public_set_follows_the_name_of_the_sites_own_data(tmp_path: Path) -> None:
    """The exported job deals no records, and every site that takes part has the model of a site with pairs."""
    job = ["jobs", "export", "creamfl", str(tmp_path / "job"), "--data", "named:pretrain,public=openi"]
    done = CliRunner().invoke(app, [*job, "--at", "st-anna", "--at", "northgate"])
    assert done.exit_code == 0, done.output
    sites = json.loads((tmp_path / "job" / "app" / "config" / "config_fed_client.json").read_text())
    settings = sites["executors"][0]["executor"]["args"]["settings"]
    assert from_config(settings["data"]) == NamedData("pretrain", 36, public="openi")
    dealt = settings["partition"]["args"]
    assert (dealt["image_only"], dealt["text_only"], dealt["public"]) == (0, 0, 0)
    paired = to_config(presets.get("creamfl").site_models[0][1])
    assert settings["site_models"] == [["st-anna", paired], ["northgate", paired]]


def test_settings_of_a_source_follow_its_folder(tmp_path: Path) -> None:
    root = folder_of("mimic_cxr", tmp_path / "root")
    data = configured("fedavg", f"mimic_cxr:{root},suffix=dcm,labels=Edema,Pneumonia,seed=3", None, None).data
    assert (data.suffix, data.labels, data.seed) == ("dcm", "Edema,Pneumonia", 3)
    with pytest.raises(ValueError, match="did you mean 'suffix'"):
        configured("fedavg", f"mimic_cxr:{root},sufix=dcm", None, None)
    with pytest.raises(ValueError, match="rsna source: the root lacks 2 of 2 published items"):
        configured("fedavg", f"rsna:{root}", None, None)


def test_creamfls_collections_are_an_experiment(tmp_path: Path) -> None:
    """Sites lack what their collections lack, towers see in colour, and each collection has its own classes."""
    creamfl(tmp_path)
    given = f"creamfl:{tmp_path},pairs=2,images=1,texts=1,shards=2,colour=true"
    chosen = configured("creamfl", given, None, None)
    assert chosen.model.in_channels == 3
    assert {model.in_channels for _, model in chosen.site_models} == {3}
    objective: Any = chosen.objective
    assert (objective.classes, objective.label_spaces) == (4 + 4, "own")
    split = chosen.partition
    assert (split.sites, split.image_only, split.text_only, split.public) == (4, 0, 0, 0.0)
    assembly = Assembly(chosen)
    held = {site: assembly.data(site).modalities for site in assembly.data_sites()}
    pairs = ("image", "text")
    assert held == {"site-01": pairs, "site-02": pairs, "site-03": ("image",), "site-04": ("text",)}
    assert assembly.has_public
    assert assembly.public(None).num_train > 0
    grey = configured("creamfl", given.removesuffix(",colour=true"), None, None)
    assert grey.model.in_channels is None
    with pytest.raises(ValueError, match="this data set deals its records to sites itself"):
        configured("creamfl", given, 3, None)
    set_later = ["data.pairs=2", "data.images=1", "data.texts=1", "data.shards=2", "data.colour=true"]
    assert configured("creamfl", f"creamfl:{tmp_path}", None, set_later) == chosen, "wherever a setting is given"
    (tmp_path / "ag_news").rename(tmp_path / "news")
    with pytest.raises(ValueError, match=r"the root has no folder ag_news; expected coco_captions,") as raised:
        configured("creamfl", given, None, None)
    assert str(tmp_path) not in str(raised.value)


def test_sites_of_one_collection_each_are_creamfls_sites(tmp_path: Path) -> None:
    """Each has the model that the preset gives to a site of its modalities; one collection in colour is enough."""
    creamfl(tmp_path)
    held = {"pairs": "flickr30k", "texts": "ag_news", "images": "cifar100", "public": "coco_captions"}
    given = [f"{site}={source}:{tmp_path / source}" for site, source in held.items()]
    given[0] += ",colour=true"
    chosen = configured("creamfl", None, None, None, given)
    models = dict(chosen.site_models)
    assert models.keys() == {"pairs", "texts", "images"}
    assert [models[site].text_tower for site in ("pairs", "images", "texts")] == ["tiny", "tiny", "gru"]
    assert {model.in_channels for model in (chosen.model, *models.values())} == {3}
    assert (chosen.partition.sites, chosen.partition.public) == (3, 0.0)
    assert Assembly(chosen).data("images").modalities == ("image",)
    assert configured("fediot", None, None, None, given).site_models == ()
    with pytest.raises(ValueError, match="--site takes a data set of files"):
        configured("creamfl", None, None, None, [f"one=creamfl:{tmp_path}"])
    with pytest.raises(ValueError, match=r"creamfl source: .* is not there"):
        configured("creamfl", f"creamfl:{tmp_path / 'absent'}", None, None)
    (tmp_path / "cifar100" / "train.bin").unlink()
    with pytest.raises(ValueError, match=r"cifar100 source: the root lacks 1 of 3 published items: train.bin"):
        configured("creamfl", f"creamfl:{tmp_path}", None, None)


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize("colour", ["false", "true"])
def test_creamfl_trains_on_its_collections(colour: str, tmp_path: Path) -> None:
    creamfl(tmp_path / "root")
    data = f"creamfl:{tmp_path / 'root'},pairs=2,images=1,texts=1,shards=2,colour={colour}"
    small = [word for one in ("rounds.rounds=1", "training.batch_size=8") for word in ("--set", one)]
    arguments = ["simulate", "creamfl", "--data", data, "--workers", "1", "--runs", str(tmp_path / "runs"), *small]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    (record, *_) = RunFolder(tmp_path / "runs" / "creamfl" / "001").history()
    assert record["dropped"] == {}
    for site in ("site-03", "site-04"):
        assert record["sites"][site]["loss/classification"] > 0, "by its own classes"


def test_a_table_alone_is_read_as_before(tmp_path: Path) -> None:
    """A file, and no folder: its labels and texts without images."""
    root = folder_of("rsna", tmp_path / "root")
    data = configured("fedavg", f"rsna:{root / 'stage_2_train_labels.csv'}", None, None).data
    assert data.root is None


def test_the_papers_presets_alone_drop_sentences_of_one_word(tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("image,report\nx.png,no effusion seen\n")
    spec = f"table:{table}"
    chosen = {name: configured(name, spec, None, None).data.reports for name in ("feddra", "feddra-paper")}
    assert chosen == {"feddra": "cleaned", "feddra-paper": "papers"}
    assert configured("feddra-paper", None, None, None, [f"north={spec}"]).data.sites[0][1].reports == "papers"
    assert configured("feddra-paper", spec, None, ["data.reports=cleaned"]).data.reports == "cleaned"


def test_each_site_may_have_a_data_set(tmp_path: Path) -> None:
    """Two sites that train, and the public set, which is none of them."""
    nih, openi = folder_of("nih_cxr14", tmp_path / "nih"), folder_of("openi", tmp_path / "openi")
    rsna = folder_of("rsna", tmp_path / "rsna")
    given = [f"north=nih_cxr14:{nih}", f"south=openi:{openi},min_report_words=1", f"public=rsna:{rsna}"]
    chosen = configured("pms-fm", None, None, None, given, tmp_path / "cache")
    names = [site for site, _ in chosen.data.sites]
    assert names == ["north", "south", "public"]
    assert {source.cache for _, source in chosen.data.sites} == {str(tmp_path / "cache")}
    assert chosen.data.sites[1][1].min_report_words == 1
    assert (chosen.partition.sites, chosen.extra.sites) == (2, 2)
    assert from_config(to_config(chosen)) == chosen


def test_mistakes_with_sites_are_named() -> None:
    for data, sites, site, said in [
        ("label-skew", None, ["a=table:x.csv"], "leave --data and --sites out"),
        (None, 2, ["a=table:x.csv"], "leave --data and --sites out"),
        (None, None, ["table:x.csv"], "is not NAME=SOURCE:FOLDER"),
        (None, None, ["a=synthetic"], "takes a data set of files"),
        (None, None, ["a=named:pretrain"], "takes a data set of files"),
        (None, None, ["a=parquet:x"], "unknown source of --data 'parquet'"),
        (None, None, ["a=table:x.csv", "a=table:y.csv"], "'x.csv' is not there"),
    ]:
        with pytest.raises(ValueError, match=said):
            configured("fedavg", data, sites, None, site)


def test_a_cache_is_for_files_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--cache is for data sets of image files"):
        configured("fedavg", "label-skew", None, None, cache=tmp_path)
    with pytest.raises(ValueError, match="--cache is for data sets of image files"):
        configured("fedavg", None, None, None, cache=tmp_path)


def test_a_seed_is_that_of_the_run_and_of_its_data_and_a_setting_goes_before_it() -> None:
    seeded = configured("feddra", None, None, None, seed=7)
    assert (seeded.rounds.seed, seeded.data.seed) == (7, 7)
    both = configured("feddra", None, None, ["data.seed=3"], seed=7)
    assert (both.rounds.seed, both.data.seed) == (7, 3)


def test_settings_may_stand_in_any_order() -> None:
    """A ViT of published weights cannot have the shipped start: each setting alone is refused, and the two are not."""
    from fedvlp.cli.overrides import overridden
    from fedvlp.models.dual_encoder import ModelConfig

    shipped = ModelConfig(image_tower="resnet18", text_tower="bert-base-uncased", head_norm="layer", init="tiny-pool")
    both = ["pretrained=true", "init=random"]
    assert overridden(shipped, both) == overridden(shipped, both[::-1])
    assert overridden(shipped, [*both, "pretrained=false"]).pretrained is False, "the last of one that is set twice"
    with pytest.raises(ValueError, match="set init to random"):
        overridden(shipped, both[:1])


# Paths


def test_paths_are_absolute_unless_the_experiment_leaves_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's config.json named weights and tables from the folder where it was begun, and failed in any other.

    A job keeps what was typed: at a site the name is that of a folder of the site's own.
    """
    save_initial(MODEL.build(0), tmp_path / "towers", {})
    (tmp_path / "other.csv").write_text("image,report\nx.png,no effusion seen\n")
    monkeypatch.chdir(tmp_path)
    settings = ["model.init=towers", "data.path=other.csv", "data.root=."]
    here = configured("fedavg", "table:other.csv", None, settings)
    weights, _, digest = here.model.init.partition("@")
    assert weights == str(tmp_path / "towers")
    assert (here.data.path, here.data.root) == (str(tmp_path / "other.csv"), str(tmp_path))  # type: ignore[attr-defined]
    away = configured("fedavg", "table:other.csv", None, settings, travels=True)
    assert away.model.init == f"towers@{digest}"
    assert (away.data.path, away.data.root) == ("other.csv", ".")  # type: ignore[attr-defined]
    assert configured("fedavg", None, None, None).model == presets.get("fedavg").model, "shipped weights have no path"
    assert CliRunner().invoke(app, ["jobs", "export", "fedavg", "job", "--set", "model.init=towers"]).exit_code == 0
    written = [path.read_text() for path in (tmp_path / "job").rglob("*.json")]
    assert not [text for text in written if str(tmp_path) in text]
    assert f'"init": "towers@{digest}"' in "".join(written)


def test_data_sets_within_a_data_set_have_absolute_paths_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    joined = JoinedSource(*(TableSource(path, root=None, cache="c") for path in ("a.csv", "b.csv", "c.csv", "/d.csv")))
    made = absolute(replace(presets.get("fedavg"), data=joined)).data
    assert made.public == TableSource(str(tmp_path / "a.csv"), cache=str(tmp_path / "c"))  # type: ignore[attr-defined]
    assert made.texts.path == "/d.csv"  # type: ignore[attr-defined]


def test_data_sets_of_sites_have_absolute_paths_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in tuples of tuples. A relative folder in an option of --site once stayed so in config.json, and the run
    could be gone on with from that folder alone.
    """
    monkeypatch.chdir(tmp_path)
    Path("a.csv").touch()
    given = configured("fedavg", None, None, None, ["north=table:a.csv,root=films", "south=table:a.csv,cache=c"])
    north, south = (source for _, source in given.data.sites)  # type: ignore[attr-defined]
    assert (north.path, north.root) == (str(tmp_path / "a.csv"), str(tmp_path / "films"))
    assert south.cache == str(tmp_path / "c")
    drawn = PatientSites(((TableSource("a.csv"), (("site-1", 3),)),))
    made = absolute(replace(presets.get("fedavg"), data=drawn)).data
    assert made == PatientSites(((TableSource(str(tmp_path / "a.csv")), (("site-1", 3),)),))
