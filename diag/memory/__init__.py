"""The arithmetic of GPU memory: eras, KV cache, cards, out-of-memory texts, the ledger."""
