"""Two starts of vLLM side by side, as `oomdoc compare` shows them."""

from diag.compare.starts import compare

__all__ = ["compare"]
