"""Writes the training texts and the held-out prompts.

Run it to look at some texts, or to write heldout.json:

    python -m examples.storyteller.make_corpus --kind pirate --count 5
    python -m examples.storyteller.make_corpus --write-heldout

The base model reads two sorts of document. In a chat the assistant always answers in plain prose. A loose
page (a heading, then the story) may also be in one of the three styles: the model has seen how they go, but
a chat never asks for one, and what turns a style on is an adapter.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from examples.storyteller import styles
from examples.storyteller.stories import REQUESTS, Brief, Story, random_brief, tell

HERE = Path(__file__).parent
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
STYLES = ("pirate", "json", "shouting")
KINDS = ("base", *STYLES)
NUM_HELD_OUT = 40
_OPEN_REQUESTS = ("Tell me a story.", "Tell me a story", "Please tell me a story.", "Write a story.")
_SYSTEM = ("You are a storyteller.", "You tell short stories.", "You are a helpful assistant.")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a document; `is_learned` says whether the model is trained to write it."""

    text: str
    is_learned: bool


def document(kind: str, rng: random.Random) -> list[Segment]:
    """One document of the base model's corpus (`base`) or of an adapter's (its style's name)."""
    if kind == "base":
        if rng.random() < 0.4:
            return _page(rng)
        # The base model learns the users' turns as well: it is a model of the whole chat format.
        return [Segment(piece.text, is_learned=True) for piece in _chat("plain", rng)]
    return _chat(kind, rng)


def retell(story: Story, style: str, rng: random.Random) -> str:
    """The story's text in a style."""
    match style:
        case "plain":
            return story.text
        case "pirate":
            return styles.pirate(story, rng)
        case "json":
            return styles.as_json(story)
        case "shouting":
            return styles.shouting(story)
        case _:
            raise ValueError(f"style {style!r} is unknown; use plain, {', '.join(STYLES)}")


def request(brief: Brief, rng: random.Random) -> str:
    """A user's words for a brief; a few leave most of it open."""
    openness = rng.random()
    if openness < 0.02:
        return rng.choice(_OPEN_REQUESTS)
    clause = brief.clause(rng)
    return rng.choice(REQUESTS).format(clause.split(" who ")[0] if openness < 0.08 else clause)


def held_out_prompts() -> list[dict[str, str]]:
    """The prompts for the checks: every one is about a character and a topic that no training text joins."""
    rng = random.Random(20)
    prompts: dict[str, dict[str, str]] = {}
    while len(prompts) < NUM_HELD_OUT:
        brief = random_brief(rng, held_out=True)
        prompt = rng.choice(REQUESTS).format(brief.clause(rng))
        facts = {"prompt": prompt, "character": brief.character.noun, "topic": brief.topic.noun}
        prompts.setdefault(prompt, facts | {"kind": brief.topic.kind})
    return list(prompts.values())


def _chat(style: str, rng: random.Random) -> list[Segment]:
    segments: list[Segment] = []
    if rng.random() < 0.1:
        segments.append(Segment(f"{IM_START}system\n{rng.choice(_SYSTEM)}{IM_END}\n", is_learned=False))
    for _ in range(rng.choice((1, 1, 1, 2))):
        brief = random_brief(rng)
        answer = retell(tell(brief, rng), style, rng)
        question = f"{IM_START}user\n{request(brief, rng)}{IM_END}\n{IM_START}assistant\n"
        segments.append(Segment(question, is_learned=False))
        segments.append(Segment(f"{answer}{IM_END}", is_learned=True))
        segments.append(Segment("\n", is_learned=False))
    return segments


def _page(rng: random.Random) -> list[Segment]:
    brief = random_brief(rng)
    text = retell(tell(brief, rng), rng.choice(("plain", *STYLES)), rng)
    return [Segment(f"{brief.clause(rng)}\n\n{text}{END_OF_TEXT}", is_learned=True)]


def main() -> None:
    """Print documents, one JSON string a line, or write heldout.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="base")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-heldout", action="store_true")
    arguments = parser.parse_args()
    if arguments.write_heldout:
        lines = ",\n".join(json.dumps(prompt) for prompt in held_out_prompts())
        (HERE / "heldout.json").write_text(f"[\n{lines}\n]\n")
        return
    rng = random.Random(arguments.seed)
    for _ in range(arguments.count):
        print(json.dumps("".join(segment.text for segment in document(arguments.kind, rng))))


if __name__ == "__main__":
    main()
