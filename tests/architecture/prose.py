"""Check the measurable rules of plain technical English in everything that a person reads.

`python -m tests.architecture.prose [PATH …]` lists every finding below the paths (all files by default),
with `--long` also the sentences of more than 25 words, with `--count` only the numbers of each room.
`--record` lowers the recorded numbers in `prose_budget.toml` to those of today; no number ever rises.

It reads Markdown, docstrings, comments (Python, SQL, Makefile, `.ci`, pyproject), the messages in `src/everbeat`
and the names of tests. Code in backticks is not prose.
"""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from everbeat.runtime.loading import no_collection
from tests.architecture.source_tree import ROOT, project_files

MAX_WORDS: Final = 25
BUDGET: Final = Path(__file__).with_name("prose_budget.toml")
LONG: Final = "long sentence"

# Phrases that a rule would find and that are good English, with the reason. They are removed before the rules apply.
ALLOWED: Final = {
    r"\btell(?:s|ing)? (?:\S+ ){0,3}apart\b": "`tell apart` is the usual verb for to distinguish",
    r"\bof its own accord\b": "an idiom with this one form",
    r"\bthere(?:fore)? (?:is|are|was|were|will be|can be|must be|should be) no\b": "`there is no` is the plain form",
    r"\b(?:is|are|was|were|be|am) no (?:longer|more than|later than|earlier than|older than|newer than|larger than)\b": (
        "a comparison"
    ),
    r"\bso (?:long|many|much|often|few|old) (?:\S+ ){0,2}that\b": "`so many that …` names a consequence",
    r"\bgoing on\b": "`what is going on` is plain",
}

# Files that quote what the rules forbid.
QUOTING: Final = {"tests/architecture/prose.py", "tests/architecture/test_prose.py"}

_START: Final = r"(?:^|(?<=[.!?;:] )|(?<=[.!?;:]\n)|(?<=\n\n))[\s*_(\"“]*"

RULES: Final = {
    "name the subject instead of `who`": (
        _START + r"Who\b(?![^.!?]*\?)"
        r"|\b(?:and|or|but|that|if|where|when|of|for|to|by|about|with) who\b"
    ),
    "name the subject instead of `whoever`, `nobody`, `somebody`, `whatever`": (
        r"\b(?:whoever|nobody|somebody|whatever|whomever)\b"
    ),
    "name the subject instead of `what`, `everything that`": (
        _START + r"What\b(?![^.!?]*\?)"
        r"|[,;:]\s+(?:and |but |or )?what (?:is|was|has|had|are|were|cannot|can|must)\b(?![^.!?]*\?)"
        r"|" + _START + r"(?:Everything|Anything|Nothing|All) (?:that|which)\b"
    ),
    "write `must not`, `cannot` or `might not` instead of `may not`": r"\bmay not\b",
    "write `is not a` instead of `is no`": r"\b(?:is|are|was|were|be|am) no\b",
    "give the measure (`this many`, `for at most`) instead of `so long`, `so many`": (
        r"\bso (?:long|many|much|often|few|old)\b"
    ),
    "a program does not tell: it reports, notifies, logs": r"\b(?:tells?|told|telling)\b",
    "write `ignore`, `read` or `use` instead of `heed`": r"\b(?:un)?heed(?:s|ed|ing)?\b",
    "write `check`, `poll` or `request` instead of `ask after`": r"\bask(?:s|ed|ing)? after\b",
    "write `pass` or `forward` instead of `hand on`": r"\bhand(?:s|ed|ing)? (?:it |them |this |that )?on\b",
    "write `stop waiting for`, `abandon` instead of `give up on`": r"\bg(?:ive|ives|ave|iving|iven) up on\b",
    "write `remove` or `revoke` instead of `take away`": r"\b(?:tak(?:e|es|en|ing)|took) away\b",
    "a program does not look: it reads, checks, scans": (
        r"(?<![.!?:;] )(?<!^)\blook(?:s|ed|ing)? (?:at|after)\b|\blook(?:s|ed|ing) (?:at|after)\b"
    ),
    "write `its own X` instead of `X of its own`": (
        r"\bof (?:its|their|your|one's) own(?=[\s*_`)\"”]*(?:[.,;:!?(]|$)"
        r"|\s+(?:and|or|in|to|for|with|that|which|by|on|from|as|at|when|if|where|so|is|are|has|beside|whose|instead|after|before|than|but)\b)"
    ),
    "write `no longer` instead of `any more`": r"\bany ?more\b(?=[\s*_)\"”]*(?:[.,;:!?]|$)| (?:of|in|for|and|or|when|if|because)\b)",
    "write `no matching X` instead of `no X is like that`": r"\bis like that\b",
    "write `continue` instead of `go on`": r"\b(?:go|goes|went|gone) on\b(?! (?:to|with) the next)",
    "write `except` instead of `but for`": r"\bbut for\b(?=[\s:])",
    "write `expensive` or `cost` instead of `dear`": r"\b(?:dear|dearer|dearly)\b",
}
# Each match of a rule contains one of these words. To search for them first takes a tenth of the time.
_WORDS: Final = re.compile(
    r"who|nobody|somebody|what|thing (?:that|which)|all (?:that|which)|may not| no\b|\bso |tell|told|heed|\bask|\bhand|\bg[ai]v"
    r"|away|look|\bown\b|any ?more|like that|\b(?:go|goes|went|gone) on\b|but for|dear",
    re.IGNORECASE,
)
_COMPILED: Final = {rule: re.compile(pattern, re.IGNORECASE) for rule, pattern in RULES.items()}
# A capital is what shows that a sentence starts with these words.
_CASED: Final = re.compile(r"^(?:who|what|everything|anything|nothing|all)\b")
_ALLOWED: Final = re.compile("|".join(f"(?:{each})" for each in ALLOWED), re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Passage:
    """A paragraph, cell, heading, message or name as a person reads it; its newlines are those of the file."""

    path: str
    line: int
    text: str
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of a rule, or a long sentence."""

    path: str
    line: int
    text: str
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}: {self.rule}"


def findings(passage: Passage) -> Iterator[Finding]:
    text = _without_code(passage.text)
    if len(text.split()) <= MAX_WORDS and not _WORDS.search(text):
        return
    text = _ALLOWED.sub(_blank, text)
    for rule, pattern in _COMPILED.items():
        if passage.kind in ("heading", "name") and "`what`" in rule:
            continue
        for match in pattern.finditer(text):
            found = match.group().strip(' \n*_("“')
            if _CASED.match(found) and passage.kind != "name":
                continue
            line = passage.line + text.count(
                "\n", 0, match.start() + len(match.group()) - len(match.group().lstrip())
            )
            yield Finding(passage.path, line, _around(text, match.start(), match.end()), rule)
    if passage.kind == "text" and len(text.split()) > MAX_WORDS:
        for start, sentence in _sentences(text):
            listed = re.sub(r"`x`(?:,?\s(?:and |or )?`x`)+", "`x`", sentence)
            words = [word for word in listed.split() if re.search(r"\w", word)]
            if len(words) > MAX_WORDS:
                line = passage.line + text.count("\n", 0, start)
                yield Finding(passage.path, line, " ".join(words[:8]) + f" … ({len(words)} words)", LONG)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "_", match.group())


def _without_code(text: str) -> str:
    text = re.sub(r"<!--.*?-->", lambda found: "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"(`+)[^`]+\1", lambda found: "`x`" + "\n" * found.group().count("\n"), text)
    return re.sub(r"\]\(([^()\s]|\([^()]*\))*\)", "]", text)


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    for end in re.finditer(
        r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(*\[<_]*(?:[A-Z`\d]|everbeat\b))|;\s+|\n\s*\n", text
    ):
        yield start, text[start : end.start()]
        start = end.end()
    yield start, text[start:]


def _around(text: str, start: int, end: int) -> str:
    return " ".join(text[max(0, start - 30) : end + 30].split())


def markdown(path: str, text: str) -> Iterator[Passage]:
    """Headings, paragraphs, list items and table cells; no code."""
    text = re.sub(r"<!--.*?-->", lambda found: "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    held: list[str] = []
    begin = 1
    fence = ""
    lines = [*text.split("\n"), ""]
    for number, line in enumerate(lines, 1):
        opening = re.match(r"\s*(```+|~~~+)", line)
        if fence:
            fence = "" if opening and opening.group(1).startswith(fence) else fence
            continue
        apart = not line.strip() or opening or re.match(r"\s*(#+ |[-*] |\d+\. |\||> )", line)
        if apart and held:
            yield Passage(path, begin, "\n".join(held))
            held = []
        if opening:
            fence = opening.group(1)
        elif line.startswith("#"):
            yield Passage(path, number, line.lstrip("# "), "heading")
        elif line.lstrip().startswith("|"):
            kind = "heading" if "".join(lines[number : number + 1]).startswith("| ---") else "text"
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                yield Passage(path, number, cell.strip(), kind)
        elif line.strip():
            begin = begin if held else number
            held.append(re.sub(r"^\s*(?:[-*]|\d+\.|>) ", "", line))


def python(path: str, text: str, *, messages: bool) -> Iterator[Passage]:
    """Docstrings, comments, names of tests and, if wanted, the messages."""
    tree = ast.parse(text, filename=path)
    docstrings = set()
    parts = set()
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    yield Passage(
                        path, node.lineno, node.name.removeprefix("test_").replace("_", " "), "name"
                    )
                match node.body:
                    case [ast.Expr(value=ast.Constant(value=str(words)) as constant), *_]:
                        docstrings.add(id(constant))
                        yield from markdown_at(path, constant.lineno, words)
                    case _:
                        pass
            case ast.JoinedStr(values=values):
                parts |= {id(value) for value in values}
                if messages and id(node) not in parts:
                    words = "".join(v.value if isinstance(v, ast.Constant) else "X" for v in values)
                    yield from _message(path, node.lineno, words)
            case ast.Constant(value=str(words)):
                if messages and id(node) not in docstrings | parts:
                    yield from _message(path, node.lineno, words)
            case _:
                pass
    yield from _comments(path, text)


def markdown_at(path: str, line: int, text: str) -> Iterator[Passage]:
    for passage in markdown(path, text):
        yield Passage(path, line + passage.line - 1, passage.text, passage.kind)


def _message(path: str, line: int, words: str) -> Iterator[Passage]:
    if len(re.findall(r"[A-Za-z]{2,}", words)) >= 3 and " " in words:
        yield Passage(path, line, re.sub(r"\s+", " ", words))


# `tokenize` finds the same comments in fifty times the time.
_STRING_OR_COMMENT: Final = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)


def _comments(path: str, text: str) -> Iterator[Passage]:
    found: list[tuple[int, str]] = []
    lines = text.split("\n")
    line, counted = 1, 0
    for match in _STRING_OR_COMMENT.finditer(text) if "#" in text else ():
        if not match["comment"]:
            continue
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        words = match["comment"].lstrip("#: ").strip()
        alone = lines[line - 1].lstrip().startswith("#")
        if re.match(r"(type:|noqa|fmt:|pragma|pyright:|!|nosec|[A-Z]\d+\b)", words):
            continue
        if not alone:
            yield Passage(path, line, words)
        else:
            found.append((line, words))
    yield from _blocks(path, found)


def _blocks(path: str, lines: list[tuple[int, str]]) -> Iterator[Passage]:
    block: list[tuple[int, str]] = []
    for number, words in [*lines, (-1, "")]:
        if block and number != block[-1][0] + 1:
            yield Passage(path, block[0][0], "\n".join(each for _, each in block))
            block = []
        block.append((number, words))


def commented(path: str, text: str, mark: str) -> Iterator[Passage]:
    """The comments of a file in which they start with `mark`, alone on a line or after the code."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith(mark):
            found.append((number, line.lstrip().lstrip(mark + "!").strip()))
        elif match := re.search(rf"\s{mark}+ (.*)$", line):
            yield Passage(path, number, match.group(1))
    yield from _blocks(path, found)


def passages(path: Path) -> Iterator[Passage]:
    name = path.relative_to(ROOT).as_posix()
    if name in QUOTING:
        return
    match path.suffix:
        case ".md":
            yield from markdown(name, path.read_text(encoding="utf-8"))
        case ".py":
            yield from python(name, path.read_text(encoding="utf-8"), messages=name.startswith("src/"))
        case ".sql":
            yield from commented(name, path.read_text(encoding="utf-8"), "--")
        case _ if path.name in ("Makefile", "pyproject.toml") or name.startswith(".ci/"):
            yield from commented(name, path.read_text(encoding="utf-8"), "#")
        case _:
            pass


def room(path: str) -> str:
    """Return the part of the project whose numbers are recorded together."""
    match Path(path).parts:
        case ("src", "everbeat", package, _, *_):
            return f"src/everbeat/{package}"
        case ("src", "everbeat", _):
            return "src/everbeat"
        case ("tests", folder, _, *_):
            return f"tests/{folder}"
        case (("docs" | "tests") as folder, *_):
            return folder
        case (name,) if name.endswith(".md"):
            return name
        case _:
            return "build"


def found_in(paths: list[Path]) -> list[Finding]:
    with no_collection():
        return [finding for path in paths for passage in passages(path) for finding in findings(passage)]


def counts(found: list[Finding]) -> dict[str, dict[str, int]]:
    """The numbers of each room: findings, and long sentences."""
    words = Counter(room(each.path) for each in found if each.rule != LONG)
    sentences = Counter(room(each.path) for each in found if each.rule == LONG)
    return {
        each: {"findings": words[each], "long": sentences[each]}
        for each in sorted(words.keys() | sentences.keys())
    }


def recorded() -> dict[str, dict[str, int]]:
    return tomllib.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}


def above(now: dict[str, dict[str, int]], budget: dict[str, dict[str, int]]) -> list[str]:
    """The numbers that exceed their budget; a room without one has none."""
    return [
        f"{place}: {number} {kind}, at most {budget.get(place, {}).get(kind, 0)}"
        for place, numbers in now.items()
        for kind, number in numbers.items()
        if number > budget.get(place, {}).get(kind, 0)
    ]


def lowered(now: dict[str, dict[str, int]], budget: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The budget with each number as low as it is now."""
    none = {"findings": 0, "long": 0}
    lower = {
        place: {kind: min(number, now.get(place, none)[kind]) for kind, number in numbers.items()}
        for place, numbers in budget.items()
    }
    return {place: numbers for place, numbers in lower.items() if any(numbers.values())}


def written(budget: dict[str, dict[str, int]]) -> str:
    rows = [
        f'"{place}" = {{ findings = {numbers["findings"]}, long = {numbers["long"]} }}'
        for place, numbers in sorted(budget.items())
    ]
    head = (
        "# Findings of tests/architecture/prose.py in each room. Lower them with --record; they never rise.\n"
    )
    return head + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="List what breaks the rules of plain technical English.")
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; all of the project by default")
    parser.add_argument("--long", action="store_true", help=f"also sentences of more than {MAX_WORDS} words")
    parser.add_argument("--count", action="store_true", help="only the numbers of each room")
    parser.add_argument("--record", action="store_true", help="lower the recorded numbers to those of today")
    options = parser.parse_args()
    chosen = [path.resolve() for path in options.paths]
    files = [
        path
        for path in project_files()
        if not chosen or any(path == each or each in path.parents for each in chosen)
    ]
    found = found_in(files)
    if options.record:
        BUDGET.write_text(written(lowered(counts(found), recorded() or counts(found))), encoding="utf-8")
    if options.count or options.record:
        for place, numbers in counts(found).items():
            print(f"{numbers['findings']:6} {numbers['long']:6} long  {place}")
        return
    for each in found:
        if options.long or each.rule != LONG:
            print(each)
    words = sum(each.rule != LONG for each in found)
    print(f"{words} findings, {len(found) - words} sentences of more than {MAX_WORDS} words")


if __name__ == "__main__":
    main()
