"""Every tensor of an upload against the base model's sites: a piece of a site, neutral, or a problem."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from adapter_manager.domain.fused_matching import FusedMatcher, FusedPair
from adapter_manager.domain.layout_options import LayoutOptions
from adapter_manager.domain.lora_names import TensorName
from adapter_manager.domain.pair_shapes import ShapeMismatchError, plain_factors, stacked_factors
from adapter_manager.domain.peft_config import PeftConfig
from adapter_manager.domain.problems import Problem, Problems
from adapter_manager.domain.safetensors_header import TensorEntry
from adapter_manager.domain.shown_text import shown
from adapter_manager.domain.site_index import PairForm, Place, SiteIndex
from adapter_manager.domain.tensor_pairs import LoraPair, has_float_dtype, pair_tensors
from adapter_manager.domain.weight_piece import WeightPiece
from lorikeet_contract.schema import LoraSchema, LoraSite

RankAndAlpha = Callable[[str], tuple[int, float]]


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A tensor that is neutral if it equals the base model's own weight at `site`."""

    entry: TensorEntry
    site: LoraSite


@dataclass(frozen=True, slots=True)
class MatchedTensors:
    """What the headers alone tell; whoever can read the weights settles the rest.

    `suspects` mean nothing to the base model, and are neutral only if their B is all zero. `unreachable`
    belong to a vision or audio tower, through which no text goes.
    """

    pieces: tuple[WeightPiece, ...]
    base_copies: tuple[BaseCopy, ...]
    suspects: tuple[LoraPair, ...]
    unreachable: tuple[LoraPair, ...]
    warnings: tuple[str, ...]


def match_tensors(
    entries: Iterable[TensorEntry],
    schema: LoraSchema,
    config: PeftConfig,
    rank_and_alpha: RankAndAlpha,
    options: LayoutOptions,
    problems: Problems,
) -> MatchedTensors:
    """Match all tensors; what is wrong with them goes into `problems`.

    Args:
        entries: the tensors of all files.
        schema: the base model's.
        config: the adapter's.
        rank_and_alpha: what the configuration gives a module or parameter of a name.
        options: what the uploader says about files that do not tell it.
        problems: filled.
    """
    index = SiteIndex(schema)
    tensors = pair_tensors(entries, problems)
    fused = FusedMatcher(index, config, options)
    scaled = _ScaledPieces(config, rank_and_alpha, problems)
    suspects, unreachable = list[LoraPair](), list[LoraPair]()
    for pair in tensors.pairs:
        place = index.find(pair.name.module)
        if pair.name.is_vision:
            unreachable.append(pair)
        elif fused.accepts(pair, place):
            continue
        elif place is None or pair.is_embedding != (place.form is PairForm.EMBEDDING):
            suspects.append(pair)
        else:
            scaled.add_placed(pair, place)
    for settled in fused.settle(problems):
        scaled.add_fused(settled)
    if config.ensure_weight_tying and any(p.site.layer is None for p in scaled.pieces):
        problems.add(
            Problem.UNSUPPORTED,
            "ensure_weight_tying ties the adapters of embed_tokens and lm_head: not served",
        )
    warnings = list(fused.warnings)
    if unreachable:
        warnings.append(
            f"{2 * len(unreachable)} tensors belong to a vision or audio tower, which text does not pass"
        )
    return MatchedTensors(
        pieces=tuple(scaled.pieces),
        base_copies=tuple(_base_copies(tensors.base_weights, index, problems)),
        suspects=tuple(suspects),
        unreachable=tuple(unreachable),
        warnings=tuple(warnings),
    )


class _ScaledPieces:
    """Pieces whose rank has been compared with the configuration's, with the scale that it gives them."""

    def __init__(self, config: PeftConfig, rank_and_alpha: RankAndAlpha, problems: Problems) -> None:
        self.pieces: list[WeightPiece] = []
        self._config = config
        self._rank_and_alpha = rank_and_alpha
        self._problems = problems

    def add_placed(self, pair: LoraPair, place: Place) -> None:
        """A pair whose module's path says all but its shapes."""
        site, index = place.site, place.slice_index
        out = site.out_features if index is None else site.slices[index].out_features
        module = pair.name.written_module
        if place.expert is not None and place.expert >= site.num_experts:
            self._problems.add(
                Problem.EXPERT_INDEX,
                f"{shown(module)}: expert {place.expert}, but {site.name} has {site.num_experts} experts",
            )
            return
        try:
            if place.form is PairForm.STACKED:
                rank, a, b = stacked_factors(pair, site, out)
            else:
                rank, a, b = plain_factors(pair, place.form, site.in_features, out)
        except ShapeMismatchError as error:
            self._problems.add(Problem.SHAPE, f"{shown(module)}: {error}")
            return
        layout = place.form.value
        if place.form is PairForm.STACKED and 0 in (a.strides[0], b.strides[0]) and site.num_experts > 1:
            layout = "shared-outer"
        scale = self._scale(self._pattern_name(module, place.form), rank)
        self.pieces.append(WeightPiece(site, index, place.expert, rank, scale, layout, a, b))

    def add_fused(self, settled: FusedPair) -> None:
        """A packed pair of PEFT's, which covers all experts and all rows."""
        scale = self._scale(settled.parameter, settled.rank)
        index = None if len(settled.site.slices) > 1 else 0
        self.pieces.append(
            WeightPiece(settled.site, index, None, settled.rank, scale, settled.layout, settled.a, settled.b)
        )

    def _pattern_name(self, module: str, form: PairForm) -> str:
        """What PEFT matches patterns with: a parameter's name where the parameter itself was targeted."""
        parameter = f"{module}.weight"
        if form is PairForm.LINEAR and any(
            parameter == t or parameter.endswith(f".{t}") for t in self._config.target_parameters
        ):
            return parameter
        return module

    def _scale(self, name: str, rank: int) -> float:
        expected, alpha = self._rank_and_alpha(name)
        if rank != expected:
            self._problems.add(
                Problem.RANK,
                f"{shown(name)} has rank {rank}, but rank {expected} by adapter_config.json",
            )
        return self._config.scale(expected, alpha)


def _base_copies(
    weights: Iterable[tuple[TensorName, TensorEntry]], index: SiteIndex, problems: Problems
) -> Iterator[BaseCopy]:
    """Full weights that may be what PEFT copies beside an adapter; any other full weight is a problem."""
    for name, entry in weights:
        place = index.find(name.module)
        if place is None or not place.site.base_weight_sha256:
            problems.add_unmatched([entry.name])
        elif has_float_dtype(entry, problems):
            yield BaseCopy(entry, place.site)
