"""``python -m tools`` is ``quartet``."""

from __future__ import annotations

from tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
