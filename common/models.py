"""Where a model lies: embedded in the package, fetched by ``quartet get-model``, a directory, or on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast

from common.config_loading import PRESETS

EMBEDDED = ("tiny",)
"""Models that come with the package."""

HUB_FILES = ["*.json", "*.py", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""What is fetched of a hub repository; other weight formats are left out."""
HUB_FILES_LEFT_OUT = ["onnx/*", "original/*", "runs/*"]

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_WEIGHTS = ".safetensors"


class ModelError(ValueError):
    """A model that cannot be found or used; the message says what to run."""


def models_folder() -> Path:
    """Where ``quartet get-model`` puts models: ``$QUARTET_MODELS``, else ``~/.cache/quartet/models``."""
    return Path(os.environ.get("QUARTET_MODELS") or "~/.cache/quartet/models").expanduser()


def resolve_model(path: str) -> Path:
    """The directory of ``model.path``; the first that exists of an embedded model, a fetched one and a directory.

    A hub id is fetched through ``huggingface_hub`` into its own cache. Raises ModelError if none of these is there, or
    if the directory holds no model.
    """
    if path in EMBEDDED:
        directory = Path(PRESETS, path, "model")
        if not (directory / "config.json").is_file():
            raise ModelError(f"model.path: the embedded model {path!r} is missing; run tools/make_{path}_model.py")
        return directory
    for directory in (models_folder() / path, Path(path).expanduser()):
        if directory.is_dir():
            return check_directory(path, directory.resolve())
    if not _HUB_ID.match(path):
        raise ModelError(
            f"model.path: {path!r} is no embedded model ({', '.join(EMBEDDED)}), no directory, and not in "
            f"{models_folder()}. If it can be fetched, run: quartet get-model {path}"
        )
    return check_directory(path, fetch_from_hub(path))


def fetch_from_hub(hub_id: str, into: Path | None = None) -> Path:
    """Fetches a hub repository into a directory, or into the hub's own cache; raises ModelError if that fails."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = cast("Any", huggingface_hub).snapshot_download(
            hub_id, local_dir=into, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_LEFT_OUT
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model.path: {hub_id!r} is no directory, and fetching it from the hub failed: {reason}. Check its name, "
            f"the network and HF_TOKEN, or fetch it elsewhere by: quartet get-model {hub_id}, and give the directory"
        ) from error
    return Path(found)


def check_directory(path: str, directory: Path) -> Path:
    """The directory itself; ModelError, naming what was asked for, if config.json or weights are missing there."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"model.path: {path!r}: {directory} holds no model (no config.json there)")
    if not any(file.suffix == _WEIGHTS for file in directory.iterdir()):
        raise ModelError(
            f"model.path: {path!r}: {directory} holds no weights (no .safetensors file; a .bin file is a pickle, "
            "which is not read); save the model there with transformers' save_pretrained"
        )
    return directory
