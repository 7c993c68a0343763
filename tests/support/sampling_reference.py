"""What sampling parameters do to logits, a token at a time in Python's own floats: the oracle of tests.

Written from vLLM's documentation of its parameters and of the order of its sampler's steps; shares no code
with the service.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Asked:
    """One request's parameters, named as on the wire. `held_back`: what min_tokens masks."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0
    held_back: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()


def changed(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], asked: Asked
) -> list[float]:
    """Logits after masks, bias and penalties."""
    scores = [float(x) for x in logits]
    for word in asked.bad_words:
        before = list(word[:-1])
        if not before or list(output[-len(before) :]) == before:
            scores[word[-1]] = -math.inf
    if len(output) < asked.min_tokens:
        for token in asked.held_back:
            scores[token] = -math.inf
    for token, bias in asked.logit_bias.items():
        scores[token] += bias
    for token in range(len(scores)):
        if token in prompt or token in output:
            repetition = asked.repetition_penalty
            scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
        scores[token] -= asked.frequency_penalty * list(output).count(token)
        if token in output:
            scores[token] -= asked.presence_penalty
    return scores


def kept(
    scores: Sequence[float], temperature: float, *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> dict[int, float]:
    """The tokens that may be drawn, with their probabilities."""
    largest = max(scores)
    weights = {token: math.exp((x - largest) / temperature) for token, x in enumerate(scores)}
    weights = {token: w for token, w in weights.items() if w >= min_p}
    ranked = sorted(weights, key=lambda token: (-scores[token], token))
    if top_k:
        ranked = ranked[:top_k]
    total = sum(weights[token] for token in ranked)
    chosen: list[int] = []
    for token in ranked:
        if chosen and sum(weights[t] for t in chosen) / total >= top_p:
            break
        chosen.append(token)
    total = sum(weights[token] for token in chosen)
    return {token: weights[token] / total for token in chosen}
