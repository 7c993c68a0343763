"""Makes a RegistryView out of an older one and the records that changed since."""

from types import MappingProxyType
from typing import Any

from adapter_manager.domain.adapter import Adapter, DigestUse
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.node import BaseModel
from adapter_manager.domain.tenant import Tenant, TokenOwner
from adapter_manager.infra.redis import records


class ViewBuilder:
    """Starts from `view`, takes records by id, builds the next view. `view` itself stays as it is."""

    def __init__(self, view: RegistryView) -> None:
        self._maps: dict[type[Any], dict[str, Any]] = {
            Tenant: dict(view.tenants),
            TokenOwner: dict(view.tokens),
            Adapter: dict(view.adapters),
            DigestUse: dict(view.uses),
            BaseModel: dict(view.models),
        }

    def put(self, record_id: str, raw: bytes | None) -> None:
        """Take a record as it is now; None means that it is gone."""
        kind, key = records.kind_of(record_id), record_id.partition(":")[2]
        if kind not in self._maps:  # tenants' usage counts follow from the adapters
            return
        if raw is None:
            self._maps[kind].pop(key, None)
        else:
            self._maps[kind][key] = records.decode(raw, kind).value

    def build(self, epoch: str, generation: int) -> RegistryView:
        """The view as of `generation`."""
        return RegistryView(
            epoch=epoch,
            generation=generation,
            tenants=MappingProxyType(self._maps[Tenant]),
            tokens=MappingProxyType(self._maps[TokenOwner]),
            adapters=MappingProxyType(self._maps[Adapter]),
            uses=MappingProxyType(self._maps[DigestUse]),
            models=MappingProxyType(self._maps[BaseModel]),
        )
