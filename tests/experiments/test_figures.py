"""README and report: every figure has its row, every path exists, what they show as code runs."""

import csv
import pathlib
import re

import jax.numpy as jnp
import pytest

from experiments import generate as job
from experiments.common import report
from models import checkpoint, tokenizer
from models.checkpoint import gguf
from tests.common import figures, processes, toys

README = processes.ROOT / "README.md"
REPORT = report.RESULTS / "REPORT.md"
LINK = re.compile(r"\((?:experiments/results/REPORT\.md)?#([\w-]+)\)")


@pytest.fixture(scope="module")
def readme():
    return README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def told():
    return REPORT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows():
    return figures.database(report.RESULTS)


def strays(text, sections, own=()):
    """Returns the numbers of blocks that neither `own` nor a section that they link to has."""
    by_anchor = {section.anchor: section for section in sections}
    out = []
    for block in figures.blocks(text):
        known = set(own).union(*(by_anchor[name].numbers for name in LINK.findall(block)))
        out += [(number, block) for number in figures.numbers(block) if number not in known]
    return out


def code_blocks(text, language=""):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_every_figure_is_computed_again_from_its_rows(told, rows):
    sections = figures.sections(told)
    assert len(sections) > 20
    faults = [figures.fault(section, f, rows) for section in sections for f in section.figures]
    assert not [fault for fault in faults if fault]


def test_a_changed_figure_is_seen(told, rows):
    """The control: each figure in turn, its last digit changed."""
    for section in figures.sections(told):
        for figure in section.figures:
            last = max(i for i, letter in enumerate(figure.shown) if letter.isdigit())
            digit = (int(figure.shown[last]) + 5) % 10
            shown = f"{figure.shown[:last]}{digit}{figure.shown[last + 1 :]}"
            wrong = figures.Figure(shown, figure.what, figure.source)
            assert figures.fault(section, wrong, rows), wrong


def test_a_query_must_read_rows(told, rows):
    section = figures.sections(told)[0]
    assert figures.fault(section, figures.Figure("1.70", "made up", "`select 1.7`"), rows)


def test_every_number_of_the_report_is_a_figure_of_its_section(told):
    sections = figures.sections(told)
    head = told[: told.index("\n## ")]
    assert not strays(head, sections)
    for section in sections:
        assert not strays(section.text, sections, section.numbers)


def test_every_number_of_the_readme_is_a_figure_of_a_section_it_links_to(readme, told):
    assert not strays(readme, figures.sections(told))


def test_a_changed_number_of_the_readme_is_seen(readme, told):
    """The control: each number in turn, a digit longer."""
    sections = figures.sections(told)
    found = [number for block in figures.blocks(readme) for number in figures.numbers(block)]
    assert len(found) >= 5
    for number in found:
        wrong = figures.NUMBER.sub(
            lambda found, number=number: found[0] + "9" * (found[0] == number), readme
        )
        assert strays(wrong, sections), number


def test_what_counts_as_a_number():
    says = figures.numbers
    assert says("1.70 of 1,486, 2e-3; 0.953 to 1.017, 95%, 2.5x, -3.") == [
        "1.70", "1,486", "2e-3", "0.953", "1.017", "95", "2.5", "3"
    ]  # fmt: skip
    assert not says(
        "H100, float32, EAGLE-3, SmolLM2-135M, torch 2.13.0, `--nodes 16`, 1F1B, goal 0.5"
    )
    assert not says(
        "```\n1 2 3\n```\n[x](a/9) arXiv 2305.09781, ASPLOS 2024, Python >= 3.11, 4-bit"
    )


def test_printed_figures_are_all_used_and_say_where_they_are_from(told):
    with (report.RESULTS / "printed.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    used = {
        (section.title, figure.what)
        for section in figures.sections(told)
        for figure in section.figures
        if figure.source == "printed"
    }
    assert {(row["claim"], row["what"]) for row in found} == used
    assert len(found) == len(used)
    for row in found:
        assert all(row.values()), row
        assert re.match(r"[0-9a-f]{7,}|not recorded", row["commit"])


def test_every_section_says_what_it_does_not_show_and_stands_in_the_index(told):
    sections = figures.sections(told)
    head = told[: told.index("\n## ")]
    for section in sections:
        for word in ("- Command: ", "- Machine: ", "- Does not show: "):
            assert word in section.text, (section.title, word)
        assert section.figures, section.title
        assert f"| [{section.title}](#{section.anchor}) |" in head
    assert head.count("](#") >= len(sections)


def test_simulated_figures_say_so(told):
    for section in figures.sections(told):
        for figure in section.figures:
            if "from centauri" in figure.source:
                assert "simulated" in figure.what


def test_the_readme_shows_the_rows_of_the_demo(readme):
    with (report.RESULTS / "demo.csv").open(newline="", encoding="utf-8") as file:
        found = [
            {name: _number(name, text) for name, text in row.items()}
            for row in csv.DictReader(file)
        ]
    assert f"{report.table(found, job.COLUMNS)}\n" in code_blocks(readme)


def _number(name, text):
    if name in ("tokens", "steps"):
        return int(text)
    return float(text) if name.endswith(("_token", "_step", "ratio")) else text


def test_the_readme_is_short(readme):
    assert readme.count("\n") <= 120
    for line in readme.splitlines():
        if line.startswith("|"):
            assert max(map(len, line.strip("|").split("|"))) <= 162  # two of them spaces
    works = readme[readme.index("## What works") : readme.index("How we know")]
    assert works.count("\n|") == 2 + 10


PATH = re.compile(r"`([\w.*/-]+/[\w.*/-]*|[\w*]+\.(?:py|csv|md|png))`")


@pytest.mark.parametrize("path", [README, REPORT], ids=lambda path: path.name)
def test_paths_targets_and_commands_exist(path):
    text = path.read_text(encoding="utf-8")
    for name in PATH.findall(text):
        if not name.startswith("out/"):
            assert any(list(root.glob(name)) for root in (processes.ROOT, path.parent)), name
    for link in re.findall(r"\]\(([^)#:]+)", text):
        assert (path.parent / link).exists(), link
    targets = re.findall(
        r"^([\w-]+):", (processes.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(re.findall(r"\bmake ([a-z][\w-]+)", "".join(code_of(text)))) <= set(targets)
    sources = (processes.ROOT / "experiments").rglob("*.py")
    flags = set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', "".join(p.read_text() for p in sources)))
    for code in code_of(text):
        for command in re.findall(r"python -m experiments\.(\w+)", code):
            assert (processes.ROOT / "experiments" / f"{command}.py").is_file()
        for flag in re.findall(r"--(\w+)", code):
            assert flag in flags | {"help"}, flag


def code_of(text):
    return figures.CODE.findall(text)


def test_the_example_of_the_readme_runs(readme, monkeypatch, capsys):
    """As it stands, on a tiny model with the vocabulary of the real one."""
    [code] = code_blocks(readme, "python")
    real = gguf.packaged_smollm2()
    names = tokenizer.load_tokenizer(real)
    model = toys.tiny(vocab_size=names.vocab_size, d_model=16, num_heads=2, head_dim=8)
    asked = []

    def load_model(path: pathlib.Path, dtype: object) -> object:
        asked.append((path, dtype))
        return model

    monkeypatch.setattr(checkpoint, "load_model", load_model)
    monkeypatch.setattr(tokenizer, "load_tokenizer", {real: names}.get)  # seconds, and loaded
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert asked == [(real, jnp.float32)]
    done = scope["done"]
    said = names.decode(done.token_ids)
    assert len(done.token_ids) == 64 or done.finish_reason == "eos"
    assert (
        capsys.readouterr().out == f"{said} {done.finish_reason} {done.metrics.tokens_per_step}\n"
    )
