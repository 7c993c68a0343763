"""Model families: from a Hugging Face directory to a decoder, its LoRA schema and its identity."""

from inference_service.models.attention_spec import AnyAttentionSpec, LatentAttentionSpec
from inference_service.models.config import GenerationDefaults
from inference_service.models.errors import CheckpointError, ModelConfigError, ModelError
from inference_service.models.finite import is_finite
from inference_service.models.loader import (
    LoadedModel,
    ModelDescription,
    compute_dtype,
    describe_model,
    load_model,
)
from inference_service.models.parameter_bytes import parameter_bytes
from inference_service.models.working_bytes import activation_bytes, lora_workspace_bytes

__all__ = [
    "AnyAttentionSpec",
    "CheckpointError",
    "GenerationDefaults",
    "LatentAttentionSpec",
    "LoadedModel",
    "ModelConfigError",
    "ModelDescription",
    "ModelError",
    "activation_bytes",
    "compute_dtype",
    "describe_model",
    "is_finite",
    "load_model",
    "lora_workspace_bytes",
    "parameter_bytes",
]
