"""How a text reads: each measure counts what it is named for, and not what looks like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.prose_counts import counts_of, sentences_below

MARKDOWN = """# What a heading says is not counted

The probe records events per step. You can read [them](docs/what.md) with `monitor record`; nobody is told.

| What | a table says |
|---|---|

```sh
what code says is not counted; you see
```

- Whoever reads this was heard.
- Two words
"""
RST = """What a heading says
===================

There are two ways. Set ``what; you`` in :ref:`your settings <settings>`:

.. code-block:: sh

    you; are told

The value is stored in the database.
"""


def test_markdown_is_counted_without_markup(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(MARKDOWN)
    sentences = sentences_below(path)
    assert sentences == [
        "The probe records events per step.",
        "You can read them with code; nobody is told.",
        "Whoever reads this was heard.",
    ]
    counted = counts_of(sentences)
    assert (counted.openings, counted.passives, counted.you, counted.semicolons) == (1, 2, 1, 1)
    assert counted.odd_words == 4  # nobody, told, whoever, heard


def test_restructured_text_is_counted_without_code_and_roles(tmp_path: Path) -> None:
    path = tmp_path / "page.rst"
    path.write_text(RST)
    sentences = sentences_below(tmp_path)
    assert sentences == ["There are two ways.", "Set code in code:", "The value is stored in the database."]
    assert counts_of(sentences)[2:] == (1, 1, 0, 0, 0)


def test_docstrings_are_counted_and_other_strings_are_not(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Return what was asked for."""\n\nNAME = "you are told"\nOTHER = 1\n"""The block is freed."""\n')
    assert sentences_below(path) == ["Return what was asked for.", "The block is freed."]


@pytest.mark.parametrize("active", ["The engine needs speed.", "A seed is red.", "It offered a block."])
def test_what_is_no_passive_is_not_counted(active: str) -> None:
    assert counts_of([active]).passives == 0


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        sentences_below(tmp_path / "none")
