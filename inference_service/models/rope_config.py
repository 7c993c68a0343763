"""RopeParameters out of a config of either style: `rope_theta` + `rope_scaling`, or `rope_parameters`."""

from inference_service.layers.rope import ROPE_KINDS, RopeParameters
from inference_service.models.config import ConfigReader
from inference_service.models.errors import ModelConfigError


def read_rope(config: ConfigReader, rotary_dim: int, *, default_theta: float = 10000.0) -> RopeParameters:
    """The rotary parameters of a model whose heads rotate `rotary_dim` elements, all that they could.

    Raises:
        ModelConfigError: a kind that this server lacks, or a bad field.
    """
    style5 = config.section("rope_parameters")
    scaling = style5 or config.section("rope_scaling") or ConfigReader(config.where, {})
    theta_from = style5 if style5 is not None and "rope_theta" in style5.fields else config
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelConfigError(
            f"{scaling.where}: rope type {kind!r} is not supported; supported are "
            f"{', '.join(sorted(ROPE_KINDS))}"
        )
    for section in (config, scaling):
        section.require("partial_rotary_factor", (1,), 1)
    original = scaling.optional_integer("original_max_position_embeddings")
    if kind == "llama3" and original is None:
        raise scaling.fail("original_max_position_embeddings", "an integer of at least 1")
    theta = theta_from.number("rope_theta", default_theta)
    if kind == "yarn" and theta <= 1:
        raise theta_from.fail("rope_theta", "a number above 1, for yarn divides by its logarithm")
    return RopeParameters(
        rotary_dim=rotary_dim,
        theta=theta,
        kind=kind,
        factor=1.0 if kind == "default" else scaling.number("factor"),
        original_max_position=original or config.integer("max_position_embeddings"),
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.boolean("truncate", default=True),
        mscale=_mscale(scaling, "mscale"),
        mscale_all_dim=_mscale(scaling, "mscale_all_dim"),
        attention_factor=scaling.optional_number("attention_factor"),
    )


def _mscale(scaling: ConfigReader, name: str) -> float:
    """0, written out, means that it is not used."""
    return 0.0 if scaling.fields.get(name) == 0 else scaling.optional_number(name) or 0.0
