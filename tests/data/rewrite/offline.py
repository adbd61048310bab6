"""Summaries of all documents, once a night."""

import os

from vllm import LLM, SamplingParams

os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"


def main():
    params = SamplingParams(temperature=0.0, max_tokens=256)
    llm = LLM(
        model="Qwen/Qwen3-8B",
        dtype='auto',
        max_model_len=32768,  # longest document
        limit_mm_per_prompt={"image": 2},
    )
    print(llm.generate(["Hello, “world”"], params))


if __name__ == "__main__":
    main()
