"""The base class of request bodies, and validation functions that several bodies use."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from nereid_client.errors import FieldError, first_field_error, shown

BodyT = TypeVar("BodyT", bound="RequestBody")

_MAX_TOKEN_ID = 2**31 - 1  # the tensor `input_ids` has the type INT32


def _end_lists_at_first_error(schema: Any) -> None:  # noqa: ANN401 - a part of a schema
    """Set the option `fail_fast` of each list in a schema of pydantic.

    With this option, pydantic ends the validation of a list at the first wrong item.

    Mutates: `schema`.
    """
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _end_lists_at_first_error(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _end_lists_at_first_error(part)


class RequestBody(BaseModel):
    """The base class of all request bodies. A body may contain fields that are not declared."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return a schema that ends the validation of each list at the first wrong item.

        By default, pydantic creates an error for each wrong item. A body of 4 MB can have two
        million wrong items. Creating their errors would need 2 GB of memory and ten seconds.
        """
        schema = handler(source)
        _end_lists_at_first_error(schema)
        return schema


def validated(kind: type[BodyT], value: object, place: str) -> BodyT:
    """Validate an object in a request body, and return it as an instance of the class `kind`.

    Args:
        kind: the class that declares the fields of the object.
        value: the object.
        place: the path of the object in the body, such as "tools[0]".

    Raises: FieldError that names the first wrong field with its path in the body.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise first_field_error(error, place) from None


def check_token_ids(value: object, field: str, place: str) -> list[int]:
    """Check that `value` is a list of token ids, and return the list.

    Args:
        value: the value in the request.
        field: the name of the request field that contains the value, for the error.
        place: the path of the value, such as "prompt[1]", for the error message.

    Raises: FieldError if the value is not a list of at least one token id.
    """
    if not isinstance(value, list) or not value:
        raise FieldError(
            field,
            f"{place} must be a list of at least one token id, but the request has {shown(value)}",
        )
    for token in value:
        # isinstance(token, int) would accept true, because a Python boolean is an int.
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID:
            raise FieldError(
                field,
                f"{place} must contain integers from 0 to {_MAX_TOKEN_ID} as token ids, but the "
                f"request has {shown(token)}",
            )
    return value
