"""Problems of settings in the words of the command line: whoever typed --terminal-records reads --terminal-records.

What lives here: the renaming. What may not: which option gives which setting, which each command knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from msgspec.structs import replace

from everbeat.errors import ConfigurationError


@contextmanager
def typed_as(options: Mapping[str, str]) -> Iterator[None]:
    """Inside, a ConfigurationError names these subjects by their options; others keep theirs. Entries of a list are named as it."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(
            [
                replace(problem, subject=options.get(problem.subject.partition("[")[0], problem.subject))
                for problem in error.problems
            ]
        ) from None
