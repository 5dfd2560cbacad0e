from pathlib import Path

import pytest

from .tiny import write_data, write_model


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "chat.jsonl")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), data)
