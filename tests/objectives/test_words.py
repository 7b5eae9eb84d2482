"""Words from tokens: which token begins a word, for every kind of tokenizer, and the sum over a word's pieces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fedvlp.core.types import CONTINUATION, SPECIAL, WORD
from fedvlp.models.text import TransformersTokenizer
from fedvlp.models.tiny import HashTokenizer
from fedvlp.objectives.gloria import sum_by_word, word_index, word_mask

if TYPE_CHECKING:
    from transformers import BertTokenizerFast, PreTrainedTokenizerFast

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "no", "left", "card", "##io", "##meg", "##aly", "effusion"]


@pytest.fixture
def wordpiece(tmp_path: Path) -> BertTokenizerFast:
    from transformers import BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    return BertTokenizerFast(str(tmp_path / "vocab.txt"))


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: "no", "left" whole, "cardio" in two pieces, every other word in letters."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*pre_tokenizers.ByteLevel.alphabet()})
    merged = ["no", "ca", "car", "card", "io", "Ġl", "Ġle", "Ġlef", "Ġleft", "Ġc", "Ġca", "Ġcar", "Ġcard"]
    vocabulary = {t: i for i, t in enumerate(["<s>", "</s>", "<pad>", "<unk>", *letters, *merged])}
    merges = [("n", "o"), ("Ġ", "l"), ("Ġl", "e"), ("Ġle", "f"), ("Ġlef", "t"), ("Ġ", "c"), ("Ġc", "a"), ("Ġca", "r"),
              ("Ġcar", "d"), ("i", "o"), ("c", "a"), ("ca", "r"), ("car", "d")]  # fmt: skip
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    special = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


REPORTS = ["no left cardiomegaly", "cardio no no effusion", "left", "", "unheard cardiomegaly"]


def expected_by_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str, length: int) -> list[int]:
    """word_ids() of the tokenizer itself: None for special tokens; numbered anew where it leaves gaps."""
    ids = tokenizer(text).word_ids()
    order = {word: place for place, word in enumerate(dict.fromkeys(i for i in ids if i is not None))}
    return [-1 if i is None else order[i] for i in ids] + [-1] * (length - len(ids))


def test_wordpieces_are_words_as_the_tokenizer_itself_says(wordpiece: BertTokenizerFast) -> None:
    tokenizer = TransformersTokenizer(wordpiece, 10)
    ids, mask = tokenizer(REPORTS)
    index = word_index(ids, mask, tokenizer.pieces)
    assert index.tolist() == [expected_by_tokenizer(wordpiece, text, 10) for text in REPORTS]
    assert index[0].tolist() == [-1, 0, 1, 2, 2, 2, 2, -1, -1, -1]  # [CLS] no left card ##io ##meg ##aly [SEP] - -
    kinds = dict(zip(PIECES, tokenizer.pieces.tolist(), strict=True))
    assert [t for t, k in kinds.items() if k == SPECIAL] == ["[PAD]", "[CLS]", "[SEP]"]
    assert [t for t, k in kinds.items() if k == CONTINUATION] == ["##io", "##meg", "##aly"]
    assert kinds["[UNK]"] == WORD  # an unknown word is a word


def test_byte_level_pieces_are_words_as_the_tokenizer_itself_says() -> None:
    own = byte_level()
    tokenizer = TransformersTokenizer(own, 40)
    ids, mask = tokenizer(REPORTS)
    index = word_index(ids, mask, tokenizer.pieces)
    assert index.tolist() == [expected_by_tokenizer(own, text, 40) for text in REPORTS]
    assert index[1].max() == 3


def test_hashed_words_are_one_token_each() -> None:
    tokenizer = HashTokenizer(64, 6)
    ids, mask = tokenizer(["no left effusion", "", "a b c d e f g"])
    assert word_index(ids, mask, tokenizer.pieces).tolist() == [
        [-1, 0, 1, 2, -1, -1], [-1] * 6, [-1, 0, 1, 2, 3, 4],
    ]  # fmt: skip


def test_position_0_is_no_word_and_a_piece_without_a_start_is_one() -> None:
    pieces = torch.tensor([SPECIAL, WORD, CONTINUATION], dtype=torch.int8)
    ids, mask = torch.tensor([[1, 2, 2, 1, 2], [0, 2, 1, 0, 2]]), torch.ones(2, 5, dtype=torch.bool)
    assert word_index(ids, mask, pieces).tolist() == [[-1, 0, 0, 1, 1], [-1, 0, 1, -1, 2]]


def test_pieces_are_summed_and_padding_is_left_out() -> None:
    """Tokens 1, 2, 4, 8, 16 of words (-, 0, 1, 1, -): sums 2 and 12, then zeros; two words are there."""
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])[None, :, None].expand(2, 5, 3)
    index = torch.tensor([[-1, 0, 1, 1, -1], [-1] * 5])
    summed = sum_by_word(values, index)
    assert summed[0].tolist() == [[2.0] * 3, [12.0] * 3, [0.0] * 3, [0.0] * 3]
    assert not summed[1].any()
    assert word_mask(index).tolist() == [[True, True, False, False], [False] * 4]


def test_the_sum_is_made_in_full_precision_under_autocast() -> None:
    values = torch.full((1, 3, 1), 1 + 2**-12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        summed = sum_by_word(values, torch.tensor([[-1, 0, 0]]))
    assert summed[0, 0].item() == 2 + 2**-11
