"""`--start`: a federation begins with a model of another library, by a folder here and by a name in a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.starts import FAMILIES, TEXTS, TINY, close, films, pair, processor
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.cli.overrides import configured
from fedvlp.models.export import EXPORTS
from fedvlp.models.initial import InitialWeightsError, load_initial, pinned
from fedvlp.models.load import load_model
from fedvlp.models.other_libraries import StartError, as_model, read
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.run.start import imported

SMALL = ["rounds.rounds=1", "method.local_steps=1", "data.size=60", "training.batch_size=8"]


@pytest.fixture(autouse=True)
def _towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVLP_TOWERS", str(tmp_path / "towers"))


def of_dino(folder: Path) -> Any:
    import transformers as hf

    folder.mkdir()
    config = hf.Dinov2Config(**{**TINY, "image_size": 32, "patch_size": 8})  # type: ignore[arg-type]
    model = hf.Dinov2Model(config).eval()
    model.save_pretrained(folder)
    processor(folder)
    return model


@pytest.mark.parametrize("more", [[], ["model.adapters=lora", "model.adapter_rank=0"], ["model.adapters=lora"]])
def test_a_federated_round_from_a_pair(tmp_path: Path, more: list[str]) -> None:
    """All weights, heads alone, and adapters: it begins as the pair itself, and is read again."""
    (tmp_path / "clip").mkdir()
    pair(tmp_path / "clip", "clip")
    folder, start = imported(tmp_path / "clip", "ours")
    own = load_model(folder)
    experiment = configured("fedavg", None, 2, [*SMALL, *more], start="ours")
    assert experiment.model.init == pinned("ours")
    assert experiment.objective.temperature == start.said["temperature"]  # type: ignore[union-attr]
    before = experiment.model.build()
    load_initial(before, experiment.model.init)
    torch.testing.assert_close(before.encode_text(TEXTS), own.encode_text(TEXTS), rtol=0, atol=0)
    run = RunFolder.create(tmp_path / "runs", experiment)
    simulate(experiment, run, workers=1)
    after = load_model(run.path)
    assert after.encode_text(TEXTS).shape == (3, 24)
    frozen = bool(more)
    same = torch.equal(
        after.text_encoder.model.embeddings.token_embedding.weight,
        own.text_encoder.model.embeddings.token_embedding.weight,
    )  # type: ignore[union-attr, union-attr]
    assert same is frozen


def test_a_federated_round_from_an_image_tower(tmp_path: Path) -> None:
    """Given by its folder, which is imported by a name of its own; frozen, it gives its library's features."""
    theirs = of_dino(tmp_path / "dino")
    settings = [*SMALL, "model.adapters=lora", "model.adapter_rank=0"]
    experiment = configured("local", None, 2, settings, start=str(tmp_path / "dino"))
    assert "@" in experiment.model.image_tower
    run = RunFolder.create(tmp_path / "runs", experiment)
    simulate(experiment, run, workers=1)
    after, (ours, seen) = load_model(run.path), films()
    with torch.no_grad():
        torch.testing.assert_close(
            after.image_encoder(ours)[:, 0], theirs(pixel_values=seen).pooler_output, rtol=1e-5, atol=1e-5
        )


REPORTS = ("Очаговых изменений не выявлено, 12 мм.", "右下肺小结节。余未见异常。", "Χωρίς πλευριτική συλλογή.")
"""In other scripts than Latin."""


def multilingual(folder: Path) -> None:
    """A tiny XLM-RoBERTa that knows the letters of ``REPORTS`` and no other."""
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["<s>", "<pad>", "</s>", "<unk>", *sorted({"\u2581", *"".join(REPORTS)} - {" "})]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], 3, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    ends = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    more = {"vocab_size": len(names), "max_position_embeddings": 70, "pad_token_id": 1}
    hf.XLMRobertaModel(hf.XLMRobertaConfig(**{**TINY, **more})).save_pretrained(folder)


@pytest.mark.parametrize("given", ["start", "model.text_tower"])
@pytest.mark.parametrize("reports", [REPORTS, ("\u05d0\u05d9\u05df \u05de\u05de\u05e6\u05d0\u05d9\u05dd",)])
def test_a_multilingual_tower_is_trained_on_reports_as_written(
    tmp_path: Path, given: str, reports: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """It changes by two steps. Where a text tower lacks the words, as here those of Hebrew, somebody is told."""
    from PIL import Image

    multilingual(tmp_path / "tower")
    rng = np.random.default_rng(0)
    lines = ["image,report,site"]
    for row in range(24):
        Image.fromarray(rng.integers(0, 255, (72, 72), dtype=np.uint8)).save(tmp_path / f"{row}.png")
        lines.append(f'{row}.png,"{reports[row % len(reports)]}",{"ab"[row % 2]}')
    (tmp_path / "pairs.csv").write_text("\n".join(lines), encoding="utf-8")
    settings = ["rounds.rounds=1", "method.local_steps=2", "training.batch_size=4"]
    if given != "start":
        settings += [f"{given}={tmp_path / 'tower'}", "model.init=random", "model.pretrained=true"]
    data = f"table:{tmp_path / 'pairs.csv'},reports=as written,min_report_words=1"
    start = str(tmp_path / "tower") if given == "start" else None
    experiment = configured("fedavg", data, None, settings, start=start)
    before = experiment.model.build()
    run = RunFolder.create(tmp_path / "runs", experiment)
    simulate(experiment, run, workers=1)
    after = load_model(run.path)
    phrases = list(REPORTS[:1])
    assert not torch.equal(after.encode_text(phrases), before.encode_text(phrases))
    assert after.preprocessing["reports"] == "as written"
    ids, mask = after.tokenizer(reports)
    assert (ids[mask] == 3).any() == (reports != REPORTS)
    assert ("lacks most words" in caplog.text) == (reports != REPORTS)


def test_the_command_says_what_it_read_and_the_checksum(tmp_path: Path) -> None:
    """The same start once more under its name is no hindrance; anything else there is."""
    of_dino(tmp_path / "dino")
    command = ["towers", "import", str(tmp_path / "dino"), "--as", "ours"]
    for _ in range(2):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert "a dinov2 of transformers: image tower" in done.output
    assert pinned("ours") in done.output
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "film.png").touch()
    for more, said in ((["--to", str(tmp_path / "full")], "something else"), (["--as", "tiny"], "another name")):
        refused = CliRunner().invoke(app, [*command, *more])
        assert refused.exit_code != 0
        assert said in f"{refused.output}{refused.exception}"


def test_a_job_names_the_start_with_its_checksum(tmp_path: Path) -> None:
    of_dino(tmp_path / "dino")
    with pytest.raises(StartError, match=r"run `fedvlp towers import` .* --as NAME"):
        configured("fedavg", None, 2, SMALL, start=str(tmp_path / "dino"), travels=True)
    imported(tmp_path / "dino", "ours")
    experiment = configured("fedavg", None, 2, SMALL, start="ours", travels=True)
    assert experiment.model.image_tower.startswith("ours@")
    assert str(tmp_path) not in repr(experiment)
    (tmp_path / "dino" / "preprocessor_config.json").write_text('{"image_mean": [0], "image_std": [1], "size": 32}')
    imported(tmp_path / "dino", "theirs")
    assert pinned("theirs").partition("@")[2] != pinned("ours").partition("@")[2], "mean and std are pinned as well"
    other = replace(experiment.model, image_tower="ours@" + "0" * 64)
    with pytest.raises(InitialWeightsError, match="SHA-256"):
        other.build()
    with pytest.raises(InitialWeightsError, match="is not on this machine; run `fedvlp towers import`"):
        replace(experiment.model, image_tower="gone@" + "0" * 64).build()


EXPORT_OF = {
    "CLIP": "onnx", "SigLIP": "onnx", "open_clip": "onnx", "BiomedCLIP, mean": "open_clip", "ViT": "onnx",
    "DINOv2": "onnx", "DINOv3": "onnx", "Swin": "onnx", "BERT": "huggingface", "CXR-BERT": "huggingface",
    "ResNet of timm, one channel": "timm", "ViT of timm": "timm", "torchxrayvision": "timm",
}  # fmt: skip
"""Family -> the library that its model goes to after a round, which is compared there before it counts as written."""


OFTEN = ("SigLIP", "DINOv2", "BERT", "torchxrayvision")
"""A pair, and towers of each library, at every commit."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow(seconds=10)) for name in EXPORT_OF]
)
def test_a_family_before_a_round_after_it_and_exported(tmp_path: Path, family: str) -> None:
    """Classified and evaluated untrained; its frozen towers give its library's features after a round, and exported.

    Of a tower alone nobody may compare images with texts before it was trained: the other tower is random.
    """
    (tmp_path / "theirs").mkdir()
    theirs = FAMILIES[family](tmp_path / "theirs")
    folder, start = imported(theirs.path, "ours")
    untrained = load_model(folder)
    Image.fromarray(np.arange(72 * 72, dtype=np.uint8).reshape(72, 72)).save(tmp_path / "film.png")
    alone = " tower alone, whose other tower is random"
    for command in (
        f"predict {folder} {tmp_path}/film.png --classes effusion,edema",
        f"evaluate {folder} --what zero-shot --data synthetic --set data.size=40",
        f"evaluate {folder} --what retrieval --data synthetic --set data.size=40",
    ):
        done = CliRunner().invoke(app, command.split())
        assert (done.exit_code == 0) == (len(start.towers) == 2), f"{command}: {done.output} {done.exception}"
        assert done.exit_code == 0 or alone in str(done.exception)
    frozen = [*SMALL, "model.adapters=lora", "model.adapter_rank=0"]
    run = RunFolder.create(tmp_path / "runs", configured("fedavg", None, 2, frozen, start="ours"))
    simulate(run.experiment(), run, workers=1)
    after, images = load_model(run.path), films(theirs.size)[0][:2]
    same(untrained, after, images, start.towers)
    assert str(tmp_path / "out") in EXPORTS[EXPORT_OF[family]](after, tmp_path / "out")
    if EXPORT_OF[family] == "open_clip":
        again = as_model(read(tmp_path / "out"))
        close(again.encode_image(images), after.encode_image(images))
        close(again.encode_text(TEXTS), after.encode_text(TEXTS))
    elif EXPORT_OF[family] != "onnx":  # which was compared while it was written, and is no start
        same(after, as_model(read(tmp_path / "out")), images, start.towers)


@torch.no_grad()
def same(one: Any, other: Any, images: Any, towers: tuple[str, ...]) -> None:
    """Both models' towers give the same features."""
    if "image" in towers:
        close(other.image_encoder(images)[:, 0], one.image_encoder(images)[:, 0])
    if "text" in towers:
        ids, mask = one.tokenizer(TEXTS)
        close(other.text_encoder(ids, mask)[mask], one.text_encoder(ids, mask)[mask])


@pytest.mark.parametrize(("family", "tower"), [("DINOv2", "text"), ("BERT", "image")])
def test_a_tower_is_not_taken_for_the_other(tmp_path: Path, family: str, tower: str) -> None:
    (tmp_path / "theirs").mkdir()
    imported(FAMILIES[family](tmp_path / "theirs").path, "ours")
    with pytest.raises(InitialWeightsError, match=f"{tower}_tower 'ours': that model is an .* tower alone"):
        configured("fedavg", None, 2, [*SMALL, f"model.{tower}_tower=ours"]).model.build()
