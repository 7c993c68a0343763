"""Which side of a fused expert parameter lora_A is on. It depends on the versions that wrote the file.

The shapes say it unless a parameter is square (gpt-oss down_proj, OLMoE gate_up_proj). Then the file's other
fused parameter says it: one writer treats both alike. Only where there is none, the PEFT version is asked:

    parameter stored as        peft < 0.19.0   0.19.0             >= 0.19.1
    [E, out, in]               exchanged       exchanged          standard
    [E, in, out], interleaved  standard        depends (*)        standard on transformers 5 (*)
    [E, in, out], else         standard        standard           exchanged

(*) The file does not record the transformers version: with 4.57 it is the other way round.
"""

from dataclasses import dataclass

from adapter_manager.domain.layout_options import ExpertOrientation
from lorikeet_contract.schema import LoraSite, ParameterLayout

_STANDARD, _EXCHANGED = ExpertOrientation.STANDARD, ExpertOrientation.EXCHANGED


@dataclass(frozen=True, slots=True)
class VersionVerdict:
    """What the PEFT version says; not certain where it depends on the transformers version, too."""

    orientation: ExpertOrientation | None
    is_certain: bool


def orientations_that_fit(site: LoraSite, width_a: int, width_b: int) -> tuple[ExpertOrientation, ...]:
    """What lora_A's columns and lora_B's rows allow: one orientation, both for a square site, or none."""
    widths = (width_a, width_b)
    fits = list[ExpertOrientation]()
    if widths == (site.in_features, site.out_features):
        fits.append(_STANDARD)
    if widths == (site.out_features, site.in_features):
        fits.append(_EXCHANGED)
    return tuple(fits)


def orientation_by_version(
    layout: ParameterLayout, is_interleaved: bool, version: tuple[int, ...] | None
) -> VersionVerdict:
    """What the writing PEFT version did with a parameter that is square.

    Args:
        layout: how the base parameter stores one expert's matrix.
        is_interleaved: whether the model's gate and up alternate; such models declare themselves transposed.
        version: None in files older than 0.18, and in those that no PEFT wrote.
    """
    if layout is ParameterLayout.OUT_IN:
        if version is None:
            return VersionVerdict(None, is_certain=False)
        return VersionVerdict(_EXCHANGED if version < (0, 19, 1) else _STANDARD, is_certain=True)
    if version is None or version < (0, 19):
        return VersionVerdict(_STANDARD, is_certain=version is not None)
    if not is_interleaved:
        return VersionVerdict(_EXCHANGED if version >= (0, 19, 1) else _STANDARD, is_certain=True)
    return VersionVerdict(_STANDARD if version >= (0, 19, 1) else None, is_certain=False)
