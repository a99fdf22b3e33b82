"""Who proposes continuations? Implementations of one protocol, `root.py` the smallest."""

from spec.drafters.early_exit import EarlyExitDrafter
from spec.drafters.ensemble import EnsembleDrafter
from spec.drafters.feature import FeatureDrafter
from spec.drafters.model import ModelDrafter
from spec.drafters.ngram import NGramDrafter
from spec.drafters.protocol import Drafter, Step, View
from spec.drafters.root import RootDrafter
from spec.drafters.scripted import ScriptedDrafter

__all__ = [
    "Drafter",
    "EarlyExitDrafter",
    "EnsembleDrafter",
    "FeatureDrafter",
    "ModelDrafter",
    "NGramDrafter",
    "RootDrafter",
    "ScriptedDrafter",
    "Step",
    "View",
]
