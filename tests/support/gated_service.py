"""`python -m tests.support.gated_service`: the inference service with the gated backend, else as it is."""

import dataclasses
import sys
from collections.abc import Sequence

import inference_service.__main__ as service
from inference_service.engine.config import EngineConfig
from inference_service.settings import Settings
from lorikeet_rpc.service_settings import read_service_settings
from tests.support.gated_backend import FACTORY


class GatedSettings(Settings):
    """The service's own settings."""

    def engine_config(self) -> EngineConfig:
        """With the backend replaced."""
        return dataclasses.replace(super().engine_config(), backend_factory=FACTORY)


def read_gated(arguments: Sequence[str]) -> Settings:
    """What `main` reads its settings with."""
    return read_service_settings(GatedSettings, arguments)


if __name__ == "__main__":
    service.read_settings = read_gated
    sys.exit(service.main())
