"""Files in real shapes for the tests of `oomdoc fix`, and the lines that a change touched."""

from __future__ import annotations

from pathlib import Path

from diag.fixes.model import Change

FOLDER = Path(__file__).parent / "data" / "rewrite"
LENGTH = Change(flag="--max-model-len", from_=32768, to=4096)
SHARE = Change(flag="--gpu-memory-utilization", to=0.85)
EAGER = Change(flag="--enforce-eager", to=True)
IMAGES = Change(flag="--limit-mm-per-prompt", to='{"image": 1}')
ALLOCATOR = Change(env="PYTORCH_CUDA_ALLOC_CONF", to="expandable_segments:True")
SHM = Change(flag="--shm-size", to="16g")
BLOCKS_OUT = Change(flag="--num-gpu-blocks-override", from_=100, to=None)
ALLOCATOR_OUT = Change(env="PYTORCH_CUDA_ALLOC_CONF", to=None)
EAGER_OUT = Change(flag="--enforce-eager", to=None)


def sample(name: str) -> str:
    """The text of a sample, line ends as they are."""
    return (FOLDER / name).read_bytes().decode()


def touched(diff: str) -> tuple[list[str], list[str]]:
    """The removed and the added lines of a unified diff."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    return (
        [line[1:] for line in lines if line.startswith("-")],
        [line[1:] for line in lines if line.startswith("+")],
    )
