"""Mutations of adapter_config.json: values of every field, patterns, and the text itself."""

import json
import random
from typing import Any

from tests.support.fuzz.adapter_draft import CONFIG, Draft, Mutation

FIELDS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters",
    "init_lora_weights", "lora_B_layout", "peft_version", "base_model_name_or_path", "ensure_weight_tying",
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "use_qalora",
    "bias", "alora_invocation_tokens", "task_type", "auto_mapping", "revision", "inference_mode",
    "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform",
    "layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "runtime_config", "qalora_group_size", "arrow_config", "use_bdlora", "unknown_field", "", "__proto__",
)  # fmt: skip
_HUGE = 10**4000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 4, 6, 8, 16, 65535, 65536, 65537, 2**31, 2**63, 2**64, _HUGE, -_HUGE,
    0.0, -0.0, 1.5, 8.0, 1e-320, 1e300, -1e300, float("nan"), float("inf"), float("-inf"),
    "", "x", "8", "LORA", "lora", "IA3", "none", "all", "lora_only", "pissa", "PiSSA_niter_4", "gaussian",
    "olora", "eva", "0.18.1", "0.19.0", "0.19.1", "0.21.2", "1" * 64, "9.9.9.9.9.9", "0.-1", "rank_major",
    "grouped_by_expert", "all-linear", "../../../etc/passwd", "\x00", "\ud800", "\u202e\u0000\n", "é" * 5000,
    "y" * 100_000, [], {}, [None], [1], [[]], [["q_proj"]], ["q_proj"], ["q_proj", 7], ["x"] * 20_000,
    {"": 1}, {"q_proj": 3}, {"q_proj": None}, {"a": {"b": {"c": []}}}, [0, 10**30], [-1], ["\ud800"],
)  # fmt: skip
# Each is quick for no input or for most, and takes exponential time for some.
CATASTROPHIC = (
    "x{99999999}", "(x{9999}y{9999}){9999}", "(((a{65000}){65000}){65000})", "(?:a?){60000}b",
    "(.{0,99}){99}{9,}x",
    "(.*)*x", "(.*)+x", "((a|b)*)*!", "(a+)+$", "([a-z._0-9]+)*!", "(.*a){20}", "(.|.)*!", "(x+x+)+y",
    "(([a-z])+.)+[A-Z]([a-z])+$", "(?:(?:.*)*)*q", ".*.*.*.*.*.*.*.*.*.*.*.*z", "(?=(.*)*y)",
    "(.*)(.*)(.*)\\3\\2\\1z",
    "(\\w|_|[a-z]|l)*\\.!", "^(([a-z])*_*\\.*)*$x", "(m|mo|mod|.)*!{5}",
)  # fmt: skip
ODD_PATTERNS = (
    "(", ")", "[", "*", "\\", "a{99999999999}", "(?P<x>a)(?P<x>b)", "(?#", "(?i)Q_PROJ", "\\1", "(?<=a+)b",
    "[[:alpha:]]", "a{,3}", "(?>a)", "a++", "\\p{L}+", "(?R)", "(?|a|b)", "[a&&b]", "$", "^", "|", "^$", "",
    "\x00", "q_proj\n", "(" * 90 + ")" * 90, "(a?){50}a{50}", "x" * 1000, "x" * 1001, "é", "\\N{DIGIT ONE}",
)  # fmt: skip
# Sound ones, which change ranks or scales where they match.
SOUND_PATTERNS = (
    "q_proj", "self_attn.q_proj", "self_attn\\.q_proj", ".*q_proj", ".*\\.q_proj",
    "^model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.v_proj", "layers\\.[01]\\.self_attn\\.[qkv]_proj", "(q|v)_proj", "gate_up_proj",
    "experts.gate_up_proj", ".*experts\\.down_proj", "down_proj", "mlp.experts", "experts\\.\\d+\\.up_proj",
    ".*",
    "gate", "lm_head", "embed_tokens", "o_proj", ".proj", "layers.1..*", "(k_proj|o_proj|lm_head)", "w[123]",
)  # fmt: skip


def set_field(rng: random.Random, draft: Draft) -> None:
    """Any field, any value."""
    name, value = rng.choice(FIELDS), rng.choice(VALUES)
    draft.config[name] = value
    draft.note(f"config {name!r} = {_short(value)}", name, CONFIG)


def drop_field(rng: random.Random, draft: Draft) -> None:
    """One of those that are there."""
    name = rng.choice(list(draft.config))
    del draft.config[name]
    # What is not said any more may make ranks, parameters or orientations unclear.
    draft.note(f"config without {name!r}", name, CONFIG, "rank", "orientation", "target_parameters", "square")


def change_scale(rng: random.Random, draft: Draft) -> None:
    """Another scale, which must come out."""
    match rng.randrange(3):
        case 0:
            draft.config["lora_alpha"] = rng.choice([1, 2, 7, 16, 0.25, 33.5, 1e6, 1e-3])
        case 1:
            draft.config["use_rslora"] = not draft.config.get("use_rslora")
        case _:
            keys = rng.sample(SOUND_PATTERNS, rng.randrange(1, 5))
            draft.config["alpha_pattern"] = {k: rng.choice([1, 3, 12.5, 64]) for k in keys}
    scale = {k: draft.config.get(k) for k in ("lora_alpha", "use_rslora", "alpha_pattern")}
    draft.note(f"config scale {scale}", "alpha", "scale", "weights")


def patterns(rng: random.Random, draft: Draft) -> None:
    """Rank or alpha patterns: sound, odd, or of exponential time."""
    name = rng.choice(["rank_pattern", "alpha_pattern"])
    pool = rng.choice(
        [SOUND_PATTERNS, ODD_PATTERNS, CATASTROPHIC, CATASTROPHIC, SOUND_PATTERNS + ODD_PATTERNS]
    )
    count = rng.choice([1, 1, 2, 5, len(pool), 300, 5000])
    value: dict[str, Any] = {}
    for number in range(count):
        key = rng.choice(pool) + ("" if number < len(pool) else f"|{number}")
        value[key] = rng.choice([1, 2, 4, 8, 16, 3, draft.config.get("r", 8)])
    if rng.random() < 0.2:
        value[rng.choice(list(value))] = rng.choice(VALUES)
    draft.config[name] = value
    draft.note(f"config {name} of {len(value)}: {_short(value)}", name, "rank", CONFIG)


def target_modules(rng: random.Random, draft: Draft) -> None:
    """What names the modules; the tensors say it already, so that it must not matter."""
    name = rng.choice(["target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"])
    value = rng.choice(
        [
            "all-linear", rng.choice(CATASTROPHIC), rng.choice(ODD_PATTERNS), rng.choice(SOUND_PATTERNS),
            list(CATASTROPHIC), ["q_proj", "nothing"], [f"model.layers.{i}.q_proj" for i in range(20_000)],
            [], None, 7, [1], {"q_proj": 1}, "q" * 50_000,
        ]
    )  # fmt: skip
    draft.config[name] = value
    draft.note(f"config {name} = {_short(value)}", name, CONFIG)


def repeated_key(rng: random.Random, draft: Draft) -> None:
    """The same field twice in the text."""
    name = rng.choice(list(draft.config))
    text = draft.files[CONFIG].decode(errors="surrogateescape")
    other = json.dumps(rng.choice([draft.config[name], 1, "x", None]))
    draft.files[CONFIG] = f"{text[:-1]}, {json.dumps(name)}: {other}}}".encode(errors="surrogateescape")
    draft.note(f"config has {name!r} twice", name)


def config_text(rng: random.Random, draft: Draft) -> None:
    """The text is not quite JSON, not UTF-8, too deep, too long, or another document."""
    text = draft.files[CONFIG]
    depth = rng.choice([10, 16, 17, 1000, 100_000])
    made = {
        "empty": b"", "blank": b"  \n", "null": b"null", "list": b"[]", "number": b"7", "string": b'"LORA"',
        "BOM": b"\xef\xbb\xbf" + text, "UTF-16": text.decode(errors="replace").encode("utf-16"),
        "trailing comma": text[:-1] + b",}",
        "comment": b"// c\n" + text, "twice": text + text, "single quotes": text.replace(b'"', b"'"),
        "bad UTF-8": text.replace(b"LORA", b"LO\xff\xfeRA"), "surrogate": text.replace(b"LORA", b"\\ud800"),
        "overlong": text[:-1] + b', "x": "\xc0\xaf"}', "NUL": text + b"\x00",
        "control": text[:-1] + b', "x": "\x01"}',
        "lists": b"[" * depth + b"]" * depth, "objects": b'{"a":' * depth + b"1" + b"}" * depth,
        "nested value": text[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}",
        "brackets in a string": text[:-1] + b', "revision": "' + b"[{" * 5000 + b'"}',
        "long number": text[:-1] + b', "x": ' + b"1" * rng.choice([41, 5000, 500_000]) + b"}",
        "long fraction": text[:-1] + b', "revision": 0.' + b"1" * 500_000 + b"}",
        "exponent": text[:-1] + b', "lora_dropout": 1e' + b"9" * 300 + b"}",
        "LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
        "many values": text[:-1] + b', "revision": [' + b"1," * 250_000 + b"1]}",
        "too long": text[:-1] + b', "revision": "' + b"z" * (4 << 20) + b'"}',
        "unclosed string": text[:-1] + b', "revision": "' + b"\\" * 99_999,
        "minus": text[:-1] + b', "x": -}', "hex": text[:-1] + b', "x": 0x10}',
        "cut": text[: rng.randrange(len(text))],
    }  # fmt: skip
    kind = rng.choice(list(made))
    draft.files[CONFIG] = made[kind]
    draft.note(f"config text: {kind}", CONFIG, "x", "revision", "lora_dropout")


def flip_config(rng: random.Random, draft: Draft) -> None:
    """Bits or bytes of the text."""
    text = bytearray(draft.files[CONFIG])
    for _ in range(rng.choice([1, 1, 2, 8])):
        text[rng.randrange(len(text))] = rng.randrange(256)
    draft.files[CONFIG] = bytes(text)
    draft.note("config bytes changed", CONFIG, "rank", "alpha", "orientation", "target_parameters")


def _short(value: object) -> str:
    text = ascii(value) if value not in (_HUGE, -_HUGE) else "huge"
    return text if len(text) < 200 else f"{text[:200]}... ({len(text)} characters)"


# Of the values, before the files are made; and of the files' bytes.
CONFIG_VALUES: tuple[Mutation, ...] = (set_field, drop_field, change_scale, patterns, target_modules)
CONFIG_TEXTS: tuple[Mutation, ...] = (repeated_key, config_text, flip_config)
