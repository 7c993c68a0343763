"""How a command reaches the services: shared options, and a client whose errors end the command."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import typer

from lorikeet_admin.output import Output
from lorikeet_client import ClientTls, Lorikeet

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
AdapterArgument = Annotated[
    str, typer.Argument(metavar="ADAPTER", help="name, tenant/name, or a resource name.", show_default=False)
]
TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", show_default=False)]
Etag = Annotated[str, typer.Option("--etag", help="Refuse if the record changed since it had this etag.")]


@dataclass(frozen=True, slots=True)
class Connection:
    """Where to and as whom: the options before the command's name."""

    inference: str
    manager: str
    token: str | None = field(repr=False)
    tls: ClientTls | None
    timeout_s: float | None

    def client(self) -> Lorikeet:
        """A fresh client."""
        return Lorikeet(self.inference, self.manager, self.token, self.tls)


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with."""

    client: Lorikeet
    output: Output
    timeout_s: float | None


@contextmanager
def session(context: typer.Context, *, as_json: bool) -> Generator[Session]:
    """A client for the command; any error of it is printed and becomes the exit code."""
    connection: Connection = context.obj
    output = Output(as_json=as_json)
    with output.reported_errors():
        try:
            client = connection.client()
        except (ValueError, OSError) as error:  # a token no header can carry; an unreadable TLS file
            raise output.fail(str(error)) from error
        with client:
            yield Session(client, output, connection.timeout_s)
