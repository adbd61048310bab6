from vllm import AsyncEngineArgs, AsyncLLMEngine

chat = AsyncEngineArgs(model="a/b", gpu_memory_utilization=0.5)
draft = AsyncEngineArgs("c/d", enforce_eager=False, max_num_seqs = 16)
