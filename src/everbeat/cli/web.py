"""`everbeat web`: serves the dashboard, which is `everbeat.web`. Its libraries belong to an optional extra."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, Final, TypeAlias

import typer

from everbeat.cli.failures import named_as_options
from everbeat.cli.output import say
from everbeat.cli.selection import SchemaOption, UrlOption, selected_app
from everbeat.errors import WebNotInstalled

USERS_VARIABLE: Final = "EVERBEAT_WEB_USERS"
_NEEDED: Final = ("jinja2", "starlette", "uvicorn")
_OPTIONS: Final = {
    "proxies": "--proxy",
    "header": "--trusted-header",
    "hide": "--hide",
    "Web.name": "--name",
    "Basic.users": USERS_VARIABLE,
}
"""The arguments of `Web` and of its authentication, and the option that gives each."""

commands = typer.Typer(rich_markup_mode=None, add_completion=False)


HostOption: TypeAlias = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Listen on this address.")
]
PortOption: TypeAlias = Annotated[
    int, typer.Option("--port", min=0, max=65_535, help="Listen on this port; 0 takes a free one.")
]
ReadOnlyOption: TypeAlias = Annotated[bool, typer.Option("--read-only", help="Offer and accept no actions.")]
InstallationOption: TypeAlias = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="The name of the installation in the header.")
]
HideOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--hide",
        metavar="TASK[:PARAMETER]",
        help="Show no payloads of this task, or not this argument; * matches any text. Can be repeated.",
    ),
]
HeaderOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--trusted-header", metavar="HEADER", help="A proxy puts the user's name into this header."),
]
ProxyOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--proxy", metavar="ADDRESS", help="The address or network of a proxy; can be repeated."),
]
RoleOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--role", metavar="ROLE", help="The role of users whom the proxy names: see, read, operate or admin."
    ),
]
RoleOfOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--role-of", metavar="USER=ROLE", help="The role of one of these users; can be repeated."),
]
RootPathOption: TypeAlias = Annotated[
    str,
    typer.Option("--root-path", metavar="PATH", help="The path under which a proxy shows the dashboard."),
]


ConnectionsOption: TypeAlias = Annotated[
    int,
    typer.Option(
        "--max-connections", min=10, max=100_000, help="Answer 503 if more connections than this are open."
    ),
]


@commands.command()
def web(
    locator: Annotated[
        str | None,
        typer.Argument(
            metavar="[LOCATOR]",
            help="Take database, schema and priorities from an app: module:app.",
            show_default=False,
        ),
    ] = None,
    *,
    url: UrlOption = None,
    schema: SchemaOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 7717,
    read_only: ReadOnlyOption = False,
    name: InstallationOption = None,
    hide: HideOption = None,
    header: HeaderOption = None,
    proxies: ProxyOption = None,
    role: RoleOption = None,
    roles: RoleOfOption = None,
    root_path: RootPathOption = "",
    connections: ConnectionsOption = 500,
) -> None:
    """Serve the dashboard.

    On this machine, it needs no password. On any other address it starts only with users in EVERBEAT_WEB_USERS, written as
    name:role:password and separated by spaces, or with --trusted-header. The roles are see, read, operate and admin.
    """
    if any(find_spec(each) is None for each in _NEEDED):
        raise WebNotInstalled
    serving: Any = import_module("everbeat.web.serving")
    with named_as_options(_OPTIONS):
        auth = serving.chosen_authentication(
            host,
            users=os.environ.get(USERS_VARIABLE),
            header=header,
            proxies=proxies or (),
            role=role,
            roles=_roles(roles or ()),
        )
        serving.check_root_path(root_path)
    with (
        selected_app(url=url, schema=schema, locator=locator) as app,
        serving.listening(host, port) as socket,
    ):
        with named_as_options(_OPTIONS):
            dashboard = serving.Web(app, auth=auth, read_only=read_only, hide=hide or (), name=name)
        say(f"The dashboard is at {serving.address_of(socket, root_path)} (Ctrl-C stops it)")
        serving.serve(dashboard, socket, root_path=root_path, connections=connections)


def _roles(given: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for each in given:
        user, equals, role = each.partition("=")
        if not user or not equals:
            raise typer.BadParameter(f"--role-of {each!r} is not USER=ROLE: write ann=operate.")
        found[user] = role
    return found
