"""Every test has a data folder and a cache of its own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folders(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.setenv("FEDSPU_CACHE", str(folder / "cache"))
    monkeypatch.setenv("FEDSPU_DATA", str(folder / "data"))
    return folder
