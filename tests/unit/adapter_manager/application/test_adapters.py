"""Get, list, pin, alias: visibility, etags, pages, and answers from memory."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adapter_manager.application.naming import parent_tenant, reference
from adapter_manager.application.registration import RegistrationLimits
from adapter_manager.domain.adapter import MAX_ALIASES, Adapter, RevisionState, WantedTier
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import (
    AdapterNotFoundError,
    AdapterNotReadyError,
    EtagMismatchError,
    InvalidRequestError,
    LimitExceededError,
    RegistryUnavailableError,
    TenantNotFoundError,
)
from adapter_manager.domain.tenant import TenantLimits
from lorikeet_contract.names import AdapterName
from tests.support.built_revisions import MemoryArtifacts
from tests.support.manager_parts import ADMIN, Parts, make_parts
from tests.support.memory_registry import MemoryRegistry

DEMO, OTHER = Caller("demo", is_admin=False), Caller("other", is_admin=False)
BAD_NAMES = Path(__file__).resolve().parents[3] / "fixtures" / "adapters_bad" / "bad_names.json"


@pytest.fixture
async def parts(tmp_path: Path) -> Parts:
    """Two tenants without adapters."""
    made = make_parts(
        MemoryRegistry(),
        MemoryArtifacts(),
        tmp_path,
        limits=RegistrationLimits(max_adapters=50, max_revisions=3),
    )
    await made.tenant("demo")
    await made.tenant("other")
    return made


@pytest.mark.parametrize("name", json.loads(BAD_NAMES.read_text())["names"])
def test_hostile_names_are_refused_or_just_not_there(name: str) -> None:
    """None reaches the registry as anything but a plain name, and none is echoed raw."""
    try:
        parsed = reference(DEMO, name)
    except (InvalidRequestError, AdapterNotFoundError) as error:
        assert "\n" not in error.message
        assert "\x00" not in error.message
    else:
        assert parsed.name.adapter == name
        assert name.isascii()
        assert not set(name) & set("/\\%$`{}<> \n\x00")


async def test_other_tenants_names_do_not_exist_except_for_admins(parts: Parts) -> None:
    """The same NOT_FOUND as for a name that nobody has."""
    await parts.push("demo/a")
    assert (await parts.adapters.get(DEMO, "a")).adapter.name.short == "demo/a"
    assert (await parts.adapters.get(ADMIN, "demo/a")).adapter.name.short == "demo/a"
    with pytest.raises(AdapterNotFoundError) as theirs:
        await parts.adapters.get(OTHER, "demo/a")
    with pytest.raises(AdapterNotFoundError) as nobodys:
        await parts.adapters.get(DEMO, "demo/b")
    assert theirs.value.message.replace("demo/a", "X") == nobodys.value.message.replace("demo/b", "X")
    with pytest.raises(TenantNotFoundError):
        parent_tenant(OTHER, "tenants/demo")


async def test_all_forms_of_names_lead_to_the_same_adapter(parts: Parts) -> None:
    """Bare, short, alias, resource name with and without revision."""
    revision, _ = await parts.push("demo/a", aliases=["prod"])
    for name in (
        "a",
        "demo/a",
        "a@prod",
        "tenants/demo/adapters/a",
        f"tenants/demo/adapters/a/revisions/{revision.digest}",
    ):
        details = await parts.adapters.get(DEMO, name)
        assert (details.adapter.name.short, details.report_digest) == ("demo/a", revision.digest)
        assert details.report is not None
    for name in ("a@dev", f"tenants/demo/adapters/a/revisions/{'0' * 64}"):
        with pytest.raises(AdapterNotFoundError):
            await parts.adapters.get(DEMO, name)


async def test_the_bare_name_answers_with_what_was_pushed_last(parts: Parts) -> None:
    """Also when that was pushed before: its content is not stored twice, its place is the newest."""
    one, is_new = await parts.push("demo/a", "one", aliases=["prod"])
    two, _ = await parts.push("demo/a", "two")
    assert is_new
    assert (await parts.adapters.get(DEMO, "a")).adapter.current_digest == two.digest
    again, is_new = await parts.push("demo/a", "one")
    adapter = (await parts.adapters.get(DEMO, "a")).adapter
    assert (again.digest, is_new, adapter.current_digest) == (one.digest, False, one.digest)
    assert len(adapter.revisions) == 2
    assert adapter.alias("prod") == one.digest


async def test_lists_are_complete_ordered_and_per_tenant(parts: Parts) -> None:
    """Every adapter once over all pages, for the tenant and for an admin over all tenants."""
    for index in range(7):
        await parts.push(f"demo/a{index}", str(index))
    await parts.push("other/b")

    async def names(caller: Caller, parent: str) -> list[str]:
        found: list[str] = []
        token = ""
        while True:
            items, token = await parts.adapters.list(caller, parent, 3, token)
            assert len(items) <= 3
            found += [item.adapter.name.short for item in items]
            if not token:
                return found

    mine = [f"demo/a{index}" for index in range(7)]
    assert await names(DEMO, "") == mine
    assert await names(DEMO, "tenants/demo") == mine
    assert await names(OTHER, "") == ["other/b"]
    assert await names(ADMIN, "") == [*mine, "other/b"]


async def test_etags_guard_changes(parts: Parts) -> None:
    """A stale one changes nothing; the current one works and changes with the change."""
    await parts.push("demo/a")
    before = await parts.adapters.get(DEMO, "a")
    after = await parts.adapters.pin(DEMO, "a", is_pinned=True, etag=before.etag)
    assert after.adapter.is_pinned
    assert after.etag != before.etag
    with pytest.raises(EtagMismatchError):
        await parts.adapters.pin(DEMO, "a", is_pinned=False, etag=before.etag)
    with pytest.raises(EtagMismatchError):
        await parts.deletion.delete(DEMO, "a", before.etag)
    assert (await parts.adapters.get(DEMO, "a")).etag == after.etag


async def test_the_number_of_aliases_is_bounded(parts: Parts) -> None:
    """By upload and by SetAlias; at the limit old ones can still move and go."""
    revision, _ = await parts.push("demo/a", aliases=[f"a{n}" for n in range(MAX_ALIASES)])
    with pytest.raises(LimitExceededError, match="max_aliases"):
        await parts.adapters.set_alias(DEMO, "a", "more", revision.digest, "")
    with pytest.raises(LimitExceededError, match="max_aliases"):
        await parts.push("demo/a", "other", aliases=["more"])
    await parts.adapters.set_alias(DEMO, "a", "a0", revision.digest, "")
    await parts.adapters.set_alias(DEMO, "a", "a0", "", "")
    changed = await parts.adapters.set_alias(DEMO, "a", "more", revision.digest, "")
    assert changed.adapter.alias("more") == revision.digest
    assert changed.adapter.current_digest == revision.digest


@pytest.mark.parametrize("digest", ["xyzzy", "A" * 64, "0" * 63, "attn\r\nX-Header: 1"])
async def test_what_is_no_digest_is_refused_and_shown_escaped(parts: Parts, digest: str) -> None:
    """Before any look-up; nothing raw of it is repeated."""
    with pytest.raises(InvalidRequestError, match="64 lower-case hex digits") as error:
        await parts.adapters.set_alias(DEMO, "a", "prod", digest, "")
    assert error.value.message.startswith(f"digest is {digest!a}; it must be a revision's digest")
    assert error.value.message.isprintable()


async def test_aliases_are_set_moved_and_removed(parts: Parts) -> None:
    """Only to READY revisions of the same adapter, only with valid names."""
    one, _ = await parts.push("demo/a", "one")
    two, _ = await parts.push("demo/a", "two")
    for digest in (one.digest, two.digest):
        changed = await parts.adapters.set_alias(DEMO, "a", "prod", digest, "")
        assert changed.adapter.alias("prod") == digest
    assert (await parts.adapters.set_alias(DEMO, "a", "prod", "", "")).adapter.aliases == ()
    with pytest.raises(AdapterNotFoundError):
        await parts.adapters.set_alias(DEMO, "a", "prod", "0" * 64, "")
    for alias in ("", "../x", "a b", "base"):
        with pytest.raises(InvalidRequestError):
            await parts.adapters.set_alias(DEMO, "a", alias, one.digest, "")


async def test_a_wish_goes_over_to_the_next_push_but_not_from_an_alias(parts: Parts) -> None:
    """Who loaded t/a wants what t/a answers with; what prod answers with stays loaded."""
    one, _ = await parts.push("demo/a", "one")
    await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 1)
    two, _ = await parts.push("demo/a", "two", aliases=["prod"])
    adapter = (await parts.adapters.get(DEMO, "a")).adapter
    assert {r.digest: r.wanted for r in adapter.revisions} == {
        one.digest: None,
        two.digest: WantedTier.ACTIVE,
    }
    three, _ = await parts.push("demo/a", "three")
    adapter = (await parts.adapters.get(DEMO, "a")).adapter
    wanted = {r.digest: r.wanted for r in adapter.revisions}
    assert (wanted[two.digest], wanted[three.digest]) == (WantedTier.ACTIVE, None)


async def test_limits_on_adapters_and_revisions(parts: Parts) -> None:
    """Named, with value and maximum; what is there already may be pushed again."""
    await parts.tenants.create("small", TenantLimits(max_adapters=1), "")
    await parts.push("small/a")
    with pytest.raises(LimitExceededError) as caught:
        await parts.push("small/b")
    assert caught.value.metadata == {"limit": "max_adapters", "value": "2", "maximum": "1"}
    for seed in ("1", "2", "3"):
        await parts.push("demo/a", seed)
    with pytest.raises(LimitExceededError, match="delete old ones"):
        await parts.push("demo/a", "4")
    assert (await parts.push("demo/a", "3"))[1] is False


async def test_reads_come_from_memory_while_the_registry_is_away(parts: Parts) -> None:
    """What was registered is still shown; what is unknown is UNAVAILABLE, not NOT_FOUND; writes must wait."""
    await parts.push("demo/a")
    assert isinstance(parts.registry, MemoryRegistry)
    parts.registry.is_away = True
    assert (await parts.adapters.get(DEMO, "a")).adapter.current_digest
    items, token = await parts.adapters.list(DEMO, "", 10, "")
    assert ([i.adapter.name.short for i in items], token) == (["demo/a"], "")
    with pytest.raises(RegistryUnavailableError):
        await parts.adapters.get(DEMO, "unknown")
    with pytest.raises(RegistryUnavailableError) as caught:
        await parts.adapters.pin(DEMO, "a", is_pinned=True, etag="")
    assert caught.value.retry_after_s


async def test_a_registry_that_goes_away_within_a_read_does_not_fail_it(parts: Parts) -> None:
    """The record was read, its report was not: then the whole answer comes from memory, without an etag."""
    revision, _ = await parts.push("demo/a")

    async def away(name: AdapterName, digest: str) -> None:
        raise RegistryUnavailableError("away", retry_after_s=1)

    parts.registry.report = away  # type: ignore[method-assign]
    details = await parts.adapters.get(DEMO, "a")
    assert (details.adapter.current_digest, details.etag) == (revision.digest, "")


async def test_an_adapter_without_a_ready_revision_says_so(parts: Parts) -> None:
    """It is there, but there is nothing to pin or load while its first upload is being stored."""
    assert isinstance(parts.store, MemoryArtifacts)
    revision, _ = await parts.push("demo/a")

    def pending(adapter: Adapter) -> Adapter:
        return adapter.with_pending(replace(revision, state=RevisionState.PENDING), 1.0)

    await parts.adapters.change(AdapterName("demo", "a"), "", pending)
    with pytest.raises(AdapterNotReadyError):
        await parts.adapters.pin(DEMO, "a", is_pinned=True, etag="")
    await parts.push("demo/a")
    assert (await parts.adapters.get(DEMO, "a")).adapter.current_digest == revision.digest
