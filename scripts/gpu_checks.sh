#!/usr/bin/env bash
# What only a GPU can show, in one go: golden values and exactness on the device, the loop against `generate`, and the
# tree builders, and the step curve of a real shape. Needs no hub. Run it in an environment with sparkbench installed; figures go to stdout.
set -uo pipefail
cd "$(dirname "$0")/.."

python - <<'PY'
import torch
print("device", torch.cuda.get_device_name(), "torch", torch.__version__)
PY
python benchmarks/gpu_exactness.py
python benchmarks/bench_loop.py --device cuda
python benchmarks/bench_tree_builders.py --device cuda
python benchmarks/bench_sparkling_builders.py
sparkbench profile --shape qwen3-4b --context 512 --batch-size 1,8 --out "${OUT:-results}/profile-qwen3-4b.json"
sparkbench run --method all --budget 16,64 --device cuda --dtype bfloat16 --temperature 0,1 --batch-size 1,8 --limit 4 \
  --out "${OUT:-results}/gpu-bfloat16"
python benchmarks/bench_overhead.py --device cuda
sparkbench run --config sweeps/rules.toml --device cuda --dtype bfloat16 --temperature 1 --limit 2 --out "${OUT:-results}/gpu-rules"
sparkbench run --method all --device cuda --dtype bfloat16 --batch-size 1,4,16,64 --ignore-eos --limit 24 --dataset gsm8k \
  --out "${OUT:-results}/gpu-batches"
sparkbench run --method dspark,ddtree --device cuda --dtype bfloat16 --batch-size 16 --arrivals poisson:8 --switch-to-ar auto \
  --dataset gsm8k --out "${OUT:-results}/gpu-stream"
