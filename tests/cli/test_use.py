"""`fedvlp predict`, `search`, `embed` and `export`: what they show, and one sentence for each mistake."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.mistakes import taken_otherwise
from support.presets import MODEL, SMALL
from typer.testing import CliRunner

from fedvlp import load_model
from fedvlp.cli import app
from fedvlp.cli.use_commands import printable
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.evaluation.attribution import attribution
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.models import MultimodalConfig
from fedvlp.run.finding_probe import heads_in, pooled
from fedvlp.run.folder import RunFolder
from fedvlp.run.zero_shot_areas import COLUMNS, file_of

TABLE = SyntheticCohort(sites=2, size=24, image_size=36)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 24 films with reports, and finished runs: of a dual encoder and of a classifier."""
    folder = tmp_path_factory.mktemp("home")
    write(TABLE, folder)
    (folder / "notes.txt").write_text("no film")
    source = TableSource("pairs.csv", image_size=36)
    for name, model in (("run", MODEL), ("classifier", MultimodalConfig(**{**vars(MODEL), "labels": ("a",)}))):
        experiment = replace(SMALL, name=name, model=model, data=source)
        RunFolder.create(folder / "runs", experiment).finish(experiment, dict(model.build(3).state_dict()), [])
    (folder / "run").symlink_to(folder / "runs" / "run" / "001")
    (folder / "classifier").symlink_to(folder / "runs" / "classifier" / "001")
    (folder / "unfinished").mkdir()
    return folder


def said(command: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command prints."""
    monkeypatch.chdir(home)
    done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "120", "XDG_DATA_HOME": str(home / "keys")})
    assert done.exit_code == 0, done.output
    return done.output


def cells(output: str) -> list[list[str]]:
    """The rows of the table in an output."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]


def test_predict_shows_the_cosines_of_every_film(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    films = ["images/000003.png", "images/000004.png"]
    rows = cells(said(f"predict run {' '.join(films)} --classes 'edema, rib [red]fracture'", home, monkeypatch))
    model = load_model(home / "run")
    expected = model.zero_shot([home / film for film in films], ["edema", "rib [red]fracture"])
    assert [row[:2] for row in rows] == [
        ["000003.png", "edema"], ["", "rib [red]fracture"], ["000004.png", "edema"], ["", "rib [red]fracture"]
    ]  # fmt: skip
    assert [row[2] for row in rows] == [f"{value:+.3f}" for of in expected for value in of.values()]
    own = cells(said(f"predict run {films[0]}", home, monkeypatch))
    assert [row[1] for row in own] == list(model.prompts)
    assert "Pleural Effusion" in model.prompts


def test_predict_fits_heads_on_a_table_and_classifies_folders_by_them(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads stay beside the model: later calls use them, but for named classes. A broken file is a line."""
    write(SyntheticCohort(sites=2, size=120, image_size=36, beta=5), tmp_path / "labelled")
    shutil.copytree(home / "runs" / "run" / "001" / "model", tmp_path / "model")
    films = tmp_path / "films"
    films.mkdir()
    for name in ("000003.png", "000004.png"):
        shutil.copy(home / "images" / name, films / name)
    (films / "broken.dcm").write_bytes(b"\0" * 128 + b"DICM")
    probe = f"table:{tmp_path}/labelled/pairs.csv,label_columns=Edema,burned_in=header"
    said(f"predict {tmp_path}/model --probe '{probe}' --sensitivity 0.8", home, monkeypatch)
    heads = heads_in(tmp_path / "model")
    assert heads is not None
    assert heads.names == ("Edema",)
    out = tmp_path / "predictions.csv"
    output = said(f"predict {tmp_path}/model {films} --out {out}", home, monkeypatch)
    assert f"wrote {out}: 2 images" in output
    assert "left out: broken.dcm: " in output
    trained = load_model(tmp_path / "model")
    prepared = torch.stack([trained.preprocess(films / name) for name in ("000003.png", "000004.png")])
    expected = heads.probabilities(pooled(trained, prepared))[:, 0].tolist()
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [str(films / name) for name in ("000003.png", "000004.png")]
    assert [float(row["probability"]) for row in rows] == pytest.approx(expected)
    threshold = heads.figures["Edema"]["threshold"]
    assert [row["above_threshold"] for row in rows] == [str(int(value >= threshold)) for value in expected]
    assert "cosine" in said(f"predict {tmp_path}/model {films} --classes edema", home, monkeypatch)
    chance = "CAUTION: no better than chance"
    assert (chance in output) == (not heads.figures["Edema"]["test_low"] > 0.5)


def test_explain_draws_the_film_and_says_where_it_looked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = said("explain run images/000003.png 'left effusion' --out map.png", home, monkeypatch)
    model = load_model(home / "run")
    cosine = float(model.encode_image(home / "images" / "000003.png") @ model.encode_text("left effusion"))
    assert output.startswith(f"cosine {cosine:+.3f}; a square of 5 pixels adds most, 0.")
    assert output.rstrip().endswith("wrote map.png")
    assert (home / "map.png").read_bytes().startswith(b"\x89PNG")
    by_gradients = said(
        "explain run images/000003.png 'left effusion' --out gradients.png --by gradients", home, monkeypatch
    )
    assert by_gradients.startswith(f"cosine {cosine:+.3f}; a square of 5 pixels adds most, ")
    assert (home / "gradients.png").read_bytes() != (home / "map.png").read_bytes()


def test_explain_says_how_much_of_the_map_lies_within_a_mask_and_first_that_the_model_is_at_chance(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of the left half of the image: a map that knows nothing has half of its strongest tenth there."""
    half = np.zeros((36, 36), np.uint8)
    half[:, :18] = 255
    Image.fromarray(half).save(home / "half.png")
    output = said("explain run images/000003.png edema --out half-map.png --mask half.png", home, monkeypatch)
    added = attribution(load_model(home / "run"), home / "images" / "000003.png", "edema").added
    strongest = added >= added.flatten().quantile(0.9)
    share = float(strongest[:, :16].sum() / strongest.sum())  # the model sees the middle 32 pixels
    assert (
        f"of the strongest tenth of the map {100 * share:.0f} % lies within the mask, which is 50 % of the image"
        in output
    )
    assert "CAUTION" not in output
    for low, first in ((0.45, "CAUTION: zero-shot of this model is no better than chance"), (0.55, "cosine ")):
        lines = [",".join(COLUMNS), f"trained,site-1,Edema,20,5,0.6,{low},0.7"]
        file_of(RunFolder(home / "run")).parent.mkdir(exist_ok=True)
        file_of(RunFolder(home / "run")).write_text("\n".join(lines) + "\n")
        assert said("explain run images/000003.png edema --out half-map.png", home, monkeypatch).startswith(first)
    file_of(RunFolder(home / "run")).unlink()


def test_search_ranks_the_films_by_their_cosine_with_a_phrase(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = said('search run "left basal effusion" --data table:pairs.csv --top 24', home, monkeypatch)
    model = load_model(home / "run")
    query = model.encode_text("left basal effusion")
    cosines = model.encode_image([home / "images" / f"{row:06d}.png" for row in range(24)]) @ query
    rows = cells(output)
    assert [row[0] for row in rows] == [str(rank) for rank in range(1, 25)]
    assert [row[1] for row in rows] == [f"{value:+.3f}" for value in cosines.sort(descending=True).values.tolist()]
    assert all(re.fullmatch(r"[0-9a-f]{32}", row[2]) for row in rows), "keyed hashes, of a hospital's own records"
    assert "impression" not in output
    assert {row[3] for row in rows} == {"site-1", "site-2"}


def test_search_by_a_film_finds_this_film_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "search run --image images/000005.png --data table:pairs.csv --top 2"
    (first, second), output = (
        cells(said(command, home, monkeypatch)),
        said(f"{command} --show-reports", home, monkeypatch),
    )
    assert first[1] == "+1.000"
    assert second[1] < "+1.000"
    report = TABLE.build().reports[5]
    words = re.findall(r"\w+", report.lower())
    shown = next(line for line in output.splitlines() if line.startswith("  1  "))
    assert set(shown.split()[1:]) <= set(words)
    assert len(shown.split()) > 5


def test_search_within_a_split(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = said("search run edema --data table:pairs.csv --split test --top 50", home, monkeypatch)
    rows, there = cells(output), int((TABLE.build().splits == "test").sum())
    assert {row[4] for row in rows} == {"test"}
    assert len(rows) == there < 24
    assert f"nearest of {there} records to the phrase" in output, "not of the whole data set"


def test_embed_writes_vectors_with_the_keys_that_search_shows(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = said("embed run --data table:pairs.csv --out vectors.npz", home, monkeypatch)
    assert "wrote vectors.npz: 24 records, 24 films, 24 reports" in output
    model = load_model(home / "run")
    with np.load(home / "vectors.npz", allow_pickle=False) as arrays:
        key, image, text = arrays["key"], torch.from_numpy(arrays["image"]), torch.from_numpy(arrays["text"])
        assert set(arrays["site"]) == {"site-1", "site-2"}
        assert set(arrays["split"]) == {"train", "val", "test"}
    films = model.encode_image([home / "images" / f"{row:06d}.png" for row in range(24)])
    assert (image - films).abs().max() <= 1e-5
    assert (text - model.encode_text(TABLE.build().reports)).abs().max() <= 1e-5
    first = cells(said("search run edema --data table:pairs.csv --top 1", home, monkeypatch))[0][2]
    assert first == key[(image @ model.encode_text("edema")).argmax()]


def test_embed_takes_a_classifier_and_records_without_reports(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors of reports that are not there are nan, and not counted."""
    count = int((TABLE.build().splits == "val").sum())
    output = said("embed classifier --data table:pairs.csv --split val --out c.npz", home, monkeypatch)
    assert f"wrote c.npz: {count} records, {count} films, {count} reports" in output
    output = said("embed run --data table:pairs.csv,report_column= --out n.npz", home, monkeypatch)
    assert "24 records, 24 films, 0 reports" in output
    with np.load(home / "n.npz", allow_pickle=False) as arrays:
        assert np.isnan(arrays["text"]).all()
        assert not np.isnan(arrays["image"]).any()


def test_embed_writes_parquet(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as in FILE.npz; a report that is not there is null."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'fedvlp[parquet]'")
    for name in ("p.npz", "p.parquet"):
        said(f"embed run --data table:pairs.csv,report_column= --out {name}", home, monkeypatch)
    table = parquet.read_table(home / "p.parquet").to_pydict()
    with np.load(home / "p.npz", allow_pickle=False) as arrays:
        assert list(table) == ["key", "split", "site", "image", "text"]
        for name in ("key", "split", "site"):
            assert table[name] == arrays[name].tolist()
        assert np.array_equal(np.array(table["image"], dtype=np.float32), arrays["image"])
    assert table["text"] == [None] * 24


def test_parquet_without_its_package_is_said_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedvlp.run.search.find_spec", lambda name: None)
    monkeypatch.chdir(home)
    done = CliRunner().invoke(app, shlex.split("embed run --data table:pairs.csv --out x.parquet"))
    assert "pip install 'fedvlp[parquet]'" in str(done.exception)


def test_export_writes_for_another_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'fedvlp[onnx]'")
    output = said("export run --to onnx --out onnx", home, monkeypatch)
    assert output == (
        'wrote onnx, with the features that it has here: onnxruntime.InferenceSession("onnx/image.onnx")\n'
    )
    prepared = ("prepare.py", "preprocessing.json", "radiograph.py", "text_restoration.py", "tokenization.json")
    names = ("README.md", "image.onnx", *prepared, "text.onnx")
    assert sorted(path.name for path in (home / "onnx").iterdir()) == sorted(names)


def test_a_model_whose_sites_keep_their_normalisation_is_exported_as_a_site_has_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a site it is refused by the name of the option that gives one."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'fedvlp[onnx]'")
    model = replace(MODEL, head_norm="batch")
    experiment = replace(SMALL, model=model, norm_statistics="site")
    state = model.build(3).state_dict()
    own = {name: tensor for name, tensor in state.items() if "running" in name or "batches_tracked" in name}
    run = RunFolder.create(tmp_path, experiment)
    run.finish(experiment, {name: tensor for name, tensor in state.items() if name not in own}, [])
    kept = {f"norm/served/{name}": tensor + 3 for name, tensor in own.items()}
    SiteMemory(run.path / "sites" / "site-1").after((0, 1), kept)
    command = f"export {run.path} --to onnx --out {tmp_path / 'onnx'}"
    refused = CliRunner().invoke(app, shlex.split(command))
    assert "--statistics SITE of predict, search, embed, explain, explore and export" in str(refused.exception)
    said(f"{command} --statistics site-1", home, monkeypatch)
    film = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "image.onnx"))
    (vector,) = session.run(None, {"image": film.numpy()})
    assert np.abs(vector - load_model(run.path, "site-1").encode_image(film).numpy()).max() <= 1e-5


MISTAKES = {
    "predict run nowhere.png": "nowhere.png: there is no such file or folder",
    "predict run images/000001.png nowhere.png": "nowhere.png: there is no such file or folder",
    "predict run notes.txt": "unsupported image format (PNG, JPEG, TIFF and DICOM are read)",
    "predict run images/000001.png --out p.txt": "--out is 'p.txt'; give a name that ends in .csv",
    "predict nowhere images/000001.png": "nowhere holds no trained model; give the folder of a run that has finished",
    "predict unfinished images/000001.png": "unfinished holds no trained model",
    "predict classifier images/000001.png": "a MultimodalClassifier compares no images with texts",
    "predict run images/000001.png --classes ,": "--classes names no class",
    "predict run images/000001.png --device tpu": "--device is 'tpu'; choose cpu, cuda, auto",
    "search run --data table:pairs.csv": "search takes one query; give a phrase",
    "search run edema --image images/000001.png --data table:pairs.csv": "search takes one query",
    "search run --image nowhere.png --data table:pairs.csv": "the image cannot be used: missing image",
    "search run edema --data table:nowhere.csv": "'nowhere.csv' is not there; give its table",
    "search run edema --data tabel:pairs.csv": "unknown source of --data 'tabel'; did you mean 'table'?",
    "search run edema --data table:pairs.csv --split tset": "unknown split 'tset'; expected one of train, val, test",
    "search run edema --data table:pairs.csv --top 0": "--top is 0; give how many records to show, at least 1",
    "search classifier edema --data table:pairs.csv": "a MultimodalClassifier compares no images with texts",
    "search run edema --data synthetic --cache x": "--cache is for data sets of image files",
    "embed run --data table:pairs.csv --out x.csv": "vectors are written as FILE.npz, which numpy reads",
    "embed run --data table:pairs.csv --out nowhere/x.npz": "its folder does not exist",
    "embed nowhere --data table:pairs.csv --out x.npz": "nowhere holds no trained model",
    "explain run images/000003.png edema --out map.jpg": "--out is 'map.jpg'; give a name that ends in .png",
    "explain run images/000003.png edema --out nowhere/map.png": "is not there; make it first, or name another",
    "explain run images/000003.png ' ' --out map.png": "explain: the phrase is empty",
    "explain run images/000003.png edema --out map.png --square 1": "a square of 1 pixels; expected 2 to 32",
    "explain run images/000003.png edema --out map.png --by attention": "no map by 'attention'; there are: occlusion",
    "explain run images/000003.png edema --out images/../images/000003.png": "--out is the image itself, which the",
    "explain run notes.txt edema --out map.png": "the image cannot be used: unsupported image format",
    "explain classifier images/000003.png edema --out map.png": "compares no images with texts",
    "export run --to tim --out x": "did you mean 'timm'?; there are: timm, huggingface, onnx, open_clip, monai-bundle",
    "export run --to open_clip --out x": "it has alignment blocks (model.alignment=false has none); its",
    "export run --to timm --out x": "the image tower is fedvlp's own (tiny), which timm does not have",
    "export run --to huggingface --out x": "the text tower is fedvlp's own, which transformers does not have",
    "export nowhere --to timm --out x": "nowhere holds no trained model",
    "embed run --data table:pairs.csv --out x.npz --statistics site-9": "site-9 holds no normalisation of a trained",
}


@pytest.mark.parametrize("part", range(3))
def test_a_mistake_is_one_line_and_exit_code_2(
    part: int, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in home.iterdir())
    monkeypatch.chdir(home)
    some = dict(list(MISTAKES.items())[part::3])
    assert taken_otherwise(some, monkeypatch, capsys) == {}
    assert sorted(path.name for path in home.iterdir()) == before


def test_cuda_that_is_not_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(home)
    done = CliRunner().invoke(app, shlex.split("predict run images/000001.png --device cuda"))
    assert "torch finds no GPU on this machine" in str(done.exception)
    assert said("predict run images/000001.png --device auto", home, monkeypatch)


def test_a_report_steers_no_terminal() -> None:
    assert printable("no\x1b[31m effusion\r\nclear\x07") == "no [31m effusion clear"
