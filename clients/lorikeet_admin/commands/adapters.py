"""`lorikeet adapters ...`: push, list, show, report, probe, alias, pin, load, unload, rm."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lorikeet_admin.exits import ExitCode
from lorikeet_admin.output import Output, short_digest, size
from lorikeet_admin.report_view import probe_text, probe_word, show_probe, show_report
from lorikeet_admin.session import AdapterArgument, Etag, Json, session
from lorikeet_admin.tables import placement_table, plain_table, short_name
from lorikeet_client import (
    Adapter,
    ExpertOrientation,
    ExpertPacking,
    LorikeetError,
    Placement,
    ProbeVerdict,
    ResidencyState,
    Revision,
    UnavailableError,
    UploadOptions,
    UploadProgress,
    UploadResult,
)

Verbose = Annotated[bool, typer.Option("--verbose", help="A line for each group of tensors.")]

app = typer.Typer(no_args_is_help=True, help="Adapters: upload them, look at them, say where they live.")


@app.command()
def push(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory written by PEFT's save_pretrained.")
    ],
    name: Annotated[
        str, typer.Option("--name", help="Adapter to upload to: tenant/name.", show_default=False)
    ],
    alias: Annotated[
        list[str] | None, typer.Option("--alias", help="Point this alias at the new revision; repeatable.")
    ] = None,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Check everything, store nothing.")
    ] = False,
    expert_packing: Annotated[
        ExpertPacking | None, typer.Option(help="Column order of fused experts' lora_B, where unclear.")
    ] = None,
    expert_orientation: Annotated[
        ExpertOrientation | None, typer.Option(help="Side of the experts' lora_A, where unclear.")
    ] = None,
    base_digest: Annotated[
        str,
        typer.Option(
            help="Digest of the base model it is for, where nodes serve several; `model show` has it."
        ),
    ] = "",
    resume: Annotated[bool, typer.Option(help="Go on where a broken upload of these files stopped.")] = True,
    probe_: Annotated[
        bool,
        typer.Option("--probe", help="Compare it with the base model on a node; fail if nothing changes."),
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Upload a PEFT directory and report what was matched."""
    if probe_ and validate_only:
        raise typer.BadParameter("--probe needs the adapter on a node, and --validate-only stores nothing")
    if alias and validate_only:
        raise typer.BadParameter("--alias needs a revision to point at, and --validate-only stores nothing")
    options = UploadOptions(aliases=alias or (), validate_only=validate_only, resume=resume)
    if expert_packing:
        options["expert_packing"] = expert_packing
    if expert_orientation:
        options["expert_orientation"] = expert_orientation
    if base_digest:
        options["base_digest"] = base_digest
    with session(context, as_json=as_json) as at, _progress_bar(at.output) as bar:
        task = bar.add_task(name, total=None)

        def advance(progress: UploadProgress) -> None:
            bar.update(task, completed=progress.sent_bytes, total=progress.total_bytes)

        options["progress"] = advance
        options["on_retry"] = _note_once(at.output)
        result = at.client.upload_adapter(directory, name, timeout_s=at.timeout_s, **options)
        bar.stop()
        failure: LorikeetError | None = None
        if probe_:
            try:
                probed = at.client.probe_adapter(result.revision.name, timeout_s=at.timeout_s)
                result = replace(result, revision=replace(result.revision, probe=probed.probe))
            except LorikeetError as error:  # the upload stands, and is told first
                failure = error
        at.output.result(
            result,
            lambda console: _show_upload(
                console, name, result, validate_only=validate_only, is_verbose=verbose
            ),
        )
        if failure is not None:
            raise failure
        if probe_:
            _check_probe(at.output, result.revision)


@app.command("list")
def list_(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose; by default your own.")] = None,
    as_json: Json = False,
) -> None:
    """List adapters."""
    with session(context, as_json=as_json) as at:
        adapters = list(at.client.list_adapters(tenant, timeout_s=at.timeout_s))
        at.output.result({"adapters": adapters}, lambda console: _show_list(console, adapters))


@app.command()
def show(
    context: typer.Context, adapter: AdapterArgument, verbose: Verbose = False, as_json: Json = False
) -> None:
    """Show an adapter, its revisions and what the one that was named was matched to."""
    with session(context, as_json=as_json) as at:
        found = at.client.get_adapter(adapter, timeout_s=at.timeout_s)
        at.output.result(found, lambda console: _show_adapter(console, found, is_verbose=verbose))


@app.command()
def report(
    context: typer.Context, adapter: AdapterArgument, verbose: Verbose = False, as_json: Json = False
) -> None:
    """Show again what the upload of a revision reported: name, name@alias, or a revision's resource name."""
    with session(context, as_json=as_json) as at:
        found = at.client.get_adapter(adapter, timeout_s=at.timeout_s)
        revision = next((r for r in found.revisions if r.report is not None), None)
        if revision is None:
            raise at.output.fail(
                f"no report of {adapter} is kept any more: push it again, or see what a push would say with "
                "--validate-only"
            )
        at.output.result(revision, lambda console: _show_report(console, revision, is_verbose=verbose))


@app.command()
def probe(context: typer.Context, adapter: AdapterArgument, as_json: Json = False) -> None:
    """Compare an adapter with the base model on a node; fail if it changes nothing."""
    with session(context, as_json=as_json) as at:
        revision = at.client.probe_adapter(adapter, timeout_s=at.timeout_s)
        at.output.result(revision, lambda console: show_probe(console, revision))
        _check_probe(at.output, revision)


@app.command()
def alias(
    context: typer.Context,
    adapter: AdapterArgument,
    name: Annotated[str, typer.Argument(metavar="ALIAS", show_default=False)],
    digest: Annotated[str, typer.Option("--digest", help="The revision; by default the current one.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
    etag: Etag = "",
    as_json: Json = False,
) -> None:
    """Point an alias at a revision, or remove it."""
    if remove and digest:
        raise typer.BadParameter("--remove takes no --digest")
    with session(context, as_json=as_json) as at:
        if not remove and not digest:
            digest = at.client.get_adapter(adapter, timeout_s=at.timeout_s).current_digest
        found = at.client.set_alias(adapter, name, digest, etag=etag, timeout_s=at.timeout_s)
        at.output.result(found, lambda console: _show_adapter(console, found))


@app.command()
def pin(context: typer.Context, adapter: AdapterArgument, etag: Etag = "", as_json: Json = False) -> None:
    """Keep an adapter active on the GPU."""
    _set_pinned(context, adapter, pinned=True, etag=etag, as_json=as_json)


@app.command()
def unpin(context: typer.Context, adapter: AdapterArgument, etag: Etag = "", as_json: Json = False) -> None:
    """Let an adapter leave the GPU when others need its place."""
    _set_pinned(context, adapter, pinned=False, etag=etag, as_json=as_json)


@app.command()
def load(
    context: typer.Context,
    adapter: AdapterArgument,
    host: Annotated[bool, typer.Option("--host", help="Into host memory only, not onto the GPU.")] = False,
    as_json: Json = False,
) -> None:
    """Bring an adapter to the nodes now, and wait until it is there."""
    tier = ResidencyState.HOST if host else ResidencyState.ACTIVE
    with session(context, as_json=as_json) as at:
        placements = at.client.load_adapter(adapter, tier, timeout_s=at.timeout_s)
        _show_placements(at.output, placements)
        if failed := [item for item in placements if item.failure]:
            where = f"{len(failed)} of {len(placements)} nodes"
            at.output.note(f"error: not loaded on {where}: {failed[0].failure}")
            raise typer.Exit(ExitCode.FAILED)


@app.command()
def unload(context: typer.Context, adapter: AdapterArgument, as_json: Json = False) -> None:
    """Free an adapter's memory on the nodes; it stays registered."""
    with session(context, as_json=as_json) as at:
        placements = at.client.unload_adapter(adapter, timeout_s=at.timeout_s)
        _show_placements(at.output, placements)


@app.command()
def rm(context: typer.Context, adapter: AdapterArgument, etag: Etag = "", as_json: Json = False) -> None:
    """Delete an adapter, or the one revision that a resource name names."""
    with session(context, as_json=as_json) as at:
        at.client.delete_adapter(adapter, etag=etag, timeout_s=at.timeout_s)
        at.output.result({"deleted": adapter}, lambda console: console.print(f"deleted {adapter}"))


def _check_probe(output: Output, revision: Revision) -> None:
    """Who asked for proof, and scripts most of all, are to hear that there is none."""
    if revision.probe is None or revision.probe.verdict is not ProbeVerdict.CHANGES:
        found = probe_text(revision.probe) if revision.probe else "was not probed"
        output.note(f"error: revision {short_digest(revision.digest)} {found}")
        raise typer.Exit(ExitCode.FAILED)


def _show_report(console: Console, revision: Revision, *, is_verbose: bool) -> None:
    console.print(
        f"{revision.name}: {revision.dtype}, max rank {revision.max_rank}, {size(revision.payload_bytes)}"
    )
    if revision.report:
        show_report(console, revision.report, is_verbose=is_verbose)
    show_probe(console, revision)


def _set_pinned(context: typer.Context, adapter: str, *, pinned: bool, etag: str, as_json: bool) -> None:
    with session(context, as_json=as_json) as at:
        found = at.client.pin_adapter(adapter, pinned=pinned, etag=etag, timeout_s=at.timeout_s)
        at.output.result(found, lambda console: _show_adapter(console, found))


def _show_placements(output: Output, placements: tuple[Placement, ...]) -> None:
    output.result({"placements": placements}, lambda console: console.print(placement_table(placements)))


def _progress_bar(output: Output) -> Progress:
    # On stderr, so that stdout holds the result alone; without a terminal rich draws nothing until the end.
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=output.notes,
        disable=output.as_json or not output.notes.is_terminal,
    )


def _note_once(output: Output) -> Callable[[UnavailableError, float], None]:
    """Says on stderr why a push takes longer, the first time that it is tried again."""
    is_told = False

    def note(error: UnavailableError, pause_s: float) -> None:
        nonlocal is_told
        if not is_told:
            output.note(f"trying again in {pause_s:.1f} s: {error}")
        is_told = True

    return note


def _show_upload(
    console: Console, name: str, result: UploadResult, *, validate_only: bool, is_verbose: bool
) -> None:
    revision = result.revision
    done = (
        "is valid, nothing stored"
        if validate_only
        else "registered"
        if result.created
        else "was there already"
    )
    console.print(
        f"{name} {done}: revision {short_digest(revision.digest)}, {revision.dtype}, "
        f"max rank {revision.max_rank}, {size(revision.payload_bytes)}"
    )
    if revision.report:
        show_report(console, revision.report, is_verbose=is_verbose)
    if not validate_only:
        show_probe(console, revision)


def _show_list(console: Console, adapters: list[Adapter]) -> None:
    table = plain_table("adapter", "revision", "aliases", "state", "rank", "size", "pinned", "probe")
    for adapter in adapters:
        current = next((r for r in adapter.revisions if r.digest == adapter.current_digest), None)
        table.add_row(
            short_name(adapter.name),
            short_digest(adapter.current_digest),
            ", ".join(sorted(adapter.aliases)),
            current.state if current else "",
            str(current.max_rank) if current else "",
            size(current.payload_bytes) if current else "",
            "yes" if adapter.pinned else "",
            probe_word(current.probe if current else None),
        )
    console.print(
        table if adapters else "no adapters; `lorikeet adapters push DIR --name tenant/name` uploads one"
    )


def _show_adapter(console: Console, adapter: Adapter, *, is_verbose: bool = False) -> None:
    console.print(
        f"{short_name(adapter.name)}  pinned: {'yes' if adapter.pinned else 'no'}  etag: {adapter.etag}"
    )
    for name, digest in sorted(adapter.aliases.items()):
        console.print(f"  @{name} -> {short_digest(digest)}")
    for revision in adapter.revisions:
        mark = "current" if revision.digest == adapter.current_digest else ""
        console.print(
            f"\n{revision.digest}  {revision.state}  {revision.dtype}  max rank {revision.max_rank}  "
            f"{size(revision.payload_bytes)}  {mark}".rstrip()
        )
        if revision.failure:
            console.print(f"  failed: {revision.failure}")
        if revision.probe:
            show_probe(console, revision)
        if revision.report:
            show_report(console, revision.report, is_verbose=is_verbose)
