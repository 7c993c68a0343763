"""Penalties, bias, masks and cuts through gRPC and the engine process, against float64 logits of the model.

The oracle computes the model's logits by itself and changes them a token at a time.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from lorikeet.inference.v1 import generation_pb2
from lorikeet_bench.rigs import write_byte_tokenizer
from tests.support import gpt_oss_reference
from tests.support.lone_node import lone_node
from tests.support.sampling_reference import Asked, changed, kept
from tests.support.stack import Completion, Stack
from tests.support.tiny_gpt_oss import CONFIG, make_weights, write_gpt_oss

pytestmark = pytest.mark.asyncio(loop_scope="module")
VOCAB = CONFIG["vocab_size"]
EOS, STOP = 5, 30
LETTERS = [bytes([ord("A") + token]) for token in range(VOCAB)]
WEIGHTS = make_weights(CONFIG)
PROMPT = [3, 17, 17, 0, 39, 8, 21, 2, EOS, 30, 11, 12]
NUM_TOKENS = 24
# A float32 node against float64: a choice that wins by less is either's.
TOLERANCE = 1e-3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One node without a manager."""
    root = tmp_path_factory.mktemp("sampling")
    model = write_gpt_oss(root / "model", WEIGHTS, eos_token_id=EOS)
    write_byte_tokenizer(model, VOCAB, LETTERS)
    async with lone_node(model, root, ["--max-top-logprobs", str(VOCAB)]) as node:
        yield node.stack


def text_of(tokens: Sequence[int]) -> str:
    """What the tokenizer reads as these tokens: a letter each."""
    return b"".join(LETTERS[token] for token in tokens).decode()


async def ask(stack: Stack, **sampling: Any) -> Completion:
    """One answer, with every log-probability."""
    values = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": VOCAB, **sampling}
    done = await stack.generate(PROMPT, **values)
    assert done.finish is not None
    return done


def check(done: Completion, asked: Asked, **cuts: Any) -> None:
    """Each token is one that the oracle may choose; log-probabilities are the model's own."""
    logits = gpt_oss_reference.logits(CONFIG, WEIGHTS, [*PROMPT, *done.token_ids])[len(PROMPT) - 1 : -1]
    for step, token in enumerate(done.tokens):
        scores = changed(logits[step].tolist(), PROMPT, done.token_ids[:step], asked)
        if cuts:
            assert token.id in kept(scores, **cuts)
        else:
            assert scores[token.id] >= max(scores) - TOLERANCE
        own = logits[step] - np.log(np.exp(logits[step]).sum())
        assert token.logprob == pytest.approx(own[token.id], abs=TOLERANCE)
        for top in token.top_logprobs:
            assert top.logprob == pytest.approx(own[top.id], abs=TOLERANCE)


CASES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.5},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.25},
    "repetition": {"repetition_penalty": 1.6},
    "repetition-wanted": {"repetition_penalty": 0.5},
    "bias": {"logit_bias": {7: 2.5, 12: -100.0}},
    "all": {
        "presence_penalty": 0.75,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {7: 2.5, 9: 1.0},
    },
}


@pytest.mark.parametrize("case", CASES)
async def test_greedy_choices(stack: Stack, case: str) -> None:
    """The best of the changed logits at every step, which is not the plain answer."""
    plain = await ask(stack)
    check(plain, Asked())
    done = await ask(stack, **CASES[case])
    check(done, Asked(**CASES[case]))
    assert done.token_ids != plain.token_ids


async def test_what_changes_nothing_is_the_plain_answer(stack: Stack) -> None:
    """Defaults written out give the same tokens and the same bits of log-probability, drawn ones too."""
    defaults = {
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
        "min_tokens": 0, "top_k": 0, "top_p": 1.0,
    }  # fmt: skip
    for sampling in ({}, {"temperature": 1.2, "seed": 7}):
        plain, same = await ask(stack, **sampling), await ask(stack, **sampling, **defaults)
        assert same.tokens == plain.tokens


async def test_min_tokens_hold_back_what_stops(stack: Stack) -> None:
    """Bias makes a stop token and the end of the sequence win; neither comes before its time."""
    bias = {STOP: 90.0, EOS: 80.0}
    at_once = await ask(stack, ignore_eos=False, logit_bias=bias, stop_token_ids=[STOP])
    assert at_once.token_ids == [STOP]
    for ignore_eos in (False, True):
        done = await ask(stack, ignore_eos=ignore_eos, logit_bias=bias, stop_token_ids=[STOP], min_tokens=6)
        assert len(done.token_ids) == 7
        assert done.token_ids[-1] == STOP
        check(done, Asked(logit_bias=bias, min_tokens=6, held_back=(EOS, STOP)))
        assert done.finish is not None
        assert done.finish.reason == generation_pb2.FINISH_REASON_STOP_TOKEN


async def test_min_tokens_come_before_stop_strings(stack: Stack) -> None:
    """The text goes through a stop string that is complete too early."""
    done = await ask(stack, logit_bias={9: 100.0}, stop_strings=[text_of([9, 9])], min_tokens=4)
    assert done.token_ids == [9] * 5
    assert done.finish is not None
    assert done.finish.reason == generation_pb2.FINISH_REASON_STOP_STRING
    assert done.text == text_of([9] * 3)


async def test_bad_words_are_never_completed(stack: Stack) -> None:
    """Words cut out of the plain answer do not come; what is left is the best of the rest."""
    plain = (await ask(stack)).token_ids
    words = [plain[1:2], plain[3:5], plain[6:9]]
    done = await ask(stack, bad_words=[text_of(word) for word in words])
    check(done, Asked(bad_words=words))
    for word in words:
        starts = range(len(done.token_ids) - len(word) + 1)
        assert word not in [done.token_ids[i : i + len(word)] for i in starts]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("cuts", [{"min_p": 0.1}, {"min_p": 0.02, "top_k": 9}, {"min_p": 0.05, "top_p": 0.8}])
async def test_draws_stay_within_the_cuts(stack: Stack, seed: int, cuts: dict[str, Any]) -> None:
    """With penalties before them; the same seed draws the same again."""
    sampling = {"temperature": 1.5, "seed": seed, "presence_penalty": 1.0, **cuts}
    done = await ask(stack, **sampling)
    # The oracle keeps a little more, so that rounding at a cut's end does not matter.
    wider = cuts | {"min_p": cuts["min_p"] - 1e-3} | ({"top_p": 0.801} if "top_p" in cuts else {})
    check(done, Asked(presence_penalty=1.0), temperature=1.5, **wider)
    assert (await ask(stack, **sampling)).token_ids == done.token_ids


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"presence_penalty": 2.5}, ["sampling.presence_penalty", "2.5", "-2 to 2"]),
        ({"repetition_penalty": 0.0}, ["sampling.repetition_penalty", "0.001 to 1000"]),
        ({"min_p": 1.5}, ["sampling.min_p", "0 to 1"]),
        ({"logit_bias": {3: 101.0}}, ["sampling.logit_bias[3]", "-100 to 100"]),
        ({"logit_bias": {VOCAB: 1.0}}, ["sampling.logit_bias", str(VOCAB - 1)]),
        ({"min_tokens": NUM_TOKENS + 1}, ["sampling.min_tokens", str(NUM_TOKENS)]),
        ({"bad_words": [" "]}, ["sampling.bad_words[0]", "blank"]),
    ],
)
async def test_refusals_name_field_and_range(stack: Stack, sampling: dict[str, Any], said: list[str]) -> None:
    """INVALID_ARGUMENT; nothing is clamped in silence."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stack, **sampling)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for words in said:
        assert words in (caught.value.details() or "")
