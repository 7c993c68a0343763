"""The parts of a model that its kernels and its bytes are told apart by."""

from enum import StrEnum


class ModelPart(StrEnum):
    """Where a decode step's time goes."""

    EXPERTS = "experts"
    PROJECTIONS = "projections, router"
    LM_HEAD = "lm_head"
    ATTENTION = "attention"
    ADAPTERS = "adapters"
    ROUTING = "routing"
    NORMS = "norms, rotation, cache"
    QUANTIZED = "quantized activations"
    SAMPLING = "sampling"
    COPIES = "copies, elementwise"
    OTHER = "other"
