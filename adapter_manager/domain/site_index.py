"""Which place in the base model a PEFT module path means: the schema's names, and those of trainers.

"{expert}" stands for an expert's index. Beside the schema's own names, an experts site is found under
    ROOT, ROOT.base_layer                    PEFT's wrapper around one or two parameters of the module ROOT
    ROOT.gate_up_proj, ROOT.down_proj        one 3-D pair for all experts
    ROOT.gate_proj, ROOT.w1, ...             one 3-D pair for all experts, one slice
    ROOT.gate_up_projs.{expert}, ...         a pair per expert, rows in the model's own order
where ROOT is the module that holds the experts, such as "model.layers.0.mlp.experts".
"""

from dataclasses import dataclass
from enum import StrEnum

from lorikeet_contract.schema import LoraSchema, LoraSite, SiteKind

# Names of a slice's projection in the checkpoints of one family or another.
_SLICE_NAMES = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
_WHOLE_NAMES = {"gate_up": "gate_up_proj", "down": "down_proj"}
# GraniteMoe's experts in transformers 4: modules whose weight is the 3-D parameter itself.
_GRANITE_NAMES = {"gate_up": "input_linear", "down": "output_linear"}


class PairForm(StrEnum):
    """How a pair of tensors is shaped."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    PER_EXPERT = "per-expert"
    PER_EXPERT_WHOLE = "per-expert-fused"
    STACKED = "stacked-3d"
    FUSED = "peft-fused"


@dataclass(frozen=True, slots=True)
class Place:
    """What a module path means. `slice_index` is None where the pair covers all rows of the site.

    `parameter` is appended to the module's path to get the name that rank and alpha patterns match.
    """

    site: LoraSite
    form: PairForm
    slice_index: int | None
    expert: int | None = None
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class _Template:
    site: LoraSite
    form: PairForm
    slice_index: int | None
    parameter: str = ""


class SiteIndex:
    """Module paths of one schema; built once per upload."""

    def __init__(self, schema: LoraSchema) -> None:
        self._templates: dict[str, _Template] = {}
        self._roots: dict[str, list[LoraSite]] = {}
        # How many parts stand behind "{expert}" in the templates' names.
        self._tails: set[int] = set()
        for site in schema.sites:
            if site.kind is SiteKind.EXPERTS:
                self._add_experts(site)
            else:
                form = PairForm.EMBEDDING if site.kind is SiteKind.EMBEDDING else PairForm.LINEAR
                for index, piece in enumerate(site.slices):
                    for module in piece.modules:
                        self._templates[module] = _Template(site, form, index)

    def find(self, module: str) -> Place | None:
        """The place that a path means by itself; PEFT's wrapper roots are not found here."""
        if template := self._templates.get(module):
            return Place(template.site, template.form, template.slice_index, None, template.parameter)
        parts = module.split(".")
        # Only where a template has its "{expert}": a name may have hundreds of numbers.
        for tail in self._tails:
            position = len(parts) - 1 - tail
            if position < 0:
                continue
            part = parts[position]
            if not (part.isascii() and part.isdigit()) or len(part) > 9 or (part[0] == "0" and part != "0"):
                continue
            template = self._templates.get(".".join([*parts[:position], "{expert}", *parts[position + 1 :]]))
            if template is not None:
                return Place(
                    template.site, template.form, template.slice_index, int(part), template.parameter
                )
        return None

    def root_sites(self, root: str) -> tuple[LoraSite, ...]:
        """The experts sites whose parameters the module `root` holds, in the module's own order."""
        return tuple(self._roots.get(root, ()))

    def _add_experts(self, site: LoraSite) -> None:
        """Enter all names of an experts site; the schema's own are entered first and are never replaced."""
        roots = dict.fromkeys([site.fused_parameter.rpartition(".")[0]] if site.fused_parameter else [])
        for index, piece in enumerate(site.slices):
            for module in piece.modules:
                self._enter(module, _Template(site, PairForm.PER_EXPERT, index))
                roots[module.partition(".{expert}")[0]] = None
        whole = None if len(site.slices) > 1 else 0
        for root in roots:
            self._roots.setdefault(root, []).append(site)
            for index, piece in enumerate(site.slices):
                for name in _SLICE_NAMES.get(piece.name or site.key, ()):
                    self._enter(f"{root}.{{expert}}.{name}", _Template(site, PairForm.PER_EXPERT, index))
                    self._enter(f"{root}.{name}", _Template(site, PairForm.STACKED, index))
            if name := _WHOLE_NAMES.get(site.key):
                self._enter(f"{root}.{name}", _Template(site, PairForm.STACKED, whole))
                self._enter(f"{root}.{{expert}}.{name}", _Template(site, PairForm.PER_EXPERT_WHOLE, whole))
                self._enter(f"{root}.{name}s.{{expert}}", _Template(site, PairForm.PER_EXPERT_WHOLE, whole))
            if name := _GRANITE_NAMES.get(site.key):
                parent = root.rpartition(".")[0]
                self._enter(f"{parent}.{name}", _Template(site, PairForm.FUSED, None, "weight"))

    def _enter(self, module: str, template: _Template) -> None:
        self._templates.setdefault(module, template)
        if "{expert}" in module:
            self._tails.add(module.partition("{expert}")[2].count("."))
