"""Where data is looked for, and files of E2E and DialogSum."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multirate.errors import UserError
from multirate.lab.evaluation import dialogsum, e2e_nlg
from multirate.lab.evaluation.data_folder import VARIABLE, data_file


def test_where_data_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"e2e_nlg/devset.csv with --data FOLDER or in {VARIABLE}"):
        data_file(None, "e2e_nlg", "devset.csv")
    with pytest.raises(UserError, match=r"there is no folder .*none"):
        data_file(tmp_path / "none", "e2e_nlg", "devset.csv")
    with pytest.raises(UserError, match=r"needs the file e2e_nlg/devset\.csv"):
        data_file(tmp_path, "e2e_nlg", "devset.csv")
    (tmp_path / "devset.csv").touch()
    assert data_file(tmp_path, "e2e_nlg", "devset.csv") == tmp_path / "devset.csv"
    (tmp_path / "e2e_nlg").mkdir()
    (tmp_path / "e2e_nlg" / "devset.csv").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert data_file(None, "e2e_nlg", "devset.csv") == tmp_path / "e2e_nlg" / "devset.csv"


def test_references_of_one_meaning_belong_together(tmp_path: Path) -> None:
    path = tmp_path / "e2e.csv"
    path.write_text('\ufeffmr,ref\nname[A],x\n"name[A], food[French]","y, z"\nname[A],"w\n  v"\n')
    assert e2e_nlg.read(path) == {"name[A]": ["x", "w v"], "name[A], food[French]": ["y, z"]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "needs mr and ref"),
        (b"a,b\n1,2\n", "needs mr and ref"),
        (b"mr,ref\n", "has no record"),
        (b"mr,ref\nname[A],\n", "line 2: mr or ref is empty"),
        (b"mr,ref\nname A,x\n", "line 2: mr cannot be read"),
        (b"mr,ref\ncolour[red],x\n", r"line 2: mr has colour\[red\]; accepted: no such slot"),
        (b"mr,ref\nfood[Greek],x\n", r"mr has food\[Greek\]; accepted: English"),
        (b'mr,ref\n"name[A],x\n', "not valid CSV"),
        (b"mr,ref\nname[A],\xff\n", "not UTF-8"),
    ],
)
def test_broken_files_of_e2e(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "e2e.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason):
        e2e_nlg.read(path)


def test_dialogues_and_their_summaries(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    record = {"dialogue": "a", "summary2": "c", "summary1": "b", "topic1": "t"}
    path.write_text(json.dumps(record) + "\n")
    assert dialogsum.read(path) == [{"dialogue": "a", "references": ["b", "c"], "target": "b"}]
    for broken in ({"dialogue": "a"}, {"summary": "b"}, {"dialogue": "a", "summary": 1}):
        path.write_text(json.dumps(record) + "\n" + json.dumps(broken) + "\n")
        with pytest.raises(UserError, match="line 2: needs non-empty text in 'dialogue'"):
            dialogsum.read(path)
    path.write_text("")
    with pytest.raises(UserError, match="has no record"):
        dialogsum.read(path)
