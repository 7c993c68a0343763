"""adapter_config.json, read strictly: the rules for rank and scale, and a refusal of all but plain LoRA."""

import math
from dataclasses import dataclass
from typing import Any

from adapter_manager.domain.errors import InvalidAdapterError, UnsupportedAdapterError
from adapter_manager.domain.layout_options import ExpertPacking
from adapter_manager.domain.peft_fields import (
    HARMLESS,
    HARMLESS_INITS,
    READ,
    REFUSED,
    REFUSED_INITS,
    is_set,
)
from adapter_manager.domain.shown_text import shown
from adapter_manager.domain.strict_json import check_not_lfs_pointer, parse_object

MAX_CONFIG_BYTES = 4 << 20
# Far above any rank in use, far below what would make sizes overflow.
MAX_RANK = 1 << 16
MAX_ALPHA = 1e6
MAX_PATTERN_LENGTH = 1000

_FILE = "adapter_config.json"
_PACKINGS = {"grouped_by_expert": ExpertPacking.EXPERT_MAJOR, "rank_major": ExpertPacking.RANK_MAJOR}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What of the configuration bears on the weights.

    Patterns are pairs in file order: PEFT takes the first that matches. `packing` is the file's own marker.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    target_parameters: tuple[str, ...]
    packing: ExpertPacking | None
    peft_version: tuple[int, ...] | None
    base_model_name: str
    ensure_weight_tying: bool

    def scale(self, rank: int, alpha: float) -> float:
        """What a module's B A is multiplied by."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_peft_config(data: bytes) -> PeftConfig:
    """Read adapter_config.json.

    A missing r or lora_alpha is refused, not defaulted: PEFT writes both always, and its own default for
    lora_alpha was different in its first versions, so a file without one has no certain scale.

    Raises:
        InvalidAdapterError: no configuration of a LoRA adapter, or a field has an impossible value.
        UnsupportedAdapterError: a field asks for what plain LoRA does not compute.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise _invalid("", f"has {len(data)} bytes; at most {MAX_CONFIG_BYTES} are read")
    check_not_lfs_pointer(data, _FILE)
    raw = parse_object(data, _FILE, max_depth=16, max_items=200_000)
    _check_peft_type(raw.get("peft_type"))
    _refuse_unsupported(raw)
    rank = _rank(raw.get("r"), "r")
    alpha = _alpha(raw.get("lora_alpha"), "lora_alpha")
    return PeftConfig(
        rank=rank,
        alpha=alpha,
        use_rslora=_flag(raw, "use_rslora"),
        rank_pattern=tuple(
            (k, _rank(v, f"rank_pattern[{shown(k)}]")) for k, v in _pattern(raw, "rank_pattern")
        ),
        alpha_pattern=tuple(
            (k, _alpha(v, f"alpha_pattern[{shown(k)}]")) for k, v in _pattern(raw, "alpha_pattern")
        ),
        target_parameters=_names(raw, "target_parameters"),
        packing=_packing(raw.get("lora_B_layout")),
        peft_version=_version(raw.get("peft_version")),
        base_model_name=_text(raw, "base_model_name_or_path"),
        ensure_weight_tying=_flag(raw, "ensure_weight_tying"),
    )


def _check_peft_type(peft_type: Any) -> None:
    if peft_type is None:
        raise _invalid("peft_type", "has no peft_type: it is not a PEFT adapter's configuration")
    if peft_type != "LORA":
        raise _unsupported("peft_type", f"has peft_type {shown(peft_type)}; only LORA adapters are served")


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    bias = raw.get("bias", "none")
    if bias not in ("none", None):
        raise _unsupported(
            "bias", f"has bias {shown(bias)}: replaced biases of the base model are not served"
        )
    if raw.get("alora_invocation_tokens") is not None:
        raise _unsupported(
            "alora_invocation_tokens",
            "has alora_invocation_tokens: activated LoRA, which begins in mid-prompt, is not served",
        )
    for field, why in REFUSED.items():
        if is_set(raw.get(field)):
            raise _unsupported(field, f"sets {field}: {why}")
    init = raw.get("init_lora_weights")
    if isinstance(init, str):
        if init.lower().startswith(REFUSED_INITS):
            raise _unsupported(
                "init_lora_weights",
                f"has init_lora_weights {shown(init)}, which changes the base weights: save the adapter with "
                "path_initial_model_for_weight_conversion to make it plain LoRA",
            )
        if init.lower() not in HARMLESS_INITS:
            raise _unsupported("init_lora_weights", f"has the unknown init_lora_weights {shown(init)}")
    elif not isinstance(init, bool | None):
        raise _invalid("init_lora_weights", f"has init_lora_weights {shown(init)}; it is a name or a boolean")
    known = READ | HARMLESS | REFUSED.keys() | {"bias", "alora_invocation_tokens"}
    for field, value in raw.items():
        if field not in known and is_set(value):
            raise _unsupported(
                shown(field),
                f"sets the unknown field {shown(field)}, which may change what the adapter computes: "
                "remove it if it does not",
            )


def _rank(value: Any, field: str) -> int:
    if value is None:
        raise _invalid(
            field, f"has no {field}, the rank of its matrices: add the one that it was trained with"
        )
    if type(value) is not int:
        raise _invalid(field, f"has {field} {shown(value)}; a rank is a whole number")
    if not 0 < value <= MAX_RANK:
        raise _invalid(field, f"has {field} {shown(value)}; a rank lies between 1 and {MAX_RANK}")
    return value


def _alpha(value: Any, field: str) -> float:
    if value is None:
        raise _invalid(field, f"has no {field}, without which the adapter has no certain scale: add it")
    if type(value) is not int and type(value) is not float:
        raise _invalid(field, f"has {field} {shown(value)}; it is a number")
    # Written so that NaN fails, too.
    if not 0 < value <= MAX_ALPHA:
        raise _invalid(field, f"has {field} {shown(value)}; it lies above 0 and at most at {MAX_ALPHA:g}")
    return float(value)


def _pattern(raw: dict[str, Any], field: str) -> list[tuple[str, Any]]:
    value = raw.get(field)
    if value is None:
        return []
    if not isinstance(value, dict):
        raise _invalid(field, f"has a {field} that is not an object")
    for key in value:
        if len(key) > MAX_PATTERN_LENGTH:
            raise _invalid(field, f"{field}: {shown(key)} is longer than {MAX_PATTERN_LENGTH} characters")
    return list(value.items())


def _names(raw: dict[str, Any], field: str) -> tuple[str, ...]:
    value = raw.get(field)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise _invalid(field, f"has {field} {shown(value)}; it is a list of parameter names")
    return tuple(value)


def _flag(raw: dict[str, Any], field: str) -> bool:
    value = raw.get(field)
    if not isinstance(value, bool | None):
        raise _invalid(field, f"has {field} {shown(value)}; it is true or false")
    return bool(value)


def _text(raw: dict[str, Any], field: str) -> str:
    """A name for messages only. It is never opened, resolved or imported."""
    value = raw.get(field)
    if not isinstance(value, str | None):
        raise _invalid(field, f"has {field} {shown(value)}; it is a text")
    return value or ""


def _packing(value: Any) -> ExpertPacking | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in _PACKINGS:
        raise _unsupported(
            "lora_B_layout", f"has lora_B_layout {shown(value)}; known are {sorted(_PACKINGS)}"
        )
    return _PACKINGS[value]


def _version(value: Any) -> tuple[int, ...] | None:
    """The release's leading numbers, (0, 19, 1) for "0.19.1.dev0"; None where they cannot be read."""
    if not isinstance(value, str) or len(value) > 64:
        return None
    numbers = list[int]()
    for part in value.split("."):
        if not (part.isascii() and part.isdigit()):
            break
        numbers.append(int(part))
    return tuple(numbers) or None


def _invalid(field: str, problem: str) -> InvalidAdapterError:
    return InvalidAdapterError(
        f"{_FILE} {problem}", metadata={"problem": "CONFIG", "file": _FILE, "field": field}
    )


def _unsupported(field: str, problem: str) -> UnsupportedAdapterError:
    return UnsupportedAdapterError(
        f"{_FILE} {problem}", metadata={"problem": "UNSUPPORTED", "file": _FILE, "field": field}
    )
