"""Writes tests/models/expected/smollm2_logits.json: what transformers says to three short prompts.

    python -m tests.parity.make_expected

Half a minute on 2 cores, most of it reading the GGUF file. tests/models/test_expected_logits.py
holds our model to the file without torch.
"""

import hashlib
import json
import pathlib

from experiments.common.hf_baseline import import_peers, load
from models.checkpoint.gguf import packaged_smollm2
from models.tokenizer import load_tokenizer

FILE = pathlib.Path(__file__).parents[1] / "models" / "expected" / "smollm2_logits.json"
TEXTS = ("The capital of France is", "def is_prime(n):\n    if n < 2:")
MESSAGE = "Give three tips for staying healthy."
# Besides the five largest logits: control tokens, frequent and rare tokens, the last of the table.
FIXED_IDS = (0, 1, 2, 17, 1000, 20000, 49151)
NEW_TOKENS = 16


def measure(model, ids: list[int]) -> dict:
    torch, _ = import_peers()
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(out.logits)
    assert logits.shape[0] == NEW_TOKENS, "the text ends early: choose another prompt"
    best = logits.topk(2).values  # how far the greedy choices are from a tie, at the closest
    least_margin = float((best[:, 0] - best[:, 1]).min())
    assert least_margin > 0.05, f"almost a tie ({least_margin}): choose another prompt"

    def pick(token_ids) -> dict[str, float]:
        return {str(i): round(float(logits[0, i]), 5) for i in token_ids}

    return {
        "token_ids": ids,
        "top_logits": pick(logits[0].topk(5).indices.tolist()),
        "fixed_logits": pick(FIXED_IDS),
        "greedy_ids": out.sequences[0, len(ids) :].tolist(),
        "least_margin": round(least_margin, 5),
    }


def main() -> None:
    torch, transformers = import_peers()
    path = packaged_smollm2()
    tokenizer = load_tokenizer(path)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": MESSAGE}])
    model = load(path)
    expected = {
        "produced_by": {
            "command": "python -m tests.parity.make_expected",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "gguf": path.name,
            "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "how": "float32 on the CPU; token_ids by models.tokenizer, all else by transformers",
        },
        "prompts": [
            {"text": text} | measure(model, tokenizer.encode(text)) for text in (*TEXTS, chat)
        ],
    }
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    for prompt in expected["prompts"]:
        print(prompt["least_margin"], repr(tokenizer.decode(prompt["greedy_ids"])))


if __name__ == "__main__":
    main()
