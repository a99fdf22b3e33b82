"""Prompts without a data set: beginnings of texts on this machine, for models without a chat.

    python -m experiments.make_prompts --target code_target --out out/code.jsonl

By default the beginnings of the standard library's files that `train:stdlib` leaves out, about 96
tokens each, to the end of a line; every second one is a `dev` prompt. Seconds on a CPU. Files are
left out by their number, so this is text that `code_target` has not seen only on the version of
Python that its card names, in a build with the same modules. Some of the files are tables of
codecs, whose like is in the training text.
"""

import json
import pathlib
import sys

from absl import flags

from experiments.common import command, setup
from experiments.data import sources
from models.tokenizer import load_tokenizer


def prompts(source: str, target: str, count: int) -> list[dict[str, str]]:
    """Returns `count` prompts in the format of `load.py`, of kind "code".

    Args:
        source: see `sources.texts`.
        target: model whose tokens count, see `setup.load`.
        count: how many, in the order of the texts.

    Raises:
        ValueError: if there is no such source or model, or it has fewer texts.
    """
    texts = sources.prefixes(source, load_tokenizer(setup.find(target)), count)
    return [
        {
            "id": f"beginning-{number:02}",
            "kind": "code",
            "split": "dev" if number % 2 else "eval",
            "text": text,
        }
        for number, text in enumerate(texts, 1)
    ]


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("source", "held:stdlib", "Texts: text:, train: or held: before a source.")
    flags.DEFINE_string("target", "code_target", "Model: name, .gguf file or folder.")
    flags.DEFINE_integer("count", 40, "Number of prompts.", lower_bound=2)
    flags.DEFINE_string("out", "out/beginnings.jsonl", "JSON-lines file to write.")
    flags.DEFINE_bool("smoke", False, "Two prompts.")


def main(args: flags.FlagValues) -> None:
    """Writes the file that the flags name."""
    try:
        found = prompts(args.source, args.target, 2 if args.smoke else args.count)
        out = pathlib.Path(args.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in found)
        out.write_text("".join(lines), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    print(f"{len(found)} prompts written to {out}")


if __name__ == "__main__":
    command.run(main, define_flags)
