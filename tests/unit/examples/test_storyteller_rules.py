"""The storyteller's rules, and the texts that its models were trained on, held against each other."""

import json
import random

import pytest

from examples.storyteller.make_corpus import HERE, STYLES, document, held_out_prompts, retell
from examples.storyteller.rules import (
    RULES,
    is_json_story,
    is_pirate,
    is_shouting,
    names,
    pirate_words,
    upper_share,
)
from examples.storyteller.stories import is_held_out, random_brief, tell
from examples.storyteller.world import CHARACTERS, TOPICS

PLAIN = "Once there was a clever fox who lived in a den. One morning, she lost her lantern."


def test_upper_share_counts_letters_only() -> None:
    """Digits, signs and blanks are neither upper nor lower case."""
    assert upper_share("AB 12 cd!") == 0.5
    assert upper_share("12 ?!") == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN.upper(), True),
        (PLAIN, False),
        ("FOX!", False),
        ("", False),
        (PLAIN.upper() + PLAIN[:20], False),
    ],
)
def test_shouting_needs_a_whole_story_in_capitals(text: str, expected: bool) -> None:
    """Nine letters in ten, and enough letters to be a story."""
    assert is_shouting(text) is expected


def test_pirate_needs_three_different_words() -> None:
    """One word said three times does not make a pirate, nor does a word inside another one."""
    assert is_pirate("Ahoy, matey! Th' fox be lost, arr.")
    assert not is_pirate("Ahoy! Ahoy! Ahoy!")
    assert pirate_words("The yellow eyes of yesterday") == set()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"title": "T", "characters": ["fox"]}',
        '{"title": "", "characters": ["fox"], "sentences": ["a", "b", "c"]}',
        '{"title": "T", "characters": [], "sentences": ["a", "b", "c"]}',
        '{"title": "T", "characters": ["fox"], "sentences": ["a", "b"]}',
        '{"title": "T", "characters": ["fox"], "sentences": ["a", "b", 3]}',
        '{"title": "T", "characters": ["fox"], "sentences": ["a", "b", "c"]',
    ],
)
def test_json_story_refuses(text: str) -> None:
    """Cut off, of another shape, or empty where words belong."""
    assert not is_json_story(text)


def test_json_story_accepts() -> None:
    """The smallest JSON story."""
    assert is_json_story('{"title": "T", "characters": ["fox"], "sentences": ["a", "b", "c"]}')


def test_names_finds_whole_words_in_any_case() -> None:
    """A cat is not in a catalogue, but it is in capitals."""
    assert names("THE CAT SLEPT.", "cat")
    assert not names("a catalogue", "cat")


def test_every_style_keeps_its_own_rule_alone() -> None:
    """What the adapters learn keeps one rule; what the base learns to answer keeps none."""
    rng = random.Random(5)
    for _ in range(150):
        story = tell(random_brief(rng), rng)
        for style in ("plain", *STYLES):
            kept = {rule for rule, holds in RULES.items() if holds(retell(story, style, rng))}
            assert kept == ({style} if style != "plain" else set())


def test_stories_are_about_what_was_asked() -> None:
    """Three to six sentences that name the character and the topic."""
    rng = random.Random(6)
    for _ in range(150):
        brief = random_brief(rng)
        story = tell(brief, rng)
        assert 3 <= len(story.sentences) <= 6
        assert names(story.text, brief.character.noun)
        assert names(story.text, brief.topic.noun)


def test_held_out_pairs_never_reach_training() -> None:
    """No training text asks for a held-out pair, and every held-out prompt is about one."""
    rng = random.Random(7)
    briefs = [random_brief(rng) for _ in range(2000)]
    assert not any(is_held_out(one.character, one.topic) for one in briefs)
    characters = {character.noun: character for character in CHARACTERS}
    topics = {(topic.kind, topic.noun): topic for topic in TOPICS}
    prompts = held_out_prompts()
    assert len(prompts) >= 20
    for one in prompts:
        assert is_held_out(characters[one["character"]], topics[one["kind"], one["topic"]])


def test_heldout_json_is_what_the_script_writes() -> None:
    """The checked-in prompts follow the tables; make_corpus --write-heldout renews them."""
    assert json.loads((HERE / "heldout.json").read_text()) == held_out_prompts()


def test_documents_repeat_with_their_seed() -> None:
    """The corpus is the same on every machine."""
    for kind in ("base", *STYLES):
        assert document(kind, random.Random(8)) == document(kind, random.Random(8))


def test_checked_in_files_are_small_and_portable() -> None:
    """Six megabytes of model, twelve in all, and no path of the machine that trained them."""
    assert (HERE / "model" / "model.safetensors").stat().st_size <= 6_000_000
    files = [
        file for folder in ("model", "adapters") for file in (HERE / folder).rglob("*") if file.is_file()
    ]
    assert sum(file.stat().st_size for file in files) < 12_000_000
    for style in STYLES:
        config = json.loads((HERE / "adapters" / style / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "lorikeet/storyteller"
