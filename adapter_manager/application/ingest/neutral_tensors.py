"""Proof that a tensor changes nothing: copies of the base model's weights, and pairs whose B is all zero."""

import hashlib
from collections.abc import Iterable

import numpy as np

from adapter_manager.application.ingest.weight_reader import AnyArray, WeightReader
from adapter_manager.domain.problems import Problem, Problems
from adapter_manager.domain.shown_text import shown
from adapter_manager.domain.tensor_matching import BaseCopy
from adapter_manager.domain.tensor_pairs import LoraPair


def check_suspects(suspects: Iterable[LoraPair], reader: WeightReader, problems: Problems) -> None:
    """Note the pairs that mean nothing to the base model, unless their B is zero everywhere."""
    for pair in suspects:
        if any(window.any() for window in reader.windows(pair.b)):
            problems.add_unmatched(pair.tensor_names)


def check_base_copies(copies: Iterable[BaseCopy], reader: WeightReader, problems: Problems) -> None:
    """Note the full weights that are not what the base model has already.

    PEFT saves embed_tokens and lm_head whole beside an adapter that targets them. A copy in another dtype
    counts as equal only if every element converts to the base's dtype without loss.
    """
    for copy in copies:
        base_dtype, entry = copy.site.base_weight_dtype, copy.entry
        sha256 = hashlib.sha256()
        is_exact = True
        for window in reader.windows(entry):
            stored = _as_stored(window, entry.dtype, base_dtype)
            if stored is None:
                is_exact = False
                break
            sha256.update(stored.tobytes())
        if not is_exact or sha256.hexdigest() != copy.site.base_weight_sha256:
            problems.add(
                Problem.UNSUPPORTED,
                f"tensor {shown(entry.name)} of dtype {entry.dtype} is not the base model's own weight of "
                f"{copy.site.name} ({base_dtype}): a replaced weight is not served, only its LoRA",
            )


def _as_stored(window: AnyArray, dtype: str, base_dtype: str) -> AnyArray | None:
    """The elements in the base's dtype; None if one of them has no exact equal there."""
    if dtype == base_dtype:
        return window
    values = np.left_shift(window, 16, dtype=np.uint32).view(np.float32) if dtype == "BF16" else window
    with np.errstate(over="ignore"):
        if base_dtype == "BF16":
            wide = values.astype(np.float32)
            bits = wide.view(np.uint32)
            is_exact = bool((wide == values).all()) and not (bits & 0xFFFF).any()
            return (bits >> 16).astype("<u2") if is_exact else None
        if base_dtype not in ("F16", "F32"):
            return None
        narrow = values.astype("<f2" if base_dtype == "F16" else "<f4")
    return narrow if bool((narrow == values).all()) else None
