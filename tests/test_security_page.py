"""docs/security.md names the tests that hold each promise: they must be there, as must the files it points to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMES = set(re.findall(r"`(test_\w+)`", PAGE))


def names_of_tests() -> set[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").glob("test_*.py"))
    functions = (node for tree in trees for node in ast.walk(tree))
    return {node.name for node in functions if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    assert len(NAMES) > 60
    assert sorted(NAMES - names_of_tests()) == []


def test_every_file_that_the_page_names_exists() -> None:
    files = set(re.findall(r"`((?:swarm|peer|tests|benchmarks|docs)/[\w./]+)`", PAGE))
    assert len(files) > 15
    assert sorted(name for name in files if not (ROOT / name).exists()) == []


def test_every_attack_has_a_defence_a_place_and_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| attack")]
    assert len(rows) > 40
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4 and all(cells) and "`test_" in cells[3], row


def test_the_readme_leads_to_the_page() -> None:
    assert "(docs/security.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
