"""The LoRA schema over the wire: nothing is lost, and a schema of another release is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.inference.v1 import model_pb2
from lorikeet_contract.schema import LoraSchema, LoraSite, ParameterLayout, RowOrder, SiteKind, SiteSlice
from lorikeet_rpc.schema_message import schema_from_message, schema_to_message

_text = st.text(max_size=8)
_count = st.integers(0, 2**32 - 1)
_slices = st.builds(SiteSlice, _text, _count, st.lists(_text, max_size=2).map(tuple))
_sites = st.builds(
    LoraSite,
    key=_text,
    layer=st.none() | _count,
    kind=st.sampled_from(SiteKind),
    in_features=_count,
    out_features=_count,
    slices=st.lists(_slices, max_size=2).map(tuple),
    num_experts=_count,
    row_order=st.sampled_from(RowOrder),
    fused_parameter=_text,
    parameter_layout=st.sampled_from(ParameterLayout),
    base_weight_dtype=_text,
    base_weight_sha256=_text,
)
_schemas = st.builds(LoraSchema, _count, st.lists(_sites, max_size=3).map(tuple))


@given(_schemas)
def test_round_trip(schema: LoraSchema) -> None:
    """Through serialized bytes and back, every field and the digest are the same."""
    wire = schema_to_message(schema).SerializeToString()
    back = schema_from_message(model_pb2.LoraSchema.FromString(wire))
    assert back == schema
    assert back.digest == schema.digest


@pytest.mark.parametrize("field", ["kind", "row_order", "parameter_layout"])
@pytest.mark.parametrize("number", [0, 99])
def test_unknown_values_are_refused(field: str, number: int) -> None:
    """Unset, or of a release to come: guessing would put weights in the wrong place."""
    schema = LoraSchema(1, (LoraSite("q", 0, SiteKind.LINEAR, 1, 1, ()),))
    message = schema_to_message(schema)
    setattr(message.sites[0], field, number)
    with pytest.raises(ValueError, match="'q' has a kind, row order or parameter layout"):
        schema_from_message(message)


def test_a_wrong_digest_is_refused() -> None:
    """The sender hashes other bytes, so it means other things."""
    message = schema_to_message(LoraSchema(1, ()))
    message.num_layers = 2
    with pytest.raises(ValueError, match="different releases"):
        schema_from_message(message)
