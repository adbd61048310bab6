"""What every test gets: no way out to the network, a plain terminal; paths to the examples and the labelled logs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LABELLED = ROOT.parent / "shared" / "cases"
LOOPBACK = ("127.", "::1", "localhost")


@pytest.fixture(autouse=True)
def only_loopback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is not marked `network` can't connect to another machine."""
    if request.node.get_closest_marker("network"):
        return
    connect = socket.socket.connect

    def guarded(self, address):
        if isinstance(address, tuple) and not str(address[0]).startswith(LOOPBACK):
            raise AssertionError(f"a test tried to connect to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's terminal settings do not change what is printed."""
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def examples() -> Path:
    """The folder of example logs."""
    return ROOT / "examples"


@pytest.fixture
def labelled() -> Path:
    """The labelled logs beside the checkout; the test is skipped where there are none."""
    if not LABELLED.is_dir():
        pytest.skip("no labelled logs beside the checkout")
    return LABELLED
