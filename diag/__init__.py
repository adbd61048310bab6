"""oomdoc: why vLLM ran out of memory, proved from its log.

>>> import diag
>>> diag.diagnose("ERROR [core.py:708] ValueError: No available memory for the cache blocks.").diagnosis.subtype
'kv.no_blocks'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diag.pipeline import diagnose
    from diag.report.model import Diagnosis

__version__ = "0.1.0"
__all__ = ["Diagnosis", "__version__", "diagnose"]


def __getattr__(name: str) -> Any:
    """Load the parts on first use: `oomdoc --help` must not pay for them."""
    if name == "diagnose":
        from diag.pipeline import diagnose

        return diagnose
    if name == "Diagnosis":
        from diag.report.model import Diagnosis

        return Diagnosis
    raise AttributeError(f"module 'diag' has no attribute {name!r}")
