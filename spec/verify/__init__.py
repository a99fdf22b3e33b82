"""Which drafts does the target accept, and what does it say after them?

One interface, eight rules. Each is exact for the trees that it admits; decoding refuses the others
by what a drafter says of its children (`rule.check_fit`).
"""

from spec.verify.block import Block
from spec.verify.greedy import Greedy
from spec.verify.naive import Naive
from spec.verify.rule import Accepted, Keys, Law, Rule
from spec.verify.top_down import TopDown
from spec.verify.traversal import Traversal

__all__ = [
    "RULES",
    "Accepted",
    "Block",
    "Greedy",
    "Keys",
    "Law",
    "Naive",
    "Rule",
    "TopDown",
    "Traversal",
    "rule",
]

RULES: dict[str, Rule] = {
    each.name: each
    for each in (
        Greedy(),
        Naive(),
        TopDown.multi_step(),
        TopDown.without_replacement(),
        TopDown.greedy_plus_one(),
        TopDown.any_order(),
        Block(),
        Traversal(),
    )
}


def rule(name: str) -> Rule:
    """Returns the rule called `name`.

    Raises:
        ValueError: if there is none; the message lists all.
    """
    if name not in RULES:
        raise ValueError(f"No verification rule {name!r}: choose one of {', '.join(RULES)}.")
    return RULES[name]
