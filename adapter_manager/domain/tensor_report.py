"""The report of an upload: every tensor with what was made of it, and every kind of site with what it got."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from adapter_manager.domain.lora_names import TensorRole, parse_tensor_name
from adapter_manager.domain.number_ranges import products, ranges
from adapter_manager.domain.peft_config import PeftConfig
from adapter_manager.domain.report import (
    MatchedSite,
    ReportedRole,
    SiteCoverage,
    TensorGroup,
    UploadReport,
)
from adapter_manager.domain.safetensors_header import TensorEntry
from adapter_manager.domain.tensor_matching import MatchedTensors
from adapter_manager.domain.weight_piece import WeightPiece
from lorikeet_contract.schema import LoraSchema, LoraSite

# A report is one value in the registry and a part of one message; ordinary ones have some kilobytes.
MAX_TENSORS_BYTES = 512 * 1024
_GROUP_BYTES = 160

_ROLES = {
    TensorRole.A: ReportedRole.LORA_A,
    TensorRole.EMBEDDING_A: ReportedRole.LORA_A,
    TensorRole.B: ReportedRole.LORA_B,
    TensorRole.EMBEDDING_B: ReportedRole.LORA_B,
}


@dataclass(frozen=True, slots=True)
class _Facts:
    """What tensors must have in common to share an entry."""

    key: str
    role: ReportedRole
    shape: tuple[int, ...]
    dtype: str
    site: str = ""
    slice: str = ""
    layout: str = ""
    rank: int = 0
    scale: float = 0.0
    scaling: str = ""
    neutral: str = ""


def upload_report(
    entries: Sequence[TensorEntry],
    matched: MatchedTensors,
    sites: tuple[MatchedSite, ...],
    schema: LoraSchema,
    config: PeftConfig,
    zero: Collection[str],
    warnings: Iterable[str],
) -> UploadReport:
    """Account for every tensor.

    Args:
        entries: all tensors of the files.
        matched: what became of each.
        sites: the payload's sites.
        schema: the base model's.
        config: the adapter's.
        zero: names of the tensors that are zero everywhere.
        warnings: in words.
    """
    groups = _Groups()
    for piece in matched.pieces:
        pair = (piece.a.entry, piece.b.entry)
        neutral = next((f"{_role(entry).value} is zero" for entry in pair if entry.name in zero), "")
        for entry in pair:
            groups.add_used(entry, piece, _scaling(piece, config), neutral)
    for pair in matched.suspects:
        groups.add_neutral((pair.a, pair.b), "lora_B is zero; the base model has no such module")
    for pair in matched.unreachable:
        groups.add_neutral((pair.a, pair.b), "of a vision or audio tower, which text does not pass")
    for copy in matched.base_copies:
        groups.add_neutral((copy.entry,), f"equal to the base model's own weight of {copy.site.name}")
    listed, num_left = groups.listed()
    used = sum(site.tensors for site in sites)
    neutral = len(matched.base_copies) + 2 * (len(matched.suspects) + len(matched.unreachable))
    assert used + neutral == groups.count == len(entries), "every tensor is used or neutral"
    return UploadReport(
        tensors_total=len(entries),
        tensors_used=used,
        tensors_neutral=neutral,
        sites=sites,
        warnings=tuple(warnings),
        tensors=listed,
        tensors_not_listed=num_left,
        coverage=tuple(_coverage(schema, matched.pieces, sites)),
        file_bytes=sum(entry.num_bytes for entry in entries),
    )


class _Groups:
    """Tensors by what they have in common, in the order in which they came."""

    def __init__(self) -> None:
        self.count = 0
        self._groups: dict[_Facts, set[tuple[int, ...]]] = {}
        self._num_bytes: dict[_Facts, int] = {}

    def add_used(self, entry: TensorEntry, piece: WeightPiece, scaling: str, neutral: str) -> None:
        site = piece.site
        index = piece.slice_index
        name = "" if index is None or len(site.slices) == 1 else site.slices[index].name
        self._add(
            entry,
            site=site.key,
            slice=name,
            layout=piece.layout,
            rank=piece.rank,
            scale=piece.scale,
            scaling=scaling,
            neutral=neutral,
        )

    def add_neutral(self, entries: Iterable[TensorEntry], why: str) -> None:
        for entry in entries:
            self._add(entry, neutral=why)

    def listed(self) -> tuple[tuple[TensorGroup, ...], int]:
        """As many as a report holds, and how many tensors are left out."""
        listed: list[TensorGroup] = []
        size = num_left = 0
        for facts, members in self._groups.items():
            for indices, count in products(members):
                size += _GROUP_BYTES + len(facts.key) + sum(map(len, indices)) + len(facts.neutral)
                if size > MAX_TENSORS_BYTES:
                    num_left += count
                    continue
                listed.append(
                    TensorGroup(
                        key=facts.key,
                        indices=indices,
                        count=count,
                        role=facts.role,
                        shape=facts.shape,
                        dtype=facts.dtype,
                        bytes=count * self._num_bytes[facts],
                        site=facts.site,
                        slice=facts.slice,
                        layout=facts.layout,
                        rank=facts.rank,
                        scale=facts.scale,
                        scaling=facts.scaling,
                        neutral=facts.neutral,
                    )
                )
        return tuple(listed), num_left

    def _add(self, entry: TensorEntry, **facts: object) -> None:
        key, numbers = _pattern(entry.name)
        group = _Facts(key, _role(entry), entry.shape, entry.dtype, **facts)  # pyright: ignore[reportArgumentType]
        self._groups.setdefault(group, set()).add(numbers)
        self._num_bytes[group] = entry.num_bytes  # shape and dtype are the same, and so is this
        self.count += 1


def _role(entry: TensorEntry) -> ReportedRole:
    return _ROLES.get(parse_tensor_name(entry.name).role, ReportedRole.BASE_WEIGHT)


def _pattern(name: str) -> tuple[str, tuple[int, ...]]:
    """The name with "*" for its numbers, and these; names are of [A-Za-z0-9_.-] alone."""
    parts, numbers = name.split("."), list[int]()
    for place, part in enumerate(parts):
        if part.isdigit() and len(part) < 10 and (part == "0" or part[0] != "0"):
            numbers.append(int(part))
            parts[place] = "*"
    return ".".join(parts), tuple(numbers)


def _scaling(piece: WeightPiece, config: PeftConfig) -> str:
    """How the scale came about: "16/8", and which patterns had a say."""
    divisor = f"sqrt({piece.rank})" if config.use_rslora else str(piece.rank)
    alpha = piece.scale * (math.sqrt(piece.rank) if config.use_rslora else piece.rank)
    patterns = [
        name
        for name, differs in (
            ("rank_pattern", piece.rank != config.rank),
            ("alpha_pattern", not math.isclose(alpha, config.alpha, rel_tol=1e-9)),
        )
        if differs
    ]
    return f"{alpha:g}/{divisor}" + (f" by {' and '.join(patterns)}" if patterns else "")


def _coverage(
    schema: LoraSchema, pieces: Iterable[WeightPiece], sites: Iterable[MatchedSite]
) -> Iterable[SiteCoverage]:
    kinds: dict[str, list[LoraSite]] = {}
    for site in schema.sites:
        kinds.setdefault(site.key, []).append(site)
    found: dict[str, list[WeightPiece]] = {}
    for piece in pieces:
        found.setdefault(piece.site.key, []).append(piece)
    keys = {site.name: site.key for site in schema.sites}
    num_bytes = dict.fromkeys(kinds, 0)
    for matched in sites:
        num_bytes[keys[matched.site]] += matched.bytes
    for key, places in kinds.items():
        layers = {p.site.layer for p in found.get(key, ()) if p.site.layer is not None}
        without = {s.layer for s in places if s.layer is not None} - layers
        yield _of_kind(key, places[0], found.get(key, ()), ranges(layers), ranges(without), num_bytes[key])


def _of_kind(
    key: str, site: LoraSite, pieces: Sequence[WeightPiece], layers: str, without: str, num_bytes: int
) -> SiteCoverage:
    experts: dict[int | None, set[int]] = {}
    names = dict.fromkeys(piece.name for piece in site.slices)
    sliced = dict[str, None]()
    for piece in pieces:
        everyone = range(piece.site.num_experts) if piece.expert is None else (piece.expert,)
        experts.setdefault(piece.site.layer, set()).update(everyone)
        index = piece.slice_index
        sliced.update(names if index is None else {piece.site.slices[index].name: None})
    counts = [len(covered) for covered in experts.values()] if site.num_experts else []
    return SiteCoverage(
        site=key,
        layers=layers,
        layers_without=without,
        tensors=2 * len(pieces),
        ranks=tuple(sorted({p.rank for p in pieces})),
        scales=tuple(sorted({p.scale for p in pieces})),
        layouts=tuple(sorted({p.layout for p in pieces})),
        slices=tuple(name for name in names if name in sliced) if len(sliced) < len(names) else (),
        min_experts=min(counts, default=0),
        max_experts=max(counts, default=0),
        num_experts=site.num_experts,
        bytes=num_bytes,
    )
