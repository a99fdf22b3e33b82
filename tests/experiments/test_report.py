"""Rows of earlier runs stay beside those of this one, letter by letter."""

import pytest

from experiments import centauri_table
from experiments.common import report


def test_rows_of_earlier_runs_are_kept(tmp_path):
    """As they were written, with their own provenance, before those of this run."""
    path = tmp_path / "rows.csv"
    report.write_csv(path, [{"cluster": "a", "value": 2}, {"cluster": "b", "value": 0.1}])
    first = path.read_text().splitlines()
    path.write_text(path.read_text().replace(report.provenance()["commit"], "earlier"))
    kept = centauri_table.others(path, ["b", "c"])
    report.write_csv(path, [{"cluster": "b", "value": 3}], kept)
    header, a, b = path.read_text().splitlines()
    assert header == first[0]
    assert a == first[1].replace(report.provenance()["commit"], "earlier")
    assert b.startswith("b,3,")
    assert report.provenance()["commit"] in b
    assert [row["cluster"] for row in centauri_table.others(path, ["x"])] == ["a", "b"]
    assert not centauri_table.others(path, [])  # all clusters are made anew
    assert not centauri_table.others(tmp_path / "none.csv", ["b"])


def test_rows_of_another_form_are_refused(tmp_path):
    path = tmp_path / "rows.csv"
    report.write_csv(path, [{"cluster": "a", "value": 2}])
    before = path.read_text()
    with pytest.raises(ValueError, match="make all of them anew"):
        report.write_csv(path, [{"cluster": "b", "seconds": 2}], report.read_csv(path))
    assert path.read_text() == before
