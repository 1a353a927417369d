#!/usr/bin/env bash
# Asynchronous PPO on whatever this machine has.
#
#   bash examples/run_async_ppo.sh [SECTION.KEY=VALUE]...      --print first: only say what would run
#
# With NVIDIA GPUs and SGLang it trains Qwen3-1.7B on GSM8K (examples/qwen3_math.toml): on one GPU the engine and the
# trainer share its memory, on more a quarter of them trains and the others generate. Without, it is `make demo`.
#   MODEL                   a model folder, or a hub name that is downloaded (Qwen/Qwen3-1.7B)
#   AGENTRL_SGLANG_PYTHON   the interpreter that has SGLang (else this project's own is tried)
set -euo pipefail
cd "$(dirname "$0")/.."

only_print=
if [ "${1:-}" = --print ]; then only_print=1; shift; fi

run() {
  printf '$'; printf ' %q' "$@"; printf '\n'
  [ -n "$only_print" ] || "$@"
}

count_gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l
  else
    { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true
  fi
}

numbers() { seq -s, "$1" "$2"; }

python=.venv/bin/python
sglang=${AGENTRL_SGLANG_PYTHON:-$python}
gpus=0
command -v nvidia-smi >/dev/null && gpus=$(count_gpus)

if [ "$gpus" -eq 0 ] || ! "$sglang" -c 'import sglang' 2>/dev/null; then
  echo "GPUs: $gpus, SGLang: $("$sglang" -c 'import sglang' 2>/dev/null && echo there || echo "not in $sglang"): the demo on the CPU"
  run make install
  run "$python" examples/demo.py "$@"
  exit
fi

model=${MODEL:-Qwen/Qwen3-1.7B}
run make install
if [ ! -d "$model" ]; then
  folder=.cache/models/${model##*/}
  [ -f "$folder/config.json" ] || run .venv/bin/hf download "$model" --local-dir "$folder"
  model=$folder
fi

if [ "$gpus" -eq 1 ]; then
  placement=(engine.memory_fraction=0.4)
else
  ranks=$(( gpus / 4 > 0 ? gpus / 4 : 1 ))
  engines=$(( gpus - ranks ))
  placement=(
    "engine.count=$engines" "engine.gpus=[$(numbers 0 $(( engines - 1 )))]" engine.memory_fraction=0.85
    "train.ranks=$ranks" "train.gpus=[$(numbers "$engines" $(( gpus - 1 )))]"
  )
fi
run .venv/bin/agentrl train examples/qwen3_math.toml "model=$model" "engine.python=$sglang" "${placement[@]}" "$@"
