"""The README and the guide are run as a reader would: in an empty folder, on an empty database."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.docs.snippets import BadSnippet, Command, FileContent, PythonCode, steps

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLAY_TIMEOUT_S = 280

pytestmark = pytest.mark.timeout(300)


class SnippetFailed(Exception):
    """A step of a document did not work; the message is what playing it printed."""


def play(document: Path, folder: Path, **environment: str) -> str:
    """Return the output of playing the document. Raises: SnippetFailed with that output if a step failed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    modules = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "src")])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.play", str(document)],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": modules} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=PLAY_TIMEOUT_S)
    finally:
        _end_session(process)
    if process.returncode != 0:
        raise SnippetFailed(printed)
    return printed


def _end_session(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # all of it has ended, as it should
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def own_database(database_url: str) -> Iterator[str]:
    """The URL of an empty database on the test server."""
    name = f"docs_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        yield urlsplit(database_url)._replace(path=f"/{name}").geturl()
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.mark.parametrize(
    "document",
    # The page of all commands starts more of them than all other pages together; tests/cli starts each of them, too.
    [pytest.param(one, marks=pytest.mark.long) if one.name == "cli.md" else one for one in DOCUMENTS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_every_document_runs_as_written(document: Path, own_database: str, tmp_path: Path) -> None:
    printed = play(document, tmp_path, EVERBEAT_DATABASE_URL=own_database)
    assert "Traceback" not in printed


def test_snippet_blocks_run_in_order_and_share_their_names(tmp_path: Path) -> None:
    document = write(
        tmp_path,
        """
        <!-- snippet: file shop.py -->
        ```python
        PRICE = 3
        ```
        <!-- snippet: append shop.py -->
        ```python
        TAX = 1
        ```
        ```python
        import shop
        total = shop.PRICE + shop.TAX
        ```
        <!-- snippet: run -->
        ```console
        $ python -c "import shop; print(shop.PRICE)" \\
          && echo anything
        3
        ...
        ```
        ```python
        import asyncio
        await asyncio.sleep(0)  # one turn: a snippet may await
        print('total', total, __name__)
        ```
        """,
    )
    assert "total 4 __main__" in play(document, tmp_path)


def test_a_background_command_of_a_snippet_is_ended_by_sigterm(tmp_path: Path) -> None:
    document = write(
        tmp_path,
        """
        <!-- snippet: file server.py -->
        ```python
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with open("ready", "w") as ready:
            ready.write("yes")
        signal.pause()
        ```
        ```python
        import os
        os.mkfifo("ready")
        ```
        <!-- snippet: run background -->
        ```sh
        $ python server.py
        ```
        ```python
        assert open("ready").read() == "yes"
        ```
        """,
    )
    assert play(document, tmp_path) == ""


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("Prose.\n\n```python\nok = 1\nwrong = 1 / 0\n```", 'guide.md", line 5'),
        ("<!-- snippet: run -->\n```console\n$ exit 3\n```", "exit code 3, not 0"),
        ("<!-- snippet: run exit 4 -->\n```console\n$ exit 3\n```", "exit code 3, not 4"),
        ("<!-- snippet: run -->\n```console\n$ echo one\ntwo\n```", "expected:\ntwo"),
        ("<!-- snippet: run background -->\n```console\n$ sleep 60\n```", "exit code -15"),
    ],
)
def test_a_snippet_with_wrong_output_fails(tmp_path: Path, block: str, complaint: str) -> None:
    with pytest.raises(SnippetFailed) as failure:
        play(write(tmp_path, block), tmp_path)
    assert complaint in str(failure.value)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- snippet: no-run -->\n```python\n```",
        "<!-- snippet: file ../x.py -->\n```python\n```",
        "<!-- snippet: file /x.py -->\n```python\n```",
        "<!-- snippet: run -->\n```python\n```",
        "<!-- snippet: run -->\n```console\nls\n```",
        "<!-- snippet: run sideways -->\n```console\n$ ls\n```",
        "<!-- snippet: skip -->\n```python\n```",
        "<!-- snippet: run -->\n\nProse.",
        "```python\nnever closed",
    ],
)
def test_an_invalid_snippet_mark_is_refused(text: str) -> None:
    with pytest.raises(BadSnippet, match=r"^line \d"):
        steps(text)


def test_the_steps_of_a_document_have_their_line_numbers() -> None:
    text = "\n".join(
        [
            "Prose.",
            "```python",
            "one = 1",
            "```",
            "<!-- snippet: no-run needs a cluster -->",
            "```python",
            "```",
            "1. item",
            "",
            "   <!-- snippet: run -->",
            "   ```console",
            "   $ first \\",
            "     more",
            "   out",
            "   $ second",
            "   ```",
            "```console",
            "$ not run",
            "```",
            "<!-- snippet: file a/b.toml -->",
            "````toml",
            "```",
            "````",
        ]
    )
    assert steps(text) == [
        PythonCode(line=3, code="one = 1\n"),
        Command(line=12, command="first   more", output="out\n", background=False, exit_code=0),
        Command(line=15, command="second", output="", background=False, exit_code=0),
        FileContent(line=21, name="a/b.toml", text="```\n", append=False),
    ]


def write(folder: Path, text: str) -> Path:
    document = folder / "guide.md"
    document.write_text(dedent(text), encoding="utf-8")
    return document
