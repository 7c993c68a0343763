"""The model families this server knows, found by `architectures` or `model_type`."""

from collections.abc import Callable
from dataclasses import dataclass

from inference_service.models import (
    deepseek_v2,
    deepseek_v3,
    gpt_oss,
    granitemoe,
    llama,
    llama4,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from inference_service.models.config import ConfigReader
from inference_service.models.errors import ModelConfigError
from inference_service.models.fp8_format import METHODS, quantized_at_load, quantized_spec
from inference_service.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """A family's names and its declaration. `quantizations` are the quant_methods it can read."""

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    declare: Callable[[ConfigReader], ModelSpec]
    quantizations: tuple[str, ...] = METHODS


FAMILIES = (
    Family(qwen3_moe.ARCHITECTURES, qwen3_moe.MODEL_TYPES, qwen3_moe.declare),
    Family(gpt_oss.ARCHITECTURES, gpt_oss.MODEL_TYPES, gpt_oss.declare, gpt_oss.QUANTIZATIONS),
    Family(mixtral.ARCHITECTURES, mixtral.MODEL_TYPES, mixtral.declare),
    Family(llama.ARCHITECTURES, llama.MODEL_TYPES, llama.declare),
    Family(qwen3.ARCHITECTURES, qwen3.MODEL_TYPES, qwen3.declare),
    Family(olmoe.ARCHITECTURES, olmoe.MODEL_TYPES, olmoe.declare),
    Family(qwen2_moe.ARCHITECTURES, qwen2_moe.MODEL_TYPES, qwen2_moe.declare),
    Family(granitemoe.ARCHITECTURES, granitemoe.MODEL_TYPES, granitemoe.declare),
    Family(llama4.ARCHITECTURES, llama4.MODEL_TYPES, llama4.declare),
    Family(deepseek_v3.ARCHITECTURES, deepseek_v3.MODEL_TYPES, deepseek_v3.declare),
    Family(deepseek_v2.ARCHITECTURES, deepseek_v2.MODEL_TYPES, deepseek_v2.declare),
)


QUANTIZATIONS = ("fp8",)
"""What a checkpoint's weights may be brought to."""


def declare_model(config: ConfigReader, quantization: str | None = None) -> tuple[str, ModelSpec]:
    """The architecture's name and the declared model of a config.

    `quantization` asks for weights to be quantised while they are read, where they are not stored so.

    Raises:
        ModelConfigError: an unknown family, an unsupported quantization, or a bad field.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ModelConfigError(
            f"quantization {quantization!r} is not supported; supported are {', '.join(QUANTIZATIONS)}"
        )
    architecture, family = _find(config)
    stored = config.section("quantization_config")
    if stored is not None:
        method = stored.text("quant_method", "unnamed")
        if method not in family.quantizations:
            supported = ", ".join(family.quantizations) or "none"
            raise ModelConfigError(
                f"{config.where}: quantization_config.quant_method is {method!r}, which is not supported for "
                f"{architecture} (supported: {supported}); serve an unquantized checkpoint of this model"
            )
    spec = family.declare(config)
    if stored is not None and stored.text("quant_method") in METHODS:
        return architecture, quantized_spec(spec, stored)
    if quantization is None:
        return architecture, spec
    if stored is not None:
        raise ModelConfigError(
            f"{stored.where}: quant_method is {stored.text('quant_method')!r}; such weights are served as "
            f"they are stored, without quantization {quantization!r}"
        )
    return architecture, quantized_at_load(spec)


def _find(config: ConfigReader) -> tuple[str, Family]:
    architectures = config.texts("architectures", ())
    model_type = config.fields.get("model_type")
    for family in FAMILIES:
        for architecture in family.architectures:
            if architecture in architectures:
                return architecture, family
    for family in FAMILIES:
        if not architectures and model_type in family.model_types:
            return family.architectures[0], family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelConfigError(
        f"{config.where}: architectures {list(architectures)!r} (model_type {model_type!r}) is not "
        f"supported; supported are {known}"
    )
