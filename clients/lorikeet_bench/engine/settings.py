"""A bench's engine as the service's settings: of the engine alone, or of a whole node."""

import dataclasses
import json
from typing import Any, get_type_hints

import msgspec
import torch
from pydantic import TypeAdapter, ValidationError

from inference_service.domain.engine import BackendUnusableError
from inference_service.engine.config import DEFAULT_BACKEND_FACTORY, EngineConfig
from inference_service.models import compute_dtype, describe_model
from inference_service.models.lora_sites import lora_schema
from inference_service.settings import Settings
from lorikeet_bench.engine.plan import EnginePlan
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.load.lengths import LoadError

_PLACES = frozenset({"model_dir", "disk_cache_dir", "backend_factory"})
# Where the node has another name for it.
_NODE_NAMES = {"arena_bytes": "adapter_arena_bytes"}
# Settings of the engine that are options of the commands.
_OWN_OPTIONS = ("device", "dtype", "load_format")
_SLACK_BYTES = 1 << 20
_LOAD_WAIT_S = 600.0
# An open loop bounds nothing by itself.
_MOST_OPEN = 64
_LEAST_RANK = 8


def engine_config(plan: EnginePlan, backend_factory: str = DEFAULT_BACKEND_FACTORY) -> EngineConfig:
    """The engine's settings; commands ask for them before anything starts, to find what cannot be.

    Raises:
        LoadError: a site or an override is unknown, a setting has a value that a node refuses, or the load is
            longer than the model's context.
    """
    for name in _OWN_OPTIONS:
        value = getattr(plan, name)
        _check_value(name, value, f"--{name.replace('_', '-')} {value}")
    overrides = _overrides(plan)
    block_tokens = overrides.get("block_tokens", 16)
    most_open = plan.most_open or _MOST_OPEN
    shape = plan.adapters if plan.rig is None else AdapterShape(rank=1, sites=("down",))
    adapter_bytes = _adapter_bytes(plan, shape)
    config = EngineConfig(
        model_dir=str(plan.model_dir.absolute()),
        disk_cache_dir=str((plan.directory / "cache").absolute()),
        device=plan.device,
        dtype=plan.dtype,
        load_format=plan.load_format,
        prefix_cache=False,
        num_blocks=most_open * (-(-plan.longest // block_tokens) + 1),
        max_running_requests=most_open,
        max_active_adapters=max(1, plan.slots),
        max_rank=max(_LEAST_RANK, shape.rank),
        arena_bytes=adapter_bytes,
        host_pool_bytes=adapter_bytes,
        max_adapter_wait_s=_LOAD_WAIT_S,
        log_level="warning",
        backend_factory=backend_factory,
    )
    return dataclasses.replace(config, **overrides)


def _overrides(plan: EnginePlan) -> dict[str, Any]:
    """What the command line says of settings, as their types."""
    known = get_type_hints(EngineConfig)
    if unknown := sorted(set(plan.overrides) - set(known)):
        word = "is no engine setting" if len(unknown) == 1 else "are no engine settings"
        raise LoadError(f"--engine-set: {', '.join(unknown)} {word}; there are {', '.join(sorted(known))}")
    found: dict[str, Any] = {}
    for name, value in plan.overrides.items():
        given = f"--engine-set {name}={json.dumps(value)}"
        try:
            found[name] = msgspec.convert(value, known[name])
        except msgspec.ValidationError as error:
            raise LoadError(
                f"{given}: {error}; a value is JSON, and a word that is none is a text"
            ) from error
        _check_value(name, found[name], given)
    return found


def _check_value(name: str, value: object, given: str) -> None:
    """Refuse what a node refuses for the setting; `given` is how the command line said it."""
    field = Settings.model_fields.get(_NODE_NAMES.get(name, name))
    # A node's lists are texts with commas.
    if field is None or isinstance(value, tuple):
        return
    try:
        TypeAdapter(field.rebuild_annotation()).validate_python(value)
    except ValidationError as error:
        raise LoadError(f"{given}: {error.errors()[0]['msg']}") from error


def runs_on_gpu(plan: EnginePlan) -> bool:
    """Whether the engine will take a GPU. Asks the driver only, and makes no context."""
    return plan.device != "cpu" and torch.cuda.device_count() > 0


def plan_dtype(plan: EnginePlan) -> torch.dtype:
    """What the engine will compute in."""
    device = torch.device("cuda" if runs_on_gpu(plan) else "cpu")
    return compute_dtype(describe_model(plan.model_dir), plan.dtype, device)


def settings_facts(plan: EnginePlan) -> dict[str, Any]:
    """The engine's settings as they go into a result, without places of this machine."""
    fields = dataclasses.asdict(engine_config(plan))
    return {name: value for name, value in fields.items() if name not in _PLACES}


def node_flags(plan: EnginePlan) -> tuple[str, ...]:
    """The same engine as flags of a whole node, for benches through gRPC.

    Raises:
        LoadError: as `engine_config`; or an override is none of the node's settings.
    """
    config, default = engine_config(plan), EngineConfig("", "")
    flags = ["--model-dir", str(plan.model_dir.absolute())]
    for item in dataclasses.fields(EngineConfig):
        value = getattr(config, item.name)
        name = _NODE_NAMES.get(item.name, item.name)
        if item.name in _PLACES or (value == getattr(default, item.name) and item.name != "device"):
            continue
        if name not in Settings.model_fields:
            raise LoadError(f"{item.name} is a setting of the engine alone, not of a node")
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            flags.extend((f"--{flag}", ",".join(map(str, value)) or "none"))
        elif value is not None:
            flags.extend((f"--{flag}", str(value)))
    return tuple(flags)


def _adapter_bytes(plan: EnginePlan, shape: AdapterShape) -> int:
    """What all adapters take together, on the host and on the device alike."""
    try:
        description = describe_model(plan.model_dir)
    except BackendUnusableError as error:
        raise LoadError(str(error)) from error
    context = description.spec.max_position
    if plan.longest > context:
        raise LoadError(
            f"the longest request has {plan.longest} tokens, the model's context {context}: lower "
            "--input-tokens or --output-tokens, or the lengths in the file of --lengths"
        )
    if not plan.slots:
        return _SLACK_BYTES
    # Names and checksums of weights do not matter to sizes.
    schema = lora_schema(description.spec, lambda _name: ("", ""))
    return plan.slots * shape.num_bytes(schema, plan_dtype(plan).itemsize) + _SLACK_BYTES
