"""The demo counts what samples counted by hand contain, and chooses the right files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everbeat.demo import source_files
from everbeat.demo.source_files import LARGEST_BYTES, Counts, choose, count_file, count_source, total

SAMPLE = b'''\
#!/usr/bin/env python3
"""A docstring is code:
its blank line too.

"""

import os, sys  # one statement
from pathlib import Path


class Outer:  # code with a comment is code
    # a comment line
    class Inner:
        def method(self):
            return [
                1,

                # a comment inside of brackets
                2,
            ]

    async def wait(self): ...


value = 1 + \\
    2
text = f"""
{value}

"""
def last(): return lambda: None
'''


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(
            SAMPLE,
            Counts(code_lines=21, comment_lines=3, blank_lines=7, functions=3, classes=2, imports=2),
            id="everything",
        ),
        pytest.param(b"", Counts(), id="empty"),
        pytest.param(b"\n\n", Counts(blank_lines=2), id="blank lines"),
        pytest.param(b"# only this", Counts(comment_lines=1), id="no line end"),
        pytest.param(
            b"x = 1\r\n\r\n# y\r\n", Counts(code_lines=1, comment_lines=1, blank_lines=1), id="CRLF"
        ),
        pytest.param(b"x = 1\ry = 2\r", Counts(code_lines=2), id="CR"),
        pytest.param(b"x = 1\n\x0c\ny = 2\n", Counts(code_lines=2, blank_lines=1), id="form feed"),
        pytest.param(b"\xef\xbb\xbfx = 1\n", Counts(code_lines=1), id="byte order mark"),
        pytest.param(b"# coding: latin-1\nx = '\xe4'\n", Counts(code_lines=1, comment_lines=1), id="latin-1"),
        pytest.param(b"if x:\n    pass\n  \n", Counts(code_lines=2, blank_lines=1), id="only spaces"),
        pytest.param(b"x = \\\n\\\n1\n", Counts(code_lines=3), id="only a backslash"),
        pytest.param("ä = 'ö'\n".encode(), Counts(code_lines=1), id="not ASCII"),
    ],
)
def test_count_source_matches_samples_counted_by_hand(source: bytes, expected: Counts) -> None:
    assert count_source(source) == expected + Counts(files=1, bytes=len(source))


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (b"x = '\xff'\n", "undecodable"),
        (b"# coding: klingon\n", "undecodable"),
        (b"def f(:\n", "unparsable"),
        (b"x = (1,\n", "unparsable"),
        (b"if x:\n        a\n    b\n", "unparsable"),
        (b"x = '''\n", "unparsable"),
        (b"x = 1\x00\n", "unparsable"),
        (b"(" * 300 + b")" * 300, "unparsable"),
        (b"print 'two'\n", "unparsable"),
    ],
)
def test_files_that_are_not_python_are_counted_as_such(source: bytes, kind: str) -> None:
    assert count_source(source) == Counts(files=1, bytes=len(source), **{kind: 1})


def test_a_file_that_cannot_be_read_is_counted_as_unreadable(tmp_path: Path) -> None:
    assert count_file(str(tmp_path / "gone.py")) == Counts(files=1, unreadable=1)
    assert count_file(str(tmp_path)) == Counts(files=1, unreadable=1)


def test_the_counts_of_several_files_add_up() -> None:
    one, two = count_source(SAMPLE), count_source(b"import os\n")
    assert total([one, two, two]) == one + two + two
    assert total([one, two]).imports == 3
    assert total([one, two]).lines == one.lines + 1
    assert total([]) == Counts()


def test_the_independent_counting_program_agrees_without_everbeat(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.py", "b b.py", "gone.py")]
    paths[0].write_bytes(SAMPLE)
    paths[1].write_bytes(b"import os\n")
    modules = (
        "import sys, runpy; runpy.run_path(sys.argv[1]); print(*[m for m in sys.modules if 'everbeat' in m])"
    )
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", modules, source_files.__file__], capture_output=True, text=True
    )
    assert loaded.stdout.strip() == ""
    counted = subprocess.run(
        [sys.executable, "-I", source_files.__file__],
        input=b"\0".join(os.fsencode(path) for path in paths),
        capture_output=True,
        check=True,
    )
    by_path = {path: Counts(**counts) for path, counts in json.loads(counted.stdout).items()}
    assert by_path == {str(path): count_file(str(path)) for path in paths}


class TestChoice:
    def test_the_demo_chooses_the_python_files_below_a_folder_in_order(self, tmp_path: Path) -> None:
        for name in (
            "b.py",
            "a/c.py",
            "a/readme.md",
            ".hidden/d.py",
            "__pycache__/e.py",
            "v/site-packages/f.py",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        os.mkfifo(tmp_path / "pipe.py")
        (tmp_path / "huge.py").write_bytes(b"#" * (LARGEST_BYTES + 1))
        (tmp_path / "dangling.py").symlink_to(tmp_path / "nothing")
        (tmp_path / "loop").symlink_to(tmp_path)
        (tmp_path / "folder.py").mkdir()
        chosen = choose(tmp_path)
        assert chosen.chosen == (str(tmp_path / "a/c.py"), str(tmp_path / "b.py"))
        assert (chosen.found, chosen.folder) == (2, tmp_path)

    def test_the_demo_omits_a_file_name_that_is_not_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "good.py").touch()
        try:
            Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py")).touch()
        except OSError:
            pytest.skip("this file system takes UTF-8 names only")
        assert choose(tmp_path).chosen == (str(tmp_path / "good.py"),)

    def test_the_demo_lists_the_files_of_a_checkout_by_git(self, tmp_path: Path) -> None:
        subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
        (tmp_path / ".gitignore").write_text("ignored.py\n")
        for name in ("ignored.py", "new.py", "staged.py", "deleted.py"):
            (tmp_path / name).touch()
        subprocess.run(["git", "-C", str(tmp_path), "add", "staged.py", "deleted.py"], check=True)
        (tmp_path / "deleted.py").unlink()
        assert choose(tmp_path).chosen == (str(tmp_path / "new.py"), str(tmp_path / "staged.py"))

    def test_the_demo_samples_many_files_evenly_and_reproducibly(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(source_files, "MOST_FILES", 4)
        for number in range(10):
            (tmp_path / f"{number}.py").touch()
        chosen = choose(tmp_path)
        assert [Path(path).stem for path in chosen.chosen] == ["0", "2", "5", "7"]
        assert chosen == choose(tmp_path)
        assert chosen.found == 10

    def test_the_demo_chooses_the_standard_library_without_its_tests_by_default(self) -> None:
        chosen = choose(None)
        assert chosen.found > 300
        assert any(path.endswith("asyncio/__init__.py") for path in choose(chosen.folder / "asyncio").chosen)
        inner = [Path(path).relative_to(chosen.folder).parts for path in chosen.chosen]
        assert not [parts for parts in inner if {"test", "tests", "site-packages"} & set(parts)]
