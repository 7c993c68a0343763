"""The blocking client."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from lorikeet_client import adapter_calls, generation_messages, inference_calls, tenant_calls
from lorikeet_client.adapters import (
    Adapter,
    Placement,
    ResidencyState,
    Revision,
    UploadOptions,
    UploadResult,
)
from lorikeet_client.blocking_transport import BlockingTransport
from lorikeet_client.endpoints import DEFAULT_INFERENCE, DEFAULT_MANAGER, Endpoints
from lorikeet_client.errors import mapped_errors
from lorikeet_client.generation import Chat, Completion, Delta, GenerateOptions, Tokenized
from lorikeet_client.model import Model
from lorikeet_client.retry import DEFAULT_RETRY, RetryPolicy
from lorikeet_client.settings import ClientSettings
from lorikeet_client.stream_fold import StreamFold
from lorikeet_client.tenants import NewToken, Tenant, TenantLimits
from lorikeet_client.upload import plan_upload
from lorikeet_rpc.channel import ClientTls


class GenerationStream(StreamFold):
    """An iterator of deltas. Leaving its `with` block, or `close`, stops the work on the server."""

    def __init__(self, call: Any, num_samples: int = 1) -> None:
        super().__init__(num_samples)
        self._call = call

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        with mapped_errors():
            message = next(self._call, None)
        if message is None:
            self.check_finished()
            raise StopIteration
        return self.add(message)

    def close(self) -> None:
        """Stop; a stream that has ended is left as it is."""
        self._call.cancel()

    def completion(self) -> Completion:
        """Read to the end and return the whole."""
        for _ in self:
            pass
        return self.whole()


class Lorikeet:
    """Both services, for blocking code; safe to use from several threads.

    Args:
        inference: address of the inference service.
        manager: address of the adapter manager.
        token: the tenant's bearer token.
        tls: None speaks plain text, for loopback only.
        retry: bounds of repeated tries; only calls that may be repeated are.

    Every method takes `timeout_s`, the time for the call with all its tries; None means the method's own
    default, and no limit for generation and uploads. Every method raises CallError's subclasses.
    """

    def __init__(
        self,
        inference: str = DEFAULT_INFERENCE,
        manager: str = DEFAULT_MANAGER,
        token: str | None = None,
        tls: ClientTls | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self._transport = BlockingTransport(Endpoints(inference, manager, token, tls), retry)

    @classmethod
    def from_env(cls) -> Self:
        """A client by the LORIKEET_ environment."""
        at = ClientSettings().endpoints()
        return cls(at.inference, at.manager, at.token, at.tls)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; running calls are cancelled."""
        self._transport.close()

    def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerationStream:
        """Stream text. Nothing is repeated by itself: what was shown cannot be taken back."""
        request = generation_messages.generate_request(prompt, **options)
        return GenerationStream(
            self._transport.generate(request, timeout_s), generation_messages.num_samples(request)
        )

    def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generate and return the whole text."""
        return self._transport.unary(inference_calls.complete(prompt, **options), timeout_s)

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Stop a running request of this tenant; False if there is none of that id."""
        return self._transport.unary(inference_calls.abort(request_id), timeout_s)

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        chat: Chat | None = None,
        add_special_tokens: bool | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Tokenized:
        """The prompt or chat as the model reads it."""
        return self._transport.unary(
            inference_calls.tokenize(prompt, chat, add_special_tokens, template_arguments), timeout_s
        )

    def get_model(self, *, timeout_s: float | None = None) -> Model:
        """The base model, its limits, its LoRA sites and the engine's counters."""
        return self._transport.unary(inference_calls.get_model(), timeout_s)

    def upload_adapter(
        self,
        directory: Path | str,
        name: str,
        *,
        timeout_s: float | None = None,
        **options: Unpack[UploadOptions],
    ) -> UploadResult:
        """Upload a PEFT directory; goes on where it stopped after a break. May raise UploadRefusedError."""
        return self._transport.upload(plan_upload(directory, name, **options), timeout_s)

    def get_adapter(self, name: str, *, timeout_s: float | None = None) -> Adapter:
        """One adapter with its revisions."""
        return self._transport.unary(adapter_calls.get_adapter(name), timeout_s)

    def list_adapters(
        self, tenant: str | None = None, *, page_size: int = 100, timeout_s: float | None = None
    ) -> Iterator[Adapter]:
        """All adapters of the tenant, fetched page by page; an admin may leave the tenant out for all."""
        page_token = ""
        while True:
            page = self._transport.unary(
                adapter_calls.list_adapters(tenant, page_size, page_token), timeout_s
            )
            yield from page.items
            if not (page_token := page.next_page_token):
                return

    def delete_adapter(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> None:
        """Delete an adapter, or the one revision that the resource name names."""
        self._transport.unary(adapter_calls.delete_adapter(name, etag), timeout_s)

    def pin_adapter(
        self, name: str, *, pinned: bool = True, etag: str = "", timeout_s: float | None = None
    ) -> Adapter:
        """Keep an adapter active on the GPU, or no longer."""
        return self._transport.unary(adapter_calls.pin_adapter(name, pinned, etag), timeout_s)

    def set_alias(
        self, name: str, alias: str, digest: str, *, etag: str = "", timeout_s: float | None = None
    ) -> Adapter:
        """Point an alias at a revision; an empty digest removes the alias."""
        return self._transport.unary(adapter_calls.set_alias(name, alias, digest, etag), timeout_s)

    def load_adapter(
        self, name: str, tier: ResidencyState = ResidencyState.ACTIVE, *, timeout_s: float | None = None
    ) -> tuple[Placement, ...]:
        """Bring an adapter to the GPU (ACTIVE) or into host memory (HOST) now."""
        return self._transport.unary(adapter_calls.load_adapter(name, tier), timeout_s)

    def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> tuple[Placement, ...]:
        """Free an adapter's memory on the nodes; it stays registered."""
        return self._transport.unary(adapter_calls.unload_adapter(name), timeout_s)

    def probe_adapter(self, name: str, *, timeout_s: float | None = None) -> Revision:
        """Compare an adapter with the base model on a node; the result's `probe` says what came of it."""
        return self._transport.unary(adapter_calls.probe_adapter(name), timeout_s)

    def get_placement(self, name: str = "", *, timeout_s: float | None = None) -> tuple[Placement, ...]:
        """Where an adapter's weights are, or all adapters' that this token may see."""
        return self._transport.unary(adapter_calls.get_placement(name), timeout_s)

    def create_tenant(
        self,
        tenant_id: str,
        limits: TenantLimits | None = None,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Tenant:
        """Create a tenant. Admins only, as all that follow."""
        return self._transport.unary(tenant_calls.create_tenant(tenant_id, limits, request_id), timeout_s)

    def get_tenant(self, tenant_id: str, *, timeout_s: float | None = None) -> Tenant:
        """One tenant."""
        return self._transport.unary(tenant_calls.get_tenant(tenant_id), timeout_s)

    def list_tenants(self, *, page_size: int = 100, timeout_s: float | None = None) -> Iterator[Tenant]:
        """All tenants, fetched page by page."""
        page_token = ""
        while True:
            page = self._transport.unary(tenant_calls.list_tenants(page_size, page_token), timeout_s)
            yield from page.items
            if not (page_token := page.next_page_token):
                return

    def delete_tenant(self, tenant_id: str, *, etag: str = "", timeout_s: float | None = None) -> None:
        """Delete a tenant."""
        self._transport.unary(tenant_calls.delete_tenant(tenant_id, etag), timeout_s)

    def create_token(
        self, tenant_id: str, *, admin: bool = False, timeout_s: float | None = None
    ) -> NewToken:
        """Make a token; it is shown this once."""
        return self._transport.unary(tenant_calls.create_token(tenant_id, admin), timeout_s)

    def revoke_token(self, tenant_id: str, token_id: str, *, timeout_s: float | None = None) -> None:
        """Make a token worthless."""
        self._transport.unary(tenant_calls.revoke_token(tenant_id, token_id), timeout_s)
