"""Which files make up an adapter upload. The client refuses with the same words as the service would."""

import re
from collections.abc import Iterable

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors")
# Formats that torch.load or pickle would open: reading one can run code of the file's author.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_PICKLE_WORDS = (
    "is a pickle, which can run code when opened, so it is refused unopened: save the adapter as safetensors "
    "(PEFT: model.save_pretrained(path, safe_serialization=True))"
)


class InvalidFileError(ValueError):
    """A file that is no part of an adapter, or a set of files that is none; the message is safe to show."""


def is_adapter_file(name: str) -> bool:
    """Whether a file of this name belongs to an adapter."""
    return name in {CONFIG, WEIGHTS, INDEX} or _SHARD.fullmatch(name) is not None


def is_pickle(name: str) -> bool:
    """Whether the name is of a format that is a pickle, or may hold one."""
    return name.lower().endswith(_PICKLES)


def check_file_name(name: str) -> str:
    """Return `name` if such a file may be uploaded, else raise InvalidFileError saying what to do."""
    if is_adapter_file(name):
        return name
    shown = ascii(name if len(name) <= 80 else name[:77] + "...")
    if is_pickle(name):
        raise InvalidFileError(f"file {shown} {_PICKLE_WORDS}")
    raise InvalidFileError(
        f"file {shown} is no part of an adapter: send {CONFIG} with {WEIGHTS}, or with shards named "
        f"adapter_model-00001-of-00002.safetensors and {INDEX}"
    )


def check_file_set(names: Iterable[str], *, beside: Iterable[str] = ()) -> None:
    """Raise InvalidFileError unless `names` hold a configuration and weights.

    Args:
        names: the adapter files at hand, each valid by itself.
        beside: other names in the same place; a pickle among them explains why weights are missing.
    """
    have = set(names)
    if CONFIG not in have:
        raise InvalidFileError(f"{CONFIG} is missing: upload the directory that PEFT's save_pretrained wrote")
    shards = [name for name in have if _SHARD.fullmatch(name)]
    if WEIGHTS in have and (shards or INDEX in have):
        raise InvalidFileError(f"both {WEIGHTS} and shards or {INDEX} are there: keep the one or the others")
    if WEIGHTS in have or (shards and INDEX in have):
        return
    if shards:
        raise InvalidFileError(f"{INDEX} is missing beside {len(shards)} shards")
    if pickles := sorted(name for name in beside if is_pickle(name)):
        raise InvalidFileError(f"file {pickles[0]!a} {_PICKLE_WORDS}")
    raise InvalidFileError(f"{WEIGHTS} is missing: upload the directory that PEFT's save_pretrained wrote")
