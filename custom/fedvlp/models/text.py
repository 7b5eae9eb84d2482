"""Text towers from transformers (Wolf et al., 2020, https://aclanthology.org/2020.emnlp-demos.6) as token sequences."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.types import CONTINUATION, SPECIAL, WORD
from fedvlp.models.fetched import IN_KIT, NoWeightsError, unreachable
from fedvlp.models.serialization import refuse_large_tokenizer
from fedvlp.models.tiny import HashTokenizer, TextTower, Tokenizer, check_length, first_attention

BERT_VOCABULARY = {"bert-base-cased": 28_996, "bio_clinicalbert": 28_996, "bert-base-uncased": 30_522}
"""Vocabulary of the BERT-base family, by the last part of the name, lower-cased. They share every other number."""

_REMEDY = (
    f"Give a local folder (config.json, model.safetensors, tokenizer files) as text_tower {IN_KIT}, or set pretrained "
    "to false"
)


class TransformersTokenizer:
    """A transformers tokenizer behind the protocol ``Tokenizer``.

    Texts are padded to ``max_tokens``. A longer one is cut before the token that ends every text, if there is one. A
    text that is empty or not a string becomes the special tokens alone. Raises ValueError for a tokenizer without
    vocabulary files.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # transformers 5 invents one like this
            raise ValueError("tokenizer without a single word: its vocabulary files are missing")
        self.tokenizer, self.vocabulary, self.max_tokens, self.truncated = tokenizer, len(tokenizer), max_tokens, 0
        self.pieces, self.unknown = _pieces(tokenizer), tokenizer.unk_token_id

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids [N, T] int64 and mask [N, T] bool, True at real tokens; T = ``max_tokens``."""
        if isinstance(texts, str):
            raise TypeError("TransformersTokenizer: one str given; expected a sequence of texts, e.g. [text]")
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.full((len(texts), self.max_tokens), pad, dtype=torch.int64)  # [N, T]
        mask = torch.zeros(len(texts), self.max_tokens, dtype=torch.bool)  # [N, T]
        for row, text in enumerate(texts):
            tokens = self.tokenizer(text if isinstance(text, str) else "", verbose=False)["input_ids"]
            if len(tokens) > self.max_tokens:
                self.truncated += 1
                tokens = self.tokenizer(text, truncation=True, max_length=self.max_tokens)["input_ids"]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        return ids, mask

    def identity(self) -> str:
        """All that ids and mask depend on beside the texts; "" where the tokenizer cannot say it."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return f"{type(self.tokenizer).__name__} {self.max_tokens} {backend.to_str()}" if backend else ""


SIGLIP = "siglip_text_model"
POOLED = ("clip_text_model", SIGLIP)
"""Text towers of pairs, whose feature of a text is their pooler's. It takes the place of the token at position 0."""


class TransformersTower(TextTower):
    """A transformers encoder: ids [B, T] and mask [B, T] (True at real tokens) -> tokens [B, T, W].

    A tower whose configuration says ``inner_projection`` ends with one more layer of that width and GELU: the first
    half of the text projection of open_clip's "mlp" (BiomedCLIP's); the second half is the model's head.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        settings: Any = model.config
        inner = getattr(settings, "inner_projection", None)
        self.inner = nn.Linear(settings.hidden_size, inner, bias=False) if inner else None
        self.width = int(inner or settings.hidden_size)
        self.dropout = float(getattr(settings, "hidden_dropout_prob", None) or getattr(settings, "dropout", None) or 0)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Tokens [B, T, W]. Raises ValueError for more tokens than the tower has positions for."""
        check_length(ids, self.tokenizer.max_tokens)
        settings: Any = self.model.config
        length = ids.shape[1]
        if settings.model_type == SIGLIP:  # it was trained on padding up to a fixed length, and sees it
            ids = ids.masked_fill(~mask, settings.pad_token_id)  # so that an export to ONNX keeps the mask
            ids = F.pad(ids, (0, self.tokenizer.max_tokens - length), value=settings.pad_token_id)
            out = self.model(input_ids=ids)
        else:
            out = self.model(input_ids=ids, attention_mask=self._visible(mask))
        tokens = out.last_hidden_state[:, :length]  # [B, T, W]
        if settings.model_type in POOLED:
            tokens = torch.cat([out.pooler_output[:, None], tokens[:, 1:]], dim=1)
        return tokens if self.inner is None else F.gelu(self.inner(tokens))

    def words_layer(self) -> Any:
        """The layer that gives each id its vector; None for a model without one, as those that read characters."""
        model: Any = self.model
        try:
            return model.get_input_embeddings()
        except NotImplementedError:
            return None

    def _visible(self, mask: Tensor) -> Tensor:
        """The mask [B, T] as the model takes it.

        transformers looks whether a mask [B, T] hides anything, and for that the host would wait for a GPU in every
        forward pass. A mask [B, 1, 1, T] counts as prepared and is taken as it is.
        """
        settings: Any = self.model.config
        if mask.device.type == "cpu" or settings.model_type != "bert" or settings._attn_implementation != "sdpa":
            return mask.long()
        return mask[:, None, None, :]

    def with_attention(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens and position 0's attention [B, T]; None unless the model is built like BERT (RoBERTa, ELECTRA)."""
        ids, mask = inputs
        layers = getattr(getattr(self.model, "encoder", None), "layer", None)
        last: Any = getattr(getattr(layers[-1], "attention", None), "self", None) if layers else None
        if (
            self.inner is not None
            or last is None
            or not all(hasattr(last, name) for name in ("query", "key", "num_attention_heads"))
        ):
            return self(ids, mask), None
        check_length(ids, self.tokenizer.max_tokens)
        out = self.model(input_ids=ids, attention_mask=self._visible(mask), output_hidden_states=True)
        with torch.no_grad():
            before = out.hidden_states[-2]  # input of the last layer
            heads = (last.num_attention_heads, -1)
            q, k = (layer(before).unflatten(-1, heads).transpose(1, 2) for layer in (last.query, last.key))
            return out.last_hidden_state, first_attention(q, k, mask)

    def checkpoint_blocks(self) -> None:
        """As for every tower, by transformers' own switch."""
        model: Any = self.model
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        model.config.use_cache = False  # a decoder warns otherwise
        enable({"use_reentrant": False})

    def architecture(self) -> dict[str, Any]:
        """The transformers configuration without the name of its source."""
        settings: Any = self.model.config
        described = json.loads(settings.to_json_string(use_diff=False))
        return {key: value for key, value in described.items() if key not in ("_name_or_path", "transformers_version")}


def _pieces(tokenizer: Any) -> Tensor:
    """What each of the V ids stands for (``Tokenizer.pieces``), [V] int8, by the marks in the vocabulary.

    WordPiece marks the pieces that continue a word ("##"); byte-level BPE and SentencePiece mark those that begin one.
    """
    vocabulary = {str(token): number for token, number in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_tokens) - {tokenizer.unk_token, tokenizer.mask_token}
    begins = next((mark for mark in ("\u0120", "\u2581") if any(t.startswith(mark) for t in vocabulary)), "")
    pieces = torch.full((max(vocabulary.values()) + 1,), WORD, dtype=torch.int8, device="cpu")
    for token, number in vocabulary.items():
        continues = not token.startswith(begins) if begins else token.startswith("##")
        if token in special:
            pieces[number] = SPECIAL
        elif continues:
            pieces[number] = CONTINUATION
    return pieces


def transformers_tower(name: str, layers: int | None, max_tokens: int, pretrained: bool) -> TransformersTower:
    """Builds an encoder from a local folder or a hub name, with its first ``layers`` layers (None: all).

    The papers' "BERT-base" is six layers: 65,192,448 parameters without pooler and cross-attention (their cost tables
    count 79,375,872, with six cross-attention blocks that are never used). A BERT-base name with ``pretrained`` false
    is built from ``BERT_VOCABULARY``: no network, the same at every site, with a HashTokenizer.
    Raises ValueError for ``layers`` or ``max_tokens`` that the model has not, NoWeightsError where files are missing.
    """
    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # every command and log would have it, twice
    settings = _settings(name, pretrained)
    if layers is not None:
        if not 1 <= layers <= settings.num_hidden_layers:
            raise ValueError(f"text_layers {layers}: {name!r} has 1 to {settings.num_hidden_layers}")
        settings.num_hidden_layers = layers
    tokenizer = _tokenizer(name, settings, max_tokens, pretrained)
    if not pretrained:
        return _build(settings, tokenizer)
    try:
        model = AutoModel.from_pretrained(
            name,
            config=settings,
            use_safetensors=True,
            dtype=torch.float32,
            local_files_only=_local(name),
            **_no_pooler(settings),
        )
    except Exception as error:
        raise NoWeightsError(f"text_tower {name!r}: weights not loaded ({type(error).__name__}). {_REMEDY}") from error
    return TransformersTower(model, tokenizer)


def rebuild_tower(architecture: dict[str, Any], max_tokens: int, tokenizer: Tokenizer | None) -> TransformersTower:
    """The tower that ``TransformersTower.architecture()`` describes, randomly initialised, without network.

    Raises ValueError where the installed transformers cannot build it.
    """
    import transformers

    try:
        settings = transformers.AutoConfig.for_model(**architecture)
        return _build(settings, tokenizer or HashTokenizer(settings.vocab_size, max_tokens))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"saved text tower: transformers {transformers.__version__} cannot build it ({error}); load it with the "
            "version that wrote it"
        ) from error


def load_tokenizer(folder: str | Path, max_tokens: int) -> TransformersTokenizer:
    """A transformers tokenizer from a local folder."""
    from transformers import AutoTokenizer

    refuse_large_tokenizer(Path(folder))
    return TransformersTokenizer(
        AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False), max_tokens
    )


def _build(settings: Any, tokenizer: Tokenizer) -> TransformersTower:
    if tokenizer.vocabulary > settings.vocab_size:
        raise ValueError(f"text tower: tokenizer of {tokenizer.vocabulary} words, embeddings for {settings.vocab_size}")
    return TransformersTower(bare_model(settings), tokenizer)


def positions_of(settings: Any) -> int | None:
    """Return how many tokens a model of this configuration has positions for; None: as many as one likes.

    RoBERTa and its kin count from behind the padding's index, so they have fewer than their configuration says. The
    embedding itself knows.
    """
    with torch.device("meta"):  # nothing is allocated
        model = bare_model(settings)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Embedding) and "position" in name.rpartition(".")[2]:
            skipped = getattr(layer, "offset", 0) if layer.padding_idx is None else layer.padding_idx + 1
            return int(layer.num_embeddings) - int(skipped)
    return getattr(settings, "max_position_embeddings", None)


def bare_model(settings: Any) -> Any:
    """transformers' model of a configuration, randomly initialised, without a pooler that is never trained."""
    from transformers import AutoModel, SiglipTextModel

    if settings.model_type == SIGLIP:  # AutoModel does not know it
        return SiglipTextModel(settings).float()
    return AutoModel.from_config(settings, dtype=torch.float32, **_no_pooler(settings))


def _settings(name: str, pretrained: bool) -> Any:
    """The transformers configuration: a local folder's, the built-in BERT-base one, or the hub's."""
    from transformers import AutoConfig, BertConfig

    family = name.rpartition("/")[2].lower()
    if not pretrained and family in BERT_VOCABULARY and not Path(name).is_dir():
        return BertConfig(vocab_size=BERT_VOCABULARY[family])
    try:
        settings = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=_local(name))
    except Exception as error:
        raise NoWeightsError(
            f"text_tower {name!r}: no configuration found ({type(error).__name__}). {_REMEDY}; names that need no "
            f"download: tiny, {', '.join(BERT_VOCABULARY)}"
        ) from error
    settings.is_decoder = settings.add_cross_attention = False
    return settings


def _tokenizer(name: str, settings: Any, max_tokens: int, pretrained: bool) -> Tokenizer:
    """The model's own tokenizer; without one and without pretrained weights a HashTokenizer, with a warning."""
    positions = positions_of(settings) or max_tokens
    if max_tokens > positions:
        raise ValueError(f"max_tokens {max_tokens}: {name!r} has positions for {positions}")
    built_in = not pretrained and not Path(name).is_dir() and name.rpartition("/")[2].lower() in BERT_VOCABULARY
    if not built_in:
        try:
            return _auto_tokenizer(name, max_tokens)
        except Exception as error:
            if pretrained:
                raise NoWeightsError(
                    f"text_tower {name!r}: no tokenizer found ({type(error).__name__}). {_REMEDY}"
                ) from error
    warnings.warn(
        f"text_tower {name!r}: no vocabulary at hand, so words are hashed into {settings.vocab_size} ids; every site "
        "must do the same. For the model's own tokenizer give a local folder that has it",
        stacklevel=2,
    )
    return HashTokenizer(settings.vocab_size, max_tokens)


def _auto_tokenizer(name: str, max_tokens: int) -> TransformersTokenizer:
    from transformers import AutoTokenizer

    return TransformersTokenizer(
        AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=_local(name)), max_tokens
    )


def _local(name: str) -> bool:
    """Whether files are looked for on this machine alone."""
    return Path(name).is_dir() or unreachable()


def _no_pooler(settings: Any) -> dict[str, bool]:
    """``add_pooling_layer=False`` for the models that know it: the pooler would never be trained.

    Swin's and BEiT's poolers are the mean of their tokens, with which they are trained.
    """
    from transformers import AutoModel

    if settings.model_type in ("swin", "swinv2", "beit"):
        return {}
    model = AutoModel._model_mapping[type(settings)]
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(model).parameters else {}
