"""A user file that raises when it is imported."""

from __future__ import annotations

raise OSError("the answer key is not mounted")
