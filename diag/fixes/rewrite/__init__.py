"""Rewriting what the user runs: compose files, manifests, Helm values, scripts, Dockerfiles, programs.

In: the text of a file and the changes of a fix. Out: the text with a minimal edit, its diff, and in words what the
file has no place for.
"""

from diag.fixes.rewrite.engine import command_in_file, detect, rewrite
from diag.fixes.rewrite.model import Kind, Rewritten

__all__ = ["Kind", "Rewritten", "command_in_file", "detect", "rewrite"]
