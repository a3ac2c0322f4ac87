"""Which versions of the libraries that matter on an edge are installed."""

from __future__ import annotations

from importlib import metadata

REPORTED_PACKAGES = ("torch", "vllm", "transformers", "pyzmq", "msgspec", "numpy")


def library_versions() -> dict[str, str]:
    """Versions of the installed packages that matter on an edge, read without importing them."""
    versions: dict[str, str] = {}
    for name in REPORTED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
