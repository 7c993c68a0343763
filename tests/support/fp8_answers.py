"""FP8 models' answers, how far apart two of them lie, and the weights behind them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from inference_service.domain.request import TokenLogprobs
from inference_service.execution.backend import DeviceBackend
from inference_service.layers.attention import Attention
from inference_service.layers.moe import Moe
from inference_service.models import LoadedModel
from lorikeet_contract.manifest import PayloadDtype
from lorikeet_contract.schema import LoraSchema
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from tests.support.fp8_checkpoint import quantize, write_fp8
from tests.support.payloads import random_site, write_payload
from tests.support.runner import GREEDY, Driven, DrivenRequest, drive
from tests.support.tiny_model import CONFIG, make_weights, write_model

WHOLE = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
RAGGED = {"mlp_only_layers": [0], "num_hidden_layers": 3}
PROMPT = (3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12, 13, 14, 15, 16, 18, 19)
SAMPLING = type(GREEDY)(max_tokens=8, temperature=0.0, prompt_logprobs=CONFIG["vocab_size"])

APART = 0.2
"""How far apart (`apart`) the answers of two right implementations may lie.

An activation that lies between two values of e4m3 falls to one or the other by its last bits, and these are
6 to 12 % apart. One that fell otherwise in an early layer makes many of the later ones fall otherwise:
answers are up to 0.03 apart where each activation was first changed by up to 1e-5 of itself, and 0.03 to
0.11 by up to 2**-9, which is a rounding to bfloat16. `test_fp8_answers.py` holds that, and that a missing
adapter is 0.6 apart. What changes answers as little as that, scales of the wrong matrix for one, must be
looked for in the weights and in single projections.
"""


def write(path: Path, form: str, fields: dict[str, object]) -> tuple[Path, str | None]:
    """A model directory, and what to ask of a load."""
    config = CONFIG | fields
    if form == "at load":
        return write_model(path, **fields), "fp8"
    return write_fp8(path, quantize(make_weights(config), form), config, form), None


def load_adapter(backend: DeviceBackend, path: Path) -> None:
    """Weights at every site, in slot 0."""
    schema = LoraSchema.from_json(backend.info.lora_schema)
    sites = [random_site(s, 4, scales=(0.3,), seed=i) for i, s in enumerate(schema.sites)]
    manifest = write_payload(path, schema, backend.info.base_digest, sites, PayloadDtype.FLOAT32)
    backend.host_pool.read(manifest, str(path))
    assert backend.arena.begin_copy(manifest.digest, 0)
    while 0 not in backend.arena.poll():
        pass


def answers(backend: DeviceBackend, slots: Sequence[int]) -> list[Driven]:
    """The prompt in chunks and decodes after it, once for each slot, together."""
    requests = [DrivenRequest(PROMPT, slot, SAMPLING) for slot in slots]
    return drive(backend, requests, num_tokens=8, chunk=7)


def apart(some: Sequence[Driven], others: Sequence[Driven]) -> list[float]:
    """For each request the root mean square over the vocabulary, at the median of the prompt's positions."""
    found: list[float] = []
    for a, b in zip(some, others, strict=True):
        pairs = zip(a.prompt_logprobs, b.prompt_logprobs, strict=True)
        each = [float(np.sqrt(np.mean((_whole(x) - _whole(y)) ** 2))) for x, y in pairs]
        found.append(sorted(each)[len(each) // 2])
    return found


def _whole(logprobs: TokenLogprobs) -> np.ndarray:
    ids = np.frombuffer(logprobs.packed_ids, dtype=np.int32)
    out = np.full(CONFIG["vocab_size"], np.nan)
    out[ids] = np.frombuffer(logprobs.packed_logprobs, dtype=np.float32)
    return out


def held(model: LoadedModel, layer: int = 0) -> dict[str, Fp8Weight]:
    """A layer's quantised weights by what they are."""
    attention, moe = model.decoder.layers[layer].attention, model.decoder.layers[layer].mlp
    assert isinstance(attention, Attention)
    assert isinstance(moe, Moe)
    found = {
        "qkv": attention.qkv.weight,
        "o": attention.o.weight,
        "gate_up": moe.experts.gate_up.weight,
        "down": moe.experts.down.weight,
    }
    return {name: weight for name, weight in found.items() if isinstance(weight, Fp8Weight)}
