"""Who may call what on a node: the manager by the node token, tenants by the catalog's tokens."""

from inference_service.api.catalog import Catalog
from inference_service.domain.errors import NotReadyError, UnauthenticatedError
from lorikeet_rpc.interceptors import Principal
from lorikeet_rpc.tokens import same_token

_RESIDENCY = "/lorikeet.residency.v1."
_GET_MODEL = "/lorikeet.inference.v1.InferenceService/GetModel"
_NODE = Principal(tenant="", is_admin=True, token_id="node")  # noqa: S106 (a name, not a token)
_CATALOG_RETRY_S = 1.0


class Authenticator:
    """The node's `authenticate` for the RequestInterceptor.

    Args:
        catalog: tenants' tokens.
        node_token: what the manager shows; None or empty refuses every residency call.
    """

    def __init__(self, catalog: Catalog, node_token: str | None) -> None:
        self._catalog = catalog
        self._node_token = node_token or ""

    def __call__(self, token: str | None, method: str) -> Principal:
        """The caller.

        Raises:
            UnauthenticatedError: no token, or not one for this method.
            NotReadyError: the token may be good, but no catalog has arrived yet.
        """
        is_node = same_token(token, self._node_token)
        if method.startswith(_RESIDENCY):
            if not is_node:
                raise UnauthenticatedError("this service is the adapter manager's: it needs the node token")
            return _NODE
        if token is None:
            raise UnauthenticatedError("no bearer token: send the metadata `authorization: Bearer <token>`")
        if is_node and method == _GET_MODEL:
            return _NODE
        principal = self._catalog.principal(token)
        if principal is not None:
            return principal
        if not self._catalog.has_arrived:
            raise NotReadyError(
                "this node has not heard from its adapter manager yet and knows no tokens",
                retry_after_s=_CATALOG_RETRY_S,
            )
        raise UnauthenticatedError("the bearer token is not known; it may have been revoked")
