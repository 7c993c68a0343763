"""Each service's process can show all of its services by reflection, methods and messages included."""

import subprocess
import sys

import pytest

# In a process of its own: here other tests have loaded every file.
PROGRAM = """
import sys
from google.protobuf import descriptor_pool
__import__(sys.argv[1])
for name in sys.argv[2:]:
    service = descriptor_pool.Default().FindServiceByName(name)
    assert service.methods, name
    assert descriptor_pool.Default().FindFileContainingSymbol(name).name == service.file.name
"""


@pytest.mark.parametrize(
    ("server", "services"),
    [
        ("inference_service.server", ["inference.v1.InferenceService", "residency.v1.ResidencyService"]),
        ("adapter_manager.server", ["adapters.v1.AdapterService", "adapters.v1.TenantService"]),
    ],
)
def test_services_are_described(server: str, services: list[str]) -> None:
    """What grpcurl asks before it can make a call."""
    names = [f"lorikeet.{service}" for service in services]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
