"""The table in docs/adapters.md is that of the code."""

from __future__ import annotations

from pathlib import Path

from kvarto.adapters.peft_keys import key_table

DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"


def test_the_key_table_is_the_codes() -> None:
    text = DOCS.read_text()
    table = text.partition("key_table -->\n")[2].partition("<!-- end -->")[0]
    assert table == key_table()


def test_every_file_of_the_room_is_listed() -> None:
    text = DOCS.read_text()
    for path in (DOCS.parents[1] / "kvarto" / "adapters").glob("[a-z]*.py"):
        assert path.name == "opened.py" or f"`{path.name}`" in text, path.name
