"""The style sheet, the script and the icon, which are files of this package. Their addresses contain a hash of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from msgspec import Struct
from starlette.responses import Response

_FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _File(Struct, frozen=True):
    content: bytes
    media_type: str
    version: str


@cache
def files() -> Mapping[str, _File]:
    """Return the files by name."""
    found = {}
    for path in sorted(_FOLDER.iterdir()):
        if (media_type := _TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            found[path.name] = _File(content, media_type, hashlib.sha256(content).hexdigest()[:16])
    return found


def serve_file(name: str, *, version: str | None) -> Response:
    """Return a file, or 404. A browser keeps a file whose version is in its address, and asks again for another one."""
    found = files().get(name)
    if found is None:
        return Response(status_code=404)
    kept = "public, max-age=31536000, immutable" if version == found.version else "no-cache"
    return Response(found.content, media_type=found.media_type, headers={"cache-control": kept})
