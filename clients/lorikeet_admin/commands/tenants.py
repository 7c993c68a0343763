"""`lorikeet tenants ...`: create, list, token, revoke, rm. Admins only."""

from typing import Annotated

import typer
from rich.console import Console

from lorikeet_admin.session import Etag, Json, TenantArgument, session
from lorikeet_admin.tables import plain_table
from lorikeet_client import NewToken, Tenant, TenantLimits

app = typer.Typer(no_args_is_help=True, help="Tenants and their tokens (admins only).")


@app.command()
def create(
    context: typer.Context,
    tenant: TenantArgument,
    weight: Annotated[float | None, typer.Option(help="Share under contention, relative to others.")] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, max=2**32 - 1, help="Most requests running at once.")
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(min=1, max=2**32 - 1, help="Most requests waiting.")
    ] = None,
    max_adapters: Annotated[int | None, typer.Option(min=1, max=2**32 - 1, help="Most adapters.")] = None,
    as_json: Json = False,
) -> None:
    """Create a tenant."""
    limits = TenantLimits(weight, max_running, max_waiting, max_adapters)
    with session(context, as_json=as_json) as at:
        made = at.client.create_tenant(tenant, limits, timeout_s=at.timeout_s)
        at.output.result(made, lambda console: _show(console, [made]))


@app.command("list")
def list_(context: typer.Context, as_json: Json = False) -> None:
    """List tenants with their tokens' ids."""
    with session(context, as_json=as_json) as at:
        tenants = list(at.client.list_tenants(timeout_s=at.timeout_s))
        at.output.result({"tenants": tenants}, lambda console: _show(console, tenants))


@app.command()
def token(
    context: typer.Context,
    tenant: TenantArgument,
    admin: Annotated[bool, typer.Option("--admin", help="May act for every tenant.")] = False,
    as_json: Json = False,
) -> None:
    """Make a token and print it, this once."""
    with session(context, as_json=as_json) as at:
        made = at.client.create_token(tenant, admin=admin, timeout_s=at.timeout_s)
        at.output.result(made, lambda console: _show_token(console, made))
        at.output.note("only its hash is kept: this token is not shown again")


@app.command()
def revoke(
    context: typer.Context,
    tenant: TenantArgument,
    token_id: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="As `tenants list` shows it.")],
    as_json: Json = False,
) -> None:
    """Make a token worthless."""
    with session(context, as_json=as_json) as at:
        at.client.revoke_token(tenant, token_id, timeout_s=at.timeout_s)
        at.output.result({"revoked": token_id}, lambda console: console.print(f"revoked {token_id}"))


@app.command()
def rm(context: typer.Context, tenant: TenantArgument, etag: Etag = "", as_json: Json = False) -> None:
    """Delete a tenant."""
    with session(context, as_json=as_json) as at:
        at.client.delete_tenant(tenant, etag=etag, timeout_s=at.timeout_s)
        at.output.result({"deleted": tenant}, lambda console: console.print(f"deleted {tenant}"))


def _show(console: Console, tenants: list[Tenant]) -> None:
    table = plain_table("tenant", "weight", "running", "waiting", "adapters", "tokens")
    for tenant in tenants:
        limits = tenant.limits
        table.add_row(
            tenant.name.removeprefix("tenants/"),
            *(
                "" if limit is None else f"{limit:g}"
                for limit in (
                    limits.weight,
                    limits.max_running_requests,
                    limits.max_waiting_requests,
                    limits.max_adapters,
                )
            ),
            ", ".join(t.token_id + (" (admin)" if t.admin else "") for t in tenant.tokens),
        )
    console.print(table if tenants else "no tenants")


def _show_token(console: Console, made: NewToken) -> None:
    console.print(made.token, soft_wrap=True)
