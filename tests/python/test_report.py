"""twostep report: from rows to pictures and one page."""

import json
import re
from pathlib import Path

import pytest

from twostep.__main__ import main
from twostep.report import read_rows

ROOT = Path(__file__).resolve().parents[2]
GEMM, KDA = (ROOT / f"bench/results/h200/{name}.jsonl" for name in ("e424c77", "abb7787-kda"))
needs_rows = pytest.mark.skipif(not GEMM.exists(), reason="bench/results is not here")


@needs_rows
def test_report_is_pictures_and_one_self_contained_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["report", str(GEMM), str(KDA), "--out", str(tmp_path)]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.split()]
    assert names == ["gemm.png", "gemm-isolated.png", "kda.png", "report.html"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names[:-1])
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page) and page.count("data:image/png") == 3
    assert page.count("<tr>") == 2 + len(GEMM.read_text().splitlines()) + len(KDA.read_text().splitlines())


@needs_rows
def test_of_rows_of_one_case_the_last_counts(tmp_path):
    row = json.loads(GEMM.read_text().splitlines()[0])
    later = {**row, "verdict": "the last"}
    strict = {**row, "choice": {**row["choice"], "strict": True}}
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, (row, later, strict))))
    gemm, kda = read_rows([file])
    assert [r["verdict"] for r in gemm] == ["the last"] and kda == []


def test_bad_files_are_named(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    for text in ("{", "[]", '{"case": 1}', ""):
        file.write_text(text)
        assert main(["report", str(file), "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert "accepted: rows of" in error and (not text or f"{file}:1" in error)
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2


def test_info(capsys):
    assert main(["info"]) == 0
    assert "version" in capsys.readouterr().out
