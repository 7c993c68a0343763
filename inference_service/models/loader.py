"""A model directory, read whole: declaration, LoRA schema, identity and weights."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from inference_service.layers.decoder import Decoder
from inference_service.models.build import ModelBuilder
from inference_service.models.checkpoint import Checkpoint, WeightSource
from inference_service.models.config import (
    ConfigReader,
    GenerationDefaults,
    read_config,
    read_generation_defaults,
)
from inference_service.models.dummy_weights import DummyWeights
from inference_service.models.errors import ModelConfigError
from inference_service.models.kv_scales import read_kv_scales
from inference_service.models.lora_sites import lora_schema, site_indices
from inference_service.models.registry import declare_model
from inference_service.models.spec import ModelSpec
from lorikeet_contract.schema import LoraSchema
from lorikeet_kernels.attention.kv_scales import KvScales

LOAD_FORMATS = ("auto", "dummy")
_NUM_HASHING = 3  # embedding, head, and the first bytes of everything
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a model before its weights are loaded."""

    model_dir: Path
    architecture: str
    config: ConfigReader
    spec: ModelSpec
    defaults: GenerationDefaults


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to compute, with its identity. `kv_scales` are its layers', for a cache in FP8."""

    decoder: Decoder
    schema: LoraSchema
    base_digest: str
    kv_scales: tuple[KvScales | None, ...]


def describe_model(model_dir: Path, quantization: str | None = None) -> ModelDescription:
    """Read the configuration only. With `quantization` weights will be held so that are not stored so.

    Raises:
        ModelConfigError: it is missing, damaged, or describes what this server cannot serve.
    """
    config = read_config(model_dir)
    architecture, spec = declare_model(config, quantization)
    defaults = read_generation_defaults(model_dir, config)
    return ModelDescription(model_dir, architecture, config, spec, defaults)


def compute_dtype(description: ModelDescription, wanted: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is the model's own on a GPU and float32 on a CPU.

    On a CPU the 16-bit dtypes are widened op by op: they halve the memory and cost time.
    """
    if wanted == "auto":
        if device.type == "cpu":
            return torch.float32
        config = description.config
        wanted = config.text("dtype", config.text("torch_dtype", "bfloat16"))
    if wanted not in _DTYPES:
        raise ModelConfigError(f"dtype {wanted!r} is not supported; supported are auto, {', '.join(_DTYPES)}")
    return _DTYPES[wanted]


def load_model(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    load_format: str = "auto",
    batch_invariant: bool = False,
) -> LoadedModel:
    """Load the weights; "dummy" makes random ones and needs no files.

    Raises:
        CheckpointError: files are missing or damaged, or a tensor is missing, misshaped or left over.
    """
    spec = description.spec
    if load_format not in LOAD_FORMATS:
        raise ModelConfigError(f"load_format {load_format!r} is none of {', '.join(LOAD_FORMATS)}")
    unread = lora_schema(spec, lambda _name: ("", ""))

    def build(source: WeightSource) -> tuple[Decoder, tuple[KvScales | None, ...]]:
        builder = ModelBuilder(
            spec,
            source,
            site_indices(unread),
            dtype=dtype,
            device=device,
            num_positions=num_positions,
            batch_invariant=batch_invariant,
        )
        decoder = builder.build()
        kv_scales = read_kv_scales(spec, source, device)
        source.finish(spec.ignored_weights)
        return decoder, kv_scales

    if load_format == "dummy":
        decoder, kv_scales = build(DummyWeights(spec, device))
        return LoadedModel(decoder, unread, unread.digest, kv_scales)
    checkpoint = Checkpoint(description.model_dir, spec.weight_prefix, device)
    # Identity takes a sha256 of embedding and head, seconds of one core each: beside the reading.
    with closing(checkpoint), ThreadPoolExecutor(_NUM_HASHING, thread_name_prefix="weight-hash") as hashing:
        names = {spec.embed_weight, spec.lm_head_weight}
        stored = {name: hashing.submit(checkpoint.stored, name) for name in names}
        base_digest = hashing.submit(checkpoint.base_digest, description.config)
        decoder, kv_scales = build(checkpoint)
        schema = lora_schema(spec, lambda name: stored[name].result())
        return LoadedModel(decoder, schema, base_digest.result(), kv_scales)
