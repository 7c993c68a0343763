#!/bin/sh
# One model of each family on one H200, random weights: Qwen3-30B-A3B (FP8, bf16), DeepSeek-V2-Lite, Llama-3.3-70B (FP8), Qwen3-32B, Llama-4-Scout (FP8);
# 512 input and 192 output tokens (96 of the three large ones), concurrency 1 and 32, 0 and 8 adapters of rank 16. Writes benchmarks/results/families_h200.json.
#
#   benchmarks/families.sh                      everything, about 5 GPU minutes
#   benchmarks/families.sh --seconds 150        what fits; rows are written after each model
#   benchmarks/families.sh --resume             models that have no rows yet; with --profiles those that have no profiles too
#   benchmarks/families.sh --only qwen3-32b     some models
#   benchmarks/families.sh --profiles           decode steps of each, kernel by kernel, too: half as long again
#   benchmarks/families.sh --engine-set kv_cache_dtype=fp8 --only qwen3-32b
#                                               with other settings: rows and a file of their own, families_h200-kv_cache_dtype=fp8.json;
#                                               DeepSeek-V2-Lite caches latents and refuses this one
#   benchmarks/families.sh --tiny               toys of the same form, to try the script on a CPU
set -eu
cd "$(dirname "$0")/.."
. benchmarks/environment.sh
exec "$python" -m benchmarks.families "$@"
