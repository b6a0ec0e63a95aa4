#!/usr/bin/env bash
# Makes the starter anew: tasks, demonstrations and tokenizer by make_starter.py, then the model
# by supervised fine-tuning from random weights, stopped as soon as it solves 35 % of tasks that
# are neither its own nor held out. Needs a built `wardian` (first argument, else from the PATH)
# and Python with `tokenizers`.
set -euo pipefail
cd "$(dirname "$0")"
wardian=$(command -v "${1:-wardian}")

rm -rf build
python3 make_starter.py --seed 0
"$wardian" sft --from-scratch --model build/model --demos build/demos.jsonl --out build/tuned \
    --tasks build/tasks/train.jsonl --seed 0 \
    --steps 240 --batch-size 64 --learning-rate 3e-3 --warmup-steps 20 --weight-decay 0.01 \
    --measure-every 10 --stop-at 0.35 \
    --set task.eval_path=build/tasks/valid.jsonl --set eval.samples=2 --set eval.temperature=1.0 \
    --set rollout.max_turns=3 --set rollout.max_new_tokens=64 --set rollout.max_total_tokens=224

mkdir -p model tasks
cp build/tuned/* build/model/generation_config.json model/
cp build/tasks/train.jsonl build/tasks/heldout.jsonl tasks/
chmod 644 model/*
sha256sum model/* tasks/* >SHA256SUMS
