"""Another content has another name."""

from __future__ import annotations

from pathlib import Path

from cupymla_lab.emulate import by_content


def test_a_name_tells_contents_apart(tmp_path: Path) -> None:
    """Parts are kept apart, and of files the content counts, folders among them left out."""
    assert by_content.digest("ab", "c") != by_content.digest("a", "bc")
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("1")
    two.write_text("2")
    before = by_content.digests([two, tmp_path, one])
    assert before == by_content.digests([one, two]) and len(before) == 2
    two.write_text("3")
    assert by_content.digests([one, two])[0] == before[0] and by_content.digests([one, two])[1] != before[1]
