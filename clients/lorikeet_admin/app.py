"""The command tree and the options before a command's name."""

from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from lorikeet_admin.command_group import CommandGroup
from lorikeet_admin.commands import adapters, bench, node, tenants
from lorikeet_admin.commands.bench_engine import engine
from lorikeet_admin.commands.bench_ingest import ingest
from lorikeet_admin.commands.bench_profile import profile
from lorikeet_admin.commands.bench_serve import serve
from lorikeet_admin.commands.generate import generate
from lorikeet_admin.commands.up import up
from lorikeet_admin.session import Connection
from lorikeet_client import DEFAULT_INFERENCE, DEFAULT_MANAGER, ClientTls

app = typer.Typer(
    name="lorikeet",
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "Lorikeet from a shell. Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 not found, "
        "4 service unavailable, 5 not allowed, 6 out of time, 130 interrupted."
    ),
)
app.command()(up)
# A text without its option would else be refused without a word on where it goes.
app.command(context_settings={"allow_extra_args": True})(generate)
app.command()(node.residency)
app.add_typer(adapters.app, name="adapters")
app.add_typer(tenants.app, name="tenants")
app.add_typer(node.app, name="model")
bench.app.command()(ingest)
bench.app.command()(engine)
bench.app.command()(serve)
bench.app.command()(profile)
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lorikeet {metadata.version('lorikeet')}")
        raise typer.Exit


@app.callback()
def connect(
    context: typer.Context,
    inference: Annotated[
        str, typer.Option(envvar="LORIKEET_INFERENCE", help="Address of the inference service.")
    ] = DEFAULT_INFERENCE,
    manager: Annotated[
        str, typer.Option(envvar="LORIKEET_MANAGER", help="Address of the adapter manager.")
    ] = DEFAULT_MANAGER,
    token: Annotated[
        str | None, typer.Option(envvar="LORIKEET_TOKEN", help="Bearer token.", show_envvar=True)
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", envvar="LORIKEET_TLS_CA_FILE", help="Speak TLS, trusting this CA file."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for each call, in place of its own limit.", min=0.001)
    ] = None,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Remember where the services are."""
    tls = ClientTls(ca_file=tls_ca) if tls_ca else None
    context.obj = Connection(inference, manager, token or None, tls, timeout)
