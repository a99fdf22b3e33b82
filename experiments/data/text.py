"""Free text that lies on a machine: the standard library, documentation, any folder."""

import gzip
import pathlib
import sysconfig
from collections.abc import Iterator

# What a text folder is searched for.
SUFFIXES = (".txt", ".md", ".rst", ".py")
_PYTHON_DOCS = "/usr/share/doc"
_MANUALS = "/usr/share/man"


def documents(source: str) -> Iterator[str]:
    """Yields the documents of a source, always in the same order.

    Args:
        source: "stdlib" (Python's standard library without its tests), "pydoc" (Python's
            documentation as reST, where a package installed it), "man" (English manual pages in
            troff, where installed), or a folder, searched for .txt, .md, .rst and .py files.

    Raises:
        ValueError: if the source is not here, or holds no document.
    """
    paths = list(_paths(source))
    if not paths:
        raise ValueError(
            f"Text source {source!r} holds no document here: install the package that provides it, "
            f"or name a folder with {', '.join(SUFFIXES)} files."
        )
    for path in paths:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        # Undecodable files are not text.
        text = raw.decode("utf-8", errors="replace")
        if "\ufffd" not in text and text.strip():
            yield text


def _paths(source: str) -> Iterator[pathlib.Path]:
    if source == "stdlib":
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        apart = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        for path in sorted(root.rglob("*.py")):
            if not apart & set(path.relative_to(root).parts):
                yield path
    elif source == "pydoc":
        yield from sorted(pathlib.Path(_PYTHON_DOCS).glob("python3*/html/_sources/**/*.txt"))
    elif source == "man":
        yield from sorted(pathlib.Path(_MANUALS).glob("man*/*.gz"))
    else:
        folder = pathlib.Path(source)
        if not folder.is_dir():
            raise ValueError(
                f"Text source {source!r} is no folder: use stdlib, pydoc, man or a folder."
            )
        yield from sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
