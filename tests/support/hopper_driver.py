"""A stand-in for Triton's driver on a machine without a GPU."""

from triton.backends.compiler import GPUTarget


class HopperDriver:
    """As much of a driver as asking for a kernel and compiling it need."""

    def get_current_target(self) -> GPUTarget:
        """A Hopper card."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return device
