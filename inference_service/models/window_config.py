"""Each layer's attention window, from the fields that say which layers have one."""

from collections.abc import Callable, Sequence

from inference_service.models.config import ConfigReader

_SLIDING, _FULL = "sliding_attention", "full_attention"


def layer_windows(config: ConfigReader, is_sliding: Callable[[int], bool]) -> Sequence[int | None]:
    """The window of each layer, None where it sees all.

    Args:
        config: `use_sliding_window` turns windows on; `layer_types` says which layers have one.
        is_sliding: whether a layer has one where the config has no `layer_types`.
    """
    num_layers = config.integer("num_hidden_layers")
    kinds = None if config.fields.get("layer_types") is None else config.texts("layer_types")
    if kinds is None:
        is_windowed = [is_sliding(index) for index in range(num_layers)]
    elif len(kinds) == num_layers and all(kind in (_SLIDING, _FULL) for kind in kinds):
        is_windowed = [kind == _SLIDING for kind in kinds]
    else:
        raise config.fail("layer_types", f"{num_layers} of {_SLIDING!r} and {_FULL!r}")
    if not config.boolean("use_sliding_window", default=False):
        return [None] * num_layers
    window = config.optional_integer("sliding_window")
    return [window if windowed else None for windowed in is_windowed]
