docker rm -f vllm || true
docker run -d --name vllm --runtime nvidia --gpus '"device=0,1"' \
    -v ~/.cache/huggingface:/root/.cache/huggingface \
    --env "HF_TOKEN=$HF_TOKEN" \
    -p 8000:8000 \
    vllm/vllm-openai:v0.11.0 \
    --model mistralai/Mistral-Small-3.2-24B-Instruct-2506 \
    --tokenizer_mode mistral --max_model_len 65536 \
    --tensor-parallel-size 2
