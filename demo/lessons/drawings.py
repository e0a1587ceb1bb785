"""Drawings of coloured shapes and digits, and questions about them with their answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw, ImageFont

from .base import draw, listing

Point = tuple[float, float]
Question = tuple[str, str, str]

MAX_SHAPES = 4
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 60, 180),
    "orange": (245, 140, 30),
    "black": (25, 25, 25),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
# The names of the items that a patch can show. The first name means the background.
NAMES = ("background", *SHAPES, *"0123456789")
WORDS = ("no", "one", "two", "three", "four", "five", "six")
# A shape on a background of a similar colour cannot be seen.
_SIMILAR = ({"yellow", "white"}, {"yellow", "orange"}, {"purple", "blue"}, {"red", "orange"})
_NO_PICTURE = "Please send me a picture. I can only talk about drawings."
_GRID = 3


@dataclass(frozen=True)
class Item:
    """A shape or a digit in a drawing.

    Attributes:
        name: the name of the shape, or the digit.
        colour: the name of the colour.
        centre: the centre as fractions of the width and of the height.
        radius: the radius as a fraction of the shorter side.
    """

    name: str
    colour: str
    centre: Point
    radius: float

    @property
    def text(self) -> str:
        """The item in words, such as "red circle"."""
        return f"{self.colour} {self.name}"


@dataclass(frozen=True)
class Drawing:
    """A drawing with either shapes or one digit."""

    size: tuple[int, int]
    background: str
    items: tuple[Item, ...]

    @property
    def digit(self) -> str | None:
        """The digit that is drawn, or None if the drawing contains shapes."""
        return self.items[0].name if self.items and self.items[0].name.isdigit() else None

    @property
    def content(self) -> str:
        """The items without their places, such as "black: blue star, red circle, red circle"."""
        return f"{self.background}: {', '.join(sorted(item.text for item in self.items))}"


def make_drawing(rng: Random, *, held_out: bool) -> Drawing:
    """Return a random drawing for the training, or a held-out drawing for the evaluation.

    The background, the items and their colours decide whether a drawing is held out. Therefore no
    drawing of the training has the content of a held-out drawing, at whatever places.
    """

    def make() -> tuple[str, Drawing]:
        drawing = _any_drawing(rng)
        return drawing.content, drawing

    return draw(make, held_out)


def _any_drawing(rng: Random) -> Drawing:
    side = rng.randrange(96, 257)
    size = (side, round(side * rng.uniform(0.85, 1.18)))
    background = rng.choice(["white", "white", "black", *COLOURS])
    colours = [name for name in COLOURS if _is_visible(name, background)]
    if rng.random() < 0.25:
        centre = (rng.uniform(0.38, 0.62), rng.uniform(0.38, 0.62))
        digit = Item(str(rng.randrange(10)), rng.choice(colours), centre, rng.uniform(0.22, 0.36))
        return Drawing(size, background, (digit,))
    # Few kinds of shapes and colours, so that several shapes are often equal.
    kinds = rng.sample(SHAPES, rng.randint(1, 3))
    colours = rng.sample(colours, rng.randint(1, 3))
    cells = rng.sample(range(_GRID**2), rng.randint(1, MAX_SHAPES))
    items = [
        Item(rng.choice(kinds), rng.choice(colours), _place(rng, cell), rng.uniform(0.09, 0.14))
        for cell in cells
    ]
    if len(items) == 1:
        centre = (rng.uniform(0.35, 0.65), rng.uniform(0.35, 0.65))
        items = [Item(items[0].name, items[0].colour, centre, rng.uniform(0.1, 0.32))]
    return Drawing(size, background, tuple(items))


def _is_visible(colour: str, background: str) -> bool:
    return colour != background and {colour, background} not in _SIMILAR


def _place(rng: Random, cell: int) -> Point:
    """Return a random point near the centre of a cell of the grid."""
    x, y = cell % _GRID, cell // _GRID
    return tuple((at + 0.5 + rng.uniform(-0.1, 0.1)) / _GRID for at in (x, y))  # type: ignore[return-value]


def render(drawing: Drawing, rng: Random) -> Image.Image:
    """Return a drawing as an image in RGB. Colours and outlines vary a little."""
    width, height = drawing.size
    image = Image.new("RGB", drawing.size, _shade(rng, drawing.background))
    pen = ImageDraw.Draw(image)
    for item in drawing.items:
        x, y = item.centre[0] * width, item.centre[1] * height
        radius = item.radius * min(width, height)
        colour = _shade(rng, item.colour)
        if item.name.isdigit():
            font = ImageFont.load_default(2.6 * radius)
            pen.text((x, y), item.name, colour, font, anchor="mm")
        elif item.name == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), colour)
        else:
            pen.polygon(_corners(item.name, x, y, radius, rng.uniform(-0.15, 0.15)), colour)
    return image


def _shade(rng: Random, colour: str) -> tuple[int, ...]:
    return tuple(max(0, min(255, value + rng.randint(-12, 12))) for value in COLOURS[colour])


def _corners(shape: str, x: float, y: float, radius: float, turn: float) -> list[Point]:
    """Return the corners of a shape around a point, turned by an angle in radians."""
    if shape == "cross":
        arm = 0.34
        steps = [(arm, 1), (arm, arm), (1, arm), (1, -arm), (arm, -arm), (arm, -1)]
        polar = [(math.hypot(a, b), math.atan2(a, b)) for a, b in steps]
        polar += [(distance, angle + math.pi) for distance, angle in polar]
    else:
        lengths = {"square": [1.2] * 4, "triangle": [1.15] * 3, "star": [1.2, 0.48] * 5}[shape]
        first = math.pi / 4 if shape == "square" else 0.0
        polar = [
            (length, first + 2 * math.pi * number / len(lengths))
            for number, length in enumerate(lengths)
        ]
    return [
        (x + radius * d * math.sin(angle + turn), y - radius * d * math.cos(angle + turn))
        for d, angle in polar
    ]


@dataclass(frozen=True)
class PatchLabel:
    """What a patch of a drawing shows.

    Attributes:
        name: the index in `NAMES`.
        colour: the index in `COLOURS`.
        is_centre: 1 if the patch contains the centre of an item, else 0.
    """

    name: int
    colour: int
    is_centre: int


def patch_labels(drawing: Drawing, patches_per_side: int) -> list[PatchLabel]:
    """Return what each patch shows, by rows.

    A patch shows an item if it contains the item's centre, or if the patch's centre is within the
    item's radius.
    """
    width, height = drawing.size
    scale = min(width, height)
    colours = list(COLOURS)
    # The patch that contains the centre of an item, by row and column.
    items = {
        tuple(int(at * patches_per_side) for at in reversed(item.centre)): item
        for item in drawing.items
    }
    labels = []
    for number in range(patches_per_side**2):
        cell = divmod(number, patches_per_side)
        y, x = ((at + 0.5) / patches_per_side for at in cell)
        shown = items.get(cell)
        for item in drawing.items:
            distance = math.hypot((x - item.centre[0]) * width, (y - item.centre[1]) * height)
            if shown is None and distance < 1.1 * item.radius * scale:
                shown = item
        name = 0 if shown is None else NAMES.index(shown.name)
        colour = colours.index(drawing.background if shown is None else shown.colour)
        labels.append(PatchLabel(name, colour, int(cell in items)))
    return labels


def make_questions(drawing: Drawing, rng: Random) -> list[Question]:
    """Return questions about a drawing, in random order.

    Each question is a tuple of its skill, its text and its answer, such as
    ("colour", "What colour is the circle?", "Red.").
    """
    makers = [_describe, _background, *(_DIGIT if drawing.digit else _SHAPE_QUESTIONS)]
    found = [question for make in makers for question in make(drawing, rng)]
    rng.shuffle(found)
    return found


def _background(drawing: Drawing, rng: Random) -> list[Question]:
    colour = _colour_word(rng)
    text = rng.choice([f"What {colour} is the background?", f"Which {colour} is behind it?"])
    return [("background", text, _sentence(drawing.background))]


def _describe(drawing: Drawing, rng: Random) -> list[Question]:
    text = rng.choice(
        [
            "What is in this picture?",
            "What do you see?",
            "Describe the picture.",
            "Describe this image.",
            "What is shown here?",
            "What is this?",
        ]
    )
    counts = sorted(Counter(item.text for item in drawing.items).items())
    if drawing.digit:
        counted = [f"a {drawing.items[0].colour} {drawing.digit}"]
    else:
        counted = [f"{_article(name, count)} {_plural(name, count)}" for name, count in counts]
    return [("description", text, _sentence(f"{listing(counted)} on {drawing.background}"))]


def _article(name: str, count: int) -> str:
    if count > 1:
        return WORDS[count]
    return "an" if name[0] in "aeio" else "a"


def _read_digit(drawing: Drawing, rng: Random) -> list[Question]:
    item = drawing.items[0]
    digit = rng.choice(["digit", "number"])
    text = rng.choice(
        [f"What {digit} is this?", f"Which {digit} do you see?", f"Read the {digit}."]
    )
    colour = f"What {_colour_word(rng)} is the {digit}?"
    return [("digit", text, f"{item.name}."), ("colour", colour, _sentence(item.colour))]


def _count_all(drawing: Drawing, rng: Random) -> list[Question]:
    thing = rng.choice(["shapes", "things", "objects"])
    text = f"How many {thing} {rng.choice(['are there', 'do you see', 'are in the picture'])}?"
    return [("count", text, _sentence(WORDS[len(drawing.items)]))]


def _count_kind(drawing: Drawing, rng: Random) -> list[Question]:
    """Return two questions about how many shapes have a name, a colour, or both."""
    questions = []
    for has in rng.sample(_KINDS, 2):
        wanted = _like(drawing, rng)
        count = sum(has(item, wanted) for item in drawing.items)
        names = {_has_shape: wanted.name, _has_colour: f"{wanted.colour} shape"}
        name = _plural(names.get(has, wanted.text), 2)
        text = f"How many {name} {rng.choice(['are there', 'do you see'])}?"
        questions.append(("count", text, _sentence("none" if count == 0 else WORDS[count])))
    return questions


def _exists(drawing: Drawing, rng: Random) -> list[Question]:
    questions = []
    for _ in range(2):
        wanted = _like(drawing, rng)
        is_there = any(_has_both(item, wanted) for item in drawing.items)
        text = f"Is there {_article(wanted.text, 1)} {wanted.text}?"
        questions.append(("yes or no", text, "Yes." if is_there else "No."))
    return questions


def _like(drawing: Drawing, rng: Random) -> Item:
    """Return an item that shares its shape or its colour with the drawing in most cases."""
    first, second = rng.choice(drawing.items), rng.choice(drawing.items)
    name = rng.choice(SHAPES) if rng.random() < 0.25 else first.name
    colour = rng.choice(list(COLOURS)) if rng.random() < 0.25 else second.colour
    return Item(name, colour, (0, 0), 0)


def _has_shape(item: Item, wanted: Item) -> bool:
    return item.name == wanted.name


def _has_colour(item: Item, wanted: Item) -> bool:
    return item.colour == wanted.colour


def _has_both(item: Item, wanted: Item) -> bool:
    return item.text == wanted.text


def _colour_of(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for the colour of a shape that occurs once."""
    counts = Counter(item.name for item in drawing.items)
    single = [item for item in drawing.items if counts[item.name] == 1]
    if not single:
        return []
    item = rng.choice(single)
    text = f"What {_colour_word(rng)} is the {item.name}?"
    return [("colour", text, _sentence(item.colour))]


def _shape_of(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for the shape whose colour occurs once, or for the only shape."""
    counts = Counter(item.colour for item in drawing.items)
    single = [item for item in drawing.items if counts[item.colour] == 1]
    if not single:
        return []
    item = rng.choice(single)
    name = "this" if len(drawing.items) == 1 else f"the {item.colour} one"
    return [("shape", f"What shape is {name}?", _sentence(f"{_article(item.name, 1)} {item.name}"))]


def _extreme(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for the shape that is farthest to one side, if its distance to the others is clear."""
    side, axis, sign = rng.choice(
        [("left", 0, 1), ("right", 0, -1), ("at the top", 1, 1), ("at the bottom", 1, -1)]
    )
    ordered = sorted(drawing.items, key=lambda item: sign * item.centre[axis])
    if len(ordered) < 2 or abs(ordered[0].centre[axis] - ordered[1].centre[axis]) < 0.2:
        return []
    where = side if side.startswith("at") else f"on the {side}"
    answer = f"{_article(ordered[0].text, 1)} {ordered[0].text}"
    return [("position", f"What is {where}?", _sentence(answer))]


def no_picture(rng: Random) -> tuple[str, str]:
    """Return a message without a picture, and the answer."""
    texts = [
        "Hello!",
        "Hi",
        "What is 2 + 2?",
        "Who are you?",
        "What can you do?",
        "What do you see?",
    ]
    return rng.choice(texts), _NO_PICTURE


def _colour_word(rng: Random) -> str:
    return rng.choice(["colour", "color"])


def _plural(name: str, count: int) -> str:
    if count == 1:
        return name
    return f"{name}es" if name.endswith("s") else f"{name}s"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


_KINDS: list[Callable[[Item, Item], bool]] = [_has_shape, _has_colour, _has_both]
_DIGIT = [_read_digit]
_SHAPE_QUESTIONS = [_count_all, _count_kind, _exists, _colour_of, _shape_of, _extreme]
