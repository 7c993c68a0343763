"""Command lines of what times ops and tiles: wrong names and numbers are found before a GPU is asked for."""

from collections.abc import Callable, Sequence

import pytest
import torch

from lorikeet_kernels import (
    bench,
    bench_base,
    tune,
    tune_experts,
    tune_few_rows,
    tune_fp8_linear,
    tune_latent,
)

Main = Callable[[Sequence[str] | None], int]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is one: nothing may run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        (bench.main, ("--models", "gpt-oss-20b,nope"), "unknown: 'nope'; known: gpt-oss-20b, "),
        (bench.main, ("--ranks", "16,x"), "'x'"),
        (bench_base.main, ("--only", "mla,nonsense"), "unknown: 'nonsense'; known: mxfp4, "),
        (bench_base.main, ("--only", ""), "unknown: ''; known: mxfp4, "),
        (tune.main, ("--tokens", "4;16"), "'4;16'"),
        (tune_experts.main, ("--models", "nope"), "unknown: 'nope'; known: gpt-oss-20b, "),
        (tune_experts.main, ("--tokens", "-4"), "'-4'"),
        (tune_few_rows.main, ("--sizes", "nope"), "unknown: 'nope'; known: gpt-oss-20b qkv, "),
        (tune_few_rows.main, ("--rows", "1,x,0"), "'x', '0'"),
        (tune_fp8_linear.main, ("--kinds", "tensor"), "unknown: 'tensor'; known: channel, block"),
        (tune_latent.main, ("--cases", "nope"), "unknown: 'nope'; known: 32x4k 16 heads, "),
    ],
)
def test_wrong_lists_are_usage_errors(
    main: Main, arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what there is to choose from."""
    option, value = arguments
    with pytest.raises(SystemExit) as ended:
        main([f"{option}={value}"])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (bench.main, ["--models", "gpt-oss-20b"]),
        (bench_base.main, ["--only", "fp8-all,qwen3"]),
        (tune.main, ["--tokens", "1,16"]),
        (tune_experts.main, ["--models", "llama4-scout"]),
        (tune_few_rows.main, ["--sizes", "gpt-oss-20b o", "--rows", "1,2"]),
        (tune_latent.main, ["--cases", "1x4k 16 heads,32x4k 128 heads"]),
        *(
            (module.main, [])
            for module in (bench, bench_base, tune, tune_experts, tune_few_rows, tune_fp8_linear, tune_latent)
        ),
    ],
)
def test_right_ones_ask_for_a_gpu(
    main: Main, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the defaults, which must name what exists."""
    assert main(arguments) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (bench_base.main, ("fp8-channel", "few-rows", "qwen3")),
        (bench.main, ("qwen3-30b-a3b",)),
        (tune_experts.main, ("llama4-scout",)),
        (tune_few_rows.main, ("gpt-oss-20b qkv",)),
        (tune_fp8_linear.main, ("llama-3.3-70b gate_up",)),
        (tune_latent.main, ("8x32k 16 heads",)),
    ],
)
def test_help_lists_what_there_is(
    main: Main, words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines may be broken anywhere that a name has a space or a hyphen."""
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = "".join(capsys.readouterr().out.split())
    assert all(word.replace(" ", "") in shown for word in words)
