"""What GPU tests of kernels share."""

from collections.abc import Iterator

import pytest
import triton


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of kernels compiled since it was cleared."""
    names: list[str] = []

    def note(**given: object) -> None:
        names.append(str(given.get("repr")))

    triton.knobs.runtime.jit_post_compile_hook = note
    yield names
    triton.knobs.runtime.jit_post_compile_hook = None
