"""Plays a document's steps in the working folder, in order: `python -m tests.docs.play DOCUMENT`.

All Python blocks share one process and one `__main__`; tracebacks point into the document.
The first step that fails ends it.
"""

import ast
import asyncio
import doctest
import inspect
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tests.docs.snippets import Command, FileContent, PythonCode, Step, steps

OUTPUT_RULES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
DRAIN_S = 40


class WrongOutput(Exception):
    """A command did not do what the document says."""


class Player:
    """Plays steps; the background commands it starts are ended by `finish`."""

    def __init__(self, document: Path) -> None:
        self._document = document
        self._main = ModuleType("__main__")
        self._runner = asyncio.Runner()
        self._background: list[tuple[Command, subprocess.Popen[str]]] = []

    def play(self, step: Step) -> None:
        match step:
            case PythonCode():
                self._run_python(step)
            case FileContent(name=name, text=text, append=append):
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                with Path(name).open("a" if append else "w", encoding="utf-8") as file:
                    file.write(text)
            case Command(background=True):
                self._background.append((step, self._start(step)))
            case Command():
                self._check(step, self._start(step))

    def finish(self) -> None:
        for command, process in reversed(self._background):
            process.send_signal(signal.SIGTERM)
            self._check(command, process)
        self._runner.close()

    def _run_python(self, step: PythonCode) -> None:
        padded = "\n" * (step.line - 1) + step.code  # the document's line numbers
        code = compile(
            padded, self._document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
        sys.modules["__main__"] = self._main
        result = eval(code, self._main.__dict__)
        if inspect.iscoroutine(result):
            self._runner.run(result)

    def _start(self, step: Command) -> subprocess.Popen[str]:
        # A reader types `&`; here the process itself is what gets the signal.
        command = f"exec {step.command.removesuffix('&')}" if step.background else step.command
        return subprocess.Popen(
            command,
            shell=True,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def _check(self, step: Command, process: subprocess.Popen[str]) -> None:
        timeout = DRAIN_S if step.background else None
        printed, _ = process.communicate(timeout=timeout)
        where = f"{self._document}:{step.line}: $ {step.command}"
        if process.returncode != step.exit_code:
            raise WrongOutput(f"{where}\nexit code {process.returncode}, not {step.exit_code}:\n{printed}")
        if step.output.strip() and not doctest.OutputChecker().check_output(
            step.output, printed, OUTPUT_RULES
        ):
            raise WrongOutput(f"{where}\nexpected:\n{step.output}\nprinted:\n{printed}")


def main() -> None:
    document = Path(sys.argv[1])
    player = Player(document)
    try:
        for step in steps(document.read_text(encoding="utf-8")):
            player.play(step)
    finally:
        player.finish()


if __name__ == "__main__":
    main()
