"""Wakes the engine loop from worker threads."""

import os


class Waker:
    """A descriptor that the loop sleeps on; `wake` may be called from any thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """Let the loop's sleep end, now or the next time."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Forget earlier calls of `wake`."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
