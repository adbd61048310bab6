"""What an action works on: the situation, its numbers, the verdict - and small helpers that build a Fix from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diag.facts.model import Value
from diag.fixes.command import changed_command, command_from_facts
from diag.fixes.flags import flag_exists
from diag.fixes.model import Change, Fix, GmuAdvice
from diag.fixes.situation import Numbers, Situation
from diag.terms import Safety

_COMPILED_COLD = re.compile(
    r"torch\.compile takes|Dynamo bytecode transform time|Compiling a graph for"
)
_COMPILED_WARM = re.compile(r"Directly load the compiled graph|load the compiled graph\(s\)")
_NPU_NAMES = ("npu", "ascend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One failure, ready for the actions. `command`: the user's own, or rebuilt from the log."""

    situation: Situation
    numbers: Numbers
    advice: GmuAdvice
    command: str | None

    def has_flag(self, flag: str) -> bool:
        """Whether the flag can be offered: known to the release, or the release is unknown."""
        return flag_exists(flag, self.situation.version) is not False

    def now(self, name: str) -> Value | None:
        """The setting's value in the log or command; None when it is at an unlogged default."""
        fact = self.situation.setting(name)
        return None if fact is None else fact.value

    def fix(  # noqa: PLR0913 - the fields of a Fix, by keyword
        self,
        name: str,
        title: str,
        changes: Sequence[Change],
        *,
        fits: bool | None,
        proof: str,
        cost: str = "",
        safety: Safety = Safety.SAFE,
        verify: str = "",
        when_not: str = "",
        predicted: Mapping[str, Value] | None = None,
        used: Sequence[str] = (),
    ) -> Fix:
        """A Fix with the user's command changed and the log lines of the named numbers."""
        changes = tuple(changes)
        return Fix(
            id=name,
            title=title,
            changes=changes,
            fits=fits,
            proof=proof,
            predicted=dict(predicted or {}),
            cost=cost,
            safety=safety,
            verify=verify,
            when_not=when_not,
            command=changed_command(self.command, changes) if self.command else None,
            lines_used=self.numbers.lines(*used),
        )

    def share_note(self) -> str:
        """Says so when the present share is the release's default and not in the log."""
        gmu = self.numbers.gmu
        if gmu is None or not gmu.default:
            return ""
        return f" ({gmu.value:g} is the release's default; the log does not show another)"

    @property
    def gpu(self) -> bool:
        """Whether the back end is a GPU with torch's caching allocator and CUDA or HIP graphs, or unknown."""
        return self.situation.backend in (None, "cuda", "rocm")

    @property
    def npu(self) -> bool:
        """Whether the back end is an Ascend NPU."""
        return (self.situation.backend or "").lower() in _NPU_NAMES

    @property
    def cold_compile(self) -> bool:
        """Whether this start compiled the model anew, which enlarges its profile peak."""
        cold = False
        for line in self.situation.facts.lines:
            if _COMPILED_WARM.search(line.text):
                return False
            cold = cold or _COMPILED_COLD.search(line.text) is not None
        return cold


def make_case(situation: Situation, numbers: Numbers, advice: GmuAdvice) -> Case:
    """The case of a situation; the command comes from the situation or from the log."""
    command = situation.command or command_from_facts(situation.facts)
    return Case(situation=situation, numbers=numbers, advice=advice, command=command)
