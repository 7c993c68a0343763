"""Tensors that say they lie on an H200, and lie in the host's memory: for launches that only compile."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.overrides import TorchFunctionMode

from lorikeet_kernels.launch import device_name, hopper
from tests.support.hopper_driver import HopperDriver

CARD = torch.device("cuda", 0)


class _OnCard(torch.Tensor):
    """Torch computes with them on the host, and gives what it computes their type."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return CARD

    def get_device(self) -> int:
        return CARD.index


def _is_card(value: object) -> bool:
    return isinstance(value, torch.device) and value == CARD


class _MadeOnHost(TorchFunctionMode):
    """Torch makes on the host what it is told to make on the card, or to copy there."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = dict(kwargs or {})
        if not any(map(_is_card, (*args, *given.values()))):
            return func(*args, **given)
        host = torch.device("cpu")
        made = func(
            *(host if _is_card(value) else value for value in args),
            **{name: host if _is_card(value) else value for name, value in given.items()},
        )
        return made.as_subclass(_OnCard)


@contextmanager
def hopper_tensors() -> Generator[torch.device]:
    """Within, launches on tensors of the device that this gives ask for an H200's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        runtime: Any = triton.runtime.driver
        patch.setattr(runtime, "_active", HopperDriver())
        patch.setattr(device_name, "_name_of", {CARD.index: "NVIDIA H200"}.__getitem__)
        patch.setattr(hopper, "_major_of", {CARD.index: 9}.__getitem__)
        sizes = SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_properties", {CARD: sizes}.__getitem__)
        with _MadeOnHost():
            yield CARD
