"""Rows and profiles of the families' benches, from the results that lie in a work directory."""

import re
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.family_models import ADAPTERS, INPUT_TOKENS, MODELS, RANK, Model
from benchmarks.rows_file import Row, figure_alone, merge_rows, read_document, read_object, write_document
from lorikeet_bench.engine.floors import FloorModel
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.model_shape import write_model_shape

# The least share of the base's tokens/s that eight adapters must leave, by concurrency, and the hope.
RATIOS = {1: (0.85, 0.92), 32: (0.78, 0.88)}
MOST_KERNELS = 20  # of a profile, the longest


def suffix(settings: Sequence[str]) -> str:
    """What files of other settings than the default have in their names."""
    return "".join("-" + re.sub(r"[^\w.=]+", "_", item) for item in sorted(settings))


def result_file(work: Path, model: Model, settings: Sequence[str] = ()) -> Path:
    """Where a model's result with these settings lies."""
    return work / f"families-{model.shape}{suffix(settings)}.json"


def profile_file(work: Path, model: Model, settings: Sequence[str] = ()) -> Path:
    """Where the profiles of its decode steps with these settings lie."""
    return work / f"families-profile-{model.shape}{suffix(settings)}.json"


def make_rows(
    model: Model, result: dict[str, Any], floors: FloorModel, settings: Sequence[str] = ()
) -> Iterator[Row]:
    """Speeds beside their floors, the ratios beside their musts, start-up and compilations."""
    name = ", ".join((model.shape, *sorted(settings)))
    points = {(point["concurrency"], point["adapters"]): point["median"] for point in result["points"]}
    for (concurrency, adapters), median in points.items():
        where = f"{name}, concurrency {concurrency}, {adapters} adapters"
        step_s = floors.decode(concurrency, adapters, model.context_tokens).seconds
        value = median["decode_tokens_per_s"]["mean"]
        yield Row(f"{where}: decode tokens/s a request", value, "tokens/s", 1 / step_s)
        most = floors.closed_loop_tokens_per_s(concurrency, adapters, INPUT_TOKENS, model.output_tokens)
        yield Row(f"{where}: tokens/s", median["tokens_per_s"], "tokens/s", most)
        least_ms = 1e3 * floors.closed_loop_ttft_s(concurrency, INPUT_TOKENS)
        yield Row(f"{where}: TTFT mean", median["ttft_ms"]["mean"], "ms", least_ms)
    for concurrency, (must, hope) in RATIOS.items():
        base, adapted = points.get((concurrency, 0)), points.get((concurrency, ADAPTERS))
        if base and adapted:
            most, without = (
                floors.closed_loop_tokens_per_s(concurrency, count, INPUT_TOKENS, model.output_tokens)
                for count in (ADAPTERS, 0)
            )
            words = f"{name}, concurrency {concurrency}: tokens/s with {ADAPTERS} adapters over without"
            ratio = adapted["tokens_per_s"] / base["tokens_per_s"]
            yield Row(words, ratio, "ratio", most / without, target=must, stretch=hope)
    for server in result["servers"]:
        yield Row(f"{name}: start-up to READY", server["startup_s"], "s")
        after = server["compilations"]
        yield Row(f"{name}: compilations after READY", after, "count", 0.0, target=0.0)


def short_profile(profile: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """A step's time, its parts beside their floors, what takes longest, and when it was measured, of what."""
    of = profile["profile"]
    return {
        **{key: machine.get(key, "") for key in ("commit", "date")},
        **{key: profile[key] for key in ("concurrency", "adapters", "parts")},
        **{key: of[key] for key in ("steps", "step_us", "busy_us")},
        "kernels": sorted(of["ops"], key=lambda op: -op["us"])[:MOST_KERNELS],
    }


def model_of(row_name: str) -> str:
    """The model that a row is of: its name's beginning."""
    return re.split(r"[,:]", row_name, maxsplit=1)[0]


def has_rows(document: dict[str, Any], model: Model) -> bool:
    """Whether a document has rows of the model."""
    return any(model_of(row["name"]) == model.shape for row in document["rows"])


def profile_name(model: Model) -> str:
    """What a failure of the model's profiles is called; that of its bench has the model's name alone."""
    return f"{model.shape}, profile"


def write_rows(
    work: Path,
    output: Path,
    settings: Sequence[str] = (),
    *,
    failures: Mapping[str, str] | None = None,
    is_toy: bool = False,
) -> None:
    """Rows and profiles of all results with these settings that lie in `work`, and what failed without one.

    What `output` has of others is kept. A result that is void gives its own failures, and a file that is none
    is told of and left out. A toy's rows are figures alone: floors and musts are the real models' on a GPU.

    Raises:
        ValueError: `output` holds something else.
    """
    document = read_document(output)
    document["failures"] |= {name: [reason] for name, reason in (failures or {}).items()}
    for model in MODELS:
        with _told_if_bad(file := result_file(work, model, settings)):
            if file.exists():
                _put_rows(
                    document, model, read_object(file, points=list, servers=list), settings, is_toy=is_toy
                )
        with _told_if_bad(file := profile_file(work, model, settings)):
            if file.exists():
                _put_profiles(document, model, read_object(file, profiles=list))
    document["engine_settings"] = sorted(settings)
    write_document(output, document)


@contextmanager
def _told_if_bad(file: Path) -> Generator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        print(f"== {file} is left out, it has other fields ({error!r}): remove it", flush=True)
    except ValueError as error:
        print(f"== {file} is left out, it {error}: remove it", flush=True)


def _put_rows(
    document: dict[str, Any], model: Model, result: dict[str, Any], settings: Sequence[str], *, is_toy: bool
) -> None:
    if result.get("failures"):
        document["failures"][model.shape] = result["failures"]
        return
    with tempfile.TemporaryDirectory() as directory:
        shape = write_model_shape(Path(directory), model.shape)
        adapters = replace(AdapterShape(), rank=RANK, sites=model.sites)
        floors = FloorModel.read(shape, torch.bfloat16, adapters)
    machine = result.get("machine", {})
    made = [
        replace(figure_alone(row) if is_toy else row, commit=machine.get("commit", ""))
        for row in make_rows(model, result, floors, settings)
    ]
    document["rows"] = merge_rows(document["rows"], made)
    document["machines"][model.shape] = machine
    document["failures"].pop(model.shape, None)


def _put_profiles(document: dict[str, Any], model: Model, result: dict[str, Any]) -> None:
    if not has_rows(document, model):
        return
    machine = result.get("machine", {})
    profiles = [short_profile(each, machine) for each in result["profiles"]]
    document.setdefault("profiles", {})[model.shape] = profiles
    document["failures"].pop(profile_name(model), None)
