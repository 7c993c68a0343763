"""Every op by its kernel on a CPU, through Triton's interpreter: what a GPU would launch, without one.

An op asks its input's device whether to launch or to call the reference. `install` loads the modules of the
kernels and layers with that question answered as on a GPU. For processes of their own, which run under
TRITON_INTERPRET=1 and call it before they import any of them.
"""

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from triton.runtime import interpreter

_PACKAGES = ("lorikeet_kernels", "inference_service.layers")
_QUESTION = re.compile(r'device\.type (==|!=) "cpu"')
# Tables of tiles and streams of a GPU are not asked for: there is none.
_KEPT = ("lorikeet_kernels.launch.device_name",)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path).decode()
        return compile(_QUESTION.sub(r'device.type \1 "no device"', source), path, "exec")


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del target
        if not fullname.startswith(_PACKAGES) or fullname in _KEPT:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(spec.name, spec.origin)
        return spec


def install() -> None:
    """See above."""
    assert not [name for name in sys.modules if name.startswith(_PACKAGES)], "imported before install"
    sys.meta_path.insert(0, _Finder())
    patch_tensor = interpreter._patch_lang_tensor

    def patch_for_numpy(tensor: Any, scope: Any) -> None:
        """Triton 3.6 turns arrays of one element into loop bounds by int(), which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_for_numpy
