"""What is kept of a site's reports: found again for the same reports alone, and never in the way."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from fedvlp.data import screening
from fedvlp.data.screening import KeptTokens, kept_tokens, searched
from fedvlp.models.tiny import HashTokenizer

REPORTS = ["No effusion.", "", "Small effusion on the left, clear right lung."]


class Counting(HashTokenizer):
    """Counts the texts that it is asked for."""

    asked = 0

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        self.asked += len(texts)
        return super().__call__(texts)


def test_tokens_are_made_once_and_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    first, again, plain = Counting(64, 4), Counting(64, 4), HashTokenizer(64, 4)
    made, read = kept_tokens(first, tmp_path), kept_tokens(again, tmp_path)
    for tokenize in (made, read):
        ids, mask = tokenize(REPORTS)
        wanted = plain(REPORTS)
        assert torch.equal(ids, wanted[0])
        assert ids.dtype == wanted[0].dtype
        assert torch.equal(mask, wanted[1])
        assert isinstance(tokenize, KeptTokens)
        assert tokenize.truncated == 1  # the log says it after a restart, too
    assert (first.asked, again.asked) == (3, 0)


def test_of_other_reports_or_another_tokenizer_nothing_is_found(tmp_path: Path) -> None:
    for number, (texts, tokens) in enumerate(
        [
            ([*REPORTS[:2], "Small effusion."], 4),
            (["No effusion.Small", *REPORTS[1:]], 4),
            (REPORTS[::-1], 4),
            (REPORTS, 5),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        kept_tokens(HashTokenizer(64, 4), folder)(REPORTS)
        asked = Counting(64, tokens)
        ids, _ = kept_tokens(asked, folder)(texts)
        assert asked.asked == 3
        assert torch.equal(ids, HashTokenizer(64, tokens)(texts)[0])


def test_what_is_kept_is_for_its_owner_alone(tmp_path: Path) -> None:
    """The folder and every file in it, whatever the shell's umask: here 022."""
    before = os.umask(0o022)
    try:
        kept_tokens(HashTokenizer(64, 4), tmp_path / "cache")(REPORTS)
        searched(str(tmp_path / "cache"), REPORTS, range(3))
        searched(str(tmp_path / "other"), REPORTS, range(3))
    finally:
        os.umask(before)
    files = [*(tmp_path / "cache").iterdir(), *(tmp_path / "other").iterdir()]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in tmp_path.iterdir()] == [0o700] * 2


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    kept_tokens(HashTokenizer(64, 4), tmp_path)(REPORTS)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    ids, _ = kept_tokens(HashTokenizer(64, 4), tmp_path)(REPORTS)
    assert torch.equal(ids, HashTokenizer(64, 4)(REPORTS)[0])
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    ids, _ = kept_tokens(HashTokenizer(64, 4), tmp_path / "file" / "cache")(REPORTS)
    assert torch.equal(ids, HashTokenizer(64, 4)(REPORTS)[0])
    assert not searched(str(tmp_path / "file" / "cache"), REPORTS, range(3))


def test_a_tokenizer_that_does_not_say_what_it_is_is_asked_each_time(tmp_path: Path) -> None:
    def tokenize(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        return HashTokenizer(64, 4)(texts)

    assert kept_tokens(tokenize, tmp_path) is tokenize
    assert kept_tokens(HashTokenizer(64, 4), None) is not None


def test_clean_reports_are_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Mock(side_effect=screening.scan)
    monkeypatch.setattr(screening, "scan", scan)
    assert not searched(str(tmp_path), REPORTS, range(3))
    assert not searched(str(tmp_path), REPORTS, range(3))
    scan.assert_called_once()
    assert searched(str(tmp_path), [*REPORTS, "Seen by Dr. Miller."], range(4)) == {"name with title": 1}
    monkeypatch.setitem(screening.KINDS, "left", re.compile("left"))  # as another version may search for more
    assert searched(str(tmp_path), REPORTS, range(3)) == {"left": 1}


def test_what_was_found_is_found_again_with_its_words(tmp_path: Path) -> None:
    """Nothing is kept of such reports: who owns them is to see the words."""
    for _ in range(2):
        found = searched(str(tmp_path), ["Seen by Dr. Miller."], ["row 7"])
        assert found == {"name with title": 1}
        assert [(one.where, one.words) for one in found.shown] == [("row 7", "Dr. Miller")]
    assert not list(tmp_path.iterdir())


def test_without_a_folder_reports_are_searched(tmp_path: Path) -> None:
    assert searched(None, ["Seen by Dr. Miller."], ["1"]) == {"name with title": 1}
