"""Tensor names of PEFT files, taken apart: which module, which factor, and what prefixes were around it."""

import re
from dataclasses import dataclass
from enum import StrEnum


class TensorRole(StrEnum):
    """What a tensor is to its module."""

    A = "A"
    B = "B"
    EMBEDDING_A = "embedding A"
    EMBEDDING_B = "embedding B"
    BASE_WEIGHT = "base weight"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class TensorName:
    """A name's parts.

    `module` is the path in the text model, `written_module` the path in the model that the trainer saw: the
    rank and alpha patterns are for that one. `adapter` is a name that PEFT leaves in raw state dicts.
    """

    module: str
    written_module: str
    role: TensorRole
    adapter: str = ""
    is_vision: bool = False


_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?")
_WEIGHT = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.weight")
# What a multimodal model puts around its text model, in transformers 4 and 5.
_LANGUAGE = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")
_VISION = re.compile(
    r"(?:model\.)?(?:vision_model|vision_tower|visual|vision_encoder|multi_modal_projector|audio_tower)\."
)
_LORA_BIAS = re.compile(r"\.lora_[AB](?:\.[^.]+)?\.bias$")
_LORA_PREFIX = "base_model.model."

# What a tensor that is neither A nor B stands for, by a piece of its name.
_FEATURES = (
    ("lora_magnitude_vector", "DoRA's magnitudes"),
    ("modules_to_save", "modules_to_save"),
    ("trainable_tokens", "trainable tokens"),
    ("lora_diag", "KaSA's singular values"),
    (".bias", "bias"),
)


def parse_tensor_name(name: str) -> TensorName:
    """Take a name apart; a name of no known form has the role OTHER."""
    if match := _FACTOR.fullmatch(name):
        role = TensorRole.A if match["side"] == "A" else TensorRole.B
    elif match := _EMBEDDING.fullmatch(name):
        role = TensorRole.EMBEDDING_A if match["side"] == "A" else TensorRole.EMBEDDING_B
    elif match := _WEIGHT.fullmatch(name):
        role = TensorRole.BASE_WEIGHT
    else:
        return TensorName(name, name, TensorRole.OTHER)
    written = match["module"].removeprefix(_LORA_PREFIX)
    adapter = "" if role is TensorRole.BASE_WEIGHT else match["adapter"] or ""
    return TensorName(text_module(written), written, role, adapter, _VISION.match(written) is not None)


def text_module(written: str) -> str:
    """The module's path in the text model: without what a multimodal model puts around it."""
    if match := _LANGUAGE.match(written):
        rest = written[match.end() :]
        return rest if rest.startswith("lm_head") else f"model.{rest}"
    if written in ("unembed_tokens", "model.unembed_tokens"):
        return "lm_head"
    return written


def feature_of(name: str) -> str:
    """The unsupported feature that a tensor's name speaks of; "" where it speaks of none."""
    if _LORA_BIAS.search(name):
        return "lora_bias"
    return next((feature for piece, feature in _FEATURES if piece in name), "")
