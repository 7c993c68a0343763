"""Which node should hold what, and where: a pure function of the registry and of each node's limits.

Every node may serve every adapter of its base model; here is decided what must be near the device already.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from adapter_manager.domain.adapter import Adapter, Revision, WantedTier
from adapter_manager.domain.catalog import NodeCatalog, RegistryView, WantedRevision, ready_for_base
from adapter_manager.domain.node import NodeModel, ResidencyTier, ResidentAdapter

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LoadStep:
    """Bring a revision to `tier`."""

    digest: str
    tier: ResidencyTier
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class UnloadStep:
    """Take a revision that nobody registers any more off the node, its disk cache included."""

    digest: str


def node_catalog(view: RegistryView, node: NodeModel, store_url: str) -> NodeCatalog:
    """The catalog for one node: what is READY for its base model, and the tiers that fit its limits."""
    base_digest = node.model.base_digest
    wanted: dict[str, WantedRevision] = {}
    adapters: list[Adapter] = []
    for key in sorted(view.adapters):
        adapter = view.adapters[key]
        ready = ready_for_base(adapter, base_digest)
        if not ready:
            continue
        digests = {r.digest for r in ready}
        adapters.append(
            replace(
                adapter, revisions=ready, aliases=tuple((a, d) for a, d in adapter.aliases if d in digests)
            )
        )
        for revision in ready:
            ours = _wish(adapter, revision)
            wanted[revision.digest] = _stronger(wanted.get(revision.digest), ours)
    dtypes = {r.digest: r for a in adapters for r in a.revisions}
    return NodeCatalog(
        generation=view.generation,
        tenants=tuple(view.tenants[t] for t in sorted(view.tenants)),
        adapters=tuple(adapters),
        revisions=tuple(fit(wanted.values(), dtypes, node)),
        store_url=store_url,
    )


def fit(
    wanted: Iterable[WantedRevision], revisions: dict[str, Revision], node: NodeModel
) -> list[WantedRevision]:
    """Grant tiers within the node's limits: pinned first, then what was asked for, oldest first.

    What does not fit the device goes to host memory, what fits neither is refused with a reason. The order
    is stable, so that one more wish never pushes an earlier one out.
    """
    limits, result = node.limits, list[WantedRevision]()
    arena_left, slots_left, host_left = limits.arena_bytes, limits.max_active_adapters, limits.host_pool_bytes
    # Pins may not take the last slot of several: requests for all other adapters go through it.
    pins_left = max(1, slots_left - 1)

    def age(w: WantedRevision) -> tuple[bool, float, str]:
        return (not w.is_pinned, revisions[w.digest].create_time_s, w.digest)

    for wish in sorted(wanted, key=age):
        if wish.tier is ResidencyTier.ABSENT:
            result.append(wish)
            continue
        revision = revisions[wish.digest]
        size = bytes_on_node(revision, node)
        if revision.max_rank > limits.max_rank:
            refusal = f"rank {revision.max_rank} is over this node's max_rank {limits.max_rank}"
            result.append(replace(wish, tier=ResidencyTier.ABSENT, is_pinned=False, refusal=refusal))
        elif (
            wish.tier is ResidencyTier.ACTIVE
            and size <= min(arena_left, host_left)
            and (pins_left if wish.is_pinned else slots_left) > 0
        ):
            arena_left, slots_left, host_left = arena_left - size, slots_left - 1, host_left - size
            pins_left -= wish.is_pinned
            result.append(wish)
        elif size <= host_left:
            host_left -= size
            refusal = (
                f"{size} bytes do not fit what is left of this node's device memory ({arena_left} bytes, "
                f"{slots_left} slots)"
                if wish.tier is ResidencyTier.ACTIVE
                else ""
            )
            result.append(replace(wish, tier=ResidencyTier.HOST, is_pinned=False, refusal=refusal))
        else:
            refusal = f"{size} bytes do not fit what is left of this node's host memory ({host_left} bytes)"
            result.append(replace(wish, tier=ResidencyTier.ABSENT, is_pinned=False, refusal=refusal))
    return result


def bytes_on_node(revision: Revision, node: NodeModel) -> int:
    """What the revision takes in the node's compute dtype; alignment makes it a close estimate, not exact."""
    computed = _ITEMSIZE.get(node.model.dtype, 4)
    return -(-revision.payload_bytes * computed // _ITEMSIZE.get(revision.dtype, computed))


def plan(
    catalog: NodeCatalog, observed: Iterable[ResidentAdapter], registered: Iterable[str]
) -> tuple[list[LoadStep], list[UnloadStep]]:
    """What must happen on the node until observed equals desired.

    Revisions that are registered but not wanted are left where they are: the node brought them there for a
    request and evicts them by itself. `registered` are all digests that any adapter still holds.
    """
    held = {a.digest: a for a in observed}
    loads = list[LoadStep]()
    for wish in catalog.revisions:
        if wish.tier is ResidencyTier.ABSENT:
            continue
        now = held.get(wish.digest)
        if now is None or not satisfies(now, wish.tier, is_pinned=wish.is_pinned):
            loads.append(LoadStep(wish.digest, wish.tier, wish.is_pinned))
    known = frozenset(registered)
    unloads = [
        UnloadStep(a.digest)
        for a in held.values()
        if a.digest not in known and a.tier is not ResidencyTier.ABSENT
    ]
    return loads, unloads


def satisfies(now: ResidentAdapter, tier: ResidencyTier, *, is_pinned: bool) -> bool:
    """Whether the node needs no push for a wish of this tier.

    An unpinned revision in host memory is near enough: the node moved it off the device for other requests
    and promotes it by itself, and pushing it back would only make the two fight. COPYING is on its way.
    """
    nearest = ResidencyTier.COPYING if is_pinned and tier is ResidencyTier.ACTIVE else ResidencyTier.HOST
    return now.tier.rank >= nearest.rank and now.is_pinned == is_pinned


def _wish(adapter: Adapter, revision: Revision) -> WantedRevision:
    named = {adapter.current_digest, *(d for _, d in adapter.aliases)}
    is_pinned = adapter.is_pinned and revision.digest in named
    if is_pinned or revision.wanted is WantedTier.ACTIVE:
        tier = ResidencyTier.ACTIVE
    else:
        tier = ResidencyTier.HOST if revision.wanted is WantedTier.HOST else ResidencyTier.ABSENT
    return WantedRevision(revision.digest, revision.payload_bytes, tier, is_pinned)


def _stronger(one: WantedRevision | None, other: WantedRevision) -> WantedRevision:
    """Adapters may share content: the digest gets the nearest tier that any of them wants."""
    if one is None:
        return other
    nearer = one if one.tier.rank >= other.tier.rank else other
    return replace(nearer, is_pinned=one.is_pinned or other.is_pinned)
