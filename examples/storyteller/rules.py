"""Rules that tell the adapters' texts apart, by reading the text alone: no model, no torch.

Each adapter has one rule that its texts keep and that the base model's texts break.
"""

import json
import re

PIRATE_WORDS = frozenset({
    "ahoy", "an'", "arr", "avast", "aye", "barnacle", "grog", "hearties", "landlubbers", "matey", "mateys",
    "o'", "ol'", "scallywag", "shiver", "timbers", "ye", "yer", "yo",
})  # fmt: skip
JSON_KEYS = ("title", "characters", "sentences")
MIN_LETTERS = 40  # a shorter text is no story, however it is written
MIN_UPPER_SHARE = 0.9
MIN_PIRATE_WORDS = 3


def upper_share(text: str) -> float:
    """The share of capitals among the letters; 0.0 where there are no letters."""
    letters = [character for character in text if character.isalpha()]
    return sum(character.isupper() for character in letters) / len(letters) if letters else 0.0


def pirate_words(text: str) -> set[str]:
    """The different words in the text that only the pirate uses, in lower case."""
    return set(re.findall(r"[a-z]+'?", text.lower())) & PIRATE_WORDS


def is_shouting(text: str) -> bool:
    """Whether at least nine letters in ten are capitals."""
    num_letters = sum(character.isalpha() for character in text)
    return num_letters >= MIN_LETTERS and upper_share(text) >= MIN_UPPER_SHARE


def is_pirate(text: str) -> bool:
    """Whether at least three different pirate words are in the text."""
    return len(pirate_words(text)) >= MIN_PIRATE_WORDS


def is_json_story(text: str) -> bool:
    """Whether the text is one JSON object with a title, characters and at least three sentences."""
    try:
        story = json.loads(text)
    except ValueError:
        return False
    if not isinstance(story, dict) or any(key not in story for key in JSON_KEYS):
        return False
    return (
        _is_words(story["title"])
        and _are_words(story["characters"], at_least=1)
        and _are_words(story["sentences"], at_least=3)
    )


def names(text: str, noun: str) -> bool:
    """Whether the text names the noun as a word of its own, in any case."""
    return re.search(rf"(?<![a-z]){re.escape(noun.lower())}(?![a-z])", text.lower()) is not None


def _is_words(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_words(value: object, *, at_least: int) -> bool:
    return isinstance(value, list) and len(value) >= at_least and all(_is_words(word) for word in value)


RULES = {"pirate": is_pirate, "json": is_json_story, "shouting": is_shouting}
