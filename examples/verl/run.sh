#!/usr/bin/env bash
# GRPO by verl in tasks that `wardian serve` serves. Needs verl with vLLM, GPUs, and the program `wardian` on each node:
#
#     wardian serve --env tasks --tasks TASKS.jsonl &
#     python3 examples/verl/tasks.py --held-out 64 --out data
#     MODEL=Qwen/Qwen3-1.7B GPUS=8 examples/verl/run.sh
#
# Arguments are settings of verl's, behind those that stand here.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
DATA=${DATA:-$PWD/data}
MODEL=${MODEL:-Qwen/Qwen3-1.7B}
GPUS=${GPUS:-1}
# The agent that is a program of its own, for rows that name `wardian_program`.
export WARDIAN_AGENT=${WARDIAN_AGENT:-$here/../agents/minimal.py}
# Where Ray's workers find agent_loop.py.
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"

exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=32 \
    data.max_prompt_length=1024 \
    data.max_response_length=3072 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.max_model_len=4096 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/agent_loop.yaml" \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.enable_auto_tool_choice=True \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser=hermes \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.logger='["console"]' \
    trainer.project_name=wardian \
    trainer.experiment_name=verl \
    trainer.total_epochs=1 \
    "$@"
