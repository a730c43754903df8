"""The system user that runs the embedded PostgreSQL.

PostgreSQL refuses to run as root, and refuses to initialize data for a user without a name.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from everbeat.embedded import user_namespace
from everbeat.errors import EmbeddedUnavailable

if sys.platform != "win32":
    import pwd

_logger = logging.getLogger(__name__)
_SYSTEM_USER = "everbeat"
_MAKE_SYSTEM_USER = (
    ("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"),
    ("adduser", "-S", "-D", "-H"),  # busybox
)


class Identity(Struct, frozen=True, kw_only=True):
    """A way to run PostgreSQL's programs: through a `prefix` command, or as another `user` and `group`."""

    name: str
    prefix: tuple[str, ...] = ()
    user: int | None = None
    group: int | None = None
    takes_over: bool = False  # the folder has another owner, which is changed to this user

    @property
    def uid(self) -> int:
        """Return the uid that owns the server's files, as seen from this process."""
        return os.geteuid() if self.user is None else self.user

    def run(
        self, *command: str, folder: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to completion in `folder`. The result's `stdout` contains both its output and its errors."""
        return subprocess.run(
            [*self.prefix, *command],
            check=False,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            user=self.user,
            group=self.group,
            extra_groups=None if self.user is None else [],
        )

    def give(self, path: Path) -> None:
        """Make the server's user the owner of `path`. This has an effect only if root is acting for another user."""
        if self.user is not None:
            os.chown(path, self.user, -1 if self.group is None else self.group, follow_symlinks=False)


def choose_identity(*, folder: Path, data: Path, program: Path) -> Identity:
    """Return the first identity that can run `program` in `folder`.

    Raises EmbeddedUnavailable, which lists each identity's obstacle, if no identity works.
    """
    met: list[str] = []
    for identity in _candidates(folder=folder, data=data, met=met):
        obstacle = _obstacle(identity, folder=folder, program=program)
        if obstacle is None:
            if identity.takes_over:
                _hand_over(folder, identity=identity)
            return identity
        met.append(f"{identity.name}: {obstacle}")
    raise EmbeddedUnavailable(
        f"No user can run the embedded PostgreSQL in {folder}: {'; '.join(met)}. "
        "PostgreSQL itself refuses to run as root.",
        fix="start as an ordinary user that owns the folder, "
        "or choose a folder that every user can enter, such as /var/lib/everbeat.",
    )


def _candidates(*, folder: Path, data: Path, met: list[str]) -> Iterator[Identity]:
    effective = os.geteuid()
    if effective != 0:
        if data.exists() or _named(effective) is not None:
            yield Identity(name=f"uid {effective}")
        else:
            yield _in_namespace()
        return
    place = (data if data.exists() else folder).stat()
    if place.st_uid != 0 and (data.exists() or _named(place.st_uid) is not None):
        yield Identity(name=f"the folder's owner, uid {place.st_uid}", user=place.st_uid, group=place.st_gid)
    yield _in_namespace()
    try:
        yield _system_user()
    except OSError as error:
        met.append(str(error))


def _in_namespace() -> Identity:
    named = next((entry for entry in pwd.getpwall() if entry.pw_uid != 0), None)
    uid, gid = (1, 1) if named is None else (named.pw_uid, named.pw_gid)
    interpreter = sys.executable or "python3"
    return Identity(
        name="a user namespace", prefix=(interpreter, "-I", "-S", user_namespace.__file__, str(uid), str(gid))
    )


def _system_user() -> Identity:
    if _named(_SYSTEM_USER) is None:
        command = next((command for command in _MAKE_SYSTEM_USER if shutil.which(command[0])), ("useradd",))
        made = subprocess.run([*command, _SYSTEM_USER], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise OSError(f"the system user {_SYSTEM_USER!r} could not be created: {made.stderr.strip()}")
    entry = pwd.getpwnam(_SYSTEM_USER)
    return Identity(
        name=f"the system user {_SYSTEM_USER!r}", user=entry.pw_uid, group=entry.pw_gid, takes_over=True
    )


def _hand_over(folder: Path, *, identity: Identity) -> None:
    _logger.warning(
        "User namespaces are forbidden on this machine, and PostgreSQL refuses to run as root: "
        "the embedded PostgreSQL in %s runs as %s, which now owns that folder.",
        folder,
        identity.name,
    )
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            identity.give(Path(parent, name))
    identity.give(folder)


def _obstacle(identity: Identity, *, folder: Path, program: Path) -> str | None:
    if not identity.prefix and identity.user is None:
        return None
    place, right = (folder.parent, "-x") if identity.takes_over else (folder, "-w")
    script = 'test -x "$1" || exit 11; test "$3" "$2" || exit 12'
    try:
        asked = identity.run("/bin/sh", "-c", script, "sh", str(program), str(place), right, folder=Path("/"))
    except OSError as error:
        return str(error)
    match asked.returncode:
        case 0:
            return None
        case 11:
            return f"cannot run {program}"
        case 12:
            return f"cannot {'enter' if identity.takes_over else 'write in'} {place}"
        case _:
            return asked.stdout.strip() or f"exit status {asked.returncode}"


def _named(user: int | str) -> str | None:
    try:
        return (pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)).pw_name
    except KeyError:
        return None


def make_folder(folder: Path) -> Path:
    """Create `folder` if it is missing, and return its absolute path. Root makes the owner of the parent folder the owner of a new folder.

    Raises EmbeddedUnavailable if the folder cannot be created.
    """
    path = folder.resolve()
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return path
    except FileNotFoundError as error:
        if path.parent.exists():
            raise _unmade(path, error) from None  # /proc reports this for every name in it
        make_folder(path.parent)
        return make_folder(path)
    except OSError as error:
        raise _unmade(path, error) from None
    place = path.parent.stat()
    if os.geteuid() == 0 and place.st_uid != 0 and _named(place.st_uid) is not None:
        os.chown(path, place.st_uid, place.st_gid)
    return path


def _unmade(path: Path, error: OSError) -> EmbeddedUnavailable:
    return EmbeddedUnavailable(
        f"The folder {path} for the embedded PostgreSQL cannot be created: {error.strerror}.",
        fix="choose another folder.",
    )
