"""The tensors of one safetensors file, or of shards with their index, which must agree."""

from functools import partial

from adapter_manager.application.ingest.adapter_files import AdapterFiles
from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.safetensors_header import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    TensorEntry,
    read_header,
)
from adapter_manager.domain.shown_text import shown
from adapter_manager.domain.strict_json import check_not_lfs_pointer, parse_object
from lorikeet_contract.adapter_files import CONFIG, INDEX, is_adapter_file


def read_entries(files: AdapterFiles) -> tuple[TensorEntry, ...]:
    """All tensors of the upload.

    Raises:
        InvalidAdapterError: a file is damaged, or shards and index disagree.
    """
    weight_map = _read_index(files) if INDEX in files.names else None
    entries = list[TensorEntry]()
    for name in files.names:
        if name in (CONFIG, INDEX):
            continue
        header = read_header(partial(files.read_at, name), files.size(name), name)
        entries.extend(header.tensors)
        if len(entries) > MAX_TENSORS:
            raise _invalid(f"the shards hold more than {MAX_TENSORS} tensors")
    if weight_map is not None:
        _check_shards(entries, weight_map, files)
    return tuple(entries)


def _read_index(files: AdapterFiles) -> dict[str, str]:
    size = files.size(INDEX)
    if size > MAX_HEADER_BYTES:
        raise _invalid(f"{INDEX} has {size} bytes; at most {MAX_HEADER_BYTES} are read")
    data = files.read_at(INDEX, 0, size)
    check_not_lfs_pointer(data, INDEX)
    raw = parse_object(data, INDEX, max_depth=8, max_items=2 * MAX_TENSORS).get("weight_map")
    if not isinstance(raw, dict):
        raise _invalid(f"{INDEX} has no weight_map")
    weight_map = dict[str, str]()
    for tensor, shard in raw.items():
        # A shard is looked up among the uploaded files and never used as a path.
        if not isinstance(shard, str) or not is_adapter_file(shard):
            raise _invalid(f"{INDEX} names {shown(shard)}, which is not the name of a shard")
        weight_map[str(tensor)] = shard
    return weight_map


def _check_shards(entries: list[TensorEntry], weight_map: dict[str, str], files: AdapterFiles) -> None:
    for shard in set(weight_map.values()):
        if shard not in files.names:
            raise _invalid(f"{INDEX} names the shard {shown(shard)}, which was not uploaded")
    seen = set[str]()
    for entry in entries:
        if entry.name in seen:
            raise _invalid(f"tensor {shown(entry.name)} is in two shards")
        seen.add(entry.name)
        if weight_map.get(entry.name) != entry.file_name:
            raise _invalid(f"{INDEX} does not say that tensor {shown(entry.name)} is in {entry.file_name}")
    if missing := weight_map.keys() - seen:
        raise _invalid(f"{INDEX} names tensor {shown(min(missing))}, which no shard holds")


def _invalid(problem: str) -> InvalidAdapterError:
    return InvalidAdapterError(problem, metadata={"problem": "SHARDS", "file": INDEX})
