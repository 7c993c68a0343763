#!/bin/sh
# The end-to-end tables of gpt-oss-20b on one H200: random MXFP4 weights, 1600 input and 600 output tokens, rank-32
# adapters on q, k, v, o and the experts. Writes benchmarks/results/gpt_oss_20b_h200.json and the runs beside it.
#
#   benchmarks/gpt_oss_20b.sh                   everything, about 15 GPU minutes
#   benchmarks/gpt_oss_20b.sh --quick           the main rows once, at most 4 GPU minutes
#   benchmarks/gpt_oss_20b.sh --only base,eight single steps; rows are made of all steps that were run so far
#   benchmarks/gpt_oss_20b.sh --tiny            all steps with a toy of the same form, to try the script on a CPU
set -eu
cd "$(dirname "$0")/.."
. benchmarks/environment.sh
exec "$python" -m benchmarks.end_to_end gpt-oss-20b "$@"
