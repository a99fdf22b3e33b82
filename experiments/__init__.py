"""How do I run it, and how do I reproduce the papers? Every file here is one command.

What commands share lies in `common/`; a training run is a file of `configs/`, its text comes
through `data/`; `prompts/` is what runs are measured on, `results/` their rows and what these say.
"""
