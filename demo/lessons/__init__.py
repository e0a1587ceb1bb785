"""The data that the demo chat model learns from: made by rule, from a seed, with no files."""

from .base import Dialogue, is_held_out
from .mixture import SKILLS, make_dialogue, training_dialogue

__all__ = ["SKILLS", "Dialogue", "is_held_out", "make_dialogue", "training_dialogue"]
