"""What an uploader may say about files that do not tell it themselves."""

from dataclasses import dataclass
from enum import StrEnum


class ExpertPacking(StrEnum):
    """How the columns of a fused lora_B run over the experts."""

    RANK_MAJOR = "rank-major"
    EXPERT_MAJOR = "expert-major"


class ExpertOrientation(StrEnum):
    """Which side of a fused expert parameter lora_A is on: STANDARD is the input side."""

    STANDARD = "standard"
    EXCHANGED = "exchanged"


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """None: found out from the files."""

    packing: ExpertPacking | None = None
    orientation: ExpertOrientation | None = None
