from __future__ import annotations

import io
import os

import pytest

from diag.apps.console import ColorChoice, shows_unicode, text_width, wants_color


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Latin(io.StringIO):
    encoding = "iso-8859-1"


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (Terminal(), {"TERM": "xterm-256color"}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (io.StringIO(), {}, False),
        (io.StringIO(), {"FORCE_COLOR": "0"}, False),
        (None, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_auto_colour(stream, environment, coloured):
    assert wants_color(ColorChoice.AUTO, stream, environment) is coloured


def test_a_pipe_gets_80_to_100_columns(monkeypatch):
    for behind, width in ((0, 80), (70, 80), (90, 90), (200, 100)):
        monkeypatch.setattr("diag.apps.console._terminal_width", lambda stream, size=behind: size)
        assert text_width(io.StringIO(), {}) == width


def test_a_terminal_gives_its_width(monkeypatch):
    monkeypatch.setattr("diag.apps.console._terminal_width", lambda stream: 173)
    assert text_width(Terminal(), {}) == 173
    assert text_width(Terminal(), {"COLUMNS": "64"}) == 64
    assert text_width(Terminal(), {"COLUMNS": "wide"}) == 173


def test_a_terminal_in_a_real_pty():
    pty = pytest.importorskip("pty")
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x18\x00\x84\x00\x00\x00\x00\x00")  # 24 x 132
        with open(slave, "w", closefd=False) as stream:
            assert text_width(stream, {}) == 132
            assert wants_color(ColorChoice.AUTO, stream, {"TERM": "xterm"})
    finally:
        os.close(master)
        os.close(slave)


def test_bars_only_where_they_can_be_shown():
    assert shows_unicode(None)
    assert not shows_unicode(Latin())
