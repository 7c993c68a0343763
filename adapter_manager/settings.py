"""Settings of the adapter manager: ADAPTER_MANAGER_* and flags of the same names. Read once, in server.py."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from lorikeet_rpc.metrics_endpoint import split_address
from lorikeet_rpc.server import TlsFiles
from lorikeet_rpc.service_settings import read_service_settings

_ADDRESS = re.compile(r"unix:.+|.+:\d{1,5}")
_REDIS_URL = re.compile(r"(redis|rediss|unix)://.+")


class Settings(BaseSettings):
    """Takes adapters, keeps tenants, tells nodes what to hold. Each flag is also ADAPTER_MANAGER_<FLAG>."""

    model_config = SettingsConfigDict(
        env_prefix="ADAPTER_MANAGER_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        cli_prog_name="lorikeet-adapter-manager",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    listen: str = Field("127.0.0.1:50052", description="host:port of the gRPC server")
    data_dir: Path = Field(
        Path("lorikeet-data"), description="uploads, the local artifact store, the embedded registry"
    )
    redis_url: SecretStr | None = Field(
        # Hosting platforms set this name; our own variable and the flag come first.
        default_factory=lambda: SecretStr(os.environ["REDIS_URL"]) if os.environ.get("REDIS_URL") else None,
        validate_default=True,
        description="redis:// or rediss:// or unix:// of a Redis >= 7 or Valkey; without it an embedded one",
    )
    adopt_registry: bool = Field(
        default=False,
        description="follow whatever registry the store holds, or begin one in an empty store, although this "
        "data directory knows another; for one start",
    )
    store_url: str | None = Field(
        None,
        description="file:///dir, s3://bucket/prefix, gs:// or az://; without it a directory in data_dir",
    )
    nodes: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="addresses of the inference services, separated by commas"
    )
    node_token: SecretStr = Field(SecretStr(""), description="the secret that the nodes know us by")
    nodes_tls: bool = Field(default=False, description="speak TLS to the nodes")
    nodes_tls_ca: Path | None = Field(None, description="authority of the nodes' certificates")
    bootstrap_tenant: str | None = Field(
        None, description="make this tenant, with an admin token in <data-dir>/bootstrap-token"
    )
    tls_cert: Path | None = Field(None, description="certificate of this server, PEM")
    tls_key: Path | None = Field(None, description="its key, PEM")
    tls_client_ca: Path | None = Field(None, description="ask clients for certificates of this authority")
    insecure_listen: bool = Field(
        default=False, description="allow plain text beyond loopback, on a network that you trust"
    )
    metrics_listen: str | None = Field(None, description="host:port of the Prometheus endpoint")
    max_upload_bytes: int = Field(16 * 1024**3, gt=0, description="largest sum of an upload's files")
    max_adapters: int = Field(10_000, gt=0, description="adapters of a tenant that has no limit of its own")
    max_revisions: int = Field(100, gt=0, description="revisions of one adapter")
    load_timeout_s: float = Field(300.0, gt=0, description="how long a node may take to load a revision")
    probe_on_load: bool = Field(
        default=True,
        description="compare each adapter with the base model once, when it first is on a node's device, and "
        "record whether it changes anything",
    )
    drain_grace_s: float = Field(30.0, ge=0, description="how long calls may go on after SIGTERM")
    log_format: Literal["json", "console"] = Field("json", description="form of the log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level to log")

    @field_validator("nodes", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return (
            tuple(part.strip() for part in value.split(",") if part.strip())
            if isinstance(value, str)
            else value
        )

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"{address!r} is not host:port, e.g. 127.0.0.1:50051")
        if len(set(value)) < len(value):
            raise ValueError("an address is given twice; name each node once")
        return value

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: SecretStr | None) -> SecretStr | None:
        # The value itself stays out of the message: it may hold a password.
        if value is not None and not _REDIS_URL.fullmatch(value.get_secret_value()):
            raise ValueError(
                "is not a URL such as redis://host:6379/0, rediss://user:password@host or unix:///path"
            )
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _check_metrics_listen(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        TlsFiles.from_settings(self.tls_cert, self.tls_key, self.tls_client_ca)
        return self

    @property
    def tls(self) -> TlsFiles | None:
        """The server's TLS files, if any."""
        return TlsFiles.from_settings(self.tls_cert, self.tls_key, self.tls_client_ca)


def read_settings(arguments: Sequence[str]) -> Settings:
    """Read flags, then environment, then defaults; raises InvalidSettingsError where one is wrong."""
    return read_service_settings(Settings, arguments)
