"""From the steps' results to rows: name, value, unit, the floor beside it, and the peer with its version."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows_file import Row, figure_alone, merge_rows, read_document, write_document
from lorikeet_bench.engine.floors import FloorModel
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.model_shape import write_model_shape

INPUT_TOKENS, OUTPUT_TOKENS = 1600, 600
# Half of the answer is there on average while the other half is made.
CONTEXT_TOKENS = INPUT_TOKENS + OUTPUT_TOKENS / 2
PEER = "vLLM 0.26.0"
PCIE_GB_PER_S = 55.0


# vLLM 0.26.0 on one H200, in process, FlashAttention 3, CUDA graphs, torch.compile, no prefix caching: by
# (concurrency, adapters): decode tokens/s a request, TTFT mean ms, tokens/s total. Its 8 adapters are on the
# sites of ours; those of the rows with 1 and 32 on the router as well.
GPT_OSS_PEER = {
    (1, 0): (338.0, 61.0, 327.0),
    (16, 0): (128.8, 1140.0, 1531.0),
    (32, 0): (133.2, 411.0, 3874.0),
    (1, 1): (178.3, 114.0, 173.0),
    (32, 1): (88.3, 2079.0, 2157.0),
    (1, 8): (182.2, 76.0, 178.0),
    (16, 8): (85.3, 553.0, 1265.0),
    (32, 8): (72.6, 789.0, 2115.0),
    (1, 32): (169.7, 94.0, 166.0),
    (32, 32): (58.0, 851.0, 1712.0),
}
# Points at which it compiled while it was timed: too low to compare with, and their rows say so.
GPT_OSS_PEER_COMPILING = frozenset({(16, 0)})
# (target, stretch) by (figure, concurrency, adapters).
GPT_OSS_TARGETS = {
    ("decode", 1, 8): (430.0, 620.0),
    ("ttft", 1, 8): (50.0, 32.0),
    ("total", 16, 8): (2800.0, 4000.0),
    ("total", 32, 8): (4000.0, 5400.0),
    ("ttft", 32, 8): (400.0, 280.0),
    ("total", 32, 32): (3500.0, 4900.0),
    ("decode", 1, 0): (500.0, 700.0),
    ("total", 32, 0): (4700.0, 6300.0),
}


def write_rows(model: str, work: Path, output: Path, *, is_toy: bool = False) -> None:
    """Read what lies in `work` of this model and put its rows into `output`.

    A toy's rows are figures alone: floors and targets are the real model's on a GPU. A step that failed or is
    void gives none; its failures stand in the document. What `output` has of steps that are not in `work`
    stays, and so does what else was written into it.
    """
    results = {
        path.stem.removeprefix(f"{model}-"): json.loads(path.read_bytes())
        for path in sorted(work.glob(f"{model}-*.json"))
    }
    with tempfile.TemporaryDirectory() as directory:
        floors = FloorModel.read(write_model_shape(Path(directory), model), torch.bfloat16, AdapterShape())
    good = {name: result for name, result in results.items() if not result.get("failures")}
    void = {name: result["failures"] for name, result in results.items() if name not in good}
    document: dict[str, Any] = {"model": model, **read_document(output)}
    # What a server without adapters measured in another session is not to become the LoRA server's.
    has_base = "base" in good or "base" in document["machines"]
    rows = _with_commits(model, good, floors, "base" if has_base else "eight")
    document["machines"] |= {name: result["machine"] for name, result in good.items() if "machine" in result}
    failures = {name: reasons for name, reasons in document["failures"].items() if name not in good}
    document["failures"] = failures | void
    made = (figure_alone(row) if is_toy else row for row in rows)
    document["rows"] = merge_rows(document["rows"], made)
    if "profile" in good:
        document["profiles"] = good["profile"]["profiles"]
    write_document(output, document)


def _with_commits(
    model: str, results: dict[str, dict[str, Any]], floors: FloorModel, base_step: str
) -> Iterator[Row]:
    """All rows with the commits of their steps: those without which a row has another value, or is not."""
    commits = {name: result.get("machine", {}).get("commit", "") for name, result in results.items()}
    make = partial(make_rows, floors=floors, base_step=base_step)
    without = {step: {row.name: row.value for row in make(model, _except(results, step))} for step in results}
    for row in make(model, results):
        steps = [step for step, values in without.items() if values.get(row.name) != row.value]
        found = dict.fromkeys(commits[step] for step in steps or results)
        yield replace(row, commit=", ".join(filter(None, found)))


def _except(results: dict[str, dict[str, Any]], step: str) -> dict[str, dict[str, Any]]:
    return {name: result for name, result in results.items() if name != step}


def make_rows(
    model: str, results: dict[str, dict[str, Any]], floors: FloorModel, *, base_step: str = "base"
) -> Iterator[Row]:
    """All rows that the results give; a step that was not run gives none.

    `base_step` has the figures without adapters: "eight" where the base was not run by itself.
    """
    is_peer_model = model == "gpt-oss-20b"
    points = {
        (step, point["concurrency"], point["adapters"]): point
        for step, result in results.items()
        for point in result.get("points", ())
    }
    places = {(count, 0): base_step for count in (1, 16, 32)} | {(1, 8): "eight", (16, 8): "eight"}
    places |= {(32, 8): "eight", (1, 1): "curve", (32, 1): "curve", (1, 32): "curve", (32, 32): "curve"}
    for (concurrency, adapters), step in places.items():
        if (point := points.get((step, concurrency, adapters))) is not None:
            yield from _point_rows(point, floors, is_peer_model=is_peer_model)
    yield from _ratio_rows(points, floors, base_step)
    yield from _curve_rows(points, floors)
    yield from _other_rows(results, points, is_peer_model=is_peer_model)


def _point_rows(point: dict[str, Any], floors: FloorModel, *, is_peer_model: bool) -> Iterator[Row]:
    concurrency, adapters, median = point["concurrency"], point["adapters"], point["median"]
    step_s = floors.decode(concurrency, adapters, CONTEXT_TOKENS).seconds
    peer = GPT_OSS_PEER.get((concurrency, adapters)) if is_peer_model else None
    was_compiling = (concurrency, adapters) in GPT_OSS_PEER_COMPILING
    peer_version = f"{PEER}, compiling meanwhile" if was_compiling else PEER
    figures = (
        (
            "decode",
            "decode tokens/s a request",
            median["decode_tokens_per_s"]["mean"],
            "tokens/s",
            1 / step_s,
        ),
        (
            "ttft",
            "TTFT mean",
            median["ttft_ms"]["mean"],
            "ms",
            1e3 * floors.closed_loop_ttft_s(concurrency, INPUT_TOKENS),
        ),
        (
            "total",
            "tokens/s",
            median["tokens_per_s"],
            "tokens/s",
            floors.closed_loop_tokens_per_s(concurrency, adapters, INPUT_TOKENS, OUTPUT_TOKENS),
        ),
    )
    for index, (kind, words, value, unit, floor) in enumerate(figures):
        target = (
            GPT_OSS_TARGETS.get((kind, concurrency, adapters), (None, None))
            if is_peer_model
            else (None, None)
        )
        yield Row(
            f"concurrency {concurrency}, {adapters} adapters: {words}",
            value,
            unit,
            floor,
            peer[index] if peer else None,
            peer_version if peer else "",
            *target,
        )
    if routing := point.get("routing"):
        share = routing["experts"] / routing["expected_experts"]
        yield Row(f"concurrency {concurrency}, {adapters} adapters: experts read over even", share, "ratio")


def _ratio_rows(points: dict[Any, dict[str, Any]], floors: FloorModel, base_step: str) -> Iterator[Row]:
    for concurrency, target, stretch in ((1, 0.85, 0.90), (32, 0.78, 0.85)):
        base, with_lora = points.get((base_step, concurrency, 0)), points.get(("eight", concurrency, 8))
        if base and with_lora:
            most, without = (
                floors.closed_loop_tokens_per_s(concurrency, count, INPUT_TOKENS, OUTPUT_TOKENS)
                for count in (8, 0)
            )
            name = f"concurrency {concurrency}: tokens/s with 8 adapters over without"
            value = with_lora["median"]["tokens_per_s"] / base["median"]["tokens_per_s"]
            yield Row(name, value, "ratio", most / without, target=target, stretch=stretch)
    for concurrency in (1, 16, 32):
        base, on_lora = points.get(("base", concurrency, 0)), points.get(("eight", concurrency, 0))
        if base and on_lora:
            name = f"concurrency {concurrency}: base requests on a LoRA server over one without"
            value = on_lora["median"]["tokens_per_s"] / base["median"]["tokens_per_s"]
            yield Row(name, value, "ratio", 1.0, target=0.99, stretch=1.0)
            if concurrency == 1:  # the one load whose batches have the same shape in both for certain
                equal = float(base["tokens_digest"] == on_lora["tokens_digest"])
                yield Row("concurrency 1: base answers equal on both servers", equal, "1 is yes", target=1.0)
    for concurrency in (1, 32):
        tuned, by_rule = points.get(("eight", concurrency, 8)), points.get(("rule", concurrency, 8))
        if tuned and by_rule:
            for words, figure in (("tokens/s", _tokens_per_s), ("TTFT mean", _ttft_ms)):
                name = f"concurrency {concurrency}, 8 adapters: {words} with measured tiles over the rules'"
                yield Row(name, figure(tuned) / figure(by_rule), "ratio")
    for concurrency in (1, 32):
        grpc, in_process = points.get(("grpc", concurrency, 8)), points.get(("eight", concurrency, 8))
        if grpc and in_process:
            value = _tokens_per_s(grpc) / _tokens_per_s(in_process)
            name = f"concurrency {concurrency}, 8 adapters: through gRPC with text over in process"
            yield Row(name, value, "ratio", 1.0, target=0.93, stretch=0.98)


def _tokens_per_s(point: dict[str, Any]) -> float:
    return point["median"]["tokens_per_s"]


def _ttft_ms(point: dict[str, Any]) -> float:
    return point["median"]["ttft_ms"]["mean"]


def _curve_rows(points: dict[Any, dict[str, Any]], floors: FloorModel) -> Iterator[Row]:
    curve = {key[2]: point for key, point in points.items() if key[:2] == ("curve", 32)}
    for adapters, point in sorted(curve.items()):
        floor = floors.closed_loop_tokens_per_s(32, adapters, INPUT_TOKENS, OUTPUT_TOKENS)
        name = f"concurrency 32, 64 slots: tokens/s with {adapters} adapters"
        yield Row(name, point["median"]["tokens_per_s"], "tokens/s", floor)
    if {1, 64} <= set(curve):
        loss = 1 - curve[64]["median"]["tokens_per_s"] / curve[1]["median"]["tokens_per_s"]
        few, many = (
            floors.closed_loop_tokens_per_s(32, count, INPUT_TOKENS, OUTPUT_TOKENS) for count in (1, 64)
        )
        yield Row("concurrency 32: loss from 1 to 64 adapters", loss, "ratio", 1 - many / few, stretch=0.15)


def _other_rows(
    results: dict[str, dict[str, Any]], points: dict[Any, dict[str, Any]], *, is_peer_model: bool
) -> Iterator[Row]:
    peer_version = PEER if is_peer_model else ""
    if lengths := points.get(("lengths", 1, 8)):
        value = lengths["median"]["worst_ttft_over_bucket"]
        yield Row(
            "200 prompt lengths: worst TTFT over its bucket's median",
            value,
            "ratio",
            1.0,
            target=1.2,
            stretch=1.05,
        )
    for step, words, target, stretch in (("base", "cold", 60.0, 40.0), ("eight", "warm", 25.0, 10.0)):
        if step in results:
            value = results[step]["servers"][0]["startup_s"]
            name = f"start-up to READY, kernel cache {words}"
            yield Row(name, value, "s", None, 71.0 if is_peer_model else None, peer_version, target, stretch)
    if "grpc" in results:
        yield Row(
            "start-up of a node to SERVING, kernel cache warm",
            results["grpc"]["servers"][0]["startup_s"],
            "s",
        )
    servers = [server for result in results.values() for server in result.get("servers", ())]
    if servers:
        count = max(server["compilations"] for server in servers)
        yield Row("compilations and graph captures after READY", count, "count", 0.0, target=0.0, stretch=0.0)
    if "adapter-load" in results:
        yield from _load_rows(results["adapter-load"], 1025.0 if is_peer_model else None)
    loads = [s for s in servers if s["adapter_load_s"] and s["slots"] >= 8]
    if loads:
        value = min(1e3 * server["adapter_load_s"] / server["slots"] for server in loads)
        name = "loading adapters from the page cache, several at once: each"
        yield Row(name, value, "ms", None, 1025.0 if is_peer_model else None, peer_version)


def _load_rows(load: dict[str, Any], peer: float | None) -> Iterator[Row]:
    """One adapter by itself; the floor is its bytes over what a PCIe 5.0 x16 link carries at best."""
    version = PEER if peer else ""
    words = f"one adapter of {load['adapter_mb']:.0f} MB"
    floor = 1e3 * load["adapter_mb"] / 1e3 / PCIE_GB_PER_S
    value = load["host_to_usable_ms"]["median"]
    yield Row(f"{words}: host memory to usable", value, "ms", floor, target=22.0, stretch=15.0)
    value = load["page_cache_to_usable_ms"]["median"]
    yield Row(f"{words}: page cache to usable", value, "ms", None, peer, version, target=250.0, stretch=90.0)
