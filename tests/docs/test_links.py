"""Every relative link of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/ leads to a file and a heading that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_of_the_documentation_has_a_target(page: Path) -> None:
    wrong = []
    for link in LINK.findall(without_code(page)):
        target, _, anchor = link.partition("#")
        other = (page.parent / target).resolve() if target else page
        if not other.exists() or (anchor and anchor not in set(anchors(other))):
            wrong.append(link)
    assert wrong == []


def test_the_index_of_the_documentation_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {link.partition("#")[0] for link in LINK.findall(index.read_text(encoding="utf-8"))}
    pages = {page.relative_to(index.parent).as_posix() for page in PAGES if page.parent == index.parent}
    assert pages - listed == {"README.md"}


def anchors(page: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def without_code(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
