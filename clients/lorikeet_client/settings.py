"""The environment that clients read, in this one place and only when asked to."""

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

from lorikeet_client.endpoints import DEFAULT_INFERENCE, DEFAULT_MANAGER, Endpoints
from lorikeet_rpc.channel import ClientTls


class ClientSettings(BaseSettings):
    """LORIKEET_INFERENCE, LORIKEET_MANAGER, LORIKEET_TOKEN, and LORIKEET_TLS_CA_FILE to speak TLS."""

    model_config = SettingsConfigDict(env_prefix="LORIKEET_", frozen=True)

    inference: str = DEFAULT_INFERENCE
    manager: str = DEFAULT_MANAGER
    token: str | None = None
    tls_ca_file: Path | None = None

    def endpoints(self) -> Endpoints:
        """The same as endpoints."""
        tls = ClientTls(ca_file=self.tls_ca_file) if self.tls_ca_file else None
        return Endpoints(self.inference, self.manager, self.token, tls)
