"""PEFT's wrapper around 3-D expert parameters (`target_parameters`): which one, which side, which packing.

Two wrapped parameters of one module nest: ROOT.base_layer.lora_* is the first in the module's order,
ROOT.lora_* the second. One alone is called ROOT.lora_*, whichever it is; then `target_parameters` tells.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from adapter_manager.domain.expert_orientation import orientation_by_version, orientations_that_fit
from adapter_manager.domain.layout_options import ExpertOrientation, ExpertPacking, LayoutOptions
from adapter_manager.domain.pair_shapes import ShapeMismatchError, fused_factors, fused_rank
from adapter_manager.domain.peft_config import PeftConfig
from adapter_manager.domain.problems import Problem, Problems
from adapter_manager.domain.shown_text import shown
from adapter_manager.domain.site_index import PairForm, Place, SiteIndex
from adapter_manager.domain.tensor_pairs import LoraPair
from adapter_manager.domain.weight_piece import Factor
from lorikeet_contract.schema import LoraSite, RowOrder

_INNER = ".base_layer"


@dataclass(frozen=True, slots=True)
class FusedPair:
    """A packed pair whose meaning is settled. `parameter` is the name that rank and alpha patterns match."""

    pair: LoraPair
    site: LoraSite
    parameter: str
    rank: int
    a: Factor
    b: Factor
    layout: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    pair: LoraPair
    site: LoraSite
    parameter: str
    rank: int
    fits: tuple[ExpertOrientation, ...]


class FusedMatcher:
    """Collects the packed pairs of a file, then settles them together: square ones follow their siblings."""

    def __init__(self, index: SiteIndex, config: PeftConfig, options: LayoutOptions) -> None:
        self._index = index
        self._config = config
        self._options = options
        self._named: list[tuple[LoraPair, Place]] = []
        self._wrapped: dict[str, dict[bool, LoraPair]] = {}
        self._warnings: dict[str, None] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was assumed where the file is silent."""
        return tuple(self._warnings)

    def accepts(self, pair: LoraPair, place: Place | None) -> bool:
        """Take `pair` if it is a packed one; `place` is what its module's path means by itself."""
        if pair.is_embedding:
            return False
        if place is not None:
            if place.form is not PairForm.FUSED:
                return False
            self._named.append((pair, place))
            return True
        root = pair.name.module.removesuffix(_INNER)
        if not self._index.root_sites(root):
            return False
        is_inner = root != pair.name.module
        return self._wrapped.setdefault(root, {}).setdefault(is_inner, pair) is pair

    def settle(self, problems: Problems) -> Iterator[FusedPair]:
        """All pairs that could be settled; the others are in `problems`."""
        candidates = [c for c in self._candidates(problems) if self._has_fit(c, problems)]
        decided = {c.fits[0] for c in candidates if len(c.fits) == 1}
        packing = self._packing(problems)
        for candidate in candidates:
            orientation = self._orientation(candidate, decided, problems)
            if orientation is None:
                continue
            a, b = fused_factors(
                candidate.pair, candidate.rank, candidate.site.num_experts, packing, orientation
            )
            layout = PairForm.FUSED.value
            if orientation is ExpertOrientation.EXCHANGED:
                layout += "-exchanged"
            if packing is ExpertPacking.EXPERT_MAJOR:
                layout += "-expert-major"
            yield FusedPair(candidate.pair, candidate.site, candidate.parameter, candidate.rank, a, b, layout)

    def _candidates(self, problems: Problems) -> Iterator[_Candidate]:
        for pair, place in self._named:
            parameter = f"{pair.name.written_module}.{place.parameter}"
            if candidate := _candidate(pair, place.site, parameter, problems):
                yield candidate
        for root, wrapped in self._wrapped.items():
            sites = self._index.root_sites(root)
            inner, outer = wrapped.get(True), wrapped.get(False)
            if inner is not None:
                yield from self._of_site(inner, sites[0], problems)
            if outer is not None:
                if inner is not None and len(sites) > 1:
                    yield from self._of_site(outer, sites[1], problems)
                elif inner is None:
                    yield from self._alone(outer, sites, problems)
                else:
                    problems.add_unmatched(outer.tensor_names)

    def _alone(self, pair: LoraPair, sites: tuple[LoraSite, ...], problems: Problems) -> Iterator[_Candidate]:
        """The only wrapped parameter of its module: by `target_parameters`, else by the only site it fits."""
        targeted = [s for s in sites if self._is_targeted(_parameter(pair, s))]
        if len(targeted) != 1:
            a, b = pair.a.shape, pair.b.shape
            is_flat = len(a) == 2 and len(b) == 2
            targeted = [s for s in sites if is_flat and orientations_that_fit(s, a[1], b[0])]
        if len(targeted) == 1:
            yield from self._of_site(pair, targeted[0], problems)
        elif targeted:
            problems.add(
                Problem.AMBIGUOUS,
                f"{shown(pair.name.written_module)} has one pair, which fits several parameters: list the "
                "one it was trained for in target_parameters of adapter_config.json",
            )
        else:
            problems.add(
                Problem.SHAPE,
                f"{shown(pair.name.written_module)}: shapes {list(pair.a.shape)} and {list(pair.b.shape)} "
                f"fit none of {', '.join(s.name for s in sites)}",
            )

    def _of_site(self, pair: LoraPair, site: LoraSite, problems: Problems) -> Iterator[_Candidate]:
        if candidate := _candidate(pair, site, _parameter(pair, site), problems):
            yield candidate

    def _is_targeted(self, parameter: str) -> bool:
        return any(parameter == t or parameter.endswith(f".{t}") for t in self._config.target_parameters)

    def _has_fit(self, candidate: _Candidate, problems: Problems) -> bool:
        if candidate.fits:
            return True
        site, a, b = candidate.site, candidate.pair.a.shape, candidate.pair.b.shape
        problems.add(
            Problem.SHAPE,
            f"{shown(candidate.parameter)}: lora_A has {a[1]} columns and lora_B {b[0]} rows; {site.name} "
            f"takes {site.in_features} and {site.out_features}, or the reverse",
        )
        return False

    def _packing(self, problems: Problems) -> ExpertPacking:
        marker, option = self._config.packing, self._options.packing
        if marker is not None and option is not None and marker is not option:
            problems.add(
                Problem.AMBIGUOUS,
                f"lora_B_layout in adapter_config.json says {marker}, the upload says {option}",
            )
        return option or marker or ExpertPacking.RANK_MAJOR

    def _orientation(
        self, candidate: _Candidate, decided: set[ExpertOrientation], problems: Problems
    ) -> ExpertOrientation | None:
        option = self._options.orientation
        if option is not None:
            if option in candidate.fits:
                return option
            problems.add(
                Problem.SHAPE,
                f"{shown(candidate.parameter)}: its shapes are {candidate.fits[0]}, the upload says {option}",
            )
            return None
        if len(candidate.fits) == 1:
            return candidate.fits[0]
        if len(decided) == 1:
            return next(iter(decided))
        verdict = orientation_by_version(
            candidate.site.parameter_layout, self._is_interleaved(candidate), self._config.peft_version
        )
        if verdict.orientation is None:
            problems.add(
                Problem.AMBIGUOUS,
                f"{shown(candidate.parameter)} is square, so its shapes do not tell which side lora_A is on: "
                "upload it with an expert orientation of standard (lora_A on the input) or exchanged",
            )
        elif not verdict.is_certain:
            self._warnings[
                f"{candidate.site.key} is square and its sibling has no weights: taken as "
                f"{verdict.orientation}, as PEFT writes it on transformers 5; if it was trained on "
                "transformers 4, upload it again with the other expert orientation"
            ] = None
        return verdict.orientation

    def _is_interleaved(self, candidate: _Candidate) -> bool:
        root = candidate.pair.name.module.removesuffix(_INNER)
        sites = self._index.root_sites(root) or (candidate.site,)
        return any(s.row_order is RowOrder.INTERLEAVED for s in sites)


def _parameter(pair: LoraPair, site: LoraSite) -> str:
    short = site.fused_parameter.rpartition(".")[2] or site.key
    return f"{pair.name.written_module.removesuffix(_INNER)}.{short}"


def _candidate(pair: LoraPair, site: LoraSite, parameter: str, problems: Problems) -> _Candidate | None:
    try:
        rank = fused_rank(pair, site)
    except ShapeMismatchError as error:
        problems.add(Problem.SHAPE, f"{shown(parameter)}: {error}")
        return None
    fits = orientations_that_fit(site, pair.a.shape[1], pair.b.shape[0])
    return _Candidate(pair, site, parameter, rank, fits)
