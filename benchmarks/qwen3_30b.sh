#!/bin/sh
# As gpt_oss_20b.sh, for Qwen3-30B-A3B in bfloat16 and with 0 and 8 adapters (2.5 GB each) only. Writes benchmarks/results/qwen3_30b_a3b_h200.json.
set -eu
cd "$(dirname "$0")/.."
. benchmarks/environment.sh
exec "$python" -m benchmarks.end_to_end qwen3-30b-a3b "$@"
