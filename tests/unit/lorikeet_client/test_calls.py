"""Unary calls of both clients: results, errors, tries, pages."""

from typing import Any

import pytest

import lorikeet_client as lk
from lorikeet.adapters.v1 import adapter_service_pb2, tenant_service_pb2
from lorikeet.inference.v1 import inference_service_pb2, model_pb2
from lorikeet_client import adapter_calls, inference_calls, tenant_calls
from lorikeet_contract.status import StatusCode
from tests.support.fake_services import SCHEMA, FakeServices, service_error

DIGEST = "d" * 64
ALL_CALLS = [
    inference_calls.complete("x"),
    inference_calls.abort("x"),
    inference_calls.tokenize("x", None, None),
    inference_calls.get_model(),
    adapter_calls.get_upload("t/a", "r"),
    adapter_calls.get_adapter("t/a"),
    adapter_calls.list_adapters("t", 1, ""),
    adapter_calls.delete_adapter("t/a", ""),
    adapter_calls.pin_adapter("t/a", pinned=True, etag=""),
    adapter_calls.set_alias("t/a", "prod", DIGEST, ""),
    adapter_calls.load_adapter("t/a", lk.ResidencyState.HOST),
    adapter_calls.unload_adapter("t/a"),
    adapter_calls.probe_adapter("t/a"),
    adapter_calls.get_placement(""),
    tenant_calls.create_tenant("t", None, ""),
    tenant_calls.get_tenant("t"),
    tenant_calls.list_tenants(1, ""),
    tenant_calls.delete_tenant("t", ""),
    tenant_calls.create_token("t", admin=False),
    tenant_calls.revoke_token("t", "id"),
]


def test_every_unary_rpc_of_the_protos_has_a_call_with_the_right_types() -> None:
    """Paths and message types are strings and values here; the descriptors say what they must be."""
    services = [
        descriptor.services_by_name[name]
        for descriptor, name in (
            (inference_service_pb2.DESCRIPTOR, "InferenceService"),
            (adapter_service_pb2.DESCRIPTOR, "AdapterService"),
            (tenant_service_pb2.DESCRIPTOR, "TenantService"),
        )
    ]
    declared = {
        f"/{service.full_name}/{method.name}": (method.input_type.full_name, method.output_type.full_name)
        for service in services
        for method in service.methods
        if method.name not in {"Generate", "Upload"}  # the two streams
    }
    built = {
        call.path: (call.request.DESCRIPTOR.full_name, call.response_type.DESCRIPTOR.full_name)
        for call in ALL_CALLS
    }
    assert built == declared


async def test_results_are_values(both: Any, fakes: FakeServices) -> None:
    """Each family of results arrives with its fields."""
    model = await both.call("get_model")
    assert model.lora_schema == SCHEMA
    assert model.name == "fake"
    adapter = await both.call("get_adapter", "demo/a1")
    assert adapter.name == "tenants/demo/adapters/a1"
    assert adapter.revisions[0].state is lk.RevisionState.READY
    assert adapter.revisions[0].report.sites[1].layer == 1
    report = adapter.revisions[0].report
    assert next((g.key, g.indices, g.role) for g in report.tensors) == (
        "layers.*.q_proj.lora_A.weight",
        ("0-1",),
        lk.TensorRole.LORA_A,
    )
    assert (report.tensors[0].shape, report.tensors[0].scaling, report.file_bytes) == ((4, 8), "8/4", 1280)
    assert [(c.site, c.layers, c.layers_without) for c in report.coverage] == [
        ("q", "0-1", "2"),
        ("router", "", "0-2"),
    ]
    assert adapter.revisions[0].probe is None
    probe = (await both.call("probe_adapter", "demo/a0")).probe
    assert (probe.verdict, probe.max_difference, probe.top1_changes) == (lk.ProbeVerdict.CHANGES, 1.25, 7)
    assert (probe.positions, probe.node, probe.time.year) == (64, "n:1", 2023)
    assert adapter.create_time is None
    assert adapter.revisions[0].create_time.year == 2023
    (placement,) = await both.call("load_adapter", "demo/a0", lk.ResidencyState.HOST)
    assert placement.state is lk.ResidencyState.HOST
    (placement,) = await both.call("unload_adapter", "demo/a0")
    assert placement.state is lk.ResidencyState.DISK
    assert len(await both.call("get_placement")) == 1
    assert (await both.call("pin_adapter", "demo/a0")).pinned
    assert (await both.call("set_alias", "demo/a0", "beta", DIGEST)).aliases == {"beta": DIGEST}
    assert await both.call("delete_adapter", "demo/a0") is None
    assert await both.call("abort", "running")
    assert not await both.call("abort", "other")
    tokenized = await both.call(
        "tokenize", chat=[lk.ChatMessage("user", "two words")], template_arguments={"a": 1}
    )
    assert tokenized.token_bytes == (b"two", b"words")
    completion = await both.call("complete", "a b", adapter="a0")
    assert (completion.text, completion.finish.adapter.tier_hit) == ("ab", lk.AdapterTier.HOST)


async def test_tenants(both: Any, fakes: FakeServices) -> None:
    """Tenants and tokens; absent limits stay absent."""
    made = await both.call("create_tenant", "acme", lk.TenantLimits(weight=2.0))
    assert made.limits == lk.TenantLimits(weight=2.0)
    assert (await both.call("get_tenant", "acme")).name == "tenants/acme"
    token = await both.call("create_token", "acme", admin=True)
    assert (token.token, token.record.admin) == ("lk_new", True)
    assert await both.call("revoke_token", "acme", "abc") is None
    assert await both.call("delete_tenant", "acme") is None


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (StatusCode.INVALID_ARGUMENT, lk.InvalidRequestError),
        (StatusCode.FAILED_PRECONDITION, lk.InvalidRequestError),
        (StatusCode.UNAUTHENTICATED, lk.AuthError),
        (StatusCode.PERMISSION_DENIED, lk.AuthError),
        (StatusCode.NOT_FOUND, lk.NotFoundError),
        (StatusCode.ALREADY_EXISTS, lk.ConflictError),
        (StatusCode.ABORTED, lk.ConflictError),
        (StatusCode.RESOURCE_EXHAUSTED, lk.LimitError),
        (StatusCode.UNAVAILABLE, lk.UnavailableError),
        (StatusCode.DEADLINE_EXCEEDED, lk.DeadlineError),
        (StatusCode.INTERNAL, lk.ServerError),
        (StatusCode.DATA_LOSS, lk.ServerError),
    ],
)
async def test_statuses_become_errors(
    both: Any, fakes: FakeServices, code: StatusCode, error: type[lk.CallError]
) -> None:
    """Each code has one class, and reason, message and metadata survive."""
    fakes.faults.add("GetModel", service_error(code, "what is wrong", reason="SOME_REASON"))
    with pytest.raises(error) as caught:
        await both.call("get_model")
    assert type(caught.value) is error
    assert (caught.value.reason, caught.value.message) == ("SOME_REASON", "what is wrong")
    assert caught.value.metadata == {"from": "fake"}


async def test_unavailable_is_tried_again_when_the_server_says_so(both: Any, fakes: FakeServices) -> None:
    """UNAVAILABLE with RetryInfo twice, then the answer."""
    draining = service_error(StatusCode.UNAVAILABLE, retry_after_s=0.001)
    fakes.faults.add("GetModel", draining, draining)
    assert (await both.call("get_model")).name == "fake"
    assert fakes.faults.calls == ["GetModel"] * 3


@pytest.mark.parametrize(
    ("method", "rpc", "arguments", "error"),
    [
        # no RetryInfo: another try is no use to anybody
        ("get_model", "GetModel", (), service_error(StatusCode.UNAVAILABLE)),
        # it may have happened already: a token would be made twice, a deletion be NOT_FOUND
        ("create_token", "CreateToken", ("t",), service_error(StatusCode.UNAVAILABLE, retry_after_s=0.001)),
        (
            "delete_adapter",
            "DeleteAdapter",
            ("t/a",),
            service_error(StatusCode.UNAVAILABLE, retry_after_s=0.001),
        ),
        # not a matter of time
        ("get_model", "GetModel", (), service_error(StatusCode.INVALID_ARGUMENT)),
    ],
)
async def test_other_failures_are_not_tried_again(
    both: Any, fakes: FakeServices, method: str, rpc: str, arguments: tuple[str, ...], error: Exception
) -> None:
    """One call on the wire, one error."""
    fakes.faults.add(rpc, error)  # type: ignore[arg-type]
    with pytest.raises(lk.CallError):
        await both.call(method, *arguments)
    assert fakes.faults.calls == [rpc]


async def test_tries_end(both: Any, fakes: FakeServices) -> None:
    """After the policy's attempts the last error comes through."""
    fakes.faults.add("GetModel", *[service_error(StatusCode.UNAVAILABLE, retry_after_s=0.001)] * 5)
    with pytest.raises(lk.UnavailableError):
        await both.call("get_model")
    assert fakes.faults.calls == ["GetModel"] * 3


async def test_no_wait_beyond_the_timeout(both: Any, fakes: FakeServices) -> None:
    """A server that says "in an hour" to a caller with one second gets no second call."""
    fakes.faults.add("GetModel", service_error(StatusCode.UNAVAILABLE, retry_after_s=3600))
    with pytest.raises(lk.UnavailableError) as caught:
        await both.call("get_model", timeout_s=1)
    assert caught.value.retry_after_s == 3600
    assert fakes.faults.calls == ["GetModel"]


async def test_a_repeated_create_carries_the_same_request_id(both: Any, fakes: FakeServices) -> None:
    """The id is what lets the server see that it is the same creation."""
    fakes.faults.add("CreateTenant", service_error(StatusCode.UNAVAILABLE, retry_after_s=0.001))
    await both.call("create_tenant", "acme")
    first, second = fakes.tenants.request_ids
    assert first == second != ""


async def test_lists_go_through_all_pages(both: Any, fakes: FakeServices) -> None:
    """Five adapters in pages of two; the tenant goes along."""
    found = await both.call("list_adapters", "demo", page_size=2)
    assert [adapter.name[-2:] for adapter in found] == ["a0", "a1", "a2", "a3", "a4"]
    assert [request.page_token for request in fakes.adapters.requests] == ["", "2", "4"]
    assert {request.parent for request in fakes.adapters.requests} == {"tenants/demo"}
    for name in ("x", "y", "z"):
        await both.call("create_tenant", name)
    assert len(await both.call("list_tenants", page_size=2)) == 3


async def test_a_schema_of_another_release_is_a_broken_reply(both: Any, fakes: FakeServices) -> None:
    """Its digest does not fit; nobody should upload against it."""
    fakes.inference.model.lora_schema.digest = "0" * 64
    with pytest.raises(lk.BrokenReplyError, match="different releases"):
        await both.call("get_model")


def test_every_model_field_is_read() -> None:
    """Limits and EngineStatus carry each field of their messages."""
    assert set(lk.Limits.__dataclass_fields__) == set(model_pb2.Limits.DESCRIPTOR.fields_by_name)
    assert set(lk.EngineStatus.__dataclass_fields__) == set(model_pb2.EngineStatus.DESCRIPTOR.fields_by_name)


async def test_no_server_is_unavailable(fakes: FakeServices) -> None:
    """Nobody listens: UNAVAILABLE at once, in both clients."""
    with lk.Lorikeet("127.0.0.1:1", "127.0.0.1:1") as client, pytest.raises(lk.UnavailableError):
        client.get_model()
    async with lk.AsyncLorikeet("127.0.0.1:1", "127.0.0.1:1") as client:
        with pytest.raises(lk.UnavailableError):
            await client.get_model()


def test_environment(monkeypatch: pytest.MonkeyPatch, fakes: FakeServices) -> None:
    """from_env reads addresses and token."""
    monkeypatch.setenv("LORIKEET_INFERENCE", fakes.address)
    monkeypatch.setenv("LORIKEET_MANAGER", fakes.address)
    monkeypatch.setenv("LORIKEET_TOKEN", "lk_test")
    with lk.Lorikeet.from_env() as client:
        assert client.get_model().name == "fake"
        assert client.get_adapter("demo/a0").etag == "7"
