"""Classes for the tokens, strings, brackets and keys of a Python literal.

python_literals.py reads the literal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from json.encoder import encode_basestring as quote_json

from nereid_parsers.stream.values.json_text import to_json
from nereid_parsers.stream.values.python_strings import StringReader


class Expected(Enum):
    """The kind of token that may come next in a literal.

    VALUE       A value: the whole literal, or the value after a key and a colon.
    FIRST_ITEM  The first item of a list or tuple, or the closing bracket.
    ITEM        An item after a comma, or the closing bracket after a trailing comma.
    FIRST_KEY   The first key of an object, or the closing brace.
    KEY         A key after a comma, or the closing brace after a trailing comma.
    COLON       The colon after a key.
    COMMA       A comma or a closing bracket. Outside all brackets, the literal is complete.
    """

    VALUE = "value"
    FIRST_ITEM = "first_item"
    ITEM = "item"
    FIRST_KEY = "first_key"
    KEY = "key"
    COLON = "colon"
    COMMA = "comma"


class StringRole(Enum):
    """The use of a string: as a key, as a value, or as a value that is converted to another type.

    KEY              A key of an object. The key is written when the colon after the key is read.
    VALUE            A value or an item. Each piece is written as soon as it is read.
    CONVERTED_VALUE  A value for which the schema allows no string. The value is written when the
                     whole string has been read and converted to another type.
    """

    KEY = "key"
    VALUE = "value"
    CONVERTED_VALUE = "converted_value"


@dataclass(frozen=True, slots=True)
class OpenString:
    """A string whose closing quote has not been read.

    Attributes:
        role: The use of the string.
        reader: The reader of the string.
        stored_parts: The JSON text that the reader has read, without quotes. The list stays empty
            for the role VALUE, because the text is then written at once.
    """

    role: StringRole
    reader: StringReader
    stored_parts: list[str]

    def whole_json(self) -> str:
        """Return the whole string as JSON text, with quotes. `role` must not be VALUE."""
        return '"' + "".join(self.stored_parts) + '"'


@dataclass(slots=True)
class Container:
    """An open list, tuple, set or object.

    Attributes:
        close: The bracket that closes the container in the model's text.
        json_close: The bracket that closes the container in the JSON text.
        has_written_key: Whether the container is an object of which a key has been written. The
            opening brace of an object is written together with the first key.
    """

    close: str
    json_close: str
    has_written_key: bool = False

    @property
    def lacks_opening_brace(self) -> bool:
        """Whether the container is an object whose opening brace has not been written."""
        return self.json_close == "}" and not self.has_written_key


@dataclass(frozen=True, slots=True)
class KeyOrItem:
    """A value such as `1` in `{1`, which may be the key of an object or the first item of a set.

    The next character shows whether the value is a key (`{1: 2}`) or an item (`{1, 2}`).

    Attributes:
        key_json: The JSON text of the value as a key, for example `"1"`.
        item_json: The JSON text of the value as an item of a set, for example `1`. A string in
            quotes has the same JSON text as a key and as an item.
    """

    key_json: str
    item_json: str

    @classmethod
    def from_string(cls, json_text: str) -> KeyOrItem:
        """Create a key or item from a string in quotes: `'a'` has the JSON text `"a"`."""
        return cls(key_json=json_text, item_json=json_text)

    @classmethod
    def from_word(cls, word: str) -> KeyOrItem:
        """Create a key or item from a word without quotes, such as `1` or `days`."""
        return cls(key_json=quote_json(word), item_json=to_json(word, types=None))

    def decoded_key(self) -> str:
        """Return the key as ordinary text, for example `city` for the JSON text `"city"`."""
        key: str = json.loads(self.key_json)
        return key
