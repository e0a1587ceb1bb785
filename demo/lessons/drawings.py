"""Drawings of coloured shapes and digits, and questions about them with their answers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from .base import Candidate, capitalised, draw, listing, with_article

Point = tuple[float, float]

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
# Each shape lies near the middle of a cell of a grid with this number of rows and columns.
_GRID = 3


class Question(NamedTuple):
    """A question about a drawing.

    Example: `Question("colour", "What colour is the circle?", "Red.")`.
    """

    skill: str
    text: str
    answer: str


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

    def propose() -> Candidate[Drawing]:
        drawing = _any_drawing(rng)
        return Candidate(key=drawing.content, example=drawing)

    return draw(propose, held_out)


def _any_drawing(rng: Random) -> Drawing:
    """Draw a size, a background, and either one digit or up to four shapes."""
    width = rng.randrange(96, 257)
    height = round(width * rng.uniform(0.85, 1.18))
    background = rng.choice(["white", "white", "black", *COLOURS])
    colours = [name for name in COLOURS if _is_visible(name, background)]
    items = [_digit(rng, colours)] if rng.random() < 0.25 else _shapes(rng, colours)
    return Drawing((width, height), background, tuple(items))


def _digit(rng: Random, colours: list[str]) -> Item:
    """Draw a large digit near the middle."""
    centre = (rng.uniform(0.38, 0.62), rng.uniform(0.38, 0.62))
    digit = str(rng.randrange(10))
    return Item(digit, rng.choice(colours), centre, radius=rng.uniform(0.22, 0.36))


def _shapes(rng: Random, colours: list[str]) -> list[Item]:
    """Draw shapes in different cells of the grid, or one shape of any size near the middle."""
    # Few kinds of shapes and colours, so that several shapes are often equal.
    kinds = rng.sample(SHAPES, rng.randint(1, 3))
    colours = rng.sample(colours, rng.randint(1, 3))
    cells = rng.sample(range(_GRID**2), rng.randint(1, MAX_SHAPES))
    shapes = [
        Item(rng.choice(kinds), rng.choice(colours), _place(rng, cell), rng.uniform(0.09, 0.14))
        for cell in cells
    ]
    if len(shapes) > 1:
        return shapes
    centre = (rng.uniform(0.35, 0.65), rng.uniform(0.35, 0.65))
    return [replace(shapes[0], centre=centre, radius=rng.uniform(0.1, 0.32))]


def _is_visible(colour: str, background: str) -> bool:
    return colour != background and {colour, background} not in _SIMILAR


def _place(rng: Random, cell: int) -> Point:
    """Return a random point near the centre of a cell of the grid."""
    row, column = divmod(cell, _GRID)
    x = (column + 0.5 + rng.uniform(-0.1, 0.1)) / _GRID
    y = (row + 0.5 + rng.uniform(-0.1, 0.1)) / _GRID
    return x, y


def render(drawing: Drawing, rng: Random) -> Image.Image:
    """Return a drawing as an image in RGB. Colours and outlines vary a little."""
    image = Image.new("RGB", drawing.size, _shade(rng, drawing.background))
    pen = ImageDraw.Draw(image)
    for item in drawing.items:
        _draw_item(pen, item, drawing.size, rng)
    return image


def _draw_item(
    pen: ImageDraw.ImageDraw, item: Item, image_size: tuple[int, int], rng: Random
) -> None:
    """Draw a digit, a circle or the polygon of another shape."""
    width, height = image_size
    x, y = item.centre[0] * width, item.centre[1] * height
    radius = item.radius * min(width, height)
    colour = _shade(rng, item.colour)
    if item.name.isdigit():
        font = ImageFont.load_default(2.6 * radius)
        pen.text((x, y), item.name, colour, font, anchor="mm")
    elif item.name == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), colour)
    else:
        turn = rng.uniform(-0.15, 0.15)
        pen.polygon(_corners(item.name, (x, y), radius, turn), colour)


def _shade(rng: Random, colour: str) -> tuple[int, ...]:
    """Return the RGB values of a colour with a small random change."""
    return tuple(max(0, min(255, value + rng.randint(-12, 12))) for value in COLOURS[colour])


class _Polar(NamedTuple):
    """A corner of a shape of radius 1. The angle starts at the top and grows clockwise."""

    distance: float
    angle: float


def _corners(shape: str, centre: Point, radius: float, turn: float) -> list[Point]:
    """Return the corners of a shape that is turned by an angle in radians."""
    x, y = centre
    corners = _cross_corners() if shape == "cross" else _star_corners(shape)
    return [
        (
            x + radius * corner.distance * math.sin(corner.angle + turn),
            y - radius * corner.distance * math.cos(corner.angle + turn),
        )
        for corner in corners
    ]


def _cross_corners() -> list[_Polar]:
    """Return the twelve corners of a cross whose arms have the length 1."""
    arm = 0.34  # half the width of an arm
    right_half = [(arm, 1), (arm, arm), (1, arm), (1, -arm), (arm, -arm), (arm, -1)]
    corners = [_Polar(math.hypot(x, y), math.atan2(x, y)) for x, y in right_half]
    left_half = [_Polar(corner.distance, corner.angle + math.pi) for corner in corners]
    return corners + left_half


def _star_corners(shape: str) -> list[_Polar]:
    """Return the corners of a square, triangle or star, which have equal angles between them."""
    distances = {"square": [1.2] * 4, "triangle": [1.15] * 3, "star": [1.2, 0.48] * 5}[shape]
    first_angle = math.pi / 4 if shape == "square" else 0.0
    return [
        _Polar(distance, first_angle + 2 * math.pi * number / len(distances))
        for number, distance in enumerate(distances)
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

    A patch shows an item if it contains the item's centre, or if the item covers its middle.
    """
    items_by_patch = {
        (int(y * patches_per_side), int(x * patches_per_side)): item
        for item in drawing.items
        for x, y in [item.centre]
    }
    colours = list(COLOURS)
    labels = []
    for row, column in itertools.product(range(patches_per_side), repeat=2):
        middle = ((column + 0.5) / patches_per_side, (row + 0.5) / patches_per_side)
        item = items_by_patch.get((row, column)) or _item_at(drawing, middle)
        name, colour = (item.name, item.colour) if item else ("background", drawing.background)
        is_centre = int((row, column) in items_by_patch)
        labels.append(PatchLabel(NAMES.index(name), colours.index(colour), is_centre))
    return labels


def _item_at(drawing: Drawing, point: Point) -> Item | None:
    """Return the first item that covers a point, or None."""
    width, height = drawing.size
    for item in drawing.items:
        distance = math.hypot(
            (point[0] - item.centre[0]) * width, (point[1] - item.centre[1]) * height
        )
        # The corners of most shapes are up to 20 % farther from the centre than the radius.
        if distance < 1.1 * item.radius * min(width, height):
            return item
    return None


def make_questions(drawing: Drawing, rng: Random) -> list[Question]:
    """Return questions about a drawing, in random order."""
    makers = [_describe, _background, *(_DIGIT if drawing.digit else _SHAPE_QUESTIONS)]
    questions = [question for make in makers for question in make(drawing, rng)]
    rng.shuffle(questions)
    return questions


def _background(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for the colour of the background."""
    colour = _colour_word(rng)
    text = rng.choice([f"What {colour} is the background?", f"Which {colour} is behind it?"])
    return [Question("background", text, _as_sentence(drawing.background))]


def _describe(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for a description, such as `A red star and two blue circles on white.`."""
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
    if drawing.digit:
        content = f"a {drawing.items[0].colour} {drawing.digit}"
    else:
        counts = Counter(item.text for item in drawing.items)
        content = listing(_counted(name, counts[name]) for name in sorted(counts))
    answer = _as_sentence(f"{content} on {drawing.background}")
    return [Question("description", text, answer)]


def _read_digit(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for the digit and for its colour."""
    item = drawing.items[0]
    digit = rng.choice(["digit", "number"])
    text = rng.choice(
        [f"What {digit} is this?", f"Which {digit} do you see?", f"Read the {digit}."]
    )
    colour_text = f"What {_colour_word(rng)} is the {digit}?"
    return [
        Question("digit", text, f"{item.name}."),
        Question("colour", colour_text, _as_sentence(item.colour)),
    ]


def _count_all(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for the number of shapes."""
    thing = rng.choice(["shapes", "things", "objects"])
    text = f"How many {thing} {rng.choice(['are there', 'do you see', 'are in the picture'])}?"
    return [Question("count", text, _as_sentence(WORDS[len(drawing.items)]))]


def _count_kind(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask two questions such as `How many red shapes are there?`."""
    questions = []
    for aspect in rng.sample(["shape", "colour", "shape and colour"], 2):
        noun = _noun(_wanted_item(drawing, rng), aspect)
        count = sum(_noun(item, aspect) == noun for item in drawing.items)
        text = f"How many {_plural(noun)} {rng.choice(['are there', 'do you see'])}?"
        questions.append(Question("count", text, _as_sentence(WORDS[count] if count else "none")))
    return questions


def _noun(item: Item, aspect: str) -> str:
    """Return the noun for all items that have the same shape, colour, or shape and colour.

    Example: `circle`, `red shape` or `red circle`.
    """
    return {
        "shape": item.name,
        "colour": f"{item.colour} shape",
        "shape and colour": item.text,
    }[aspect]


def _exists(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask two questions such as `Is there a red circle?`."""
    questions = []
    for _ in range(2):
        wanted = _wanted_item(drawing, rng).text
        exists = any(item.text == wanted for item in drawing.items)
        text = f"Is there {with_article(wanted)}?"
        questions.append(Question("yes or no", text, "Yes." if exists else "No."))
    return questions


def _wanted_item(drawing: Drawing, rng: Random) -> Item:
    """Return an item to ask for. In most cases, its shape and its colour occur in the drawing."""
    first, second = rng.choice(drawing.items), rng.choice(drawing.items)
    name = rng.choice(SHAPES) if rng.random() < 0.25 else first.name
    colour = rng.choice(list(COLOURS)) if rng.random() < 0.25 else second.colour
    return Item(name, colour, centre=(0, 0), radius=0)


def _colour_of(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for the colour of a shape that occurs once."""
    counts = Counter(item.name for item in drawing.items)
    unique = [item for item in drawing.items if counts[item.name] == 1]
    if not unique:
        return []
    item = rng.choice(unique)
    text = f"What {_colour_word(rng)} is the {item.name}?"
    return [Question("colour", text, _as_sentence(item.colour))]


def _shape_of(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for the shape whose colour occurs once, or for the only shape."""
    counts = Counter(item.colour for item in drawing.items)
    unique = [item for item in drawing.items if counts[item.colour] == 1]
    if not unique:
        return []
    item = rng.choice(unique)
    subject = "this" if len(drawing.items) == 1 else f"the {item.colour} one"
    return [Question("shape", f"What shape is {subject}?", _as_sentence(with_article(item.name)))]


class _Side(NamedTuple):
    """A side of the drawing. The coordinate of its axis is 0 at the left and at the top."""

    words: str
    axis: int
    is_at_zero: bool


_SIDES = (
    _Side("on the left", axis=0, is_at_zero=True),
    _Side("on the right", axis=0, is_at_zero=False),
    _Side("at the top", axis=1, is_at_zero=True),
    _Side("at the bottom", axis=1, is_at_zero=False),
)
_CLEAR_DISTANCE = 0.2


def _extreme(drawing: Drawing, rng: Random) -> list[Question]:
    """Ask for the shape that is farthest to one side, if the next shape is not near that side."""
    side = rng.choice(_SIDES)
    ordered = sorted(
        drawing.items,
        key=lambda item: item.centre[side.axis] if side.is_at_zero else -item.centre[side.axis],
    )
    if len(ordered) < 2:
        return []
    first, second = ordered[:2]
    if abs(first.centre[side.axis] - second.centre[side.axis]) < _CLEAR_DISTANCE:
        return []
    answer = _as_sentence(with_article(first.text))
    return [Question("position", f"What is {side.words}?", answer)]


def no_picture(rng: Random) -> Question:
    """Return a message without a picture. The answer asks for a picture."""
    texts = [
        "Hello!",
        "Hi",
        "What is 2 + 2?",
        "Who are you?",
        "What can you do?",
        "What do you see?",
    ]
    answer = "Please send me a picture. I can only talk about drawings."
    return Question("no picture", rng.choice(texts), answer)


def _colour_word(rng: Random) -> str:
    return rng.choice(["colour", "color"])


def _counted(noun: str, count: int) -> str:
    """Return words such as `a red star` or `two red stars`."""
    return with_article(noun) if count == 1 else f"{WORDS[count]} {_plural(noun)}"


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def _as_sentence(text: str) -> str:
    return f"{capitalised(text)}."


_DIGIT = [_read_digit]
_SHAPE_QUESTIONS = [_count_all, _count_kind, _exists, _colour_of, _shape_of, _extreme]
