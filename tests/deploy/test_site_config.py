"""A site's fedvlp.json: the site says what a name means, a job says only the name, and no path leads out."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.laboratory import OUR_SOURCES, SOURCES

from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.deploy.named_data import NamedData, SiteConfigError
from fedvlp.deploy.site_config import OwnData, SiteConfig, accept, accepts_phi_risk, at_site, own_source
from fedvlp.models.initial import InitialWeightsError, save_initial
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import fingerprint, from_config, to_config
from fedvlp.run.experiment import Experiment


def configure(kit: Path, content: Any) -> Path:
    """A kit with this local/fedvlp.json; returns its local folder."""
    local = kit / "local"
    local.mkdir(parents=True, exist_ok=True)
    (local / "fedvlp.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return local


def table(**settings: Any) -> dict[str, Any]:
    return {"data": {"pretrain": {"source": "table", "root": "cxr", "path": "pairs.csv", **settings}}}


def named(name: str = "pretrain") -> Experiment:
    return replace(presets.get("fedavg"), data=NamedData(name))


def test_the_site_says_where_its_data_are_and_owns_all_of_them(tmp_path: Path) -> None:
    """A table of three sites, read at one hospital: every record is the hospital's."""
    write(SyntheticCohort(sites=3, size=60, image_size=72), tmp_path / "data" / "cxr")
    local = configure(tmp_path, table(min_report_words=2))
    experiment = at_site(named(), "st-anna", local)
    assert isinstance(experiment.data, OwnData)
    assert experiment.data.source.path == str(tmp_path / "data" / "cxr" / "pairs.csv")
    assert experiment.data.source.min_report_words == 2
    assembly = Assembly(experiment)
    assert assembly.sites() == ("st-anna",)
    assert assembly.site("st-anna").client.data.num_train > 0


def test_the_job_decides_the_image_size_and_the_rest_is_unchanged(tmp_path: Path) -> None:
    local = configure(tmp_path, table())
    asked = replace(named(), data=NamedData("pretrain", image_size=256))
    found = at_site(asked, "st-anna", local)
    assert found.data.source.image_size == 256  # type: ignore[attr-defined]
    assert replace(found, data=asked.data) == asked


def test_a_named_data_set_travels_in_a_job_as_its_name_alone() -> None:
    config = to_config(NamedData("pretrain"))
    assert config == {"path": "fedvlp.deploy.NamedData", "args": {"name": "pretrain", "image_size": 72, "public": ""}}
    assert from_config(config) == NamedData("pretrain")
    assert fingerprint(named("a")) != fingerprint(named("b"))


def test_the_built_in_cohort_needs_no_file_and_differs_by_site(tmp_path: Path) -> None:
    """A rehearsal before any patient's data: no fedvlp.json, every site its own studies, the same in every process."""
    first, again, other = (at_site(named("synthetic"), site, tmp_path).data.build() for site in ("a", "a", "b"))
    assert set(first.sites or ()) == {"a"}
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint
    assert not set(first.ids) & set(other.ids)


def test_the_rehearsals_patients_are_the_same_in_every_version(tmp_path: Path) -> None:
    """Else a rehearsal after an update could not be compared with one before it."""
    assert own_source(NamedData("synthetic", 48), "a", tmp_path) == SyntheticCohort(1, 400, 48, seed=1090962027)


def test_an_absolute_root_of_the_site_is_the_sites_choice(tmp_path: Path) -> None:
    local = configure(tmp_path / "kit", {"root": str(tmp_path / "films"), **table(cache="cache")})
    source = SiteConfig.load(local).data["pretrain"]
    assert source.path == str(tmp_path / "films" / "cxr" / "pairs.csv")
    assert source.cache == str(tmp_path / "kit" / "cache"), "a mount of images is often read-only"


def test_a_wrong_file_is_refused_with_the_place_and_the_remedy(tmp_path: Path) -> None:
    for number, (content, said) in enumerate(
        [
            ("{", "is not JSON"),
            ([], "expected an object"),
            ({"dota": {}}, "unknown setting 'dota'; did you mean 'data'?"),
            ({"data": []}, "maps names to data sets"),
            ({"root": 3}, "root is 3"),
            ({"data": {"synthetic": {"source": "table", "path": "x"}}}, "synthetic cohort"),
            ({"data": {"pretrain": "x.csv"}}, "a data set is an object"),
            ({"data": {"pretrain": {"source": "tabel", "path": "x"}}}, "did you mean 'table'?"),
            ({"data": {"pretrain": {"source": "table"}}}, 'needs "path"'),
            (table(report_colum="text"), "did you mean 'report_column'?"),
            (table(max_skipped="many"), "max_skipped is 'many'"),
            (table(image_size=64), "image_size is the job's"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(SiteConfigError, match=r"local/fedvlp\.json") as error:
            SiteConfig.load(configure(folder, content))
        assert said in str(error.value)
        assert str(folder) not in str(error.value)


def test_no_path_leads_out_of_the_sites_root(tmp_path: Path) -> None:
    """Faults 27 and 28: parents, absolute paths, drives and links, for the table, its root and the cache."""
    for number, settings in enumerate([
            {"path": "../../etc/passwd"}, {"path": "/etc/passwd"}, {"path": "C:\\films.csv"}, {"root": ".."},
            {"root": "/"}, {"root": "link"}, {"path": "../pairs.csv"}, {"cache": "../cache"}, {"cache": "/var/cache"},
        ]):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "data").mkdir()
        (folder / "elsewhere").mkdir()
        (folder / "data" / "link").symlink_to(folder / "elsewhere")
        with pytest.raises(SiteConfigError, match="leads out of the root") as error:
            SiteConfig.load(configure(folder, table(**settings)))
        assert str(folder) not in str(error.value), "the server reads it"


def test_an_entry_of_another_shape_is_refused_with_what_it_must_be(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        '"envelope" is an object with limits': {"envelope": []},
        'a data set is an object with "source"': {"data": {"pretrain": {"path": "x.csv"}}},
        "processes is -1; 0 = as the job says": {"processes": -1},
        "root is 3": table(root=3),  # what is no text is told so before it is taken for a path
    }
    for said, content in wrong.items():
        with pytest.raises(SiteConfigError) as error:
            SiteConfig.load(configure(tmp_path, content))
        assert said in str(error.value)


def test_reports_with_identifiers_are_trained_on_only_where_the_engineer_says_so(tmp_path: Path) -> None:
    assert accepts_phi_risk(tmp_path / "local") is False, "no file, no consent"
    assert accepts_phi_risk(configure(tmp_path, {"processes": 1})) is False
    assert accepts_phi_risk(configure(tmp_path, {"accept_phi_risk": True})) is True
    some = configure(tmp_path, {"accept_phi_risk": ["date", "name-with-title"]})
    assert accepts_phi_risk(some) == ("date", "name with title")
    with pytest.raises(SiteConfigError, match="unknown kind of identifier 'dates'; there are: name-with-title"):
        accepts_phi_risk(configure(tmp_path, {"accept_phi_risk": ["dates"]}))


def test_an_experiment_is_accepted_once_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    local = configure(tmp_path, {"processes": 2})
    for mark in ("a" * 16, "b" * 16, "a" * 16):
        accept(local, mark)
    content = json.loads((local / "fedvlp.json").read_text())
    assert content == {"processes": 2, "envelope": {"accepted": ["a" * 16, "b" * 16]}}


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    local = configure(tmp_path, table())
    with pytest.raises(SiteConfigError, match=r"site st-anna offers no data set 'pretrian'; did you mean 'pretrain'\?"):
        at_site(named("pretrian"), "st-anna", local)


def test_a_site_without_the_file_says_what_to_copy(tmp_path: Path) -> None:
    with pytest.raises(SiteConfigError, match=r"a site takes the one of its kit's archive"):
        at_site(named(), "st-anna", tmp_path / "local")


def test_a_provisioned_site_opens_no_path_that_a_job_brings(tmp_path: Path) -> None:
    """In the simulator the job's author owns the machine; at a site a path in a job is refused, wherever it leads."""
    local = configure(tmp_path, table())
    brought = replace(named(), data=TableSource(path="/etc/passwd"))
    assert at_site(brought, "st-anna", local) == brought
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_client.json").write_text("{}")
    with pytest.raises(SiteConfigError, match="a site opens only what its own"):
        at_site(brought, "st-anna", local)
    assert at_site(presets.get("fedavg"), "site-1", local) == presets.get("fedavg"), "the synthetic cohort has no path"


def provisioned(kit: Path) -> Path:
    """The local folder of a kit that FLARE provisioned."""
    (kit / "startup").mkdir(parents=True)
    (kit / "startup" / "fed_client.json").write_text("{}")
    return configure(kit, {})


def towers(image: str, text: str = "tiny") -> Experiment:
    return replace(
        presets.get("fedavg"), model=replace(presets.get("fedavg").model, image_tower=image, text_tower=text)
    )


PATHS_OF_A_JOB = (
    "/etc", "..", "../data", "startup", "local-dir:/etc", "hf-hub:x/y", "a/../../b", "a/b/c", ".hidden", "x\x00",
    "x\n", "a" * 300, "file:///etc",
)  # fmt: skip


@pytest.mark.parametrize("name", PATHS_OF_A_JOB)
def test_a_job_names_towers_and_no_path_of_the_site(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a folder is there, and what is in its config.json, is nothing that a lead learns."""
    local = provisioned(tmp_path / "kit")
    monkeypatch.chdir(tmp_path / "kit")
    hidden = replace(presets.get("fedavg"), site_models=(("st-anna", towers("tiny", name).model),))
    for asked in (towers(name), towers("tiny", name), hidden):
        with pytest.raises(
            SiteConfigError, match=r"is no name of a model|is no folder of this site's models/"
        ) as refused:
            at_site(asked, "st-anna", local)
        assert str(tmp_path) not in str(refused.value)
    assert at_site(towers(name), "st-anna", tmp_path / "no-kit" / "local") == towers(name), "a laptop is its owner's"


def test_a_tower_of_the_sites_own_is_called_by_its_name(tmp_path: Path) -> None:
    local = provisioned(tmp_path)
    folder = tmp_path / "models" / "owner" / "vit"
    folder.mkdir(parents=True)
    found = at_site(towers("owner/vit", "bert-base-cased"), "st-anna", local)
    assert (found.model.image_tower, found.model.text_tower) == (str(folder), "bert-base-cased")
    pinned = at_site(towers(f"owner/vit@{DIGEST}", "bert-base-cased"), "st-anna", local)
    assert pinned.model.image_tower == f"{folder}@{DIGEST}"
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ValueError, match="a path leads out"):
        at_site(towers("owner/vit"), "st-anna", local)


DIGEST = "0123456789abcdef" * 4


def starting(init: str) -> Experiment:
    experiment = presets.get("fedavg")
    return replace(experiment, model=replace(experiment.model, init=init))


@pytest.mark.parametrize("name", ["/etc", "../models", "a/b/c", "~/towers", "x y", "models/mine", "startup"])
def test_a_job_names_weights_to_start_from_and_no_path_of_the_site(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that leads somewhere from the folder that the site's process happens to run in."""
    local = provisioned(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    init = f"{name}@{DIGEST}"
    hidden = replace(presets.get("fedavg"), site_models=(("st-anna", starting(init).model),))
    for asked in (starting(init), hidden):
        with pytest.raises(SiteConfigError, match=r"is no name of weights|is no folder of this site's models/") as said:
            at_site(asked, "st-anna", local)
        assert str(tmp_path) not in str(said.value)
    assert at_site(starting(init), "st-anna", tmp_path / "no-kit" / "local") == starting(init)


def test_weights_of_the_sites_own_are_called_by_their_name_and_checksum(tmp_path: Path) -> None:
    local = provisioned(tmp_path)
    folder = tmp_path / "models" / "owner" / "towers"
    digest, _ = save_initial(presets.get("fedavg").model.build(5), folder, {})
    found = at_site(starting(f"owner/towers@{digest}"), "st-anna", local)
    assert found.model.init == f"{folder}@{digest}"
    first = Assembly(found).initial()["image_encoder.summary"]
    assert first.tolist() == presets.get("fedavg").model.build(5).image_encoder.summary.detach().half().float().tolist()
    with pytest.raises(InitialWeightsError, match=f"the experiment was made with {DIGEST}") as refused:
        Assembly(at_site(starting(f"owner/towers@{DIGEST}"), "st-anna", local)).initial()
    assert str(tmp_path) not in str(refused.value)
    with pytest.raises(SiteConfigError, match=r"model\.init 'owner/towers' lacks the checksum of the weights"):
        at_site(starting("owner/towers"), "st-anna", local)
    with pytest.raises(InitialWeightsError, match=r"model\.init 'none-here': model\.safetensors cannot be read there"):
        Assembly(at_site(starting(f"none-here@{DIGEST}"), "st-anna", local)).initial()


def test_shipped_weights_need_nothing_of_a_site(tmp_path: Path) -> None:
    local = provisioned(tmp_path)
    assert at_site(starting("tiny-pool"), "st-anna", local) == starting("tiny-pool")
    assert at_site(starting(""), "st-anna", local) == starting(""), "nor does a model that starts from chance"


def test_a_data_sets_name_is_plain_at_both_ends(tmp_path: Path) -> None:
    for name in ["Chest", "../x", "a b", "", "x" * 65, "a/b"]:
        with pytest.raises(ValueError, match="the name of a data set is"):
            NamedData(name)
        with pytest.raises(SiteConfigError, match="the name of a data set is"):
            SiteConfig.load(configure(tmp_path, {"data": {name: table()["data"]["pretrain"]}}))


def test_the_server_cannot_build_what_the_sites_keep() -> None:
    with pytest.raises(SiteConfigError, match="kept by the sites"):
        Assembly(named()).sites()


@pytest.mark.parametrize("source", cases(sorted(SOURCES), often=OUR_SOURCES))
def test_every_source_of_files_can_be_offered_and_stays_below_the_root(source: str, tmp_path: Path) -> None:
    """A field that holds text and may be absent is a path unless it is known to be none: each is confined."""
    other = {"cache", "root"}
    paths = [
        f.name for f in fields(SOURCES[source]) if f.name == "path" or (f.type == "str | None" and f.name not in other)
    ]
    assert set(paths) == {f.name for f in fields(SOURCES[source]) if f.metadata.get("below_root")}
    for name in paths:
        entry = {"source": source, "root": "cxr", "path": "t.csv", name: "../../elsewhere"}
        with pytest.raises(SiteConfigError, match="leads out of the root"):
            SiteConfig.load(configure(tmp_path, {"data": {"pretrain": entry}}))
    local = configure(tmp_path, {"data": {"pretrain": {"source": source, "root": "cxr", **dict.fromkeys(paths, "x")}}})
    offered = SiteConfig.load(local).data["pretrain"]
    assert type(offered) is SOURCES[source]
    assert all(getattr(offered, name) == str(tmp_path / "data" / "cxr" / "x") for name in paths)
    own = at_site(named(), "st-anna", local).data
    assert own.source.image_size == NamedData("pretrain").image_size  # type: ignore[attr-defined]
