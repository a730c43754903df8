"""Finds the app that a locator names ("package.module:app", "file.py:app").

Worker and task processes import this module. So it imports no other module of the command line, and no library for terminals.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from everbeat.app import App
from everbeat.errors import AppNotFound, EverbeatError, ImportFailed
from everbeat.errors.wording import class_name, nearest, safe_text

_NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_FORMS = "write it as 'package.module:app' or 'path/to/file.py:app'."


def locate(locator: str) -> App:
    """Return the app that a locator names. Adds the working directory to `sys.path`.

    Raises:
        AppNotFound: The module or its app does not exist.
        ImportFailed: The user's module raised an exception.
        EverbeatError: everbeat rejected something in the user's module.
    """
    return app_of(load(locator), locator)


def load(locator: str) -> ModuleType:
    """Import and return the module that a locator names. Raises the same errors as `locate`."""
    place, _ = _parts(locator)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    return _load_file(place, locator) if _is_file(place) else _load_module(place, locator)


def app_of(module: ModuleType, locator: str) -> App:
    """Return the app that a locator names, from its imported module. Raises AppNotFound."""
    _, attribute = _parts(locator)
    return _named(module, attribute, locator) if attribute else _only(module, locator)


def apps_of(module: ModuleType) -> dict[str, App]:
    """Return the apps in a module, by name."""
    return {name: value for name, value in vars(module).items() if isinstance(value, App)}


def _parts(locator: str) -> tuple[str, str]:
    place, _, attribute = locator.rpartition(":") if ":" in locator else (locator, "", "")
    if not place or (":" in locator and not attribute):
        raise AppNotFound(f"The locator {locator!r} is incomplete.", locator=locator, fix=_FORMS)
    return place, attribute


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place


def _load_file(place: str, locator: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise AppNotFound(f"There is no file {place!r}.", locator=locator, fix=_FORMS)
    parts = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if "." in name:
        return _load_module(name, locator)  # so that a file in a package can import its siblings
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AppNotFound(f"The file {place!r} is not Python source.", locator=locator, fix=_FORMS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except EverbeatError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code can raise anything, and its author must see it
        del sys.modules[name]
        _refuse(error, name, locator)
    return module


def _load_module(name: str, locator: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except EverbeatError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            _refuse(error, name, locator)
        found = sorted(path.stem for path in Path.cwd().glob("*.py"))
        guess = nearest(name, found)
        raise AppNotFound(
            f"There is no module {error.name!r} in {Path.cwd()} or on Python's path.",
            locator=locator,
            fix=f"did you mean {guess!r}?" if guess else f"run from the folder that contains it, or {_FORMS}",
        ) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        _refuse(error, name, locator)


def _refuse(error: BaseException, name: str, locator: str) -> NoReturn:
    """Raise ImportFailed with the part of the traceback that belongs to the user's code."""
    step = error.__traceback__
    while step is not None and _is_machinery(step.tb_frame.f_code.co_filename):
        step = step.tb_next
    where = place_of(error)
    if isinstance(error, SyntaxError):
        step = None  # the message already contains the location
    lines = "".join(traceback.format_exception(type(error), error, step)).rstrip()
    summary = f"{class_name(type(error))}: {safe_text(error, limit=500)}"
    raise ImportFailed(
        f"Importing {name!r} failed with {summary}\n\n{lines}\n",
        locator=locator,
        where=where,
        fix="correct the module.",
    ) from None


def place_of(error: BaseException) -> str | None:
    """Return the location of an error as `file:line`: its innermost frame that is in neither everbeat nor a library."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    steps = [
        f"{step.f_code.co_filename}:{line}"
        for step, line in traceback.walk_tb(error.__traceback__)
        if not step.f_code.co_filename.startswith(("<", *_NOT_THE_USERS))
    ]
    return steps[-1] if steps else None


def _is_machinery(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen") or "importlib" in Path(filename).parts


def _named(module: ModuleType, attribute: str, locator: str) -> App:
    found: object = module
    for step in attribute.split("."):
        try:
            found = getattr(found, step)
        except AttributeError:
            apps = apps_of(module)
            guess = nearest(step, apps) or next(iter(apps), None) or nearest(step, vars(module))
            raise AppNotFound(
                f"The module {module.__name__!r} ({_file_of(module)}) has no attribute {attribute!r}.",
                locator=locator,
                fix=_fix_attribute(module, guess),
            ) from None
    if isinstance(found, App):
        return found
    raise AppNotFound(
        f"{locator!r} is of type {type(found).__name__}, not an App.",
        locator=locator,
        fix=_fix_attribute(module, next(iter(apps_of(module)), None)),
    )


def _only(module: ModuleType, locator: str) -> App:
    apps = apps_of(module)
    distinct = {id(app): app for app in apps.values()}
    match len(distinct):
        case 1:
            return next(iter(distinct.values()))
        case 0:
            message = f"The module {module.__name__!r} ({_file_of(module)}) contains no App."
            raise AppNotFound(message, locator=locator, fix="create one there: app = App(...).")
        case _:
            names = ", ".join(apps)
            message = f"The module {module.__name__!r} contains several apps: {names}."
            raise AppNotFound(message, locator=locator, fix=_fix_attribute(module, next(iter(apps))))


def _fix_attribute(module: ModuleType, name: str | None) -> str:
    return "create one there: app = App(...)." if name is None else f"use '{module.__name__}:{name}'."


def _file_of(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or "built in")
