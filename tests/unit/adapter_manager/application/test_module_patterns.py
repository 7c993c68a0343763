"""rank_pattern and alpha_pattern: PEFT's own expression is the oracle, and hostile ones end in time."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_manager.application.ingest.module_patterns import ModulePatterns
from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.peft_config import PeftConfig

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.11.self_attn.o_proj",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.experts.3.gate_proj",
    "model.layers.0.mlp.gate",
    "lm_head",
]


def patterns(
    ranks: dict[str, int], alphas: dict[str, float] | None = None, max_s: float = 1.0
) -> ModulePatterns:
    """The tables of a configuration with rank 1 and alpha 1."""
    config = PeftConfig(
        rank=1,
        alpha=1.0,
        use_rslora=False,
        rank_pattern=tuple(ranks.items()),
        alpha_pattern=tuple((alphas or {}).items()),
        target_parameters=(),
        packing=None,
        peft_version=None,
        base_model_name="",
        ensure_weight_tying=False,
    )
    return ModulePatterns(config, max_s)


def peft(ranks: dict[str, int], name: str) -> int:
    """PEFT's get_pattern_key."""
    return next((v for k, v in ranks.items() if re.match(rf"(.*\.)?({k})$", name)), 1)


PIECES = st.sampled_from(
    [
        "model",
        "layers",
        "0",
        "1",
        ".",
        "\\.",
        ".*",
        "self_attn",
        "q_proj",
        "o_proj",
        "mlp",
        "experts",
        "^",
        "$",
        "gate_up_proj",
        "gate",
        "(0|1)",
        "[01]",
        "\\d+",
        "q.proj",
        "_proj",
        "lm_head",
        "(?:q|o)_proj",
        "x?",
    ]
)
KEYS = st.lists(PIECES, min_size=1, max_size=6).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, st.integers(2, 9), min_size=1, max_size=6))
def test_first_match_in_file_order_as_peft_has_it(ranks: dict[str, int]) -> None:
    """Tables and the regex library together equal PEFT's loop, for names and for expressions."""
    tables = patterns(ranks)
    assert [tables.rank_and_alpha(n)[0] for n in NAMES] == [peft(ranks, n) for n in NAMES]


def test_rank_and_alpha_are_looked_up_apart() -> None:
    """A module may have its own alpha and the common rank."""
    tables = patterns({"o_proj": 5}, {"q_proj": 3.0})
    assert tables.rank_and_alpha("model.layers.0.self_attn.q_proj") == (1, 3.0)
    assert tables.rank_and_alpha("model.layers.0.self_attn.o_proj") == (5, 1.0)
    assert tables.rank_and_alpha("model.layers.0.self_attn.xo_proj") == (1, 1.0)


@pytest.mark.parametrize(
    "key", ["(([a-z_.0-9])+)+!", "((.*)*)*!", "(a|a)*(a|a)*(a|a)*!", "(.*)(.*)(.*)(.*)(.*)(.*)(.*)!"]
)
def test_catastrophic_expression_ends_in_time(key: str) -> None:
    """It is matched, or refused for the time that it takes, within the budget."""
    started = time.perf_counter()
    try:
        tables = patterns({key: 4}, {key: 4.0}, max_s=0.3)
        assert {tables.rank_and_alpha(n) for n in NAMES * 100} == {(1, 1.0)}
    except InvalidAdapterError as error:
        assert error.metadata["field"] in ("rank_pattern", "alpha_pattern")
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    "key",
    [
        "(",
        "[",
        "*",
        "(?P<x",
        "a{e<=1}",
        "(?R)",
        "\\p{L}",
        "[[a]--[b]]",
        "(?e)(q_proj){i}",
        "\\L<x>",
        "a{999999999999}",
    ],
)
def test_what_re_would_not_read_alike_is_refused(key: str) -> None:
    """Neither a broken expression nor one that means something else to another library."""
    with pytest.raises(InvalidAdapterError, match="rank_pattern"):
        patterns({key: 4})


def test_thousands_of_names_are_looked_up_at_once() -> None:
    """EVA writes a rank for every module: 20,000 keys against 20,000 names stay well under a second."""
    names = [f"model.layers.{layer}.mlp.experts.{e}.gate_proj" for layer in range(40) for e in range(500)]
    ranks = {name: 2 + i % 7 for i, name in enumerate(names)}
    tables = patterns(ranks, max_s=5.0)
    started = time.perf_counter()
    assert [tables.rank_and_alpha(n)[0] for n in names] == list(ranks.values())
    assert time.perf_counter() - started < 3


def test_tables_without_end_are_cut_off() -> None:
    """As many different kinds of keys as a hostile file can hold cost no more than the budget."""
    ranks = {f"{'a' * (1 + i % 400)}.{'b' * (1 + i // 400)}": 2 for i in range(10_000)}
    tables = patterns(ranks, max_s=0.2)
    started = time.perf_counter()
    with pytest.raises(InvalidAdapterError, match="too long"):
        for i in range(100_000):
            tables.rank_and_alpha(f"model.layers.{i}.self_attn.q_proj" + "x" * 450)
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    "key",
    ["x{99999999}", "(x{9999}y{9999}){9999}", "(((a{65000}){65000}){65000})", "(.{0,99}){11}", "a{1001,}"],
)
def test_a_repeat_that_takes_minutes_to_compile_is_refused_at_once(key: str) -> None:
    """The library's time limit is for matching alone: the counts are looked at first, and named."""
    with pytest.raises(InvalidAdapterError, match=r"repeats .* times; at most 1000"):
        patterns({key: 2})


def test_counts_that_people_write_are_read() -> None:
    """As `re` reads them."""
    table = patterns({r"layers\.\d{1,2}\.self_attn\.(q|k)_proj": 2, "(layers.){1}11.*": 3})
    assert [table.rank_and_alpha(name)[0] for name in NAMES[:3]] == [2, 1, 3]


def test_compiling_is_counted_and_timed() -> None:
    """Too many expressions are refused before the first is compiled; long ones are cut off in time."""
    long = "(a|b)*" * 160
    start_s = time.process_time()
    with pytest.raises(InvalidAdapterError, match="5000 regular expressions"):
        patterns({f"{long}|{n}": 1 for n in range(5000)})
    with pytest.raises(InvalidAdapterError, match="takes too long"):
        patterns({f"{long}|{n}": 1 for n in range(250)}, max_s=0.01)
    assert time.process_time() - start_s < 2
