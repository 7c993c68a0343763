"""What an adapter directory means, read with numpy and a few regular expressions: dense deltas in float64.

It shares nothing with ingest but the base model's schema. It is for directories that are sound: it judges
nothing, and raises UndecidedError where only ingest's own rules would tell.
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorikeet_contract.schema import LoraSchema, LoraSite, RowOrder, SiteKind
from tests.support.fuzz.adapter_draft import CONFIG
from tests.support.lora_deltas import Deltas

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:(?P<side>[AB])(?:\.[^.]+)?\.weight|embedding_(?P<embedding>[AB])(?:\.[^.]+)?)"
)
_TEXT = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")
_TOWER = re.compile(
    r"(?:model\.)?(?:vision_model|vision_tower|visual|vision_encoder|multi_modal_projector|audio_tower)\."
)
_SLICES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_WHOLES = {"gate_up_proj": "gate_up", "down_proj": "down"}
# `re` itself may take for ever with what the product's bounded matching refuses or survives.
_SUSPICIOUS = re.compile(r"[)\]*+}][*+{]|(?:\.\*){4}|\(\?")


class UndecidedError(Exception):
    """The files alone do not tell."""


@dataclass(frozen=True)
class _Pair:
    written: str
    module: str
    is_embedding: bool
    a: np.ndarray
    b: np.ndarray


def expected_deltas(files: Mapping[str, bytes], schema: LoraSchema) -> Deltas:
    """By (site, expert or -1): the sum that the adapter adds to each weight."""
    config = json.loads(files[CONFIG])
    tensors: dict[str, np.ndarray] = {}
    for name, data in files.items():
        if name.endswith(".safetensors"):
            tensors |= read_safetensors(data)
    pairs = _pairs(tensors)
    return _Reading(config, schema, pairs).deltas()


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """All floating-point tensors as float64; float64 itself rounded to float32, as it is stored."""
    (length,) = struct.unpack("<Q", data[:8])
    found: dict[str, np.ndarray] = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = data[start:end]
        match entry["dtype"]:
            case "BF16":
                values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
            case "F16" | "F32" | "F64" as kind:
                values = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[kind]).astype("<f4")
            case _:
                continue
        found[name] = values.astype(np.float64).reshape(entry["shape"])
    return found


def _pairs(tensors: Mapping[str, np.ndarray]) -> list[_Pair]:
    sides: dict[tuple[str, bool], dict[str, np.ndarray]] = {}
    for name, values in tensors.items():
        if match := _KEY.fullmatch(name):
            side = match["side"] or match["embedding"]
            is_embedding = bool(match["embedding"])
            sides.setdefault((match["module"], is_embedding), {})[side] = values
    found = list[_Pair]()
    for (written, is_embedding), both in sides.items():
        if not _TOWER.match(written):
            module = _TEXT.sub("model.", written)
            found.append(_Pair(written, module, is_embedding, both["A"], both["B"]))
    return found


class _Reading:
    def __init__(self, config: Mapping[str, Any], schema: LoraSchema, pairs: list[_Pair]) -> None:
        self._config = config
        self._pairs = pairs
        self._written = {p.module for p in pairs}
        self._linear: dict[str, tuple[LoraSite, int]] = {}
        self._roots: dict[str, list[LoraSite]] = {}
        self._named: dict[str, tuple[LoraSite, str]] = {}
        self._result: Deltas = {}
        for site in schema.sites:
            if site.kind is not SiteKind.EXPERTS:
                self._linear |= {m: (site, i) for i, s in enumerate(site.slices) for m in s.modules}
                continue
            roots = {m.partition(".{expert}")[0] for s in site.slices for m in s.modules}
            for root in roots | {site.fused_parameter.rpartition(".")[0]}:
                self._roots.setdefault(root, []).append(site)

    def deltas(self) -> Deltas:
        fused = list[tuple[_Pair, LoraSite, str]]()
        for pair in self._pairs:
            root, _, rest = self._root_of(pair.module)
            place = self._linear.get(pair.module)
            if pair.is_embedding != bool(place and place[0].kind is SiteKind.EMBEDDING):
                _must_be_neutral(pair)
            elif place is not None:
                self._add_linear(pair, *place)
            elif root and rest in ("", "base_layer"):
                site = self._fused_site(pair, self._roots[root], is_inner=bool(rest))
                written = pair.written.removesuffix(".base_layer")
                fused.append((pair, site, f"{written}.{site.fused_parameter.rpartition('.')[2]}"))
            elif granite := self._granite(pair.module):
                fused.append((pair, granite, f"{pair.written}.weight"))
            elif not (root and self._add_of_root(pair, self._roots[root], rest)):
                _must_be_neutral(pair)
        self._add_fused(fused)
        return self._result

    def _root_of(self, module: str) -> tuple[str, str, str]:
        for root in self._roots:
            if module == root or module.startswith(f"{root}."):
                return root, ".", module[len(root) + 1 :]
        return "", "", ""

    def _granite(self, module: str) -> LoraSite | None:
        parent, _, name = module.rpartition(".")
        key = {"input_linear": "gate_up", "output_linear": "down"}.get(name)
        return next(
            (
                s
                for r, sites in self._roots.items()
                if r.rpartition(".")[0] == parent
                for s in sites
                if s.key == key
            ),
            None,
        )

    def _scale(self, name: str, rank: int) -> float:
        alpha = self._config["lora_alpha"]
        for key, value in (self._config.get("alpha_pattern") or {}).items():
            if _SUSPICIOUS.search(key):
                raise UndecidedError(f"the pattern {key[:40]} may take `re` too long")
            if re.match(rf"(.*\.)?({key})$", name):
                alpha = value
                break
        return alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank

    def _dense(self, site: LoraSite, expert: int) -> np.ndarray:
        return self._result.setdefault((site.name, expert), np.zeros((site.out_features, site.in_features)))

    def _add_linear(self, pair: _Pair, site: LoraSite, index: int) -> None:
        name = pair.written
        if (
            f"{name}.weight".endswith(tuple(f".{t}" for t in self._targets()))
            or f"{name}.weight" in self._targets()
        ):
            name = f"{name}.weight"
        scale = self._scale(name, len(pair.a))
        self._dense(site, -1)[_rows(site, index)] = scale * pair.b @ pair.a

    def _targets(self) -> tuple[str, ...]:
        return tuple(self._config.get("target_parameters") or ())

    def _add_of_root(self, pair: _Pair, sites: list[LoraSite], rest: str) -> bool:
        """Experts listed one by one, or stacked in three dimensions."""
        parts = rest.split(".")
        expert: int | None = None
        if len(parts) == 2 and parts[0].isdecimal():
            expert, name = int(parts[0]), parts[1]
        elif len(parts) == 2 and parts[0] in ("gate_up_projs", "down_projs") and parts[1].isdecimal():
            expert, name = int(parts[1]), parts[0].removesuffix("s")
        elif len(parts) == 1:
            name = parts[0]
        else:
            return False
        for site in sites:
            if site.key == _WHOLES.get(name):
                rows: np.ndarray | slice = slice(None)
            elif (piece := _SLICES.get(name)) and (
                piece == site.key or piece in [s.name for s in site.slices]
            ):
                rows = _rows(site, [s.name for s in site.slices].index(piece))
            else:
                continue
            scale = self._scale(pair.written, pair.a.shape[-2])
            for e in range(site.num_experts) if expert is None else (expert,):
                a, b = (x[e if len(x) > 1 else 0] if expert is None else x for x in (pair.a, pair.b))
                self._dense(site, e)[rows] = scale * b @ a
            return True
        return False

    def _fused_site(self, pair: _Pair, sites: list[LoraSite], *, is_inner: bool) -> LoraSite:
        root = pair.module.removesuffix(".base_layer")
        if is_inner:
            return sites[0]
        if f"{root}.base_layer" in self._written:
            return sites[1]
        said = [s for s in sites if any(s.fused_parameter.endswith(t) for t in self._targets())]
        if len(said) != 1:
            said = [s for s in sites if {pair.a.shape[1], pair.b.shape[0]} == {s.in_features, s.out_features}]
        if len(said) != 1:
            raise UndecidedError(f"{root} has one pair, which fits several parameters")
        return said[0]

    def _add_fused(self, pairs: list[tuple[_Pair, LoraSite, str]]) -> None:
        told = {
            pair.a.shape[1] == site.out_features
            for pair, site, _ in pairs
            if site.in_features != site.out_features
        }
        for pair, site, parameter in pairs:
            n = site.num_experts
            rank = len(pair.a) // n
            scale = self._scale(parameter, rank)
            if site.in_features != site.out_features:
                is_exchanged = pair.a.shape[1] == site.out_features
            elif len(told) == 1:
                is_exchanged = next(iter(told))
            else:
                raise UndecidedError(f"{parameter} is square and no other parameter tells its orientation")
            a = pair.a.reshape(n, rank, -1)
            if self._config.get("lora_B_layout") == "grouped_by_expert":
                b = pair.b.reshape(-1, n, rank).transpose(1, 0, 2)
            else:
                b = pair.b.reshape(-1, rank, n).transpose(2, 0, 1)
            for expert in range(n):
                delta = scale * b[expert] @ a[expert]
                self._dense(site, expert)[:] = delta.T if is_exchanged else delta


def _must_be_neutral(pair: _Pair) -> None:
    assert not np.any(pair.b), f"{pair.module} is no place of the schema, and its B is not zero"


def _rows(site: LoraSite, index: int) -> np.ndarray:
    width = site.slices[index].out_features
    if site.row_order is RowOrder.INTERLEAVED and len(site.slices) > 1:
        return np.arange(width) * len(site.slices) + index
    return np.arange(width) + sum(s.out_features for s in site.slices[:index])
