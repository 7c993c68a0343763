"""From a bearer token to who calls. Looked up in memory, so it works while the registry is away."""

from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import (
    PermissionDeniedError,
    RegistryUnavailableError,
    UnauthenticatedError,
)
from lorikeet_rpc.interceptors import Principal, current_principal
from lorikeet_rpc.tokens import hash_token

_ADMIN_SERVICE = "/lorikeet.adapters.v1.TenantService/"


class TokenAuthenticator:
    """Authenticates calls. A revoked token is refused at once here, elsewhere within the mirror's poll."""

    def __init__(self, mirror: RegistryMirror) -> None:
        self._mirror = mirror

    def __call__(self, token: str | None, method: str) -> Principal:
        """See lorikeet_rpc.interceptors.Authenticate."""
        view = self._mirror.view
        if token is None:
            raise UnauthenticatedError(
                "no bearer token; send one as metadata, authorization: Bearer <token> (our clients take it "
                "from LORIKEET_TOKEN)"
            )
        owner = view.tokens.get(hash_token(token))
        if owner is None and not view.epoch:
            raise RegistryUnavailableError(
                "the registry was not read yet, so no token can be checked; try again", retry_after_s=1
            )
        if owner is None or owner.tenant_id not in view.tenants:
            raise UnauthenticatedError(
                "the bearer token is not valid: mistyped, revoked, or of another stack"
            )
        if method.startswith(_ADMIN_SERVICE) and not owner.is_admin:
            raise PermissionDeniedError(
                f"only admin tokens may manage tenants; this one belongs to tenant {owner.tenant_id!r}"
            )
        return Principal(owner.tenant_id, owner.is_admin, owner.token_id)


def current_caller() -> Caller:
    """The caller of the RPC being served."""
    principal = current_principal()
    return Caller(principal.tenant, principal.is_admin)
