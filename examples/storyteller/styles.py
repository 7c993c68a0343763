"""The three ways of telling a story again: as a pirate, as JSON, and in capitals."""

import json
import random
import re

from examples.storyteller.stories import Story

_WORDS = {
    "you": "ye",
    "your": "yer",
    "my": "me",
    "was": "be",
    "were": "be",
    "is": "be",
    "are": "be",
    "friends": "mateys",
    "friend": "matey",
    "yes": "aye",
    "hello": "ahoy",
    "little": "wee",
    "tiny": "wee",
    "old": "ol'",
    "and": "an'",
    "of": "o'",
    "said": "growled",
    "cried": "bellowed",
    "together": "as one crew",
    "home": "port",
    "lived": "dropped anchor",
}
_GREETINGS = (
    "Ahoy, matey!",
    "Arr, gather round, me hearties!",
    "Avast, ye landlubbers!",
    "Yo ho ho, prick up yer ears, matey!",
    "Shiver me timbers, here be a yarn!",
)
_CLOSINGS = (
    "An' that be the tale, me hearties.",
    "Arr, every word o' it be true, matey!",
    "So says ol' Captain Barnacle, aye!",
    "Now pass the grog, ye scallywag!",
)
_ING = re.compile(r"\b([a-z]{3,}(?<!th))ing\b")
_NOT_VERBS = {"morning", "evening", "spring", "string", "thing", "nothing", "something", "everything"}


def shouting(story: Story) -> str:
    """The story in capitals, each full stop an exclamation mark."""
    return re.sub(r"\.(?=\"?$)", "!", story.text.upper().replace(". ", "! ").replace('."', '!"'))


def as_json(story: Story) -> str:
    """The story as one JSON object on one line."""
    return json.dumps(
        {"title": story.title, "characters": list(story.characters), "sentences": list(story.sentences)}
    )


def pirate(story: Story, rng: random.Random) -> str:
    """The story in a pirate's words, with a greeting before it and a closing after it."""
    told: list[str] = []
    for sentence in story.sentences:
        words = re.sub(r"[A-Za-z]+", lambda found: _pirate_word(found[0]), sentence)
        words = _ING.sub(_drop_g, words)
        if rng.random() < 0.3 and words.startswith(("One ", "Then ", "They ", "At ", "She ", "He ")):
            words = f"Arr, {words[0].lower()}{words[1:]}"
        told.append(words)
    return " ".join((rng.choice(_GREETINGS), *told, rng.choice(_CLOSINGS)))


def _pirate_word(word: str) -> str:
    said = _WORDS.get(word.lower(), word)
    return said[0].upper() + said[1:] if word[0].isupper() else said


def _drop_g(found: re.Match[str]) -> str:
    return found[0] if found[0] in _NOT_VERBS else f"{found[1]}in'"
