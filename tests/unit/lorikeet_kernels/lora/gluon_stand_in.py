"""A stand-in for Gluon that runs its kernels in Triton's interpreter, which knows Triton kernels only.

`install()` before the first import of a Gluon kernel, in a process with TRITON_INTERPRET=1: layouts are
forgotten, everything else is Triton's function of the same name. What a layout decides (which thread holds
what) is therefore not tested here.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton
import triton.experimental
import triton.language as tl
from triton.experimental import gluon as real_gluon
from triton.runtime import jit

SAME = (
    "load", "store", "where", "maximum", "minimum", "max", "sum", "arange", "zeros", "full", "program_id",
    "multiple_of", "static_range",
)  # fmt: skip
LAYOUTS = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout")


def _as_triton(name: str) -> Callable[..., Any]:
    def call(*args: Any, layout: object = None, **kwargs: Any) -> Any:
        del layout
        return getattr(tl, name)(*args, **kwargs)  # looked up late: the interpreter replaces it while it runs

    return call


def _multiply(a: Any, b: Any, acc: Any) -> Any:
    return tl.dot(a, b, acc, input_precision="ieee")


def install() -> None:
    """Put the stand-in in the place of triton.experimental.gluon and of what kernels import from it."""
    gluon = ModuleType("triton.experimental.gluon")
    language = ModuleType("triton.experimental.gluon.language")
    ampere = ModuleType("triton.experimental.gluon.language.nvidia.ampere")
    for name in SAME:
        setattr(language, name, _as_triton(name))
    for name in LAYOUTS:
        setattr(language, name, lambda *_args, **_kwargs: None)  # pyright: ignore[reportUnknownLambdaType]
    for name in ("int32", "int64", "float32", "constexpr"):
        setattr(language, name, getattr(tl, name))
    vars(language)["convert_layout"] = lambda value, _layout: value  # pyright: ignore[reportUnknownLambdaType]
    vars(gluon).update(jit=triton.jit, language=language)
    vars(ampere)["mma_v2"] = _multiply
    vars(gluon)["__path__"] = real_gluon.__path__  # Triton imports from below it
    setattr(triton.experimental, "gluon", gluon)  # noqa: B010 (a module that the package does not declare)
    normalize = vars(jit)["_normalize_ty"]

    def normalize_either(annotation: Any) -> str:
        """The interpreter compares annotations as text and knows tl.constexpr only."""
        return normalize(annotation.replace("gl.", "tl.") if isinstance(annotation, str) else annotation)

    setattr(jit, "_normalize_ty", normalize_either)  # noqa: B010 (it is private)
    sys.modules.update({module.__name__: module for module in (gluon, language, ampere)})


def attach(kernel_module: ModuleType) -> None:
    """Let the interpreter find Triton's language in a kernel's module, where it looks for what to replace."""
    vars(kernel_module)["tl"] = tl
