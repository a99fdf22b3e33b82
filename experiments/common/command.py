"""What every command does before its own work and after it."""

import functools
from collections.abc import Callable

from absl import app, flags, logging

from experiments.common import compilation

flags.disclaim_key_flags()  # `--help` shows the flag below as the command's own


def run(main: Callable[[flags.FlagValues], None], define_flags: Callable[[], None]) -> None:
    """Runs a command, as its file does when it is started.

    Args:
        main: takes the parsed flags.
        define_flags: declares the flags. Not done on import: names such as --out would clash.
    """
    define_flags()
    flags.DEFINE_string(
        "compilation_cache",
        None,
        "Folder that keeps compiled programs; empty for none. Default: the user's cache folder.",
    )
    app.run(functools.partial(_run, main))


def _run(main: Callable[[flags.FlagValues], None], argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments {argv[1:]}: use flags.")
    logging.set_verbosity(logging.WARNING)  # JAX tells at INFO which accelerators are absent
    compilation.use_cache(flags.FLAGS.compilation_cache)
    programs = compilation.programs()
    try:
        main(flags.FLAGS)
    finally:
        if programs.asked:
            print(programs.told())
