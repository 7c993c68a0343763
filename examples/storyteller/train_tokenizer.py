"""Trains the byte-level BPE tokenizer and writes it, with the chat template, into the model's folder.

    python -m examples.storyteller.train_tokenizer

Takes seconds. The models' ids depend on it: retrain them after a change.
"""

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from examples.storyteller.make_corpus import END_OF_TEXT, HERE, IM_END, IM_START, KINDS, document

VOCAB_SIZE = 2048
NUM_DOCUMENTS = 12_000
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MARKS = re.compile("|".join(re.escape(mark) for mark in (END_OF_TEXT, IM_START, IM_END)))
# Qwen's word splitter: contractions, words with one leading sign at most, digits, signs, line ends, blanks.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train() -> Tokenizer:
    """The trained tokenizer; the same texts and the same merges every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _texts() -> Iterator[str]:
    """As many documents of each style as of the base, so that the styles' words get tokens of their own."""
    for kind in KINDS:
        rng = random.Random(f"tokenizer/{kind}")
        for _ in range(NUM_DOCUMENTS // len(KINDS)):
            for segment in document(kind, rng):
                yield from _MARKS.split(segment.text)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    arguments = parser.parse_args()
    PreTrainedTokenizerFast(
        tokenizer_object=train(),
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    ).save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
