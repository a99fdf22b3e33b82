"""Files of records: bytes in, rows with the line that each stands on out. Knows no prompt."""

import csv
import dataclasses
import gzip
import io
import json
import pathlib
import reprlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 60


@dataclasses.dataclass(frozen=True)
class Record:
    """One row of a file.

    Attributes:
        where: "file:line", for error messages.
        name: made of the file's name and the row's number, for a row that has none of its own.
        values: the fields.
    """

    where: str
    name: str
    values: Mapping[str, Any]

    def string(self, *keys: str | int) -> str:
        """Returns the string at `values[keys[0]][keys[1]]...`, which may be empty.

        Raises:
            ValueError: if there is no such field, or it is no text.
        """
        value = self.get(*keys)
        if not isinstance(value, str):
            raise self.error(keys, "make it a string")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise self.error(keys, "write the character that it holds half of")
        return value

    def text(self, *keys: str | int) -> str:
        """Returns the string there, which must hold more than white space."""
        value = self.get(*keys)
        if not isinstance(value, str) or not value.strip():
            raise self.error(keys, "make it a non-empty string")
        return self.string(*keys)

    def identity(self, key: str) -> str:
        """Returns the field as a name, be it a text or a whole number."""
        value = self.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return self.text(key)

    def items(self, key: str) -> list[Any]:
        """Returns the field, which must be a list of at least one item."""
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise self.error((key,), "make it a list of at least one item")
        return value

    def get(self, *keys: str | int) -> Any:
        """Returns what is at `values[keys[0]][keys[1]]...`, None if there is nothing."""
        value: Any = self.values
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def error(self, keys: Sequence[str | int], fix: str) -> ValueError:
        """Returns the complaint about what is there, on one line."""
        name = str(keys[0]) + "".join(f"[{key}]" for key in keys[1:])
        return ValueError(f"{self.where}: field {name!r} is {brief(self.get(*keys))}; {fix}")


def brief(value: object) -> str:
    """Returns a value as Python writes it, on one line and without the middle if it is long."""
    return _brief.repr(value)


def read(path: pathlib.Path) -> Iterator[Record]:
    """Yields the records of a file.

    Args:
        path: a table with a header if it ends in .csv, else JSON: one object a line, or one list of
            objects. UTF-8 with or without a byte order mark; lines may end as on Windows; blank
            ones are skipped; a compressed file (.gz) is unpacked.

    Raises:
        ValueError: naming file and line, if it is none of these.
    """
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read as prompts ({error}): give a text file."
        ) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: not UTF-8 ({error.reason}); save it as UTF-8") from error
    name = pathlib.PurePath(path.name.removesuffix(".gz"))
    rows = _table(text, path) if name.suffix == ".csv" else _json(text, path)
    for number, (line, row) in enumerate(rows, 1):
        where = f"{path}:{line}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: found {brief(row)}; write an object with named fields")
        yield Record(where, f"{name.stem}-{number}", row)


def _table(text: str, path: pathlib.Path) -> Iterator[tuple[int, object]]:
    table = csv.DictReader(io.StringIO(text, newline=""), restkey="(more)", strict=True)
    try:
        for row in table:
            yield table.line_num, row
    except csv.Error as error:
        line = table.reader.line_num
        raise ValueError(f"{path}:{line}: not CSV ({error}); correct the line") from error


def _json(text: str, path: pathlib.Path) -> Iterator[tuple[int, object]]:
    if text.lstrip().startswith("["):
        yield from _list(text, path)
        return
    # Not `splitlines`, which also cuts at characters that JSON allows within a string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _parse(line, path, number)


def _list(text: str, path: pathlib.Path) -> Iterator[tuple[int, object]]:
    """Yields the items of the list that the whole text is, each with the line it begins on."""
    _parse(text, path, 1)  # once for its errors: the walk below meets nothing unexpected
    decode = json.JSONDecoder().raw_decode
    line, counted, at = 1, 0, _skip(text, text.index("[") + 1)
    while text[at] != "]":
        line, counted = line + text.count("\n", counted, at), at
        item, at = decode(text, at)
        yield line, item
        at = _skip(text, at)


def _skip(text: str, at: int) -> int:
    """Returns the place of the next character that neither separates items nor is white space."""
    while text[at] in " \t\r\n,":
        at += 1
    return at


def _parse(text: str, path: pathlib.Path, first_line: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line, reason = first_line + error.lineno - 1, error.msg
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        line, reason = first_line, str(error)
    raise ValueError(f"{path}:{line}: not JSON ({reason}); correct the line")
