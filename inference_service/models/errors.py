"""Why a model cannot be served; these end start-up, no request ever sees them.

ModelError
├── ModelConfigError   config.json lacks a field, has a bad value, or asks for what this server lacks
└── CheckpointError    the weights' files are missing, damaged or not the model that config.json describes
"""

from inference_service.domain.engine import BackendUnusableError


class ModelError(BackendUnusableError):
    """The model directory cannot be served."""


class ModelConfigError(ModelError):
    """A field of config.json; the message names file, field and value."""


class CheckpointError(ModelError):
    """The safetensors files; the message names files and tensors."""
