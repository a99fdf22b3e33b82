"""Log-probabilities are the target's, one a token, cut with the text (HO-18)."""

import pytest

from spec.drafters import NGramDrafter
from spec.generate import Request, generate, stream
from tests.common.toys import PLAIN, VOCAB1, chain, chain11, chain11_greedy, scripted, tiny

# Log-softmax of (4, 3, 0 x 9) at its best entry.
BEST = -0.427044
LETTERS = {7: b"a", 0: b"b", 1: b"c", 4: b"d", 2: b"e"}


def perfect(depth):
    return scripted([(2, *chain11_greedy(2, 20))], chain(depth), VOCAB1)


@pytest.mark.parametrize("drafter", [PLAIN, perfect(1), perfect(6), NGramDrafter()], ids=str)
def test_best_token_of_chain11(drafter):
    [done] = generate(chain11(), drafter, [[2]], Request(5, logprobs=True))
    assert done.logprobs == pytest.approx([BEST] * 5, abs=1e-5)
    assert sum(done.logprobs) == pytest.approx(-2.135220, abs=1e-4)


@pytest.mark.parametrize("depth", [1, 6])
def test_cut_with_a_stop_string(depth):
    request = Request(
        8, logprobs=True, stop=("bc",), token_bytes=lambda token: LETTERS.get(token, b"?")
    )
    [done] = generate(chain11(), perfect(depth), [[2]], request)
    assert (done.token_ids, done.finish_reason) == ((7,), "stop")
    assert done.logprobs == pytest.approx([BEST], abs=1e-5)
    *_, [last] = stream(chain11(), perfect(depth), [[2]], request, steps=1)
    assert last == done


def test_sampled_tokens_have_the_logprobs_of_plain_decoding():
    """The same tokens by `naive`, alone and by tree: the same log-probabilities."""
    target = tiny(0)
    request = Request(24, temperature=1.0, seed=4, logprobs=True, rule="naive")
    [plain] = generate(target, PLAIN, [[1, 2, 3, 1, 2]], request)
    [grown] = generate(target, NGramDrafter(), [[1, 2, 3, 1, 2]], request)
    assert grown.token_ids == plain.token_ids
    assert grown.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert len(plain.logprobs) == 24
    assert all(value < 0 for value in plain.logprobs)


def test_none_unless_asked_for():
    [done] = generate(chain11(), PLAIN, [[2]], Request(5))
    assert done.logprobs == ()
