"""The arithmetic of GPU memory: eras, cards, model shapes, KV cache, the ledger of a log, a plan before the start."""
