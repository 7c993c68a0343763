"""Model directories with a tokenizer each, of every shape there is, for compilers of grammars."""

from pathlib import Path

from inference_service.text.grammar import GrammarCompiler
from inference_service.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import byte_tokenizer_json, make_sentencepiece_tokenizer

_FIXTURES = Path(__file__).parents[1] / "fixtures"


def model_dirs(root: Path) -> dict[str, tuple[Path, int]]:
    """Directory and an end-of-sequence token by name."""
    for name, text in (
        ("bytes", byte_tokenizer_json()),
        ("sentencepiece", make_sentencepiece_tokenizer().to_json()),
    ):
        (root / name).mkdir(exist_ok=True)
        (root / name / "tokenizer.json").write_text(text, encoding="utf-8")
    return {
        "bytes": (root / "bytes", 256),
        "sentencepiece": (root / "sentencepiece", 1),
        "merges": (_FIXTURES / "models" / "mixtral", 2),
        "harmony": (_FIXTURES / "harmony", 262),
        "storyteller": (_FIXTURES.parents[1] / "examples" / "storyteller" / "model", 0),
    }


def make_compiler(
    root: Path, name: str, num_padding: int = 21, vocab_size: int | None = None
) -> tuple[GrammarCompiler, Tokenizer, int]:
    """Compiler, tokenizer and end token of one of them, for a model with padding rows."""
    model_dir, end = model_dirs(root)[name]
    tokenizer = Tokenizer.from_directory(model_dir)
    size = vocab_size if vocab_size is not None else tokenizer.vocab_size + num_padding
    return GrammarCompiler(model_dir, size, (end,)), tokenizer, end
