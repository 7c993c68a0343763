"""Which node should hold what: pins, wishes, limits, sharing, and what must be done about it."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from adapter_manager.domain.adapter import Adapter, Revision, RevisionState, WantedTier
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.node import BaseModel, NodeLimits, NodeModel, ResidencyTier, ResidentAdapter
from adapter_manager.domain.placement import LoadStep, UnloadStep, node_catalog, plan
from lorikeet_contract.schema import LoraSchema

BASE = "b" * 64
ACTIVE, HOST, ABSENT = ResidencyTier.ACTIVE, ResidencyTier.HOST, ResidencyTier.ABSENT


def make_node(*, arena: int = 1000, host: int = 1000, slots: int = 4, dtype: str = "float32") -> NodeModel:
    """A node with small limits."""
    model = BaseModel("m", "M", BASE, dtype, 64, LoraSchema(0, ()))
    return NodeModel("i", model, NodeLimits(64, slots, arena, host))


def make_revision(digest: str, **changes: object) -> Revision:
    """A READY revision of 100 bytes; the digest's text is also its age."""
    revision = Revision(digest, RevisionState.READY, float(ord(digest[0])), 100, "float32", 8, BASE)
    return replace(revision, **changes)  # pyright: ignore[reportArgumentType]


def make_adapter(name: str, *revisions: Revision, **changes: object) -> Adapter:
    """An adapter of tenant t."""
    return replace(Adapter("t", name, 0, 0, revisions), **changes)  # pyright: ignore[reportArgumentType]


def make_view(*adapters: Adapter) -> RegistryView:
    """A view at generation 7."""
    return RegistryView("e", 7, adapters=MappingProxyType({a.name.short: a for a in adapters}))


def tiers(view: RegistryView, node: NodeModel) -> dict[str, ResidencyTier]:
    """The catalog's wishes by digest."""
    return {r.digest: r.tier for r in node_catalog(view, node, "store").revisions}


def test_only_pinned_and_wanted_revisions_are_desired() -> None:
    """Everything is in the catalog; only pins and explicit loads ask for a tier."""
    view = make_view(
        make_adapter("idle", make_revision("a")),
        make_adapter("pinned", make_revision("c"), is_pinned=True),
        make_adapter("host", make_revision("d", wanted=WantedTier.HOST)),
        make_adapter("loaded", make_revision("e", wanted=WantedTier.ACTIVE)),
    )
    assert tiers(view, make_node()) == {"a": ABSENT, "c": ACTIVE, "d": HOST, "e": ACTIVE}


def test_a_pin_follows_what_the_names_answer_with() -> None:
    """The current revision and alias targets are pinned, an old revision without a name is not."""
    view = make_view(
        make_adapter(
            "x",
            make_revision("a"),
            make_revision("c"),
            make_revision("d"),
            aliases=(("prod", "c"),),
            is_pinned=True,
        )
    )
    assert tiers(view, make_node()) == {"a": ABSENT, "c": ACTIVE, "d": ACTIVE}


def test_what_does_not_fit_the_device_goes_to_host_memory_and_says_so() -> None:
    """The older wish keeps its place; the newer falls to HOST with a reason."""
    view = make_view(
        make_adapter("x", make_revision("a", wanted=WantedTier.ACTIVE)),
        make_adapter("y", make_revision("c", wanted=WantedTier.ACTIVE)),
    )
    catalog = node_catalog(view, make_node(arena=150), "store")
    assert {r.digest: r.tier for r in catalog.revisions} == {"a": ACTIVE, "c": HOST}
    assert "device memory" in (catalog.wish("c") or pytest.fail("missing")).refusal
    assert not (catalog.wish("a") or pytest.fail("missing")).refusal


def test_pins_go_before_older_wishes_but_leave_one_slot() -> None:
    """Two slots: one pin gets one, the second pin must not take the last, the wish may."""
    view = make_view(
        make_adapter("w", make_revision("a", wanted=WantedTier.ACTIVE)),
        make_adapter("p", make_revision("c"), is_pinned=True),
        make_adapter("q", make_revision("d"), is_pinned=True),
    )
    assert tiers(view, make_node(slots=2)) == {"c": ACTIVE, "d": HOST, "a": ACTIVE}


def test_what_fits_nowhere_is_absent_and_over_rank_too() -> None:
    """No push can succeed, so none is wanted; the reason is kept."""
    view = make_view(
        make_adapter("x", make_revision("a", wanted=WantedTier.ACTIVE)),
        make_adapter("y", make_revision("c", wanted=WantedTier.HOST, max_rank=65, payload_bytes=1)),
    )
    catalog = node_catalog(view, make_node(host=50), "store")
    assert {r.digest: r.tier for r in catalog.revisions} == {"a": ABSENT, "c": ABSENT}
    assert "host memory" in (catalog.wish("a") or pytest.fail("missing")).refusal
    assert "max_rank 64" in (catalog.wish("c") or pytest.fail("missing")).refusal


def test_sizes_are_those_of_the_node_dtype() -> None:
    """A float32 payload takes half on a bfloat16 node."""
    view = make_view(make_adapter("x", make_revision("a", wanted=WantedTier.ACTIVE)))
    assert tiers(view, make_node(arena=50, host=50, dtype="bfloat16")) == {"a": ACTIVE}
    assert tiers(view, make_node(arena=50, host=50)) == {"a": ABSENT}


def test_other_base_models_and_unready_revisions_are_not_in_the_catalog() -> None:
    """Neither names, nor aliases, nor digests of them reach the node."""
    other = make_revision("d", base_digest="0" * 64)
    pending = make_revision("c", state=RevisionState.PENDING)
    view = make_view(
        make_adapter("x", make_revision("a"), pending, other, aliases=(("new", "d"),)),
        make_adapter("y", other),
    )
    catalog = node_catalog(view, make_node(), "store")
    assert [a.adapter for a in catalog.adapters] == ["x"]
    assert catalog.adapters[0].current_digest == "a"
    assert catalog.adapters[0].aliases == ()
    assert [r.digest for r in catalog.revisions] == ["a"]


def test_shared_content_gets_the_nearest_tier_that_anyone_wants() -> None:
    """Two tenants' adapters of one digest are one entry."""
    mine = make_adapter("x", make_revision("a", wanted=WantedTier.HOST))
    theirs = replace(make_adapter("x", make_revision("a")), tenant="u", is_pinned=True)
    catalog = node_catalog(make_view(mine, theirs), make_node(), "store")
    assert [(r.digest, r.tier, r.is_pinned) for r in catalog.revisions] == [("a", ACTIVE, True)]


def test_plan_loads_what_is_missing_and_unloads_what_is_unknown() -> None:
    """Registered but unwanted revisions stay where the node put them."""
    view = make_view(
        make_adapter("p", make_revision("a"), is_pinned=True),
        make_adapter("idle", make_revision("c")),
    )
    catalog = node_catalog(view, make_node(), "store")
    held = [ResidentAdapter("c", ACTIVE), ResidentAdapter("gone", ResidencyTier.DISK)]
    loads, unloads = plan(catalog, held, ["a", "c"])
    assert loads == [LoadStep("a", ACTIVE, is_pinned=True)]
    assert unloads == [UnloadStep("gone")]


@pytest.mark.parametrize(
    ("tier", "is_pinned", "needs_push"),
    [(ACTIVE, True, False), (ResidencyTier.COPYING, True, False), (HOST, True, True), (ACTIVE, False, True)],
)
def test_a_pin_needs_the_device(tier: ResidencyTier, is_pinned: bool, needs_push: bool) -> None:
    """Host memory is not enough for a pin; a copy on its way is, and so is only a pinned one."""
    catalog = node_catalog(
        make_view(make_adapter("p", make_revision("a"), is_pinned=True)), make_node(), "store"
    )
    loads, _ = plan(catalog, [ResidentAdapter("a", tier, is_pinned=is_pinned)], ["a"])
    assert bool(loads) is needs_push


def test_an_unpinned_wish_is_content_with_host_memory() -> None:
    """The node moved it off the device for others; pushing it back would make the two fight."""
    view = make_view(make_adapter("x", make_revision("a", wanted=WantedTier.ACTIVE)))
    catalog = node_catalog(view, make_node(), "store")
    assert plan(catalog, [ResidentAdapter("a", HOST)], ["a"]) == ([], [])
    assert plan(catalog, [ResidentAdapter("a", ResidencyTier.DISK)], ["a"])[0]
