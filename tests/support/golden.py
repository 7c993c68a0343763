"""Golden outputs of transformers + peft, and how answers of the running service compare with them."""

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.support.stack import Completion, Stack, make_request

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
DECODED_PROMPT = "p33"
# More than the others' prefill and 16 steps can outlast, less than any fixture model's positions.
_DECODED_TOKENS = 2000
GREEDY_TOKENS = 16  # what the golden outputs hold for each prompt


def _checker() -> ModuleType:
    """The fixtures' own checker, which shares no code with the product."""
    spec = importlib.util.spec_from_file_location("check_golden", FIXTURES / "check_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKER = _checker()


@dataclass(frozen=True, slots=True)
class GoldenModel:
    """A fixture model. `golden` is the model whose adapters and golden outputs are its own, too.

    `is_always` False: compared through gRPC by `make golden` and `make test-long` only.
    """

    name: str
    golden: str
    is_always: bool = False

    @property
    def base(self) -> str:
        """The base model's golden path, as the manifest writes such paths."""
        return f"golden/{self.golden}/base"

    @property
    def vocab_size(self) -> int:
        """Rows of the head, those beyond the tokenizer included."""
        return json.loads((FIXTURES / "models" / self.name / "config.json").read_text())["vocab_size"]

    @property
    def mixed(self) -> tuple[str, ...]:
        """Four adapters that between them change most kinds of sites, for batches that mix them."""
        return MIXED[self.golden]

    def adapters(self, expect: str = "load") -> list[dict[str, str]]:
        """The manifest's adapters with the given expected outcome."""
        return manifest_adapters(self.golden, expect)


# By model: the router, the experts or the MLP, attention alone, and ranks and layouts that differ.
_EXPERTS_TOO = ("attn-experts-r16", "router-r4", "rslora-r4-patterns")
MIXED = {
    "qwen3_moe": ("attn-r8", "router-r4", "head-embed-r8", "legacy-per-expert-r6"),
    "gpt_oss": ("attn-r8", "router-r4", "experts-r4.unsloth-projs", "rslora-r4-patterns"),
    "mixtral": ("attn-experts-r16", "router-r4", "head-embed-r8", "legacy-w123-r4"),
    "llama": ("attn-mlp-r16", "head-r8", "embed-r4", "rslora-r4-patterns"),
    "qwen3": ("attn-mlp-r16", "head-r8", "embed-r4", "rslora-r4-patterns"),
    "olmoe": (*_EXPERTS_TOO, "experts-r4.fused-reversed"),
    "qwen2_moe": (*_EXPERTS_TOO, "experts-r4.per-expert"),
    "granitemoe": (*_EXPERTS_TOO, "experts-1layer-r8"),
    "llama4": (*_EXPERTS_TOO, "experts-r4.fused-standard"),
    "deepseek_v3": (*_EXPERTS_TOO, "legacy-all-linear-r4"),
    "deepseek_v2": (*_EXPERTS_TOO, "experts-r4.per-expert"),
}
GOLDEN_MODELS = (
    GoldenModel("qwen3_moe", "qwen3_moe", is_always=True),
    GoldenModel("gpt_oss", "gpt_oss"),
    GoldenModel("gpt_oss_mxfp4", "gpt_oss", is_always=True),
    GoldenModel("mixtral", "mixtral"),
    GoldenModel("llama", "llama"),
    GoldenModel("qwen3", "qwen3"),
    GoldenModel("olmoe", "olmoe"),
    GoldenModel("qwen2_moe", "qwen2_moe"),
    GoldenModel("granitemoe", "granitemoe"),
    GoldenModel("llama4", "llama4", is_always=True),
    GoldenModel("deepseek_v3", "deepseek_v3", is_always=True),
    GoldenModel("deepseek_v2", "deepseek_v2"),
)


def manifest_adapters(model: str, expect: str) -> list[dict[str, str]]:
    """The manifest's adapters of a model with the given expected outcome."""
    document = json.loads((FIXTURES / "manifest.json").read_text())
    return [a for a in document["adapters"] if a["model"] == model and a["expect"] == expect]


def prompts() -> dict[str, list[int]]:
    """Prompt ids by name: p1, p7, p33, p130."""
    document = json.loads((FIXTURES / "golden" / "prompts.json").read_text())
    return {name: p["ids"] for name, p in document["prompts"].items()}


async def golden_answers(
    stack: Stack, model: GoldenModel, adapter: str | None, *, only: Sequence[str] = ()
) -> dict[str, Completion]:
    """Greedy answers to all prompts (or to `only` these) at once, with log-probabilities of all tokens."""
    names, vocab = {n: ids for n, ids in prompts().items() if not only or n in only}, model.vocab_size
    done = await asyncio.gather(
        *(
            stack.generate(
                ids,
                adapter=adapter,
                max_tokens=GREEDY_TOKENS,
                ignore_eos=True,
                logprobs=vocab,
                **({"prompt_logprobs": vocab} if name == "p33" else {}),
            )
            for name, ids in names.items()
        )
    )
    return dict(zip(names, done, strict=True))


class Decoding:
    """One long greedy stream, read as it comes."""

    def __init__(self, call: Any) -> None:
        self.token_ids: list[int] = []
        self._call = call
        self._more = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @property
    def is_open(self) -> bool:
        """Whether tokens still come."""
        return not self._reading.done()

    async def has_tokens(self, count: int) -> None:
        """Wait for that many; fails if the stream ends before."""
        async with asyncio.timeout(60), self._more:
            await self._more.wait_for(lambda: len(self.token_ids) >= count or not self.is_open)
        assert len(self.token_ids) >= count, f"the stream ended after {len(self.token_ids)} tokens"

    async def stop(self) -> None:
        """Leave."""
        self._call.cancel()
        await asyncio.wait((self._reading,))

    async def _read(self) -> None:
        try:
            async for piece in self._call:
                self.token_ids += [token.id for token in piece.tokens]
                async with self._more:
                    self._more.notify_all()
        except asyncio.CancelledError:
            return  # left
        finally:
            async with self._more:
                self._more.notify_all()


@asynccontextmanager
async def decoding(stack: Stack, adapters: Sequence[str | None]) -> AsyncIterator[list[Decoding]]:
    """While this is entered, DECODED_PROMPT is continued for every adapter, the base (None) among them."""
    prompt, stub = prompts()[DECODED_PROMPT], stack.inference()
    streams = [
        Decoding(
            stub.Generate(
                make_request(prompt, adapter=adapter, max_tokens=_DECODED_TOKENS, ignore_eos=True),
                metadata=stack.auth(),
                timeout=120,
            )
        )
        for adapter in adapters
    ]
    try:
        await asyncio.gather(*(stream.has_tokens(1) for stream in streams))
        yield streams
    finally:
        await asyncio.gather(*(stream.stop() for stream in streams))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    y = x.astype(np.float64) - x.max(-1, keepdims=True)
    return (y - np.log(np.exp(y).sum(-1, keepdims=True))).astype(np.float32)


def _by_token(ids_and_logprobs: list[tuple[int, float]], vocab: int) -> np.ndarray:
    row = np.full(vocab, np.nan, np.float32)
    for token, value in ids_and_logprobs:
        row[token] = value
    return row


def positions_before_tie(golden: str, gap: float) -> int | None:
    """How many of p33's positions lie before the first at which a router is within `gap` of choosing others.

    None where there is no such position: less precision then sends no token to another expert.
    """
    gaps = load_file(FIXTURES / f"{golden}.safetensors").get("router_gap.p33")
    ties = [] if gaps is None else np.flatnonzero(gaps < gap).tolist()
    return ties[0] if ties else None


def compare(
    golden: str, answers: dict[str, Completion], mode: str = "fp32", *, num_positions: int | None = None
) -> list[tuple[bool | None, str]]:
    """The checker's verdicts for one adapter: (ok, text), ok None where it calls the case undecidable.

    Args:
        golden: the manifest's golden path, e.g. "golden/qwen3_moe/attn-r8".
        answers: per prompt name, a greedy answer with log-probabilities of the whole vocabulary; prompt
            log-probabilities are compared too where they were asked for.
        mode: "fp32" or "bf16".
        num_positions: how many positions of a whole prompt to compare, all by default.
    """
    gold = {
        k: v if k.startswith("router_gap") else _log_softmax(v)
        for k, v in load_file(FIXTURES / f"{golden}.safetensors").items()
    }
    info = json.loads((FIXTURES / f"{golden}.json").read_text())
    gold |= {k: v[:num_positions] for k, v in gold.items() if k.startswith("all.")}
    vocab = next(v.shape[-1] for k, v in gold.items() if k.startswith("last."))
    results: dict[str, np.ndarray] = {}
    for name, answer in answers.items():
        first = answer.tokens[0]
        results[f"last.{name}"] = _by_token([(t.id, t.logprob) for t in first.top_logprobs], vocab)
        if answer.prompt_tokens:
            rows = [
                _by_token([(t.id, t.logprob) for t in p.top_logprobs], vocab)
                for p in answer.prompt_tokens[1:]
            ]
            results[f"all.{name}"] = np.stack([*rows, results[f"last.{name}"]])[:num_positions]
    greedy = {"prompts": {name: {"greedy": answer.token_ids} for name, answer in answers.items()}}
    return CHECKER.compare(gold, info, results, greedy, mode)


# A step of bfloat16 at the size of router logits. Within it rounding decides the expert, and the tokens that
# follow see the other one's result through attention.
ROUTER_TIE = 0.005


def judged_in_bfloat16(golden: str, answers: dict[str, Completion]) -> list[tuple[bool | None, str]]:
    """The checker's verdicts; a whole prompt that fails is judged up to the router's first tie, if any."""
    verdicts = compare(golden, answers, mode="bf16")
    if all(ok is not False for ok, text in verdicts if text.startswith("all.")):
        return verdicts
    return compare(
        golden, answers, mode="bf16", num_positions=positions_before_tie(golden, ROUTER_TIE) or None
    )
