"""`python -m diag` is `oomdoc`."""

from __future__ import annotations

import sys

from diag.apps.entry import main

if __name__ == "__main__":
    sys.exit(main())
