"""Built-in towers and tokenizer: about half a million parameters each, no download, fast on one CPU core.

Also the base class of all towers (``Tower``), and the transformer block of these towers and the alignment modules.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from fedvlp.core.types import SPECIAL, WORD

BUILT_IN = ("tiny", "pixels", "gru", "words")
"""Names of the towers of this file: no download, and no published weights."""

PAD, CLS = 0, 1
"""Reserved ids of ``HashTokenizer``; words hash into [2, vocabulary)."""

_WORD = re.compile(r"[^\W_]+")
_FIRST_WORD = 2
_HASH_START = 6  # CRC-32 start value for which the common words of chest reports do not collide at 4096 (tested)


class Tokenizer(Protocol):
    """Reports to ids [N, T] int64 and mask [N, T] bool (True at real tokens, position 0 always real)."""

    vocabulary: int  # number of ids
    max_tokens: int  # T
    truncated: int  # texts cut at max_tokens so far
    pieces: Tensor  # [vocabulary] int8, what each id stands for: SPECIAL, WORD (the start of one) or CONTINUATION

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids [N, T] and mask [N, T] of N texts. Raises TypeError for one string instead of a sequence."""
        ...

    def identity(self) -> str:
        """All that ids and mask depend on beside the texts; "" where it cannot be said."""
        ...


class HashTokenizer:
    """Lower-cased words and numbers, hashed (CRC-32) into a fixed vocabulary: the same ids on every machine.

    Needs no vocabulary file, so nothing about a site's reports is learned or shared. Two words may share an id
    (about one in ``vocabulary``). T is ``max_tokens``. A text that is empty or not a string becomes CLS alone.
    """

    def __init__(self, vocabulary: int = 4096, max_tokens: int = 64) -> None:
        if vocabulary < 3 or max_tokens < 1:
            raise ValueError(
                f"HashTokenizer: vocabulary {vocabulary}, max_tokens {max_tokens}; expected at least 3 (pad, cls, one "
                "word) and at least 1"
            )
        self.vocabulary, self.max_tokens, self.truncated = vocabulary, max_tokens, 0
        self.pieces = torch.full((vocabulary,), WORD, dtype=torch.int8, device="cpu")
        self.pieces[[PAD, CLS]] = SPECIAL

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids [N, T] int64 and mask [N, T] bool of N texts. Raises TypeError for one string."""
        if isinstance(texts, str):
            raise TypeError("HashTokenizer: one str given; expected a sequence of texts, e.g. [text]")
        ids = torch.full((len(texts), self.max_tokens), PAD, dtype=torch.int64)  # [N, T]
        mask = torch.zeros(len(texts), self.max_tokens, dtype=torch.bool)  # [N, T]
        for row, text in enumerate(texts):
            words = _WORD.findall(text.lower()) if isinstance(text, str) else []
            self.truncated += len(words) >= self.max_tokens
            tokens = [CLS, *(self.word_id(w) for w in words[: self.max_tokens - 1])]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        return ids, mask

    def word_id(self, word: str) -> int:
        """Id of one lower-cased word, in [2, vocabulary)."""
        return _FIRST_WORD + zlib.crc32(word.encode(), _HASH_START) % (self.vocabulary - _FIRST_WORD)

    def identity(self) -> str:
        """All that ids and mask depend on beside the texts."""
        return json.dumps(self.described())

    def described(self) -> dict[str, Any]:
        """All that another program needs to give the same ids; JSON values."""
        return {
            "kind": "hash",
            "word": _WORD.pattern,
            "pad": PAD,
            "cls": CLS,
            "first_word": _FIRST_WORD,
            "crc32_start": _HASH_START,
            "vocabulary": self.vocabulary,
            "max_tokens": self.max_tokens,
        }


class Tower(nn.Module):
    """Base class of encoders to tokens of ``width`` W; the token at position 0 is the summary token.

    An image tower maps images [B, 1 or C, H, W] to tokens [B, M, W]; a text tower maps ids [B, T] and mask [B, T] to
    tokens [B, T, W] and has its ``tokenizer``.
    """

    width: int  # W
    dropout: float = 0.0  # of the alignment block on this tower
    mlp_ratio: int = 4  # of the alignment block on this tower
    checkpointing: bool = False  # see ``checkpoint_blocks``

    def with_attention(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tokens, and the attention [B, M or T] of position 0 in the last block; None where the tower has none."""
        return self(*inputs), None

    def maps(self, images: Tensor) -> list[Tensor]:
        """Feature maps [B, C, h, w] of images, from fine to coarse: the patches as one square grid.

        Raises ValueError where the patches form no square.
        """
        patches = self(images)[:, 1:]  # [B, M-1, W]
        side = math.isqrt(patches.shape[1])
        if not side or side**2 != patches.shape[1]:
            raise ValueError(f"image tower: {patches.shape[1]} patches are no square; use square images and patches")
        return [patches.transpose(1, 2).unflatten(2, (side, side))]

    def checkpoint_blocks(self) -> None:
        """From now on, blocks store only their inputs for the backward pass, in which they are run again."""
        self.checkpointing = True

    def through(self, blocks: Iterable[nn.Module], tokens: Tensor, *mask: Tensor) -> Tensor:
        """``tokens`` [B, T, W] after these blocks, checkpointed where that is switched on."""
        for block in blocks:
            again = self.checkpointing and torch.is_grad_enabled()
            tokens = checkpoint(block, tokens, *mask, use_reentrant=False) if again else block(tokens, *mask)
        return tokens

    def architecture(self) -> dict[str, Any]:
        """What is needed beside ModelConfig to rebuild this tower without its source; JSON values."""
        return {}


class TextTower(Tower):
    """A tower for reports, with its tokenizer."""

    tokenizer: Tokenizer

    def words_layer(self) -> Any:
        """The layer that gives each id its vector; None for a tower that has none."""
        return getattr(self, "words", None)


def heads_for(width: int, size: int = 64) -> int:
    """Number of attention heads for a width: about ``size`` dimensions each (12 at 768), a divisor of the width."""
    return next(h for h in range(max(1, width // size), 0, -1) if width % h == 0)


class Block(nn.Module):
    """Transformer block, [B, T, W] -> [B, T, W]: pre-norm (ViT) or, with ``post_norm``, post-norm (BERT).

    ``mask`` [B, T] is True at real tokens; padding is never attended to. Initial weights have std 0.02 at width 768
    (BERT, ViT), scaled by 1/sqrt(width) for others.
    """

    def __init__(
        self, width: int, heads: int, mlp_ratio: int = 4, post_norm: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.post_norm, self.dropout = heads, post_norm, dropout
        self.fused_attn = True  # PyTorch's fused kernels; False: matrix products
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, mlp_ratio * width), nn.Linear(mlp_ratio * width, width)
        for layer in (self.qkv, self.out, self.expand, self.contract):
            nn.init.trunc_normal_(layer.weight, std=0.02 * (768 / width) ** 0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """``tokens`` [B, T, W] after attention and MLP; ``mask`` [B, T] is True at real tokens, None: at all."""
        if self.post_norm:
            tokens = self.norm1(tokens + self._drop(self._attend(tokens, mask)))
            return self.norm2(tokens + self._drop(self._mlp(tokens)))
        tokens = tokens + self._drop(self._attend(self.norm1(tokens), mask))
        return tokens + self._drop(self._mlp(self.norm2(tokens)))

    def _attend(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        b, t, w = tokens.shape
        q, k, v = self.qkv(tokens).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)  # [B, H, T, W/H]
        visible = None if mask is None else mask[:, None, None, :]  # [B, 1, 1, T]
        if self.fused_attn:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=self.dropout * self.training)
        else:
            scores = q @ k.transpose(-2, -1) * (w // self.heads) ** -0.5  # [B, H, T, T]
            scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
            mixed = self._drop(scores.softmax(dim=-1)) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, t, w))

    @torch.no_grad()
    def summary_attention(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of position 0 of the block's input [B, T, W]: [B, T], rows sum to 1, no gradient."""
        states = tokens if self.post_norm else self.norm1(tokens)
        q, k, _ = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2) for projected in self.qkv(states).chunk(3, dim=-1)
        )  # [B, H, T, W/H]
        return first_attention(q, k, mask)

    def _mlp(self, tokens: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(tokens)))

    def _drop(self, tokens: Tensor) -> Tensor:
        return F.dropout(tokens, self.dropout, self.training)


def first_attention(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of position 0, mean over heads: queries and keys [B, H, T, d] -> [B, T], in at least float32.

    ``mask`` [B, T] is True at the tokens that may be attended to.
    """
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = (q[:, :, :1].to(dtype) @ k.to(dtype).transpose(2, 3)).squeeze(2) * q.shape[-1] ** -0.5  # [B, H, T]
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return scores.softmax(dim=-1).mean(dim=1)


def as_channels(images: Tensor, channels: int, size: int) -> Tensor:
    """Images [B, 1 or C, size, size] with a grey channel repeated to C. Raises ValueError for another shape."""
    if images.ndim != 4 or images.shape[1] not in (1, channels) or images.shape[2:] != (size, size):
        raise ValueError(
            f"image tower: images {list(images.shape)}, expected [B, 1 or {channels}, {size}, {size}]; set image_size "
            "of the model to what the data gives, and in_channels to 3 for images in colour"
        )
    return images.expand(-1, channels, -1, -1)


class Normalised(nn.Module):
    """Images as fedvlp prepares them, (x - 0.5) / 0.5, to (x - mean) / std of each channel, as a tower expects them.

    ``mean`` and ``std`` are of C channels, with pixels in 0..1. For 0.5 nothing is computed, so no bit changes.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] = (), std: Sequence[float] = ()) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(map(math.isfinite, (*mean, *std))) or min(std, default=1) <= 0:
            raise ValueError(f"image tower: mean {list(mean)}, std {list(std)}; expected as many numbers, std above 0")
        self.changes = any(value != 0.5 for value in (*mean, *std))
        self.said = {"mean": list(mean), "std": list(std)} if self.changes else {}
        for name, values in self.said.items():  # no tensors of the model's State
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] of [B, C, H, W]."""
        return (images * 0.5 + 0.5 - self.mean) / self.std if self.changes else images


class TinyImage(Tower):
    """Two strided convolutions (8x down) to a token grid, then ``layers`` pre-norm blocks of width 128.

    A 64-pixel image gives M = 1 + 8*8 tokens. The first convolution maps 25 pixels to 32 channels, so it loses nothing.
    Raises ValueError unless ``image_size`` is a multiple of 8.
    """

    width, mlp_ratio = 128, 2

    def __init__(self, image_size: int = 64, in_channels: int = 1, layers: int = 2) -> None:
        super().__init__()
        if image_size % 8:
            raise ValueError(f"image_size {image_size}: the tiny image tower needs a multiple of 8")
        self.image_size, self.in_channels = image_size, in_channels
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, 32, 5, stride=4, padding=2),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            nn.Conv2d(32, self.width, 3, stride=2, padding=1),
            nn.GroupNorm(8, self.width),
            nn.ReLU(),
        )
        self.summary = nn.Parameter(torch.empty(1, 1, self.width))
        self.position = nn.Parameter(torch.empty(1, 1 + (image_size // 8) ** 2, self.width))
        nn.init.trunc_normal_(self.summary, std=0.02)
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = _blocks(self.width, layers, self.mlp_ratio)
        self.norm = nn.LayerNorm(self.width, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        """Tokens [B, M, 128] of images [B, 1 or C, H, W]."""
        return self.norm(self.through(self.blocks, self._embed(images)))

    def with_attention(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, M, 128], and the summary token's attention [B, M] in the last block."""
        *first, last = cast(list[Block], list(self.blocks))
        before = self.through(first, self._embed(*inputs))
        return self.norm(self.through([last], before)), last.summary_attention(before)

    def _embed(self, images: Tensor) -> Tensor:
        grid = self.stem(as_channels(images, self.in_channels, self.image_size))  # [B, W, H/8, W/8]
        patches = grid.flatten(2).transpose(1, 2)  # [B, M-1, W]
        return torch.cat([self.summary.expand(patches.shape[0], -1, -1), patches], dim=1) + self.position  # [B, M, W]


class TinyText(TextTower):
    """Embeddings of words and positions, then ``layers`` pre-norm blocks of width 128; position 0 is CLS."""

    width, mlp_ratio = 128, 2

    def __init__(self, vocabulary: int = 4096, max_tokens: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokenizer = HashTokenizer(vocabulary, max_tokens)
        self.words = nn.Embedding(vocabulary, self.width)
        self.position = nn.Parameter(torch.empty(1, max_tokens, self.width))
        nn.init.trunc_normal_(self.words.weight, std=0.05)
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = _blocks(self.width, layers, self.mlp_ratio)
        self.norm = nn.LayerNorm(self.width, eps=1e-6)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Tokens [B, T, 128] of ids and mask [B, T]."""
        return self.norm(self.through(self.blocks, self._embed(ids), mask))

    def with_attention(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, T, 128], and the attention [B, T] of CLS in the last block."""
        ids, mask = inputs
        *first, last = cast(list[Block], list(self.blocks))
        before = self.through(first, self._embed(ids), mask)
        return self.norm(self.through([last], before, mask)), last.summary_attention(before, mask)

    def _embed(self, ids: Tensor) -> Tensor:
        check_length(ids, self.tokenizer.max_tokens)
        return self.words(ids) + self.position[:, : ids.shape[1]]  # [B, T, W]


class GRUText(TextTower):
    """Word embeddings and a bidirectional GRU of 2 x 64, as at CreamFL's sites; position 0 is both final states."""

    width, mlp_ratio = 128, 2

    def __init__(self, vocabulary: int = 4096, max_tokens: int = 64, layers: int = 1) -> None:
        super().__init__()
        self.tokenizer = HashTokenizer(vocabulary, max_tokens)
        self.words = nn.Embedding(vocabulary, self.width)
        nn.init.trunc_normal_(self.words.weight, std=0.05)
        self.gru = nn.GRU(self.width, self.width // 2, layers, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Tokens [B, T, 128] of ids and mask [B, T]."""
        check_length(ids, self.tokenizer.max_tokens)
        lengths = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)  # [B], to the last real token
        packed = pack_padded_sequence(self.words(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, final = self.gru(packed)  # final [2 * layers, B, W/2]
        tokens, _ = pad_packed_sequence(outputs, batch_first=True, total_length=ids.shape[1])  # [B, T, W]
        return torch.cat([torch.cat([final[-2], final[-1]], dim=1)[:, None], tokens[:, 1:]], dim=1)

    def architecture(self) -> dict[str, Any]:
        """Marks this tower in a saved model."""
        return {"model_type": "gru"}


class Pixels(Tower):
    """The pixels themselves as the only token, [B, 1, C H W]: what is learned is the head's. For drawn vectors."""

    def __init__(self, image_size: int, in_channels: int = 1) -> None:
        super().__init__()
        self.image_size, self.in_channels, self.width = image_size, in_channels, in_channels * image_size**2

    def forward(self, images: Tensor) -> Tensor:
        """Tokens [B, 1, C H W] of images [B, 1 or C, H, W]."""
        return as_channels(images, self.in_channels, self.image_size).flatten(1)[:, None]

    def architecture(self) -> dict[str, Any]:
        """Marks this tower in a saved model."""
        return {"name": "pixels"}


class BagOfWords(TextTower):
    """The mean of a report's word embeddings, at every position: the order of words does not matter."""

    width, mlp_ratio = 128, 2

    def __init__(self, vocabulary: int = 4096, max_tokens: int = 64) -> None:
        super().__init__()
        self.tokenizer = HashTokenizer(vocabulary, max_tokens)
        self.words = nn.Embedding(vocabulary, self.width)
        nn.init.trunc_normal_(self.words.weight, std=0.05)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Tokens [B, T, 128] of ids and mask [B, T]."""
        check_length(ids, self.tokenizer.max_tokens)
        real = mask[:, :, None].to(self.words.weight.dtype)  # [B, T, 1]
        mean = (self.words(ids) * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)  # [B, 1, W]
        return mean.expand(-1, ids.shape[1], -1)

    def architecture(self) -> dict[str, Any]:
        """Marks this tower in a saved model."""
        return {"model_type": "words"}


def check_length(ids: Tensor, max_tokens: int) -> None:
    """Raises ValueError unless ids are [B, T] with 1 <= T <= ``max_tokens``."""
    if ids.ndim != 2 or not 1 <= ids.shape[1] <= max_tokens:
        raise ValueError(
            f"text tower: ids {list(ids.shape)}, expected [B, T] with 1 <= T <= {max_tokens}; tokenise with the "
            "model's own tokenizer or raise max_tokens"
        )


def _blocks(width: int, layers: int, mlp_ratio: int) -> nn.ModuleList:
    return nn.ModuleList(Block(width, heads_for(width, 32), mlp_ratio) for _ in range(layers))
