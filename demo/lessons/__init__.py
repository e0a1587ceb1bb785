"""The training data of the demo models, which rules generate from a seed without data files."""

from .base import Dialogue
from .mixture import SKILLS, make_dialogue, training_group

__all__ = [
    "SKILLS",
    "Dialogue",
    "make_dialogue",
    "training_group",
]
