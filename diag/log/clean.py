"""Takes off what a screen, a browser or a chat put on a line: colours, HTML, quotes, borders.

In: the text of one physical line. Out: the text a program printed; the formats met are counted.
"""

from __future__ import annotations

import re

# A terminal sequence with its escape character, in the ways that character is written out.
_ESCAPE = re.compile(
    r"""(?:\x1b|\x9b|\^\[|\#033|\\x1[bB]|\\033|\\u001[bB]|\\e|\u2190|\u241b|\ufffd)
        (?: \[ [0-?]{0,24} [ -/]{0,2} [@-~]           # CSI: colours, cursor
          | \] [^\x07\x1b]{0,400} (?:\x07|\x1b\\)?    # OSC: titles, links
          | (?<=\x1b) [()#][0-9A-B] | (?<=\x1b) [=>78cDEHMNOZ] )""",
    re.VERBOSE,
)
_ESCAPE_SIGNS = ("\x1b", "\x9b", "^[[", "#033[", "\\x1b[", "\\x1B[", "\\033[", "\\u001b[",
                 "\\u001B[", "\\e[", "\u2190[", "\u241b[", "\ufffd[")  # fmt: skip
# Colours whose escape character got lost: only believed beside a reset or at the start of the line.
_BARE_RESET = re.compile(r"\[(?:0|0;0|39|22|39;49)m")
_BARE_COLOUR = re.compile(r"\[\d{1,3}(?:;\d{1,3}){0,4}m")
_ENTITY = re.compile(r"&(lt|gt|quot|amp|apos|nbsp|#39|#x27|#34|#60|#62);")
_ENTITIES = {
    "lt": "<",
    "gt": ">",
    "quot": '"',
    "amp": "&",
    "apos": "'",
    "nbsp": " ",
    "#39": "'",
    "#x27": "'",
    "#34": '"',
    "#60": "<",
    "#62": ">",
}
_COLOUR_TAG = re.compile(r"</?(?:font|span)(?: [^<>]{0,200})?>", re.IGNORECASE)
_BLOCK_TAG = re.compile(
    r"^(?:</?(?:br|pre|code|p|div|samp)(?: [^<>]{0,200})?/?>){1,8}"
    r"|(?:</?(?:br|pre|code|p|div|samp)/?>){1,8}$",
    re.IGNORECASE,
)
_CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u200e\u200f\u202a-\u202e\u2060\ufeff]"
)
_BORDERS = "│┃║┆┊"
_EXCEPTION_GROUP = re.compile(r"^ {2,}\| ?(?!.*\|\s*$)")
_QUOTE = re.compile(r"^(?:> ?(?!>>))+")
_PYTEST = re.compile(r"E {3,40}(?=\S)")
_FENCE = re.compile(r"^(?:```+|~~~+)\s*[\w+-]*\s*$")
_BULLET = re.compile(
    r"^(?:[-*•+] |\d{1,2}\. )(?=\(\w[\w.-]* (?:rank=\d+ )?pid=|(?:INFO|WARNING|ERROR|DEBUG)[ :]"
    r"|(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): )"
)
_BAR = re.compile(r"\d+/\d+ \[[^\[\]\n]{1,60}\]|\d%\|")
_BAR_END = re.compile(
    r"(\d+/(?:\d+|\?)[^\s\[]{0,3} \[\d[\d:.]{0,9}<[^\[\]\n]{1,160}\])(?=[^\s\]])|"
    r"(\d+it \[\d[\d:.]{0,9}, [^\[\]\n]{1,40}\])(?=[^\s\]])"
)


def strip_screen(text: str, formats: dict[str, int]) -> str:
    """The text without terminal sequences, HTML and controls. Counts in `formats` what it met."""
    if any(sign in text for sign in _ESCAPE_SIGNS):
        cleaned = _ESCAPE.sub("", text)
        if cleaned != text:
            formats["ansi"] = formats.get("ansi", 0) + 1
            text = cleaned
    if "m" in text and "[" in text:
        text = _strip_bare_colours(text, formats)
    if "&" in text and _ENTITY.search(text):
        formats["html"] = formats.get("html", 0) + 1
        text = _ENTITY.sub(lambda match: _ENTITIES[match.group(1)], text)
    if "<" in text:
        text = _strip_tags(text, formats)
    if not text.isprintable():
        text = _CONTROL.sub("", text).replace("\xa0", " ").replace("\u2028", " ")
    return text


def _strip_bare_colours(text: str, formats: dict[str, int]) -> str:
    if _BARE_RESET.search(text):
        cleaned = _BARE_COLOUR.sub("", text)
    else:
        match = _BARE_COLOUR.match(text)
        if match is None:
            return text
        cleaned = text[match.end() :]
    formats["ansi"] = formats.get("ansi", 0) + 1
    return cleaned


def _strip_tags(text: str, formats: dict[str, int]) -> str:
    cleaned = _BLOCK_TAG.sub("", _COLOUR_TAG.sub("", text.rstrip()))
    if cleaned != text.rstrip():
        formats["html"] = formats.get("html", 0) + 1
    return cleaned


def strip_decoration(text: str, formats: dict[str, int]) -> str:
    """The text without quote marks, bold, fences, list bullets, box and exception-group borders."""
    first = text[:1]
    if first == ">":
        match = _QUOTE.match(text)
        if match is not None:
            formats["markdown_quote"] = formats.get("markdown_quote", 0) + 1
            text = text[match.end() :]
            first = text[:1]
    if first in "`~*-•+0123456789":
        text = _strip_markdown(text, formats)
        first = text[:1]
    if first == " ":
        text = _EXCEPTION_GROUP.sub("", text)
    elif first == "E" and (match := _PYTEST.match(text)) is not None:
        formats["pytest"] = formats.get("pytest", 0) + 1
        text = text[match.end() :]
    if text[:1] in _BORDERS or (first == " " and text.lstrip()[:1] in _BORDERS):
        text = _strip_box(text, formats)
    return text


def _strip_box(text: str, formats: dict[str, int]) -> str:
    inner = text.strip()
    if not inner:
        return text
    formats["box"] = formats.get("box", 0) + 1
    inner = inner[1:]
    if inner[-1:] and inner[-1] in _BORDERS:
        inner = inner[:-1]
    return inner.rstrip().removeprefix(" ")


def _strip_markdown(text: str, formats: dict[str, int]) -> str:
    if _FENCE.match(text):
        formats["code_fence"] = formats.get("code_fence", 0) + 1
        return ""
    bare = text.rstrip()
    plain = bare
    if bare.startswith("**") and bare.endswith("**") and len(bare) > 4 and bare[2] != "*":
        plain = bare[2:-2]
    elif bare.startswith("`") and bare.find("`", 1) == len(bare) - 1:
        plain = bare[1:-1]
    if plain is not bare:
        formats["markdown"] = formats.get("markdown", 0) + 1
        text = plain
    return _BULLET.sub("", text, count=1)


def is_progress(text: str) -> bool:
    """Whether the text shows a tqdm-like progress bar."""
    return ("/s" in text or "it]" in text or "%|" in text) and _BAR.search(text) is not None


def split_states(text: str, formats: dict[str, int]) -> list[str]:
    """The states that carriage returns painted over each other, and what was glued behind a bar.

    Of a run of states of one bar only the last is kept; every other text is kept in order.
    """
    states = [part for part in text.split("\r") if part] if "\r" in text else [text]
    if len(states) > 1:
        formats["progress_bars"] = formats.get("progress_bars", 0) + 1
    parts: list[str] = []
    for state in states:
        for part in _split_behind_bar(state):
            if (
                parts
                and part[:12] == parts[-1][:12]
                and is_progress(part)
                and is_progress(parts[-1])
            ):
                parts[-1] = part
            else:
                parts.append(part)
    return parts or [""]


def _split_behind_bar(text: str) -> list[str]:
    if "/s]" not in text and "/it]" not in text and "?it" not in text:
        return [text]
    parts: list[str] = []
    start = 0
    for match in _BAR_END.finditer(text):
        parts.append(text[start : match.end()])
        start = match.end()
    parts.append(text[start:])
    return parts
