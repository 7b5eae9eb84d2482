"""What may be the name of a run or a data set, and what a refusal repeats of one that is none."""

from __future__ import annotations

import pytest

from fedvlp.core.validate import require, require_name


def test_a_plain_name_is_taken() -> None:
    for name in ["a", "0", "fedavg", "pms-fm-paper", "a" * 64]:
        require_name("it", name)


def test_another_is_refused_and_an_endless_one_not_repeated() -> None:
    neither = "is not a string of at most 64 characters"
    for name, said in [
        ("", "is ''"), ("-a", "is '-a'"), ("A", "is 'A'"), ("a/b", "is 'a/b'"), ("a\n", r"is 'a\\n'"),
        ("/" * 64, f"is '{'/' * 64}'"), ("a" * 65, neither), (7, neither), (("a",), neither), (None, neither),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"^it {said}; it takes 1 to 64 characters"):
            require_name("it", name)


def test_a_condition_that_does_not_hold_raises_its_message() -> None:
    require(True, "x")
    with pytest.raises(ValueError, match=r"^x$"):
        require(False, "x")
