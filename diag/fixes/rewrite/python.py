"""Python programs: keywords of `LLM(...)`, `EngineArgs(...)` and `AsyncEngineArgs(...)`, changed with libcst.

libcst is an extra. Python's own parser reads the text first: it is safe on any input, and its tree serves the check.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diag.errors import MissingExtraError, RewriteError
from diag.facts.model import Value
from diag.fixes.command import flag_name, written
from diag.fixes.flags import takes
from diag.fixes.model import Change
from diag.fixes.rewrite.model import (
    MAX_CHARACTERS,
    CannotPutError,
    Seen,
    Splice,
    is_container_setting,
    same,
)

if TYPE_CHECKING:
    import libcst as cst

CALLS = ("LLM", "AsyncEngineArgs", "EngineArgs")
_MAX_DEPTH = 120  # of the syntax tree; libcst needs stack for each level
_MAX_NODES = 60_000


def edit(text: str, change: Change, service: str | None) -> list[Splice]:
    """One splice with the text of the changed call. Raises RewriteError, MissingExtraError, or CannotPutError for
    what is no keyword of the call.
    """
    if is_container_setting(change):
        raise CannotPutError(f"start the container with {change.flag} {written(change.to or '')}")
    if change.env is not None:
        raise CannotPutError(_for_environment(change))
    assert change.flag is not None
    call = find_call(text, service)
    name = _keyword(change.flag)
    now = next((item.value for item in call.keywords if item.arg == name), None)
    if change.to is None and now is None:
        return []
    if now is not None and change.to is not None and _is(now, change.to):
        return []
    if now is None and any(item.arg is None for item in call.keywords):
        raise CannotPutError(f"the call takes its arguments from a mapping (**); set {name} there")
    start, end = _span(text, call)
    value = None if change.to is None else _expression(change.flag, change.to, text[start:end])
    return [Splice(start, end, _changed_call(text[start:end], name, value))]


def seen(text: str, service: str | None) -> Seen:
    """What the file says, for the check: the call's keywords as flags, the rest of the program as a tree."""
    tree = _tree(text)
    call = _choose(tree, service)
    words: list[str] = []
    for item in call.keywords:
        if item.arg is not None:
            words += [f"--{item.arg}", _shown(item.value)]
    call.keywords = [item for item in call.keywords if item.arg is None]
    try:
        return Seen(words=tuple(words), rest=ast.dump(tree))
    except RecursionError as error:
        raise RewriteError("the program is nested too deeply") from error


def arguments(text: str, service: str | None) -> Sequence[str]:
    """The words of the command line that the call stands for."""
    call = find_call(text, service)
    words = [_shown(call.args[0])] if call.args and isinstance(call.args[0], ast.Constant) else []
    for item in call.keywords:
        value = _literal(item.value)
        if item.arg is None or value is None:
            continue
        flag = "--" + item.arg.replace("_", "-")
        if item.arg == "model":
            words.insert(0, str(value))
        elif isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


def find_call(text: str, service: str | None) -> ast.Call:
    """The call that starts vLLM; `service`, the variable it is assigned to, chooses among several."""
    return _choose(_tree(text), service)


# --- finding --------------------------------------------------------------------------------------------------


def _tree(text: str) -> ast.Module:
    if len(text) > MAX_CHARACTERS:
        raise RewriteError(f"the file has more than {MAX_CHARACTERS:,} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the program's own, such as an invalid escape
            tree = ast.parse(text.removeprefix("\ufeff"))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        raise RewriteError(f"the file can't be read as Python{where}") from error
    level: list[ast.AST] = [tree]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if depth > _MAX_DEPTH or nodes > _MAX_NODES:
            raise RewriteError("the program is too large or nested too deeply")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return tree


def _choose(tree: ast.Module, wanted: str | None) -> ast.Call:
    names = set(CALLS)
    targets: dict[int, str] = {}
    calls: list[ast.Call] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            names |= {item.asname for item in node.names if item.asname and item.name in CALLS}
        elif isinstance(node, ast.Assign):
            targets[id(node.value)] = ast.unparse(node.targets[0])
        elif isinstance(node, ast.Call):
            calls.append(node)
    found = [call for call in calls if _called(call) in names]
    if wanted is not None:
        found = [call for call in found if targets.get(id(call)) == wanted]
    if len(found) > 1:
        lines = ", ".join(str(call.lineno) for call in found[:6])
        raise RewriteError(
            f"vLLM is started on several lines: {lines}",
            hint="give --service the name of the variable that one of them is assigned to",
        )
    if not found:
        raise RewriteError(f"no call of {', '.join(CALLS)} was found")
    return found[0]


def _called(call: ast.Call) -> str | None:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _span(text: str, call: ast.Call) -> tuple[int, int]:
    """Start and end of a call as offsets in characters; the tree counts columns in bytes of UTF-8."""
    body = text.removeprefix("\ufeff")
    lines = body.split("\n")
    starts = [len(text) - len(body)]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode("utf-8", "ignore"))

    assert call.end_lineno is not None
    assert call.end_col_offset is not None
    return offset(call.lineno, call.col_offset), offset(call.end_lineno, call.end_col_offset)


# --- values -----------------------------------------------------------------------------------------------------


def _keyword(flag: str) -> str:
    return flag_name(flag).replace("-", "_")


def _is(now: ast.expr, value: Value) -> bool:
    """Whether an expression already is the value."""
    literal = _literal(now)
    if literal is None:
        return False
    if isinstance(literal, bool) or isinstance(value, bool):
        return literal is value
    return same(json.dumps(literal) if isinstance(literal, (dict, list)) else str(literal), value)


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
        json.dumps(value)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return None
    return value


def _shown(node: ast.expr) -> str:
    literal = _literal(node)
    if literal is None:
        return ast.unparse(node)
    return json.dumps(literal) if isinstance(literal, (dict, list)) else str(literal)


def _expression(flag: str, value: Value, around: str) -> str:
    """The value as Python, strings in the quotes that the call uses."""
    found: Any = value
    if isinstance(value, str) and takes(flag) == "json":
        try:
            found = json.loads(value)
        except ValueError:
            found = value
    if takes(flag) == "switch" and value in (0, 1):
        found = bool(value)
    shown = repr(round(found, 6)) if isinstance(found, float) else repr(found)
    single = around.count("'") > around.count('"')
    return shown if single or '"' in shown else shown.replace("'", '"')


def _for_environment(change: Change) -> str:
    if change.to is None:
        return f"take {change.env} out of the environment before vllm is imported"
    return f"set {change.env}={written(change.to)} in the environment before vllm is imported"


# --- the change ---------------------------------------------------------------------------------------------------


def _changed_call(code: str, name: str, value: str | None) -> str:
    """The call's text with one keyword set, or taken out when `value` is None."""
    try:
        import libcst as cst
    except ImportError as error:
        raise MissingExtraError(
            "changing a Python program needs libcst", hint="pip install 'oomdoc[rewrite]'"
        ) from error
    try:
        call = cst.parse_expression(code)
        assert isinstance(call, cst.Call)
        return cst.Module(body=[]).code_for_node(_with_keyword(call, name, value))
    except (cst.ParserSyntaxError, RecursionError) as error:
        raise RewriteError("the call can't be read by libcst") from error


def _with_keyword(call: cst.Call, name: str, value: str | None) -> cst.Call:
    import libcst as cst

    args = list(call.args)
    index = next((k for k, a in enumerate(args) if a.keyword and a.keyword.value == name), None)
    if value is None:
        assert index is not None
        gone = args.pop(index)
        if index == len(args) and args:  # what closes the list stays as it was
            args[-1] = args[-1].with_changes(
                comma=gone.comma, whitespace_after_arg=gone.whitespace_after_arg
            )
        return call.with_changes(args=args)
    expression = cst.parse_expression(value)
    if index is not None:
        args[index] = args[index].with_changes(value=expression)
        return call.with_changes(args=args)
    tight = cst.AssignEqual(
        whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace("")
    )
    equal = next((a.equal for a in args if a.keyword), tight)
    new = cst.Arg(value=expression, keyword=cst.Name(name), equal=equal)
    return call.with_changes(args=_appended(call, args, new))


def _appended(call: cst.Call, args: list[cst.Arg], new: cst.Arg) -> list[cst.Arg]:
    """The arguments with one more, set apart as the others are."""
    import libcst as cst

    if not args:
        return [new]
    last = args[-1]
    gap = call.whitespace_before_args
    if len(args) > 1 and isinstance(args[-2].comma, cst.Comma):
        gap = args[-2].comma.whitespace_after
    elif not isinstance(gap, cst.ParenthesizedWhitespace):
        gap = cst.SimpleWhitespace(" ")
    if isinstance(last.comma, cst.Comma):
        closing = last.comma.whitespace_after
        between, closing = _moved(closing, gap)
        args[-1] = last.with_changes(comma=last.comma.with_changes(whitespace_after=between))
        return [*args, new.with_changes(comma=last.comma.with_changes(whitespace_after=closing))]
    between, closing = _moved(last.whitespace_after_arg, gap)
    args[-1] = last.with_changes(
        comma=cst.Comma(whitespace_after=between), whitespace_after_arg=cst.SimpleWhitespace("")
    )
    return [*args, new.with_changes(whitespace_after_arg=closing)]


def _moved(
    closing: cst.BaseParenthesizableWhitespace, gap: cst.BaseParenthesizableWhitespace
) -> tuple[cst.BaseParenthesizableWhitespace, cst.BaseParenthesizableWhitespace]:
    """What stands between the last argument and a new one, and after the new one: a comment stays with the last."""
    import libcst as cst

    plain = cst.TrailingWhitespace()
    if isinstance(gap, cst.ParenthesizedWhitespace):
        gap = gap.with_changes(first_line=plain, empty_lines=[])
        if isinstance(closing, cst.ParenthesizedWhitespace):
            gap = gap.with_changes(first_line=closing.first_line, empty_lines=closing.empty_lines)
            closing = closing.with_changes(first_line=plain, empty_lines=[])
    return gap, closing
