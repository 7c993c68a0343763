"""An upload's files in, a canonical payload with its manifest out. The files are read, never changed."""

from pathlib import Path

from adapter_manager.application.ingest.adapter_files import AdapterFiles
from adapter_manager.application.ingest.limits import IngestLimits, IngestTarget
from adapter_manager.application.ingest.module_patterns import ModulePatterns
from adapter_manager.application.ingest.neutral_tensors import check_base_copies, check_suspects
from adapter_manager.application.ingest.payload_sink import PayloadSink
from adapter_manager.application.ingest.payload_writer import PayloadWriter
from adapter_manager.application.ingest.tensor_files import read_entries
from adapter_manager.application.ingest.weight_reader import WeightReader
from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.errors import InvalidAdapterError, LimitExceededError
from adapter_manager.domain.layout_options import LayoutOptions
from adapter_manager.domain.peft_config import MAX_CONFIG_BYTES, PeftConfig, parse_peft_config
from adapter_manager.domain.problems import Problems
from adapter_manager.domain.report import MatchedSite
from adapter_manager.domain.safetensors_header import TensorEntry
from adapter_manager.domain.shown_text import shown
from adapter_manager.domain.site_plan import LayerPlan, payload_dtype, plan_layers
from adapter_manager.domain.tensor_matching import MatchedTensors, match_tensors
from adapter_manager.domain.tensor_report import upload_report
from lorikeet_contract.adapter_files import CONFIG
from lorikeet_contract.manifest import Manifest, PayloadDtype, PayloadLayer, place_layer


def ingest_adapter(
    files: AdapterFiles,
    target: IngestTarget,
    payload_path: Path,
    options: LayoutOptions | None = None,
    limits: IngestLimits | None = None,
) -> BuiltRevision:
    """Check an adapter against a base model and write its canonical payload.

    Args:
        files: the upload.
        target: the base model.
        payload_path: written; removed again if anything is wrong.
        options: what the uploader says about layouts that do not tell themselves.
        limits: bounds on what is written and on the time for patterns.

    Raises:
        InvalidAdapterError: with everything that is wrong, as far as it can be told at once.
        LimitExceededError: a rank or the payload is over a limit.
    """
    limits = limits or IngestLimits()
    config = _read_config(files)
    entries = read_entries(files)
    problems = Problems()
    patterns = ModulePatterns(config, limits.max_pattern_s)
    matched = match_tensors(
        entries, target.schema, config, patterns.rank_and_alpha, options or LayoutOptions(), problems
    )
    reader = WeightReader(files)
    check_suspects(matched.suspects, reader, problems)
    check_base_copies(matched.base_copies, reader, problems)
    layers = plan_layers(matched.pieces, target.schema, problems)
    problems.raise_if_any(_other_base(config, target))
    if not layers:
        raise InvalidAdapterError(
            "the adapter holds no weights for any place of the base model, so it would change nothing",
            metadata={"problem": "NO_WEIGHTS"},
        )
    dtype = payload_dtype(e for p in matched.pieces for e in (p.a.entry, p.b.entry))
    payload_bytes = _check_limits(layers, dtype, target, limits)
    written, is_all_zero = _write(reader, layers, dtype, target, payload_path)
    manifest = Manifest(target.base_digest, target.schema.digest, dtype, payload_bytes, written)
    warnings = [*matched.warnings, *_warnings(config, matched, entries, dtype, target, is_all_zero)]
    factors = (entry for p in matched.pieces for entry in (p.a.entry, p.b.entry))
    zero = {entry.name for entry in factors if reader.largest(entry) == 0}
    sites = _matched_sites(layers, written)
    report = upload_report(entries, matched, sites, target.schema, config, zero, warnings)
    return BuiltRevision(manifest, payload_path, report)


def ingest_directory(
    directory: Path,
    target: IngestTarget,
    payload_path: Path,
    options: LayoutOptions | None = None,
    limits: IngestLimits | None = None,
) -> BuiltRevision:
    """Ingest the adapter in a directory, for tools and tests; links are refused, other files left alone."""
    with AdapterFiles.open(directory) as files:
        return ingest_adapter(files, target, payload_path, options, limits)


def _read_config(files: AdapterFiles) -> PeftConfig:
    size = files.size(CONFIG)
    # One byte more than allowed is enough for the parser to refuse it.
    return parse_peft_config(files.read_at(CONFIG, 0, min(size, MAX_CONFIG_BYTES + 1)))


def _check_limits(
    layers: tuple[LayerPlan, ...], dtype: PayloadDtype, target: IngestTarget, limits: IngestLimits
) -> int:
    """The payload's size, before a byte of it is written."""
    for site in (s for layer in layers for s in layer.sites):
        if target.max_rank and site.rank > target.max_rank:
            raise LimitExceededError(
                f"{site.site.name} has rank {site.rank}; this base model is served with ranks up to "
                f"{target.max_rank} (a node's --max-rank)",
                metadata={"limit": "max_rank", "value": str(site.rank), "maximum": str(target.max_rank)},
            )
    end = 0
    for layer in layers:
        _, end = place_layer(end, [(s.site, s.rank, s.num_a, s.scales) for s in layer.sites], dtype.itemsize)
    if end > limits.max_payload_bytes:
        raise LimitExceededError(
            f"the adapter takes {end} bytes in canonical form; at most {limits.max_payload_bytes} are stored",
            metadata={
                "limit": "max_payload_bytes",
                "value": str(end),
                "maximum": str(limits.max_payload_bytes),
            },
        )
    return end


def _write(
    reader: WeightReader,
    layers: tuple[LayerPlan, ...],
    dtype: PayloadDtype,
    target: IngestTarget,
    payload_path: Path,
) -> tuple[tuple[PayloadLayer, ...], bool]:
    try:
        with payload_path.open("wb", buffering=0) as file, PayloadSink(file) as sink:
            writer = PayloadWriter(reader, dtype, sink, target.compute_dtype)
            written = writer.write(layers)
    except OSError as error:
        payload_path.unlink(missing_ok=True)
        raise LimitExceededError(
            f"the payload could not be written: {error.strerror}",
            metadata={"limit": "staging disk"},
            retry_after_s=30.0,
        ) from error
    except BaseException:
        payload_path.unlink(missing_ok=True)
        raise
    return written, writer.is_all_zero


def _warnings(
    config: PeftConfig,
    matched: MatchedTensors,
    entries: tuple[TensorEntry, ...],
    dtype: PayloadDtype,
    target: IngestTarget,
    is_all_zero: bool,
) -> list[str]:
    warnings = list[str]()
    if any(e.dtype == "F64" for e in entries):
        warnings.append("float64 weights were rounded to float32")
    elif dtype is PayloadDtype.FLOAT32 and any(e.dtype != "F32" for e in entries):
        warnings.append("weights of several dtypes are kept as float32, without loss")
    if matched.suspects:
        warnings.append(
            f"{2 * len(matched.suspects)} tensors for modules that the base model does not have are all zero"
        )
    if is_all_zero:
        warnings.append("every lora_B is zero: the adapter changes nothing")
    if other_base := _other_base(config, target):
        warnings.append(f"{other_base}, and all shapes fit")
    return warnings


def _other_base(config: PeftConfig, target: IngestTarget) -> str:
    """That the adapter names another base model than the server's, if it does."""
    if not (target.model_name and config.base_model_name):
        return ""
    theirs, ours = (n.rstrip("/").rpartition("/")[2] for n in (config.base_model_name, target.model_name))
    if theirs.lower() == ours.lower():
        return ""
    return (
        f"the adapter names {shown(config.base_model_name)} as its base model, this server has "
        f"{shown(target.model_name)}"
    )


def _matched_sites(
    layers: tuple[LayerPlan, ...], written: tuple[PayloadLayer, ...]
) -> tuple[MatchedSite, ...]:
    sites = list[MatchedSite]()
    for plan, layer in zip(layers, written, strict=True):
        starts = [s.a.offset for s in layer.sites]
        ends = [*starts[1:], layer.offset + layer.num_bytes]
        sites.extend(
            MatchedSite(
                site=s.site.name,
                layer=plan.layer,
                rank=s.rank,
                scales=s.scales,
                layout=s.layout,
                tensors=s.num_tensors,
                bytes=end - start,
            )
            for s, start, end in zip(plan.sites, starts, ends, strict=True)
        )
    return tuple(sites)
