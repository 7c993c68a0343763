"""Which ops of a model can be launched in which shapes, and each distinct one launched once. GPU only."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from inference_service.domain.engine import BackendUnusableError
from inference_service.execution.forward_pass import ForwardPass
from inference_service.layers.attention import Attention, AttentionShape
from inference_service.layers.batch import LayerCache, LoraBatch
from inference_service.layers.decoder import Decoder
from inference_service.layers.dense_mlp import DenseMlp
from inference_service.layers.latent_attention import LatentAttention
from inference_service.layers.linear import Linear
from inference_service.layers.moe import Moe
from inference_service.layers.projected import Projected
from lorikeet_kernels.attention.latent_attention import MAX_LATENT, NEVER_FRESH
from lorikeet_kernels.attention.paged_attention import MAX_DIM
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.experts.moe_experts import ExpertProjection, ExpertsLora, experts_kind
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from lorikeet_kernels.experts.routing import RouterLora
from lorikeet_kernels.warm_up import warm_up_linear, warm_up_moe
from lorikeet_kernels.warm_up_base import (
    warm_up_attention,
    warm_up_experts,
    warm_up_few_rows,
    warm_up_fp8_linear,
    warm_up_router,
    warm_up_sampling,
)
from lorikeet_kernels.warm_up_latent import LatentHeads, warm_up_heads, warm_up_latent_attention


def linears(model: Decoder) -> Iterator[Linear]:
    """The dense projections of all layers, the output head left out."""
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, Attention):
            yield from (attention.qkv, attention.o)
        else:
            yield from (attention.down, attention.kv_up, attention.o)
            if attention.query is not None:
                yield attention.query.up
        if isinstance(mlp, DenseMlp):
            yield from (mlp.gate_up, mlp.down)
            continue
        yield mlp.router
        if mlp.shared is not None:
            yield from (mlp.shared.mlp.gate_up, mlp.shared.mlp.down)
            if mlp.shared.gate is not None:
                yield mlp.shared.gate


def check_heads(model: Decoder) -> None:
    """Refuse heads and latents that are wider than the kernels take.

    Raises:
        BackendUnusableError: some are.
    """
    for layer in model.layers:
        shape = layer.attention.shape
        what, size, most = (
            ("heads", shape.head_dim, MAX_DIM)
            if isinstance(shape, AttentionShape)
            else ("latents", shape.latent_dim, MAX_LATENT)
        )
        if size > most:
            raise BackendUnusableError(
                f"attention {what} of {size} elements are wider than {most}, the most that a GPU's kernels "
                "take; --device cpu serves them"
            )


def warm_up_linears(forward: ForwardPass, *, max_tokens: int, max_sampled: int) -> int:
    """Dense projections in FP8 or of few rows, and all projections' LoRA ops; how many batches it took."""
    side = _fixed(forward).side
    beside_tokens = range(0) if side is None else side.rows.dense
    joined_tokens = range(0) if side is None else side.rows.joined
    seen: set[object] = set()
    count = 0
    for linear, most in (
        *((linear, max_tokens) for linear in linears(forward.model)),
        (forward.model.lm_head, max_sampled),
    ):
        sites, in_features, weight = linear.sites, int(linear.weight.shape[1]), linear.weight
        dtype = forward.tables.arena.dtype
        made: tuple[object, ...] = (weight.shape, linear.bias is None, linear.batch_invariant)
        if isinstance(weight, Fp8Weight):
            made += (weight.kind, weight.activations.kind, weight.block_of_row is None)
        if made not in seen:
            if isinstance(weight, Fp8Weight):
                count += warm_up_fp8_linear(weight, linear.bias, dtype=dtype, max_tokens=most)
            elif not linear.batch_invariant:
                count += warm_up_few_rows(weight, linear.bias, dtype=dtype, max_tokens=most)
        joined = (made, sites.out_features, sites.num_slices)
        if joined not in seen and linear is not forward.model.lm_head:
            count += _warm_up_joined(forward, linear, [n for n in joined_tokens if n <= most])
        seen |= {made, joined}
        key = (in_features, sites.out_features, sites.num_slices, most)
        if key in seen:
            continue
        seen.add(key)
        count += warm_up_linear(
            forward.tables,
            forward.workspace,
            in_features=in_features,
            sites=sites.indices,
            out_features=sites.out_features,
            num_slices=sites.num_slices,
            max_tokens=most,
            beside_tokens=range(0) if linear is forward.model.lm_head else beside_tokens,
        )
    return count


def _warm_up_joined(forward: ForwardPass, linear: Linear, tokens: Sequence[int]) -> int:
    """Launch a projection with its adapters in one, where it can be."""
    for num_tokens in tokens:
        weight = linear.weight
        x = torch.zeros((num_tokens, weight.shape[1]), dtype=forward.tables.arena.dtype, device=weight.device)
        slots = torch.full((num_tokens,), -1, dtype=torch.int32, device=weight.device)
        linear.beside(x, forward.lora(slots, has_adapters=True, beside=True))
    return len(tokens)


def warm_up_moes(forward: ForwardPass, *, max_tokens: int) -> int:
    """Routers, experts with adapters and without, their LoRA ops; returns how many batches it took."""
    seen: set[object] = set()
    count = 0
    for layer in forward.model.layers:
        moe = layer.mlp
        if not isinstance(moe, Moe):
            continue
        experts = moe.experts
        up, down = experts.gate_up, experts.down
        assert not isinstance(up.weight, Mxfp4Weight)
        assert not isinstance(down.weight, Mxfp4Weight)
        num_experts, num_rows, hidden = up.weight.shape
        router = moe.router
        made = (num_experts, hidden, router.bias is None)
        if isinstance(router.weight, torch.Tensor) and not router.batch_invariant and made not in seen:
            seen.add(made)
            dtype = forward.tables.arena.dtype
            adapters = partial(_router_lora, forward, router.sites.indices[0])
            count += warm_up_router(
                router.weight, router.bias, moe.routing, adapters, dtype=dtype, max_tokens=max_tokens
            )
        top_k = _top_k(moe, num_experts, forward)
        biases = (up.bias is None, down.bias is None)
        kinds = (experts_kind(up.weight), experts_kind(down.weight))
        has_shared = moe.shared is not None
        is_shared_gated = moe.shared is not None and moe.shared.gate is not None
        key = (
            tuple(up.weight.shape), kinds, experts.row_order, experts.activation, top_k, biases, has_shared,
            is_shared_gated,
        )  # fmt: skip
        if key in seen:
            continue
        seen.add(key)
        base = _fixed(forward)
        count += warm_up_experts(
            ExpertProjection(up.weight, up.bias, experts.row_order),
            ExpertProjection(down.weight, down.bias, None),
            experts.activation,
            dtype=forward.tables.arena.dtype,
            top_k=top_k,
            max_tokens=max_tokens,
            lora=ExpertsLora(
                base.segments, forward.tables, experts.sites.gate_up, experts.sites.down, side=base.side
            ),
            has_shared=has_shared,
            is_shared_gated=is_shared_gated,
            batch_invariant=experts.batch_invariant,
        )
        count += warm_up_moe(
            forward.tables,
            forward.workspace,
            hidden=hidden,
            inner=num_rows // 2,
            num_experts=num_experts,
            top_k=top_k,
            gate_up_site=experts.sites.gate_up,
            down_site=experts.sites.down,
            row_order=experts.row_order,
            max_tokens=max_tokens,
            grouped_only=True,
        )
    return count


def warm_up_attentions(
    forward: ForwardPass, *, max_requests: int, max_context_tokens: int, max_step_tokens: int
) -> int:
    """Paged attention of all kinds of layers; returns how many kernels there are."""
    seen: set[object] = set()
    count = 0
    for layer, cache in zip(forward.model.layers, forward.cache, strict=True):
        if isinstance(layer.attention, LatentAttention):
            if layer.attention.shape not in seen:
                seen.add(layer.attention.shape)
                count += _warm_up_latents(
                    forward, layer.attention, cache, max_requests, max_context_tokens, max_step_tokens
                )
            continue
        shape, sinks = layer.attention.shape, layer.attention.sinks
        window, chunk = shape.window, shape.chunk
        key = (shape.num_heads, _sizes(cache), shape.scale, window, chunk, sinks is None)
        if key in seen:
            continue
        seen.add(key)
        count += warm_up_attention(
            cache.keys,
            cache.values,
            dtype=forward.tables.arena.dtype,
            num_heads=shape.num_heads,
            scale=shape.scale,
            max_requests=max_requests,
            max_tokens=max_context_tokens,
            window=window,
            chunk=chunk,
            sinks=sinks,
            scales=cache.scales,
        )
    return count


def _warm_up_latents(
    forward: ForwardPass,
    attention: LatentAttention,
    cache: LayerCache,
    max_requests: int,
    max_context_tokens: int,
    max_step_tokens: int,
) -> int:
    shape = attention.shape
    heads = LatentHeads(
        shape.num_heads,
        shape.latent_dim,
        shape.plain_dim,
        shape.rope_dim,
        shape.value_dim,
        row_width=int(attention.down.weight.shape[0]),
        is_query_beside=attention.query is None,
        is_pairwise=shape.is_pairwise,
        projects_prompts=shape.most_fresh < NEVER_FRESH,
    )
    return warm_up_latent_attention(
        cache.keys,
        heads,
        scale=shape.scale,
        max_requests=max_requests,
        max_tokens=max_context_tokens,
        has_deltas=_fixed(forward).side is not None,
    ) + warm_up_heads(
        forward.tables,
        forward.workspace,
        heads,
        attention.head_weights,
        site=attention.kv_up.sites.indices[0],
        max_tokens=max_step_tokens,
    )


def warm_up_readers(forward: ForwardPass) -> int:
    """What adds deltas that adapters made beside a projection or in its launch; how many launches it took.

    Latent attention's inputs have `warm_up_attentions`, sums of experts `warm_up_moes`.
    """
    if _fixed(forward).side is None:
        return 0
    count = 0
    place = torch.zeros(1, dtype=torch.int64, device=_device(forward))
    for layer, cache in zip(forward.model.layers, forward.cache, strict=True):
        attention = layer.attention
        mlp = layer.mlp
        if isinstance(mlp, Moe):
            mlp = None if mlp.shared is None else mlp.shared.mlp
        readers: list[tuple[int, Callable[[Projected], object]]] = [
            (int(layer.mlp_norm.weight.shape[0]), lambda x, norm=layer.mlp_norm: norm.after(x, x.y.clone()))
        ]
        if mlp is not None:
            readers.append((int(mlp.gate_up.weight.shape[0]), mlp.activate))
        if isinstance(attention, Attention):
            prepare = partial(attention.prepare, cache=cache, slot_mapping=place, positions=place)
            readers.append((int(attention.qkv.weight.shape[0]), prepare))
        elif attention.query is not None:
            readers.append((int(attention.query.norm.weight.shape[0]), attention.query.norm.of))
        for width, read in readers:
            for is_joined in (False, True):
                y = torch.zeros((1, width), dtype=forward.tables.arena.dtype, device=place.device)
                read(Projected(y, y.float(), is_joined))
                count += 1
    return count


def warm_up_sampler(forward: ForwardPass, *, max_requests: int) -> None:
    """Everything that may choose a token."""
    head = forward.model.lm_head.weight
    assert isinstance(head, torch.Tensor)
    warm_up_sampling(int(head.shape[0]), head.dtype, max_requests)


def _top_k(moe: Moe, num_experts: int, forward: ForwardPass) -> int:
    """Experts of a token: the routing rule is a function, whose answer says it."""
    logits = torch.zeros((1, num_experts), dtype=forward.tables.arena.dtype, device=_device(forward))
    return int(moe.routing(logits)[1].shape[1])


def _fixed(forward: ForwardPass) -> LoraBatch:
    """A batch of one row, the base model's, as in steps of fixed shapes."""
    slots = torch.full((1,), -1, dtype=torch.int32, device=_device(forward))
    return forward.lora(slots, has_adapters=True, beside=True)


def _router_lora(forward: ForwardPass, site: int, x: torch.Tensor) -> RouterLora:
    """Rows of the base model in a batch that has adapters."""
    slots = torch.full((x.shape[0],), -1, dtype=torch.int32, device=x.device)
    lora = forward.lora(slots, has_adapters=True)
    return RouterLora(x, lora.segments, lora.tables, site)


def _sizes(cache: LayerCache) -> tuple[int, ...]:
    return (*cache.keys.shape[1:], *cache.values.shape[1:])


def _device(forward: ForwardPass) -> torch.device:
    return forward.sampled.device
