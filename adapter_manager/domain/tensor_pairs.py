"""A file's tensors as pairs of lora_A and lora_B; what belongs to no pair is set apart."""

from collections.abc import Iterable
from dataclasses import dataclass

from adapter_manager.domain.lora_names import TensorName, TensorRole, feature_of, parse_tensor_name
from adapter_manager.domain.problems import Problem, Problems
from adapter_manager.domain.safetensors_header import FLOAT_DTYPES, TensorEntry
from adapter_manager.domain.shown_text import shown, shown_list

_A_ROLES = (TensorRole.A, TensorRole.EMBEDDING_A)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Both factors of one module."""

    name: TensorName
    a: TensorEntry
    b: TensorEntry

    @property
    def is_embedding(self) -> bool:
        """Whether PEFT wrote it for an embedding, where A is a lookup table."""
        return self.name.role is TensorRole.EMBEDDING_A

    @property
    def tensor_names(self) -> tuple[str, str]:
        """The names in the file."""
        return self.a.name, self.b.name


@dataclass(frozen=True, slots=True)
class SortedTensors:
    """All tensors of an upload, each in exactly one place or noted as a problem."""

    pairs: tuple[LoraPair, ...]
    base_weights: tuple[tuple[TensorName, TensorEntry], ...]


def pair_tensors(entries: Iterable[TensorEntry], problems: Problems) -> SortedTensors:
    """Sort `entries`; a factor without its other half, and a tensor of unknown kind, are problems."""
    factors: dict[tuple[str, bool], dict[bool, tuple[TensorName, TensorEntry]]] = {}
    base_weights: list[tuple[TensorName, TensorEntry]] = []
    adapters = dict[str, None]()
    for entry in entries:
        name = parse_tensor_name(entry.name)
        match name.role:
            case TensorRole.OTHER:
                _note_other(entry, problems)
            case TensorRole.BASE_WEIGHT:
                if feature_of(entry.name):
                    _note_other(entry, problems)
                else:
                    base_weights.append((name, entry))
            case _:
                adapters[name.adapter] = None
                is_embedding = name.role in (TensorRole.EMBEDDING_A, TensorRole.EMBEDDING_B)
                both = factors.setdefault((name.written_module, is_embedding), {})
                side = name.role in _A_ROLES
                if side in both:
                    problems.add(Problem.REPEATED, f"tensor {shown(entry.name)} is given twice")
                both[side] = (name, entry)
    if len(adapters) > 1:
        problems.add(
            Problem.REPEATED, f"the file holds several adapters: {shown_list(sorted(adapters))}; keep one"
        )
    pairs = [pair for both in factors.values() if (pair := _pair(both, problems)) is not None]
    return SortedTensors(tuple(pairs), tuple(base_weights))


def _pair(both: dict[bool, tuple[TensorName, TensorEntry]], problems: Problems) -> LoraPair | None:
    if len(both) == 1:
        ((is_a, (_, entry)),) = both.items()
        missing = "lora_B" if is_a else "lora_A"
        problems.add(Problem.MISSING_PAIR, f"tensor {shown(entry.name)} has no {missing} beside it")
        return None
    (name, a), (_, b) = both[True], both[False]
    return LoraPair(name, a, b) if all(has_float_dtype(e, problems) for e in (a, b)) else None


def has_float_dtype(entry: TensorEntry, problems: Problems) -> bool:
    """Whether weights can be read from it; if not, that is a problem."""
    if entry.dtype in FLOAT_DTYPES:
        return True
    problems.add(
        Problem.DTYPE,
        f"tensor {shown(entry.name)} has dtype {entry.dtype}; adapters are served from "
        f"{', '.join(sorted(FLOAT_DTYPES))}",
    )
    return False


def _note_other(entry: TensorEntry, problems: Problems) -> None:
    if feature := feature_of(entry.name):
        problems.add(
            Problem.UNSUPPORTED, f"tensor {shown(entry.name)} belongs to {feature}, which is not served"
        )
    else:
        problems.add_unmatched([entry.name])
