"""Figures of a report and the rows that they come from: parsed, and computed again.

A section of REPORT.md names each of its figures in a table `| figure | what | from |`. `from` is an
SQL query, one table a file of experiments/results; or "printed", for what no command writes to a
file: then printed.csv has a row of that claim (the section's title) and of the same words.
"""

import csv
import dataclasses
import pathlib
import re
import sqlite3
import statistics
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

# A number, unless it ends a name (H100, float32, EAGLE-3) or is a version of three parts (2.13.0).
NUMBER = re.compile(
    r"(?<![\w.])(?<![A-Za-z]-)\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\d|\.\d|,\d{3})"
)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\([^)]*\)")
# What else is written in digits and measures nothing.
NOT_MEASURED = {
    "a model": r"SmolLM2-135M",
    "a requirement": r"Python >= \d+\.\d+",
    "a paper": r"arXiv \d{4}\.\d{5}",
    "the year of a conference": r"ASPLOS \d{4}",
    "a format of numbers": r"\b\d+-bit\b",
    "what an issue asks for": r"\b[Gg]oal \d+(?:\.\d+)?",
    "a schedule of pipelines": r"\b1F1B\b",
    "the level of an interval": r"\b95% interval",
    "the number of an item": r"(?m)^\d+\. ",
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One row of a section's table."""

    shown: str
    what: str
    source: str


@dataclasses.dataclass(frozen=True)
class Section:
    """What stands below a heading of the second level."""

    title: str
    text: str
    figures: tuple[Figure, ...]

    @property
    def anchor(self) -> str:
        """What a link to it ends in."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    @property
    def numbers(self) -> set[str]:
        """Those that the table accounts for."""
        return {number for figure in self.figures for number in numbers(figure.shown)}


def numbers(markdown: str) -> list[str]:
    """Returns the numbers of a text that say something measured, in order."""
    text = TARGET.sub("]", CODE.sub(" ", markdown))
    for pattern in NOT_MEASURED.values():
        text = re.sub(pattern, " ", text)
    return NUMBER.findall(text)


def blocks(markdown: str) -> Iterator[str]:
    """Yields paragraphs, items of lists and rows of tables; code blocks are left out."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"\n\s*\n|\n(?=\||[-*] |\d+\. |#)", text):
        if part.strip():
            yield part.strip()


def sections(markdown: str) -> list[Section]:
    """Returns the sections of a report; one without figures has an empty table."""
    out = []
    for part in re.split(r"^## ", markdown, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        figures = []
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            if line.startswith("|") and len(cells) == 3 and cells[0] != "figure":
                figures.append(Figure(*cells))
        out.append(Section(title.strip(), text, tuple(f for f in figures if f.shown[:3] != "---")))
    return out


class _Values:
    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, value: float | None) -> None:
        if value is not None:
            self.values.append(value)


class _Median(_Values):
    def finalize(self) -> float | None:
        return statistics.median(self.values) if self.values else None


class _GeometricMean(_Values):
    def finalize(self) -> float | None:
        return statistics.geometric_mean(self.values) if self.values else None


def database(folder: pathlib.Path) -> sqlite3.Connection:
    """Returns the files of a folder as tables; knows `median` and `geomean`, too."""
    out = sqlite3.connect(":memory:")
    out.create_aggregate("median", 1, _Median)  # type: ignore[arg-type]
    out.create_aggregate("geomean", 1, _GeometricMean)  # type: ignore[arg-type]
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            names, *rows = csv.reader(file)
        columns = ", ".join(f'"{name}"' for name in names)
        out.execute(f'create table "{path.stem}" ({columns})')
        marks = ", ".join("?" * len(names))
        # What was printed stays as it was printed.
        read = str if path.stem == "printed" else _value
        values = ([read(text) for text in row] for row in rows)
        out.executemany(f'insert into "{path.stem}" values ({marks})', values)
    return out


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def agrees(shown: str, value: Any) -> bool:
    """Says whether a number, rounded to the digits that are shown, is what is shown."""
    if not isinstance(value, int | float):
        return False
    number = Decimal(shown.replace(",", ""))
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return abs(value - float(number)) <= 0.5 * 10.0**exponent * (1 + 1e-9)


def fault(section: Section, figure: Figure, rows: sqlite3.Connection) -> str | None:
    """Returns what is wrong with a figure, or nothing."""
    where = f"{section.title}: {figure.shown!r} ({figure.what})"
    if figure.source == "printed":
        query = "select figure from printed where claim = ? and what = ?"
        found = rows.execute(query, (section.title, figure.what)).fetchall()
        return None if found == [(figure.shown,)] else f"{where}, printed.csv has {found}"
    query = figure.source.strip("`")
    if not re.match(r"select .*\bfrom \w", query):
        return f"{where}: {query!r} reads no row"
    found = [value for row in rows.execute(query) for value in row]
    shown = numbers(figure.shown)
    same = len(found) == len(shown) and all(map(agrees, shown, found))
    return None if same else f"{where}, the rows say {found}"
