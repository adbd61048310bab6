"""The receipts script on a log made for it: 36 layers, 8 KV heads of 128 in 16 bit are 144 KiB a token."""

from __future__ import annotations

import json

import receipts

LOG = """\
INFO 10-10 08:15:00 [core.py:77] Initializing a V1 LLM engine (v0.12.0) with config: model='Qwen/Qwen3-8B', \
speculative_config=None, tokenizer='Qwen/Qwen3-8B', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, \
pipeline_parallel_size=1, data_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
INFO 10-10 08:15:20 [gpu_model_runner.py:3000] Model loading took 15.2683 GiB memory and 8.1 seconds
INFO 10-10 08:15:30 [gpu_worker.py:298] Available KV cache memory: 13.50 GiB
INFO 10-10 08:15:30 [kv_cache_utils.py:1148] GPU KV cache size: 98,304 tokens
INFO 10-10 08:15:30 [kv_cache_utils.py:1152] Maximum concurrency for 8,192 tokens per request: 12.00x
INFO 10-10 08:15:40 [gpu_model_runner.py:3500] Graph capturing finished in 5 secs, took 0.60 GiB
"""


def test_predicted_against_logged(tmp_path, capsys):
    (tmp_path / "1.log").write_text(LOG)
    (tmp_path / "2.log").write_text("INFO no vLLM here\n")
    out = tmp_path / "receipts.json"
    assert receipts.main([str(tmp_path), "--json", str(out), "--verbose"]) == 0
    body = json.loads(out.read_text())
    assert (body["logs_read"], body["logs_used"]) == (2, 1)
    assert body["terms"]["kv_bytes_per_token"]["worst_pct"] == 0
    assert body["terms"]["kv_tokens"]["worst_pct"] == 0
    assert body["terms"]["max_concurrency"]["worst_pct"] == 0
    assert abs(body["terms"]["weights"]["worst_pct"]) < 1
    assert "Qwen/Qwen3-8B" in capsys.readouterr().out


def test_nothing_to_compare_ends_with_2(tmp_path, capsys):
    assert receipts.main([str(tmp_path)]) == 2
    assert "no log" in capsys.readouterr().err
