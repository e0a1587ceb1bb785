"""The training data of the demo models, which rules generate from a seed without data files."""

from .base import Dialogue, is_held_out
from .mixture import SKILLS, make_dialogue, training_group

__all__ = [
    "SKILLS",
    "Dialogue",
    "is_held_out",
    "make_dialogue",
    "training_group",
]
