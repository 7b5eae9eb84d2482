"""timm image towers: token layout, the paper's parameter count, grey input, offline errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedvlp.models.image import timm_tower


def test_paper_tower_parameters() -> None:
    """ViT-B/16 at 224 without classifier: 85,798,656 (spec 1.1)."""
    with torch.device("meta"):
        tower = timm_tower("vit_base_patch16_224", 224, False)
    assert sum(p.numel() for p in tower.parameters()) == 85_798_656
    assert tower.width == 768


@pytest.mark.parametrize(
    ("name", "size", "tokens", "width"),
    [
        ("vit_base_patch16_224", 224, 197, 768),
        ("deit_tiny_distilled_patch16_224", 64, 17, 192),
        ("vit_small_patch16_dinov3", 64, 17, 384),
        ("vit_medium_patch16_reg4_gap_256", 64, 17, 512),  # registers, no class token
        ("swin_tiny_patch4_window7_224", 224, 50, 768),
        ("swin_tiny_patch4_window7_224", 448, 197, 768),
        ("resnet18", 64, 5, 512),
        ("convnext_atto", 64, 5, 320),
    ],
)
def test_token_shapes(name: str, size: int, tokens: int, width: int) -> None:
    with torch.device("meta"):
        tower = timm_tower(name, size, False)
        out = tower(torch.empty(2, 1, size, size))
    assert out.shape == (2, tokens, width)
    assert tower.width == width


def test_vit_summary_is_the_class_token() -> None:
    tower = timm_tower("vit_tiny_patch16_224", 32, False).eval()
    images = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(tower(images)[:, 0], tower.model.forward_features(images.repeat(1, 3, 1, 1))[:, 0])


def test_vit_without_class_token() -> None:
    tower = timm_tower("vit_little_patch16_reg1_gap_256", 32, False)
    out = tower(torch.randn(2, 1, 32, 32))
    torch.testing.assert_close(out[:, 0], out[:, 1:].mean(dim=1))
    out.square().sum().backward()
    assert [n for n, p in tower.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto"])
def test_map_summary_is_the_mean_and_every_parameter_learns(name: str) -> None:
    tower = timm_tower(name, 64, False)
    out = tower(torch.randn(2, 1, 64, 64))
    torch.testing.assert_close(out[:, 0], out[:, 1:].mean(dim=1))
    out.square().sum().backward()
    assert [n for n, p in tower.named_parameters() if p.grad is None] == []


def test_map_positions_are_in_row_order() -> None:
    tower = timm_tower("resnet10t", 64, False).eval()
    images = torch.randn(1, 1, 64, 64)
    grid = tower.model.forward_features(images.repeat(1, 3, 1, 1))  # [1, W, 2, 2]
    torch.testing.assert_close(tower(images)[0, 2], grid[0, :, 0, 1])


def test_one_channel_tower() -> None:
    assert timm_tower("resnet10t", 64, False, in_channels=1)(torch.randn(2, 1, 64, 64)).shape == (2, 5, 512)


def test_refuses_unknown_names_and_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="has no model 'vit_gigantic'"):
        timm_tower("vit_gigantic", 224, False)
    with pytest.raises(ValueError, match="neither an existing folder nor a timm model name"):
        timm_tower("hf-hub:someone/something", 224, False)
    with pytest.raises(ValueError, match=r"\[2, 1, 48, 48\]"):
        timm_tower("resnet10t", 64, False)(torch.randn(2, 1, 48, 48))


def test_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("timm.create_model", unreachable)
    with pytest.raises(RuntimeError, match=r"weights could not be loaded \(OSError\).*local folder"):
        timm_tower("resnet10t", 64, True)


def test_pretrained_from_a_local_folder(tmp_path: Path) -> None:
    import timm

    source = timm.create_model("resnet10t", num_classes=3)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    described = {"architecture": "resnet10t", "num_classes": 3, "pretrained_cfg": {"num_classes": 3}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    tower = timm_tower(str(tmp_path), 64, True)
    assert torch.equal(tower.model.conv1[0].weight, source.conv1[0].weight)
    default = timm.get_pretrained_cfg("resnet10t")
    statistics = {"mean": list(default.mean), "std": list(default.std)}  # the folder says none
    assert tower.architecture() == {"name": "resnet10t", "args": {}, **statistics}
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        timm_tower(str(tmp_path), 64, True)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        timm_tower(str(tmp_path), 64, False)


def test_a_folder_brings_its_mean_std_and_channels(tmp_path: Path) -> None:
    """Films come as (x - 0.5) / 0.5; timm's own model sees (x - mean) / std of the same film."""
    import timm

    for channels in (1, 3):
        source = timm.create_model("resnet10t", num_classes=0, in_chans=channels).eval()
        save_file(source.state_dict(), tmp_path / "model.safetensors")
        mean, std = [0.48, 0.45, 0.40][:channels], [0.22, 0.23, 0.24][:channels]
        published = {"num_classes": 0, "mean": mean, "std": std, "input_size": [channels, 64, 64]}
        described = {"architecture": "resnet10t", "model_args": {"in_chans": channels}, "pretrained_cfg": published}
        (tmp_path / "config.json").write_text(json.dumps(described))
        tower = timm_tower(str(tmp_path), 64, True).eval()
        films = torch.rand(2, channels, 64, 64)
        as_timm = (films - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
        torch.testing.assert_close(tower((films - 0.5) / 0.5)[:, 0], source(as_timm), rtol=1e-5, atol=1e-5)
        again = timm_tower("resnet10t", 64, False, channels, saved=tower.architecture())
        assert again.architecture() == tower.architecture()
        assert again.architecture()["mean"] == mean
