"""The device: model runner, key-value cache, host pool and adapter arena."""

from inference_service.execution.backend import DeviceBackend, load_backend
from inference_service.execution.config import BackendConfig

__all__ = ["BackendConfig", "DeviceBackend", "load_backend"]
