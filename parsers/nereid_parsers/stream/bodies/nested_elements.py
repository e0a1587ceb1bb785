"""Defines the classes for XML-like elements in arguments, for example `<city>Paris</city>`.

convert_nested_tags.py reads these elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from json.encoder import encode_basestring as quote_json

from nereid_parsers.stream.values.json_text import to_json

# The schema may declare no type for an element. If the first child of such an element is called
# `item`, the element is treated as an array.
_ARRAY_ITEM = "item"
_CONTAINER_TYPES = frozenset({"array", "object"})


class ElementKind(Enum):
    """The kind of value that an element contains. Example: `<city>Paris</city>` contains a string.

    UNKNOWN    The text that has been read does not show the kind.
    OBJECT     The child elements are the members of an object.
    ARRAY      The child elements are the items of an array.
    STRING     The text is a string, and each piece of the text is written when the piece arrives.
    VALUE      The text has another type, or its type is not known. The text is stored until the
               element closes, because only the complete text shows its type.
    """

    UNKNOWN = "unknown"
    OBJECT = "object"
    ARRAY = "array"
    STRING = "string"
    VALUE = "value"


@dataclass(slots=True)
class Element:
    """An element whose closing tag has not been read yet, for example `<city>Paris`.

    Successive children with the same name become the items of one JSON array. Therefore, the value
    of a child is stored when the child closes, and is written when a child with another name opens
    or when the parent closes.

    Attributes:
        name: The name in the element's tags. "" for the object that contains all arguments.
        schema: The JSON schema of the element's value.
        types: The JSON types that the schema allows, or None if the schema declares no type.
        shares_key: Whether no JSON key has been written for this element. The reason is that the
            previous sibling has the same name, so the two elements may become items of one array.
        kind: The kind of the element's value.
        text_pieces: The stored text of an element of kind VALUE.
        num_children: The number of children whose key has been written.
        last_child: The name of the child element that was opened last.
        stored_values: The values of closed children that have not been written yet, as JSON texts.
            All these children have the name `last_child`.
    """

    name: str
    schema: Mapping[str, object]
    types: frozenset[str] | None
    shares_key: bool = False
    kind: ElementKind = ElementKind.UNKNOWN
    text_pieces: list[str] = field(default_factory=list)
    num_children: int = 0
    last_child: str = ""
    stored_values: list[str] = field(default_factory=list)

    def child_schema(self, name: str) -> Mapping[str, object]:
        """Return the JSON schema of the child element `name`, or {} if the child has no schema."""
        if self.kind is ElementKind.ARRAY:
            schema = self.schema.get("items")
        else:
            properties = self.schema.get("properties")
            schema = properties.get(name) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def container_kind(self, first_child: str | None) -> ElementKind:
        """Return the kind of this element: ARRAY or OBJECT. The schema or the first child decides.

        Examples: the types `{"array", "null"}` give ARRAY, and `{"array", "object"}` give OBJECT.
        If the schema declares no type, the first child `item` gives ARRAY, and a first child with
        any other name, or with an unknown name (None), gives OBJECT.
        """
        if self.types is None:
            is_array = first_child == _ARRAY_ITEM
        else:
            is_array = "array" in self.types and "object" not in self.types
        return ElementKind.ARRAY if is_array else ElementKind.OBJECT

    def value_as_json(self) -> str:
        """Convert the stored text of this element to JSON, and return the JSON text.

        Example: for `~<days>3~</days>`, the result is `3`. For an element without text, the result
        is `[]` or `{}` if the schema allows only arrays or objects.
        """
        text = "".join(self.text_pieces)
        is_empty = not text.strip()
        if is_empty and self.types is not None and self.types <= _CONTAINER_TYPES:
            return "[]" if "array" in self.types else "{}"
        return to_json(text, self.types)

    def has_stored_value_of(self, child: str) -> bool:
        """Return whether the value of an earlier child named `child` has not been written yet.

        Example: after `~<tag>a~</tag>`, the value `"a"` of `tag` is stored, because another `tag`
        may follow, and the two values would become one array.
        """
        return child == self.last_child and bool(self.stored_values)

    def may_become_item_in(self, parent: Element) -> bool:
        """Return whether the value of this element may become an item of a new array in `parent`.

        If an object has several children of one name, such as `<tag>a</tag><tag>b</tag>`, their
        values become the items of one array, if the schema allows an array. If `parent` is itself
        an array, no new array is needed.
        """
        schema_allows_array = self.types is None or "array" in self.types
        return parent.kind is ElementKind.OBJECT and schema_allows_array

    def add_key(self, child: str) -> str:
        """Return the JSON text that precedes the value of a new child, for example `"days": `.

        Increase `num_children`. Examples for the new child `days`: `"days": ` for the first child
        of an object, `, "days": ` for the second child of an object, and `, ` for the second child
        of an array.
        """
        comma = ", " if self.num_children else ""
        key = f"{quote_json(child)}: " if self.kind is ElementKind.OBJECT else ""
        self.num_children += 1
        return comma + key

    def take_stored_values(self) -> str:
        """Remove all values from `stored_values`, and return one JSON text that contains them.

        Example: after `~<tag>a~</tag>~<tag>b~</tag>`, the result is the array `["a", "b"]`. After
        `~<tag>a~</tag>` alone, the result is `"a"`. If there are no values, the result is "".
        """
        values = self.stored_values
        self.stored_values = []
        return f"[{', '.join(values)}]" if len(values) > 1 else "".join(values)
