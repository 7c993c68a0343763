"""`lorikeet model show` and `lorikeet residency`: what is served and where adapters are."""

from typing import Annotated

import typer
from rich.console import Console

from lorikeet_admin.output import size
from lorikeet_admin.session import Json, session
from lorikeet_admin.tables import layer_ranges, placement_table, plain_table
from lorikeet_client import Model
from lorikeet_contract.schema import LoraSite

app = typer.Typer(no_args_is_help=True, help="The base model.")


@app.command()
def show(context: typer.Context, as_json: Json = False) -> None:
    """Show the model, its limits, the places that take LoRA and the engine's counters."""
    with session(context, as_json=as_json) as at:
        model = at.client.get_model(timeout_s=at.timeout_s)
        at.output.result(model, lambda console: _show(console, model))


def residency(
    context: typer.Context,
    adapter: Annotated[str, typer.Argument(help="One adapter; by default all that you may see.")] = "",
    as_json: Json = False,
) -> None:
    """Show where adapters' weights are: on the GPU, in host memory, in a node's disk cache."""
    with session(context, as_json=as_json) as at:
        placements = at.client.get_placement(adapter, timeout_s=at.timeout_s)
        at.output.result(
            {"placements": placements},
            lambda console: console.print(
                placement_table(placements) if placements else "nothing is resident"
            ),
        )


def _show(console: Console, model: Model) -> None:
    limits, status = model.limits, model.status
    console.print(f"{model.name}  {model.architecture}  {model.dtype}  vocabulary {model.vocab_size}")
    console.print(f"base digest {model.base_digest}\ninstance    {model.instance_id}")
    facts = plain_table("limit", "value")
    facts.add_row("context tokens", str(limits.max_context_tokens))
    facts.add_row(
        "running / waiting requests", f"{limits.max_running_requests} / {limits.max_waiting_requests}"
    )
    facts.add_row("samples of a request", str(limits.max_samples))
    facts.add_row("tokens a step", str(limits.max_step_tokens))
    facts.add_row("LoRA rank", str(limits.max_rank))
    facts.add_row("adapters in a batch", str(limits.max_active_adapters))
    facts.add_row("adapter arena", f"{size(status.arena_used_bytes)} of {size(limits.adapter_arena_bytes)}")
    facts.add_row("host pool", f"{size(status.host_used_bytes)} of {size(limits.host_pool_bytes)}")
    facts.add_row("KV blocks free", f"{status.kv_blocks_available} of {status.kv_blocks_total}")
    facts.add_row("requests now", f"{status.running_requests} running, {status.waiting_requests} waiting")
    console.print(facts)
    rows: dict[tuple[str, str, int, int, int], list[LoraSite]] = {}
    for site in model.lora_schema.sites:
        key = (site.key, site.kind, site.in_features, site.out_features, site.num_experts)
        rows.setdefault(key, []).append(site)
    sites = plain_table("site", "kind", "layers", "in", "out", "experts")
    for (key, kind, in_features, out_features, num_experts), found in rows.items():
        layers = layer_ranges(site.layer for site in found)
        sites.add_row(key, kind, layers, str(in_features), str(out_features), str(num_experts or ""))
    console.print(sites)
