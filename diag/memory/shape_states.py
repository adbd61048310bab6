"""Mamba and linear-attention layers: their weights and the state they keep of a sequence.

In: the reader of a config and the counts that all layers share. Out: parameters of one layer, and its `State`. Kinds:
gated delta net (Qwen3-Next, Qwen3.5), Mamba 1 (Jamba), Mamba 2 (Granite 4, Nemotron-H), lightning (MiniMax), short
convolution (LFM2).
"""

from __future__ import annotations

from dataclasses import dataclass

from diag.memory.shape_reader import Reader
from diag.memory.shapes import State


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One such layer, by the config's counts."""

    read: Reader
    hidden: int
    heads: int
    head_dim: int

    def params(self) -> int:
        """Parameters of one layer; 0 when the kind is not known."""
        read, hidden = self.read, self.hidden
        if read.find("linear_num_value_heads"):  # gated delta net
            key, value, heads = self._delta()
            conv = read.find("linear_conv_kernel_dim") or 4
            return (
                hidden * (2 * key + 2 * value + 2 * heads)
                + (2 * key + value) * conv
                + value * hidden
            )
        if read.kind == "jamba" or read.find("mamba_dt_rank", "time_step_rank"):  # Mamba 1
            inner = (read.find("mamba_expand", "expand") or 2) * hidden
            size = read.find("mamba_d_state", "state_size") or 16
            rank = read.find("mamba_dt_rank", "time_step_rank") or hidden // 16
            conv = (read.find("mamba_d_conv", "conv_kernel") or 4) + 1
            return 3 * hidden * inner + inner * (conv + 2 * rank + 3 * size + 2)
        count = read.find("mamba_n_heads", "mamba_num_heads", "num_heads")
        if count:  # Mamba 2
            inner, groups, size = self._mamba2()
            conv = (read.find("mamba_d_conv", "conv_kernel") or 4) + 1
            mixed = inner + 2 * groups * size
            return hidden * (inner + mixed + count) + mixed * conv + inner * hidden + inner
        if read.kind == "minimax_m1":
            return 5 * hidden * self.heads * self.head_dim
        if read.kind.startswith("lfm2"):
            return 4 * hidden * hidden + hidden * (read.find("conv_L_cache") or 3)
        return 0

    def state(self) -> State | None:
        """What one layer keeps of one sequence; None when the kind is not known."""
        read = self.read
        dtype = read.config.get("mamba_ssm_dtype")
        named = str(dtype) if isinstance(dtype, str) else None
        if read.find("linear_num_value_heads"):
            key, value, _ = self._delta()
            conv = (read.find("linear_conv_kernel_dim") or 4) - 1
            size = value * read.need("linear_key_head_dim")
            return State(conv_elements=(2 * key + value) * conv, ssm_elements=size, ssm_dtype=named)
        if read.kind == "jamba":
            inner = (read.find("mamba_expand") or 2) * self.hidden
            conv = (read.find("mamba_d_conv") or 4) - 1
            return State(
                conv_elements=inner * conv, ssm_elements=inner * (read.find("mamba_d_state") or 16)
            )
        if read.find("mamba_n_heads", "mamba_num_heads"):
            inner, groups, state = self._mamba2()
            conv = (read.find("mamba_d_conv", "conv_kernel") or 4) - 1
            mixed = inner + 2 * groups * state
            return State(conv_elements=mixed * conv, ssm_elements=inner * state, ssm_dtype=named)
        if read.kind == "minimax_m1":
            size = self.heads * self.head_dim * self.head_dim
            return State(conv_elements=0, ssm_elements=size, ssm_dtype="float32")
        if read.kind.startswith("lfm2"):
            return State(
                conv_elements=self.hidden * ((read.find("conv_L_cache") or 3) - 1), ssm_elements=0
            )
        return None

    def _delta(self) -> tuple[int, int, int]:
        """Key and value widths and value heads of a gated delta net."""
        read = self.read
        heads = read.need("linear_num_value_heads")
        key = read.need("linear_num_key_heads") * read.need("linear_key_head_dim")
        return key, heads * read.need("linear_value_head_dim"), heads

    def _mamba2(self) -> tuple[int, int, int]:
        """Inner width, groups and state size of a Mamba-2 layer."""
        read = self.read
        heads = read.need("mamba_n_heads", "mamba_num_heads", "num_heads")
        size = read.find("mamba_d_head", "mamba_head_dim") or 64
        state = read.find("mamba_d_state", "ssm_state_size", "state_size") or 128
        return heads * size, read.find("mamba_n_groups", "n_groups") or 1, state
