"""Where the services are and who is calling."""

from dataclasses import dataclass, field

from lorikeet_client.calls import Service
from lorikeet_rpc.channel import ClientTls

DEFAULT_INFERENCE = "127.0.0.1:50051"
DEFAULT_MANAGER = "127.0.0.1:50052"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses, token and TLS of a client. The token is left out of the repr."""

    inference: str = DEFAULT_INFERENCE
    manager: str = DEFAULT_MANAGER
    token: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None

    def target(self, service: Service) -> str:
        """The address that speaks `service`."""
        return self.inference if service is Service.INFERENCE else self.manager
