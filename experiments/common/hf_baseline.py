"""The baseline `transformers`: the same weights in float32, greedy, on the CPU.

torch and transformers are imported when a function is called: only the extra `parity` has them.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Timing:
    """One measured continuation.

    Attributes:
        token_ids: emitted tokens, an ending end-of-sequence token included.
        prefill_ms: time to the first token, which follows from the pass over the prompt.
        ms_per_token: of the other tokens, if they are decoded one by one. (What speculates does
            more in the pass over the prompt than a call for one token shows.)
        total_ms: all of it.
    """

    token_ids: tuple[int, ...]
    prefill_ms: float
    ms_per_token: float
    total_ms: float


def load(path: str | os.PathLike[str]) -> Any:
    """Loads a model as transformers does; the weights become float32.

    Args:
        path: a `.gguf` file, or a Hugging Face folder.

    Returns:
        A `transformers` causal language model on the CPU, in evaluation mode.

    Raises:
        RuntimeError: if torch, transformers or accelerate is not installed.
    """
    torch, transformers = import_peers()
    path = pathlib.Path(path)
    where = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    return transformers.AutoModelForCausalLM.from_pretrained(
        where[0], dtype=torch.float32, **where[1]
    ).eval()


def time_greedy(
    model: Any, prompt: Sequence[int], max_new_tokens: int, threads: int = 2, **how: Any
) -> Timing:
    """Times `generate` after one warm-up.

    The prefill is told apart by a second call for one token.

    Args:
        model: from `load`. Its generation config says which tokens end the text.
        prompt: token ids. Take them from our tokenizer: the one that transformers makes of a GGUF
            file splits some texts differently.
        max_new_tokens: most new tokens, at least 2.
        threads: of torch. The process gets its old number back afterwards.
        **how: of `generate`: `prompt_lookup_num_tokens` or `assistant_model` let it speculate.

    Raises:
        RuntimeError: if torch, transformers or accelerate is not installed.
        ValueError: if there is no second token to time.
    """
    torch, _ = import_peers()
    if not len(prompt) or max_new_tokens < 2:
        raise ValueError(
            f"{len(prompt)} prompt tokens and max_new_tokens = {max_new_tokens}: give at least 1 "
            "and 2, since the first new token belongs to the prefill."
        )
    prompt_1T = torch.tensor([list(prompt)])

    def run(count: int) -> tuple[tuple[int, ...], float]:
        clock = time.perf_counter()
        out_1T = model.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            do_sample=False,
            max_new_tokens=count,
            **how,
        )
        seconds = time.perf_counter() - clock
        return tuple(out_1T[0, len(prompt) :].tolist()), 1e3 * seconds

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run(2)
        _, prefill_ms = run(1)
        token_ids, total_ms = run(max_new_tokens)
    finally:
        torch.set_num_threads(before)
    if len(token_ids) < 2:
        raise ValueError(f"The text ended after {len(token_ids)} token: time another prompt.")
    rest_ms = (total_ms - prefill_ms) / (len(token_ids) - 1)
    return Timing(token_ids, prefill_ms, rest_ms, total_ms)


def time_prefill(model: Any, prompt: Sequence[int], threads: int) -> float:
    """Returns the seconds of one pass over a prompt that fills a cache, logits of its end only.

    Args:
        model: from `load`.
        prompt: token ids.
        threads: of torch. The process gets its old number back afterwards.
    """
    torch, _ = import_peers()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    prompt_1T = torch.tensor([list(prompt)])
    try:
        clock = time.perf_counter()
        with torch.no_grad():
            model(prompt_1T, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - clock
    finally:
        torch.set_num_threads(before)


def import_peers() -> tuple[Any, Any]:
    """Imports and returns torch and transformers, the latter without progress bars.

    Raises:
        RuntimeError: if one of them, or accelerate, is not installed.
    """
    try:
        import accelerate  # noqa: F401  (transformers needs it to read GGUF, and says so too late)
        import torch
        import transformers
    except ImportError as error:
        raise RuntimeError(
            f"The baseline transformers needs {error.name}: run `pip install -e '.[parity]'`."
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers
