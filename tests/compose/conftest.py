"""The engine and the images, once for all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.engine import OFF, Project, base_image


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if os.environ.get(OFF) == "off" and collection_path.name.startswith("test_") else None


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base image, after all images have been built on it."""
    found = base_image()
    Project(tmp_path_factory.mktemp("build"), found).build()
    return found


@pytest.fixture
def project(tmp_path: Path, base: str) -> Iterator[Project]:
    made = Project(tmp_path, base)
    yield made
    made.down()
