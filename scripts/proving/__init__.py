"""Fixes tried on the real vLLM, on the CPU; `scripts/prove_cpu.py` is the command.

`install` gets vLLM, `tiny_model` writes models, `cases` lists the failures, `server` runs a start under limits,
`remedy` makes a fix's change to a case, `trial` puts them together.
"""
