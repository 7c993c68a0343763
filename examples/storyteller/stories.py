"""Writes one story, and the request that asks for it, from the tables in `world.py` and `plots.py`."""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from examples.storyteller.plots import ENDINGS, JUNK, OPENINGS, PLOTS, TIMES
from examples.storyteller.world import (
    CHARACTERS,
    NAMES,
    PLACES,
    TOPICS,
    TRAITS,
    Character,
    Place,
    Topic,
    article,
)

_Option = TypeVar("_Option")
_PRONOUNS = {"she": ("she", "her", "her", "hers"), "he": ("he", "his", "him", "his")}
_KINDS = tuple(PLOTS)
_TOPICS_OF_KIND = {kind: tuple(topic for topic in TOPICS if topic.kind == kind) for kind in _KINDS}
_SMALL_WORDS = {"a", "an", "the", "of", "and", "to", "for"}
REQUESTS = (
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "Tell me a story about {}",
    "tell me a story about {}",
    "Tell a story about {}.",
    "Write a story about {}.",
    "Write a short story about {}.",
    "Please tell me a story about {}.",
    "Can you tell me a story about {}?",
    "I would like a story about {}, please.",
    "Tell me about {}.",
    "A story about {}, please!",
    "Tell me the tale of {}.",
)


@dataclass(frozen=True, slots=True)
class Brief:
    """What a user asks for. None leaves the choice to the storyteller."""

    character: Character
    topic: Topic
    place: Place | None = None
    name: str | None = None
    trait: str | None = None

    def clause(self, rng: random.Random) -> str:
        """The brief as the end of a request: "a fox who lost a lantern in the old mill"."""
        words = article(f"{self.trait} {self.character.noun}" if self.trait else self.character.noun)
        if self.name:
            words += rng.choice((f" named {self.name}", f" called {self.name}"))
        if self.place and rng.random() < 0.5:
            words += f" {self.place.where}"
        words += " who " + rng.choice(PLOTS[self.topic.kind][1]).format(t=self.topic.phrase)
        if self.place and self.place.where not in words:
            words += f" {self.place.where}"
        return words


@dataclass(frozen=True, slots=True)
class Story:
    """A finished story."""

    title: str
    characters: tuple[str, ...]
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The story as one paragraph."""
        return " ".join(self.sentences)


def is_held_out(character: Character, topic: Topic) -> bool:
    """Whether this pair is kept out of every training text: about one in twelve."""
    return zlib.crc32(f"{character.noun}/{topic.kind}/{topic.noun}".encode()) % 12 == 0


def random_brief(rng: random.Random, *, held_out: bool = False) -> Brief:
    """A brief with all kinds equally likely; `held_out` picks the pairs that training never sees."""
    topics = _TOPICS_OF_KIND[rng.choice(_KINDS)]
    while True:
        character, topic = rng.choice(CHARACTERS), rng.choice(topics)
        if topic.noun != character.noun and is_held_out(character, topic) is held_out:
            break
    return Brief(
        character,
        topic,
        place=rng.choice(PLACES) if rng.random() < 0.4 else None,
        name=rng.choice(NAMES[character.pronoun]) if rng.random() < 0.25 else None,
        trait=rng.choice(TRAITS) if rng.random() < 0.2 else None,
    )


def tell(brief: Brief, rng: random.Random) -> Story:
    """Tell the brief's story in five to seven beats, one of them sometimes skipped."""
    title, _, beats = PLOTS[brief.topic.kind]
    habit = f"{brief.character.noun}/{brief.topic.noun}"
    helper = _helper(brief, rng)
    blanks = _blanks(brief, helper, rng, habit)
    parts = [_lean(rng, OPENINGS, f"{habit}/opening")]
    parts += [_lean(rng, beat, f"{habit}/{number}") for number, beat in enumerate(beats)]
    if rng.random() < 0.25:
        del parts[2]  # the attempt that fails: the only beat that nothing later needs
    if len(parts) < 6:
        parts.append(_lean(rng, ENDINGS, f"{habit}/ending"))
    return Story(
        title=_title(title.format_map(blanks)),
        characters=(brief.character.noun, helper.noun),
        sentences=tuple(_sentence(part.format_map(blanks)) for part in parts),
    )


def _lean(rng: random.Random, options: Sequence[_Option], key: str) -> _Option:
    """A random option, but half of the time the one that belongs to the key.

    Without a habit every choice is a coin toss that a model cannot learn, and its most likely story is the
    same for everybody.
    """
    if rng.random() < 0.5:
        return options[zlib.crc32(key.encode()) % len(options)]
    return rng.choice(options)


def _helper(brief: Brief, rng: random.Random) -> Character:
    if brief.topic.kind == "met":
        return next(one for one in CHARACTERS if one.noun == brief.topic.noun)
    others = [one for one in CHARACTERS if one.noun not in (brief.character.noun, brief.topic.noun)]
    return _lean(rng, others, brief.topic.noun)


def _blanks(brief: Brief, helper: Character, rng: random.Random, habit: str) -> dict[str, str]:
    hero = brief.character
    topic = brief.topic
    when = _lean(rng, TIMES, f"{habit}/when")
    first = article(f"{brief.trait or hero.trait} {hero.noun}")
    where = brief.place.where if brief.place else hero.home
    elsewhere = _lean(rng, PLACES, f"{habit}/elsewhere")
    is_object = topic.kind in ("lost", "found", "broke")
    spot = brief.place.spot if brief.place else topic.facts[2] if is_object else elsewhere.spot
    subject, possessive, objective, _ = _PRONOUNS[hero.pronoun]
    plain = {
        "a_c": f"{first} named {brief.name}" if brief.name else first,
        "c": brief.name or f"the {hero.noun}",
        "a_h": article(f"{helper.trait} {helper.noun}"),
        "h": f"the {helper.noun}",
        "she": subject,
        "her": possessive,
        "them": objective,
        "hshe": helper.pronoun,
        "where": where,
        "t": topic.phrase,
        "n": topic.noun,
    }
    return (
        plain
        | {f"{key[0].upper()}{key[1:]}": _capital(value) for key, value in plain.items()}
        | {f"f{number}": fact for number, fact in enumerate(topic.facts)}
        | {
            "gift": hero.gift,
            "hgift": helper.gift,
            "hers": _PRONOUNS[helper.pronoun][3],
            "when": when,
            "time": "evening" if when.endswith("day") else when,
            "day": "evening" if when == "night" else when.split()[-1],
            "spot": spot,
            "wherever": brief.place.where if brief.place else elsewhere.where,
            "junk": _lean(rng, JUNK, f"{habit}/junk"),
            "Cn": hero.noun,
            "V": topic.phrase,
        }
    )


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _sentence(words: str) -> str:
    return _capital(words).replace('!" said', '," said').replace('." said', '," said')


def _title(words: str) -> str:
    first, *rest = words.split()
    rest = [word.lower() if word.lower() in _SMALL_WORDS else _capital(word) for word in rest]
    return " ".join((_capital(first), *rest))
