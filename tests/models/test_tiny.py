"""Tiny towers, the shared block and the hash tokenizer."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.models.tiny import (
    CLS,
    PAD,
    BagOfWords,
    Block,
    GRUText,
    HashTokenizer,
    Pixels,
    TinyImage,
    TinyText,
    heads_for,
)

REPORT_WORDS = (
    "no right left lung lobe upper lower middle zone base apex apical hilar pleural effusion effusions edema "
    "consolidation opacity opacities pneumothorax pneumonia atelectasis cardiomegaly heart size normal "
    "enlarged clear without with evidence of is are there small moderate large mild severe bilateral "
    "interstitial pulmonary vascular congestion airspace mediastinal silhouette cardiac acute focal process "
    "disease chest radiograph ap pa portable view frontal not absent present negative positive unchanged "
    "stable new increased decreased tube line fracture nodule mass tiny trace retinopathy diabetic macular "
    "hemorrhage exudate findings impression likely possible cannot excluded within limits "
)


def test_tokenizer_ids_are_the_hash_of_the_words() -> None:
    """Known by arithmetic: 2 + crc32(word, 6) mod 4094; lower-cased, punctuation dropped, padded with 0."""
    ids, mask = HashTokenizer(4096, 6)(["No EFFUSION, 3.5 cm", ""])
    expected = [2 + zlib.crc32(w.encode(), 6) % 4094 for w in ("no", "effusion", "3", "5", "cm")]
    assert ids.tolist() == [[CLS, *expected], [CLS, PAD, PAD, PAD, PAD, PAD]]
    assert mask.tolist() == [[True] * 6, [True] + [False] * 5]
    assert ids.dtype == torch.int64
    assert mask.dtype == torch.bool
    assert 2 + zlib.crc32(b"effusion", 6) % 4094 == 944  # frozen: a saved model depends on it


def test_tokenizer_common_words_do_not_collide() -> None:
    tokenizer = HashTokenizer()
    assert len({tokenizer.word_id(w) for w in REPORT_WORDS.split()}) == len(REPORT_WORDS.split())
    assert all(2 <= tokenizer.word_id(w) < 4096 for w in REPORT_WORDS.split())


def test_tokenizer_counts_truncation() -> None:
    tokenizer = HashTokenizer(max_tokens=4)
    ids, _ = tokenizer(["one two three", "one two three four", "one"])
    assert tokenizer.truncated == 1
    assert torch.equal(ids[0], ids[1])


def test_tokenizer_empty_or_not_text() -> None:
    for text in ["", "  \n", "?!", None, float("nan"), 7]:
        ids, mask = HashTokenizer(max_tokens=3)([text])  # type: ignore[list-item]
        assert ids.tolist() == [[CLS, PAD, PAD]]
        assert mask.tolist() == [[True, False, False]]


def test_tokenizer_edges() -> None:
    ids, mask = HashTokenizer(max_tokens=3)([])
    assert ids.shape == mask.shape == (0, 3)
    with pytest.raises(TypeError, match="sequence"):
        HashTokenizer()("one text")
    with pytest.raises(ValueError, match="at least 3"):
        HashTokenizer(vocabulary=2)


def test_towers_shapes_and_size() -> None:
    image, text = TinyImage(), TinyText()
    assert image(torch.randn(2, 1, 64, 64)).shape == (2, 65, 128)
    ids, mask = text.tokenizer(["small left effusion", ""])
    assert text(ids, mask).shape == (2, 64, 128)
    assert text(ids[:, :5], mask[:, :5]).shape == (2, 5, 128)
    for tower in (image, text):
        assert sum(p.numel() for p in tower.parameters()) < 1_000_000
        assert not [m for m in tower.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]


def test_image_tower_expands_grey_and_refuses_other_sizes() -> None:
    images = torch.randn(2, 1, 32, 32)
    tower = TinyImage(32, in_channels=3)
    torch.testing.assert_close(tower(images), tower(images.repeat(1, 3, 1, 1)))
    with pytest.raises(ValueError, match=r"\[2, 1, 32, 32\], expected \[B, 1 or 1, 64, 64\]"):
        TinyImage()(images)
    with pytest.raises(ValueError, match="multiple of 8"):
        TinyImage(60)


def test_text_tower_refuses_more_tokens_than_positions() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        TinyText(max_tokens=4)(torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 5, dtype=torch.bool))


@pytest.mark.parametrize("post_norm", [False, True])
def test_block_ignores_masked_tokens(post_norm: bool) -> None:
    block = Block(16, 2, post_norm=post_norm)
    tokens, mask = torch.randn(3, 7, 16), torch.arange(7).expand(3, -1) < torch.tensor([[7], [4], [1]])
    changed = torch.where(mask[..., None], tokens, torch.randn(3, 7, 16))
    torch.testing.assert_close(block(tokens, mask)[mask], block(changed, mask)[mask], rtol=0, atol=1e-6)
    torch.testing.assert_close(block(tokens[1:2, :4]), block(tokens, mask)[1:2, :4], rtol=1e-5, atol=1e-5)


def test_block_is_attention_and_mlp_by_the_formula() -> None:
    """Pre-norm, one head: x + W_o softmax(q k^T / sqrt(W)) v, then + W_2 gelu(W_1 norm(x))."""
    block = Block(8, 1).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    q, k, v = block.qkv(block.norm1(x)).chunk(3, dim=-1)
    y = x + block.out((q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ v)
    expected = y + block.contract(torch.nn.functional.gelu(block.expand(block.norm2(y))))
    torch.testing.assert_close(block(x), expected)


def test_block_dropout_only_in_training() -> None:
    block, tokens = Block(16, 2, dropout=0.5), torch.randn(2, 4, 16)
    assert not torch.equal(block(tokens), block(tokens))
    assert torch.equal(block.eval()(tokens), block(tokens))


def test_heads() -> None:
    for width, heads in [(768, 12), (128, 2), (32, 1), (200, 2), (2048, 32), (512, 8)]:
        assert heads_for(width) == heads


def test_gru_reads_real_tokens_alone_and_its_summary_is_both_final_states() -> None:
    """Padding changes nothing, whatever its ids; position 0 is the last state forward and the first backward."""
    torch.manual_seed(0)
    tower = GRUText(vocabulary=64, max_tokens=8)
    ids = torch.tensor([[CLS, 5, 6, PAD, PAD], [CLS, 7, 8, 9, 3]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1] * 5]).bool()
    tokens = tower(ids, mask)
    assert tokens.shape == (2, 5, tower.width)
    noisy = ids.clone()
    noisy[0, 3:] = 9
    assert torch.equal(tower(noisy, mask), tokens)
    assert torch.allclose(tower(ids[:1, :3], mask[:1, :3])[0], tokens[0, :3], atol=1e-6)
    plain, _ = tower.gru(tower.words(ids[1:]))
    assert torch.allclose(tokens[1, 1:], plain[0, 1:], atol=1e-6)
    half = tower.width // 2
    expected = torch.cat([plain[0, -1, :half], plain[0, 0, half:]])
    assert torch.allclose(tokens[1, 0], expected, atol=1e-6)


def test_gru_is_a_text_tower_of_the_dual_encoder(tmp_path: Path) -> None:
    config = ModelConfig(embedding_dim=8, image_size=16, max_tokens=8, vocabulary=64, head_hidden=8, text_tower="gru")
    model = config.build(0).eval()
    ids, mask = model.tokenizer(["a small effusion", "none"])
    text = model({"text": ids, "text_mask": mask}).text
    assert text.shape == (2, 8)
    model.save(tmp_path)
    again = DualEncoder.from_pretrained(tmp_path)
    assert isinstance(again.text_encoder, GRUText)
    assert torch.equal(again({"text": ids, "text_mask": mask}).text, text)
    with pytest.raises(ValueError, match="built-in towers have no published weights"):
        ModelConfig(text_tower="gru", pretrained=True)


def test_a_bag_of_words_is_the_mean_of_real_words_in_any_order() -> None:
    torch.manual_seed(0)
    tower = BagOfWords(vocabulary=64, max_tokens=8)
    ids = torch.tensor([[CLS, 5, 6, PAD, PAD], [CLS, 7, 8, 9, 3]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1] * 5]).bool()
    tokens = tower(ids, mask)
    assert tokens.shape == (2, 5, tower.width)
    assert torch.allclose(tokens[0], tower.words.weight[[CLS, 5, 6]].mean(0).expand(5, -1))
    noisy = torch.tensor([[CLS, 6, 5, 9, 9], [CLS, 3, 9, 8, 7]])
    assert torch.allclose(tower(noisy, mask), tokens, atol=1e-6)


def test_pixels_are_their_own_token_and_no_grid() -> None:
    tower = Pixels(4, in_channels=3)
    images = torch.randn(2, 3, 4, 4)
    assert torch.equal(tower(images), images.reshape(2, 1, 48))
    assert (tower.width, list(tower.parameters())) == (48, [])
    with pytest.raises(ValueError, match="0 patches are no square"):
        tower.maps(images)


def test_the_towers_for_drawn_vectors_are_saved_with_their_model(tmp_path: Path) -> None:
    config = ModelConfig("pixels", "words", 8, image_size=8, max_tokens=8, vocabulary=64, alignment=False)
    model = config.build(0).eval()
    ids, mask = model.tokenizer(["e0a e1b", "e0d"])
    batch = {"image": torch.randn(2, 1, 8, 8), "text": ids, "text_mask": mask}
    model.save(tmp_path)
    again = DualEncoder.from_pretrained(tmp_path)
    assert (again.config.image_tower, again.config.text_tower) == ("pixels", "words")
    for one, other in zip(
        (model(batch).image, model(batch).text), (again(batch).image, again(batch).text), strict=True
    ):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="built-in towers have no published weights"):
        ModelConfig("pixels", "words", pretrained=True)
