"""The LoRA schema as a message and back: a node answers with it, the adapter manager and clients read it."""

from lorikeet.inference.v1 import model_pb2
from lorikeet_contract.schema import LoraSchema, LoraSite, ParameterLayout, RowOrder, SiteKind, SiteSlice

_KINDS = {
    SiteKind.LINEAR: model_pb2.SITE_KIND_LINEAR,
    SiteKind.EXPERTS: model_pb2.SITE_KIND_EXPERTS,
    SiteKind.EMBEDDING: model_pb2.SITE_KIND_EMBEDDING,
}
_LAYOUTS = {
    ParameterLayout.OUT_IN: model_pb2.PARAMETER_LAYOUT_OUT_IN,
    ParameterLayout.IN_OUT: model_pb2.PARAMETER_LAYOUT_IN_OUT,
}
_ORDERS = {
    RowOrder.CONCATENATED: model_pb2.ROW_ORDER_CONCATENATED,
    RowOrder.INTERLEAVED: model_pb2.ROW_ORDER_INTERLEAVED,
}
_KINDS_BACK = {message: value for value, message in _KINDS.items()}
_LAYOUTS_BACK = {message: value for value, message in _LAYOUTS.items()}
_ORDERS_BACK = {message: value for value, message in _ORDERS.items()}


def schema_to_message(schema: LoraSchema) -> model_pb2.LoraSchema:
    """Every field of the schema, with its digest."""
    sites = [_site_to_message(site) for site in schema.sites]
    return model_pb2.LoraSchema(num_layers=schema.num_layers, sites=sites, digest=schema.digest)


def schema_from_message(message: model_pb2.LoraSchema) -> LoraSchema:
    """Inverse of `schema_to_message`.

    Raises:
        ValueError: a site has a kind, layout or order that this release does not know, or the content does
            not hash to the digest that came with it. Both mean that the two sides are of different releases.
    """
    schema = LoraSchema(
        num_layers=message.num_layers, sites=tuple(_site_from_message(site) for site in message.sites)
    )
    if schema.digest != message.digest:
        raise ValueError(
            f"the LoRA schema hashes to {schema.digest} here, but its sender says {message.digest!r}: "
            "the two run different releases; upgrade the older one"
        )
    return schema


def _site_to_message(site: LoraSite) -> model_pb2.LoraSite:
    message = model_pb2.LoraSite(
        key=site.key,
        kind=_KINDS[site.kind],
        in_features=site.in_features,
        out_features=site.out_features,
        num_experts=site.num_experts,
        slices=[
            model_pb2.SiteSlice(name=s.name, out_features=s.out_features, modules=s.modules)
            for s in site.slices
        ],
        row_order=_ORDERS[site.row_order],
        fused_parameter=site.fused_parameter,
        parameter_layout=_LAYOUTS[site.parameter_layout],
        base_weight_dtype=site.base_weight_dtype,
        base_weight_sha256=site.base_weight_sha256,
    )
    if site.layer is not None:
        message.layer = site.layer
    return message


def _site_from_message(message: model_pb2.LoraSite) -> LoraSite:
    if not (
        message.kind in _KINDS_BACK
        and message.row_order in _ORDERS_BACK
        and message.parameter_layout in _LAYOUTS_BACK
    ):
        raise ValueError(
            f"LoRA site {message.key!r} has a kind, row order or parameter layout that this release does not "
            f"know ({message.kind}, {message.row_order}, {message.parameter_layout}): upgrade it"
        )
    return LoraSite(
        key=message.key,
        layer=message.layer if message.HasField("layer") else None,
        kind=_KINDS_BACK[message.kind],
        in_features=message.in_features,
        out_features=message.out_features,
        slices=tuple(SiteSlice(s.name, s.out_features, tuple(s.modules)) for s in message.slices),
        num_experts=message.num_experts,
        row_order=_ORDERS_BACK[message.row_order],
        fused_parameter=message.fused_parameter,
        parameter_layout=_LAYOUTS_BACK[message.parameter_layout],
        base_weight_dtype=message.base_weight_dtype,
        base_weight_sha256=message.base_weight_sha256,
    )
