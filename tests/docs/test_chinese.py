"""Commands, code and numbers of the Chinese pages are those of the English ones, and each links to the other."""

from __future__ import annotations

import re

import pytest

from tests.docs.chinese import MATRIX, PAIRS, blocks, numbers, read, tables


@pytest.mark.parametrize("name", PAIRS)
def test_code_and_numbers_are_the_same(name: str) -> None:
    english, chinese = read(name), read(PAIRS[name])
    assert blocks(chinese) == blocks(english)
    assert MATRIX.findall(chinese) == MATRIX.findall(english)
    shapes = [[[len(row) for row in table] for table in tables(text)] for text in (chinese, english)]
    assert shapes[0] == shapes[1]
    assert numbers(chinese) == numbers(english)


@pytest.mark.parametrize("name", PAIRS)
def test_sections_are_the_same(name: str) -> None:
    levels = [[len(h) for h in re.findall(r"^(#+) ", text, re.MULTILINE)] for text in (read(name), read(PAIRS[name]))]
    assert levels[0] == levels[1]


def test_the_tutorials_name_the_same_keys_and_files() -> None:
    """Every `word in code` of the one is in the other."""
    english, chinese = read("docs/tutorial.md"), read("docs/tutorial.zh-CN.md")
    words = [set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)))
             for text in (english, chinese)]  # fmt: skip
    assert words[0] == words[1]


@pytest.mark.parametrize("name", PAIRS)
def test_each_links_to_the_other(name: str) -> None:
    other = PAIRS[name].rpartition("/")[2]
    assert f"]({other})" in read(name).partition("\n## ")[0]
    assert f"]({name.rpartition('/')[2]})" in read(PAIRS[name]).partition("\n## ")[0]
