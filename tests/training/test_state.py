"""The output folder of a run, which several processes prepare at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from multirate.training.state import prepare_output


def test_many_may_prepare_one_folder_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(prepare_output, folder, False) for _ in range(400)]:
            done.result()
    assert not list(folder.iterdir())
