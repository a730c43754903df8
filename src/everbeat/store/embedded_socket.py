"""Where the embedded server puts its Unix socket: with its data, or in a short folder where that is too long.

What lives here: choosing and checking that folder. What may not: starting anything.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from pathlib import Path

from everbeat.errors import EmbeddedUnavailable
from everbeat.store.server_identity import Identity

_LONGEST_BYTES = 100  # the whole path: Linux takes 107, macOS 103
_FILE_NAME = ".s.PGSQL.65535"


def socket_folder(data: Path, *, owner: Identity) -> Path:
    """The folder for the socket of `data`, always the same one, which only the server's user may enter.

    Raises EmbeddedUnavailable when somebody else has taken the place.
    """
    if _fits(data):
        return data
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:12]
    name = f"everbeat-{owner.uid}-{digest}"
    folder = next(
        place / name for place in (Path(tempfile.gettempdir()), Path("/tmp")) if _fits(place / name)
    )
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        _check(folder, owner=owner)
    else:
        owner.give(folder)
    return folder


def _fits(folder: Path) -> bool:
    # A comma or a quote would need quoting in the server's settings, in the URL and in libpq: not worth it.
    plain = re.fullmatch(r"[\w./-]+", str(folder), re.ASCII) is not None
    return plain and len(os.fsencode(folder / _FILE_NAME)) <= _LONGEST_BYTES


def _check(folder: Path, *, owner: Identity) -> None:
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == owner.uid and stat.S_IMODE(found.st_mode) == 0o700:
        return
    raise EmbeddedUnavailable(
        f"{folder} is {stat.filemode(found.st_mode)} and belongs to uid {found.st_uid}; for the socket of "
        f"the embedded PostgreSQL it must be a folder that only uid {owner.uid} may enter.",
        fix=f"remove {folder}, or set TMPDIR to a folder of your own.",
    )
