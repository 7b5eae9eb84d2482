"""Dual encoder of FedDRA and FedRGB (after MGCA, https://arxiv.org/abs/2210.06044): towers, alignment blocks, heads.

Every tensor is named ``<modality>_<group>.<path>``, group being encoder, alignment or head (``core.types.group``).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.checkpoint import writing
from fedvlp.core.client import Trainee, digest, frozen_tensors
from fedvlp.core.seeds import seed as named_seed
from fedvlp.core.seeds import seeded
from fedvlp.core.types import IMAGE_TOKENS, TEXT_TOKENS, Batch, VLOutput, group, is_statistic, total_size
from fedvlp.models import adapters
from fedvlp.models.initial import InitialWeightsError, load_initial, own_folder, pinned, settled
from fedvlp.models.pretrained import alignment_block, image_tower, text_tower
from fedvlp.models.serialization import (
    USE,
    WEIGHTS,
    check_weights,
    read_config,
    verify_checksums,
    write_checksums,
)
from fedvlp.models.tiny import BUILT_IN, Block, HashTokenizer, TextTower, Tokenizer, Tower
from fedvlp.models.use import Usable

if TYPE_CHECKING:
    from fedvlp.core.client import MicroBatching


# Projection heads of FedDRA, FedRGB and MGCA (spec 1.1).

NORMS = ("batch", "layer", "none")


class _BatchNorm(nn.BatchNorm1d):
    """BatchNorm1d that refuses a training batch of one, whose variance is undefined, and says what to do."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and len(input) < 2:
            raise ValueError(
                f"projection head: training batch of {len(input)} with head_norm 'batch', expected at least 2; drop "
                "the short last batch, or set head_norm to 'layer'"
            )
        return super().forward(input)


def head(width: int, hidden: int | None, d: int, kind: str) -> nn.Sequential:
    """Projection head [B, W] -> [B, d]: Linear(W, hidden), norm, ReLU, Linear(hidden, d), norm without affine weights.

    ``hidden`` None gives one Linear(W, d). ``kind`` of the norm is one of ``NORMS``.
    """
    if hidden is None:
        return nn.Sequential(nn.Linear(width, d))

    def norm(features: int, affine: bool) -> nn.Module:
        if kind == "batch":
            return _BatchNorm(features, affine=affine)
        if kind == "layer":
            return nn.LayerNorm(features, elementwise_affine=affine)
        return nn.Identity()

    return nn.Sequential(nn.Linear(width, hidden), norm(hidden, True), nn.ReLU(), nn.Linear(hidden, d), norm(d, False))


FORMAT = 1  # of the folder written by DualEncoder.save
POOLINGS = ("summary", "mean")


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a DualEncoder. Raises ValueError, which names the field, for a value that is not allowed.

    FedDRA's model: vit_base_patch16_224, bert-base-cased, 6 layers, 112 tokens, 224 pixels, head_hidden 2048.
    """

    image_tower: str = "tiny"  # "tiny", "pixels", "lite0" (models/fetched.py), a timm name, or a folder in its layout
    text_tower: str = "tiny"  # "tiny", "gru", "words", "minilm" (models/fetched.py), a transformers name, or a folder
    embedding_dim: int = 128  # d, length of the unit vectors
    text_layers: int | None = None  # use the first so many layers of the text tower; None: all; papers: 6
    max_tokens: int = 64  # T, tokens of a report with the summary token; the papers use 112
    image_size: int = 64  # pixels, square
    in_channels: int | None = None  # of the image tower, to which grey is repeated; None: 1 for tiny, 3 for timm
    vocabulary: int = 4096  # ids of the tiny text towers, whose words are hashed
    head_hidden: int | None = 512  # width of the projection heads; papers: 2048; None: the head is one linear layer
    head_norm: str = "batch"  # "batch" (papers), "layer" (for any batch size and under differential privacy), "none"
    text_pooling: str = "summary"  # a report's feature: the "summary" token (FedDRA, FedRGB) or the "mean" (MedCLIP)
    alignment: bool = True  # one extra transformer block on each tower
    pretrained: bool = False  # load the towers' published weights
    init: str = ""  # weights to start from (models/initial.py): shipped, e.g. "tiny-pool", or a folder; "": random
    gradient_checkpointing: bool = False  # store only the input of each tower block and run the block again backwards
    adapters: str = ""  # "lora": the towers are frozen, low-rank adapters on them are trained; "": all weights are
    adapter_rank: int = 8  # r of the adapters; 0: none, the towers are frozen alone
    adapter_alpha: float = 16.0  # the adapters' outputs are scaled by alpha / r
    adapter_layers: str = "all"  # "all" linear layers of the towers, "attention", or "every": all that they have
    adapter_private: bool = False  # a second adapter on each of these layers, which never leaves its site

    def __post_init__(self) -> None:
        for name in ("image_tower", "text_tower"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"ModelConfig.{name}: {getattr(self, name)!r}, expected a name or a folder")
        optional = {"text_layers", "in_channels", "head_hidden"}
        for name in ("embedding_dim", "max_tokens", "image_size", "vocabulary", *sorted(optional)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (whole or (value is None and name in optional)):
                raise ValueError(f"ModelConfig.{name}: {value!r}, expected a whole number of at least 1")
        if self.head_norm not in NORMS:
            raise ValueError(f"ModelConfig.head_norm: {self.head_norm!r}, expected one of {', '.join(NORMS)}")
        if self.text_pooling not in POOLINGS:
            raise ValueError(f"ModelConfig.text_pooling: {self.text_pooling!r}, expected one of {', '.join(POOLINGS)}")
        for name in ("alignment", "pretrained", "gradient_checkpointing", "adapter_private"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"ModelConfig.{name}: {getattr(self, name)!r}, expected true or false")
        if self.pretrained and {self.image_tower, self.text_tower} <= set(BUILT_IN):
            raise ValueError("ModelConfig.pretrained: the built-in towers have no published weights; set it to false")
        if not isinstance(self.init, str):
            raise ValueError(f"ModelConfig.init: {self.init!r}, expected the name of shipped weights, or a folder")
        object.__setattr__(self, "init", settled(self.init))
        if self.pretrained and self.init:
            raise ValueError(
                "ModelConfig.init: pretrained loads published weights already; set init to random, or pretrained to "
                "false"
            )

        self._check_adapters()

    def _check_adapters(self) -> None:
        kind = self.adapters.partition("@")[0] if isinstance(self.adapters, str) else None
        if kind not in (adapters.NONE, adapters.LORA):
            raise ValueError(f"ModelConfig.adapters: {self.adapters!r}, expected lora, or nothing")
        rank = self.adapter_rank
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"ModelConfig.adapter_rank: {rank!r}, expected a whole number of at least 0")
        if not self.adapter_alpha > 0:
            raise ValueError(f"ModelConfig.adapter_alpha: {self.adapter_alpha!r}, expected a number above 0")
        if self.adapter_layers not in adapters.LAYERS:
            raise ValueError(
                f"ModelConfig.adapter_layers: {self.adapter_layers!r}, expected one of {', '.join(adapters.LAYERS)}"
            )
        if self.adapter_private and not (kind and rank):
            raise ValueError(
                "ModelConfig.adapter_private: there are no adapters beside which a site could have its own; set "
                "adapters to lora and adapter_rank to at least 1"
            )
        if kind and not (self.pretrained or self.init):
            raise ValueError(
                "ModelConfig.adapters: frozen towers must have learned; set init to weights that every site has, e.g. "
                "tiny-pool, or pretrained to true"
            )

    def build(self, seed: int = 0) -> DualEncoder:
        """The model; the same weights for the same seed.

        Every module has a random stream of its own, and the global generators stay untouched. Frozen towers have the
        weights that they start from. Raises InitialWeightsError for these.
        """
        return self._with_towers(self.untrained(seed))

    def outline(self) -> Any:
        """The model on torch's "meta" device: the shapes of its tensors, without values or the memory for them."""
        shape = copy.copy(self)
        object.__setattr__(shape, "pretrained", False)  # no weights are read, though adapters ask for some
        with torch.device("meta"):
            return shape.untrained()

    def untrained(self, seed: int = 0) -> DualEncoder:
        """The model, its frozen towers too, with random weights."""
        return DualEncoder(self, seed)

    def pinned(self) -> ModelConfig:
        """The same with the checksum of the weights that it starts from. Raises InitialWeightsError."""
        init = pinned(self.init)
        image, text = (pinned(name) if own_folder(name) else name for name in (self.image_tower, self.text_tower))
        if (image, text) != (self.image_tower, self.text_tower):
            return replace(self, image_tower=image, text_tower=text).pinned()
        if self.adapters != adapters.LORA or not self.pretrained:
            return replace(self, init=init)
        return replace(self, adapters=f"{adapters.LORA}@{self.build().towers_digest()}")

    def is_pinned(self) -> bool:
        """Whether the weights of frozen towers are named by their checksum: here, or by that of ``init``."""
        return not self.pretrained or self.adapters != adapters.LORA

    def _with_towers(self, model: Any) -> Any:
        """``model`` with its frozen towers' own weights, where they are frozen."""
        if self.adapters:
            load_initial(model, self.init)
            model.verify_towers()
        return model


@dataclass(frozen=True)
class Encoded:
    """The towers' outputs: image [B, M, W], text [B, T, W], text_mask [B, T]; None for an absent modality.

    ``image_attention`` [B, M], ``text_attention`` [B, T]: the summary token's, in the last block of each tower.
    ``views`` [B, V, M, W]: of V changed copies of each image, where the batch has them.
    """

    image: Tensor | None = None
    text: Tensor | None = None
    text_mask: Tensor | None = None
    image_attention: Tensor | None = None
    text_attention: Tensor | None = None
    views: Tensor | None = None


# Towers that run only when a model aligns their outputs: used while gradients are cached (training/grad_cache.py).

INPUTS = ("image", "text", "text_mask", "views", IMAGE_TOKENS, TEXT_TOKENS)
"""Keys of a batch that the towers read, or that stand for what they would make of it."""


@dataclass(frozen=True)
class Deferred:
    """Stands for ``encoder.towers(batch)`` until a model aligns it: outputs take less memory after alignment."""

    encoder: Any  # a DualEncoder
    batch: Batch
    micro_batches: MicroBatching
    gradient: bool = field(default_factory=torch.is_grad_enabled)  # whether gradients were on when it was made

    def aligned(self, model: Any) -> VLOutput:
        """``model.align`` of the towers' outputs, computed chunk by chunk."""

        def towers(batch: Batch) -> VLOutput:
            with torch.set_grad_enabled(self.gradient and torch.is_grad_enabled()):
                encoded = self.encoder.towers(batch)
            return model.align(encoded)

        return self.micro_batches.map(towers, self.batch)


class DualEncoder(Usable, Trainee, nn.Module):
    """Image and text towers with alignment blocks and projection heads; ``forward(batch) = project(encode(batch))``.

    The image block is pre-norm (as in ViT), the text block post-norm (as in BERT). Both start from random weights and
    see all tokens, with padding masked. Differs: the reference code attends to the padding.
    ``attention``: whether outputs hold the attention of the summary tokens, in the alignment blocks or, without these,
    in the last blocks of the towers.
    """

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    attention: bool = False
    micro_batches: MicroBatching | None = (
        None  # how the towers see a batch in parts, while gradients are cached (training/grad_cache.py)
    )

    def __init__(self, config: ModelConfig, seed: int = 0, saved: dict[str, Any] | None = None) -> None:
        """``saved``: towers and tokenizer as a saved model's config.json has them, to rebuild without downloads."""
        super().__init__()
        self.config, saved = config, saved or {}
        image: Tower = seeded(seed, 0, lambda: image_tower(config, saved.get("image_architecture")))
        described, tokenizer = saved.get("text_architecture"), saved.get("tokenizer")
        text: TextTower = seeded(seed, 1, lambda: text_tower(config, described, tokenizer))
        self.image_encoder, self.text_encoder = image, text
        if config.gradient_checkpointing:
            image.checkpoint_blocks()
            text.checkpoint_blocks()
        self.image_alignment = seeded(seed, 2, lambda: alignment_block(config, image, post_norm=False))
        self.text_alignment = seeded(seed, 3, lambda: alignment_block(config, text, post_norm=True))
        self.image_head = seeded(seed, 4, lambda: self.new_head("image"))
        self.text_head = seeded(seed, 5, lambda: self.new_head("text"))
        self._adapt(seed)
        self.preprocessing: dict[str, Any] = {}  # how images and phrases are prepared, as config.json says it
        self.prompts: dict[str, tuple[str, ...]] = {}  # the model's own classes for zero-shot: sentences of each
        self.start: dict[
            str, Any
        ] = {}  # of one of another library (models/other_libraries.py): what it is, temperature
        self.frozen_statistics: tuple[str, ...] = ()  # modules whose running statistics its run left as they were

    def _adapt(self, seed: int) -> None:
        config = self.config
        self._frozen: tuple[str, ...] = ()
        if not config.adapters:
            return
        rank, alpha, layers = config.adapter_rank, config.adapter_alpha, config.adapter_layers
        own = named_seed(seed, "adapters")
        self.image_adapter = seeded(own, 0, lambda: adapters.adapt(self.image_encoder, rank, alpha, layers))
        self.text_adapter = seeded(own, 1, lambda: adapters.adapt(self.text_encoder, rank, alpha, layers))
        if config.adapter_private:
            self.image_private = seeded(own, 2, lambda: adapters.adapt_privately(self.image_encoder, rank, alpha))
            self.text_private = seeded(own, 3, lambda: adapters.adapt_privately(self.text_encoder, rank, alpha))
        towers = {"image_encoder.": self.image_encoder, "text_encoder.": self.text_encoder}
        self._frozen = tuple(
            prefix + name for prefix, tower in towers.items() for name in adapters.frozen(tower, rank, layers)
        )

    @property
    def frozen_prefixes(self) -> tuple[str, ...]:
        """What the names of the frozen tensors begin with: of towers that have adapters, or none."""
        return self._frozen if self.config.adapters else ()

    def towers_digest(self) -> str:
        """SHA-256 of the frozen towers' weights."""
        return digest(self.state_dict(), self.frozen_prefixes)

    def verify_towers(self) -> None:
        """Raises InitialWeightsError where the frozen towers are not those that the experiment was made with."""
        wanted = self.config.adapters.partition("@")[2]
        if wanted and wanted != (seen := self.towers_digest()):
            raise InitialWeightsError(
                f"model.adapters: the frozen towers have the SHA-256 {seen}, but the experiment was made with "
                f"{wanted}; get those weights here, or begin anew with these"
            )

    def merge_adapters(self) -> None:
        """Adds the adapters to the towers' weights, in place: the same function (to rounding), without adapters."""
        if not self.config.adapters:
            return
        frozen = filter(is_statistic, frozen_tensors(self))
        self.frozen_statistics = tuple(sorted({name.partition(".")[0] for name in frozen}))
        for tower in (self.image_encoder, self.text_encoder):
            adapters.merge(tower)
        del self.image_adapter, self.text_adapter
        if self.config.adapter_private:
            del self.image_private, self.text_private
        self.config = replace(self.config, adapters=adapters.NONE, adapter_private=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """Maps N texts to ids [N, T] and mask [N, T]: the ``text`` and ``text_mask`` of a batch."""
        return self.text_encoder.tokenizer

    def encode(self, batch: Batch) -> Encoded | Deferred:
        """The towers' outputs on the model's device; with ``split``, ``project`` runs the towers instead.

        Without ``text_mask`` in the batch, every token is real.
        """
        device = next(self.parameters()).device
        batch = {name: batch[name].to(device) for name in INPUTS if name in batch}
        return self.towers(batch) if self.micro_batches is None else Deferred(self, batch, self.micro_batches)

    def towers(self, batch: Batch) -> Encoded:
        """Runs both towers on all of ``batch``; position 0 of the text is always a real token.

        Tokens that the batch has already (training/frozen_features.py) are taken as they are.
        """
        return Encoded(**self._image_tower(batch), **self._text_tower(batch))

    def _image_tower(self, batch: Batch) -> dict[str, Tensor | None]:
        image, attention = batch.get(IMAGE_TOKENS), None
        if "image" in batch:
            image, attention = self._run(self.image_encoder, batch["image"])  # [B, M, W]
        views = of_views(self.image_encoder, batch["views"]) if "views" in batch else None  # [B, V, M, W]
        return {"image": image, "image_attention": attention, "views": views}

    def _text_tower(self, batch: Batch) -> dict[str, Tensor | None]:
        if "text" not in batch:
            return {}
        mask = batch.get("text_mask")
        mask = torch.ones_like(batch["text"], dtype=torch.bool) if mask is None else mask.bool()  # [B, T]
        mask = torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], dim=1)  # attention over nothing would be nan
        text, attention = batch.get(TEXT_TOKENS), None
        if text is None:
            text, attention = self._run(self.text_encoder, batch["text"], mask)  # [B, T, W]
        return {"text": text, "text_mask": mask, "text_attention": attention}

    def _run(self, tower: Tower, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """A tower's tokens and, where asked for and there is no alignment block, the attention in its last block."""
        if self.attention and not self.config.alignment:
            return tower.with_attention(*inputs)
        return tower(*inputs), None

    def align(self, encoded: Encoded) -> VLOutput:
        """Alignment blocks and pooling: ``image`` and ``text`` of the output are pooled features [B, W]."""
        image, text = self._image_aligned(encoded), self._text_aligned(encoded)
        views = None if encoded.views is None else of_views(self.image_alignment, encoded.views)
        return VLOutput(**image, **text, text_mask=encoded.text_mask, views=views)

    def _image_aligned(self, encoded: Encoded) -> dict[str, Tensor | None]:
        if encoded.image is None:
            return {}
        tokens = self.image_alignment(encoded.image)  # [B, M, W]
        attention = self._attention(self.image_alignment, encoded.image, None, encoded.image_attention)
        return {"image": tokens[:, 0], "image_tokens": tokens, "image_attention": attention}

    def _text_aligned(self, encoded: Encoded) -> dict[str, Tensor | None]:
        if encoded.text is None:
            return {}
        tokens = self.text_alignment(encoded.text, encoded.text_mask)  # [B, T, W]
        attention = self._attention(self.text_alignment, encoded.text, encoded.text_mask, encoded.text_attention)
        mean = self.config.text_pooling == "mean"
        text = masked_mean(tokens, encoded.text_mask) if mean else tokens[:, 0]
        return {"text": text, "text_tokens": tokens, "text_attention": attention}

    def project(self, encoded: Encoded | Deferred) -> VLOutput:
        """Alignment, pooling, head, unit length: vectors [B, d]. One encoding can be projected by several models."""
        return self.heads(encoded.aligned(self) if isinstance(encoded, Deferred) else self.align(encoded))

    def heads(self, aligned: VLOutput) -> VLOutput:
        """Unit vectors [B, d] of pooled features [B, W]."""
        image = None if aligned.image is None else _unit(self.image_head(aligned.image))
        text = None if aligned.text is None else _unit(self.text_head(aligned.text))
        return replace(aligned, image=image, text=text)

    def set_attention(self, kind: str) -> None:
        """Chooses "sdpa" (PyTorch's fused kernels) or "explicit" (matrix products) in all blocks."""
        for module in self.modules():
            if hasattr(module, "fused_attn"):  # our blocks and timm's
                module.fused_attn = kind == "sdpa"  # type: ignore[assignment]
            choose: Any = getattr(module, "set_attn_implementation", None)  # transformers
            if choose is not None:
                choose("sdpa" if kind == "sdpa" else "eager")

    def _attention(self, block: nn.Module, tokens: Tensor, mask: Tensor | None, below: Tensor | None) -> Tensor | None:
        """Attention [B, T-1] of the alignment block over ``tokens`` [B, T, W]; else ``below`` [B, T], the tower's."""
        if self.attention and isinstance(block, Block):
            below = block.summary_attention(tokens, mask)
        return None if below is None else below[:, 1:]

    def new_head(self, modality: str) -> nn.Module:
        """A new projection head [N, W] -> [N, d] for ``modality``; objectives make their own, for tokens."""
        config, tower = self.config, self.image_encoder if modality == "image" else self.text_encoder
        return head(tower.width, config.head_hidden, config.embedding_dim, config.head_norm)

    def forward(self, batch: Batch) -> VLOutput:
        """Unit vectors [B, d] of the modalities in ``batch``, with tokens and mask."""
        return self.project(self.encode(batch))

    def save(
        self, folder: str | Path, statistics: str = "", more: Callable[[Path], object] = lambda folder: None
    ) -> None:
        """Writes model.safetensors, config.json, SHA256SUMS and, for a transformers tower, tokenizer/.

        Each file is replaced whole, the weights last. The folder is complete: a tower that came from a local folder or
        the hub is described, not referred to. ``statistics`` says of which records the running statistics of batch
        normalisation are. ``more`` writes files of its own into the folder that it is given. Raises CheckpointError
        where the disk takes no more, and ValueError for a model with adapters, which no saved model has.
        """
        if self.config.adapters:
            raise ValueError(
                f"{folder}: this model has adapters beside its towers, and a saved model has none; call merge_adapters "
                "first, on a copy if training is to continue"
            )
        folder = Path(folder)
        with writing(folder / WEIGHTS, total_size(self.state_dict())):
            self._save(folder, statistics, more)

    def _save(self, folder: Path, statistics: str, more: Callable[[Path], object]) -> None:
        """Writes into a folder beside, and moves what is there."""
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
        try:
            self._write(draft, statistics)
            more(draft)
            write_checksums(draft)
            files = sorted(p for p in draft.rglob("*") if p.is_file())
            for path in sorted(files, key=lambda path: path.name == WEIGHTS):  # where they are, the folder is complete
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                target = folder / path.relative_to(draft)
                target.parent.mkdir(exist_ok=True)
                os.replace(path, target)
            handle = os.open(folder, os.O_RDONLY)
            os.fsync(handle)  # the renames
            os.close(handle)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _write(self, folder: Path, statistics: str) -> None:
        from safetensors.torch import save_file

        if not isinstance(self.tokenizer, HashTokenizer):
            self.tokenizer.tokenizer.save_pretrained(folder / "tokenizer")  # type: ignore[attr-defined]
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        # With the checksum of the weights, a job also pins how images and texts of a model to start from are prepared.
        prepared = {"start": json.dumps([self.start, *self._prepared()])} if self.start else None
        save_file(tensors, folder / WEIGHTS, metadata=prepared)
        said = self.described() | ({"statistics": statistics} if statistics else {})
        (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")

    def _prepared(self) -> tuple[Any, ...]:
        """What vectors depend on beside the weights, of towers that others have trained."""
        statistics = {key: self.image_encoder.architecture().get(key) for key in ("mean", "std")}
        return statistics, self.config.image_size, self.config.text_pooling, self.tokenizer.identity()

    def described(self) -> dict[str, Any]:
        """What config.json says: all that is needed beside the weights to build this model again without a download."""
        own = not isinstance(self.tokenizer, HashTokenizer)
        image, text = self.image_encoder.architecture(), self.text_encoder.architecture()
        towers = {"image_tower": image.get("name", "tiny"), "text_tower": text.get("model_type", "tiny")}
        return {
            "format": FORMAT,
            "model": {**asdict(self.config), **towers, "pretrained": False, "init": ""},
            "image_architecture": image,
            "text_architecture": text,
            "tokenizer": "transformers" if own else "hash",
            **({"preprocessing": self.preprocessing} if self.preprocessing else {}),
            **({"prompts": self.prompts} if self.prompts else {}),
            **({"start": self.start} if self.start else {}),
            **({"frozen_statistics": self.frozen_statistics} if self.frozen_statistics else {}),
        }

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> DualEncoder:
        """The model that ``save`` wrote, on the CPU, in evaluation mode. Nothing is downloaded or unpickled.

        Raises ValueError for a folder without a saved model, a file that is not as it was saved, or weights that do not
        fit.
        """
        from safetensors.torch import load_file

        folder = Path(folder)
        verify_checksums(folder)
        saved, config = read_config(folder, FORMAT, cls.config_class)
        preprocessing, prompts, frozen, start = (saved.pop(key) for key in USE)
        if saved.pop("tokenizer") == "transformers":
            from fedvlp.models.text import load_tokenizer

            saved["tokenizer"] = load_tokenizer(folder / "tokenizer", config.max_tokens)
        check_weights(folder, lambda: cls(config, saved=saved))
        model = cls(config, saved=saved)
        model.load_state_dict(load_file(folder / WEIGHTS))
        model.preprocessing = dict(preprocessing or {})
        model.prompts = {name: tuple(sentences) for name, sentences in (prompts or {}).items()}
        model.frozen_statistics, model.start = tuple(frozen or ()), dict(start or {})
        return model.eval()


def of_views(module: nn.Module, views: Tensor) -> Tensor:
    """A module of images or tokens applied to V of them for each of B records: [B, V, ...] -> [B, V, ...]."""
    outputs: Tensor = module(views.flatten(0, 1))
    return outputs.unflatten(0, views.shape[:2])


def masked_mean(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the real tokens, mask [B, T] True, of each row: [B, T, W] -> [B, W].

    Differs: MedCLIP's released code averages the padding too, and the hidden states of three layers.
    """
    if mask is None:
        return tokens.mean(dim=1)
    weight = mask.to(tokens.dtype)[:, :, None]  # [B, T, 1]
    return (tokens * weight).sum(dim=1) / weight.sum(dim=1)


def describe(model: DualEncoder) -> dict[str, int]:
    """Parameter counts: {"image_encoder": n, ..., "encoder": n, "alignment": n, "head": n, "total": n}."""
    counts = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
    for name, count in list(counts.items()):
        if group(name) != name:  # a classifier is a group of its own
            counts[group(name)] = counts.get(group(name), 0) + count
    return {**counts, "total": sum(p.numel() for p in model.parameters())}


def _unit(vectors: Tensor) -> Tensor:
    """Rows scaled to unit length, in at least float32. [B, d] -> [B, d]"""
    return F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)
