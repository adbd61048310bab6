#!/usr/bin/env bash
# Don't run this twice: the card is shared.
set -euo pipefail

export HF_HOME=/data/hf
export PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:256"

if [[ -z "${MODEL:-}" ]]; then
    MODEL="Qwen/Qwen3-14B"
fi

CUDA_VISIBLE_DEVICES=0,1 vllm serve "$MODEL" \
    --tensor-parallel-size 2 \
    --max-model-len "32768" \
    --limit-mm-per-prompt '{"image": 2}' \
    --port 8000 2>&1 | tee -a /var/log/vllm.log
