#!/usr/bin/env bash
# Make the embedded language model 2:4 sparse with SparseGPT, show what that cost, and check the folder it leaves.
set -euo pipefail
cd "$(dirname "$0")/.."
bash .ci/setup .venv
testbed=examples/testbed
out=${1:-out/tiny-llama-2of4}
.venv/bin/modelopt-sparse sparsify "$testbed/tiny-llama" --method sparsegpt --pattern 2:4 --dtype float32 \
    --data "$testbed/calibration.txt" --eval "$testbed/heldout.txt" --seq-len 512 --out "$out" --overwrite
.venv/bin/modelopt-sparse verify "$out" --pattern 2:4 > /dev/null
echo "verified: every block layer of $out is 2:4"
