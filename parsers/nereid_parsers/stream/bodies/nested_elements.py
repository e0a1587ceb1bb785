"""Classes for the elements of nested arguments such as `~<city>Paris~</city>`.

nested_tags.py reads these elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

# An element without a declared type is an array if the name of its first child is `item`.
_ARRAY_ITEM = "item"


class ElementKind(Enum):
    """The kind of the value that an element contains.

    UNKNOWN    The text that has been read does not show the kind.
    OBJECT     The child elements are the members of an object.
    ARRAY      The child elements are the items of an array.
    STRING     The text is a string. The text is written as it arrives.
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
    """An element whose closing tag has not been read, as in `<city>Paris`.

    Attributes:
        name: The name in the element's tags. "" for the object that contains all arguments.
        schema: The JSON schema of the element's value.
        is_key_written: Whether the JSON key of the element has been written. False if the previous
            sibling has the name of this element, because the two elements may become the items of
            one array under one key.
        kind: The kind of the element's value.
        num_children: The number of children whose key has been written.
        last_child: The name of the child element that was opened last.
        delayed_values: The JSON texts of the closed children with the name `last_child`. Several
            children of one name become one array. Therefore these texts are not written until a
            child with another name opens.
    """

    name: str
    schema: Mapping[str, object]
    is_key_written: bool = True
    kind: ElementKind = ElementKind.UNKNOWN
    num_children: int = 0
    last_child: str = ""
    delayed_values: list[str] = field(default_factory=list)


def child_schema(parent: Element, name: str) -> Mapping[str, object]:
    """Return the schema of the child element `name`, or {} if the parent's schema declares none."""
    if parent.kind is ElementKind.ARRAY:
        schema = parent.schema.get("items")
    else:
        properties = parent.schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def container_kind(types: frozenset[str] | None, first_child: str) -> ElementKind:
    """Return the kind ARRAY or OBJECT for an element that has child elements.

    Examples: the types `{"array", "null"}` give ARRAY, and `{"array", "object"}` give OBJECT. If
    the schema declares no type, the first child `item` gives ARRAY, and any other first child gives
    OBJECT.

    Args:
        types: The JSON types that the schema allows for the element, or None if it declares none.
        first_child: The name of the element's first child.
    """
    if types is None:
        is_array = first_child == _ARRAY_ITEM
    else:
        is_array = "array" in types and "object" not in types
    return ElementKind.ARRAY if is_array else ElementKind.OBJECT
