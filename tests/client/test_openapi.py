"""Tests that `GET /openapi.json` describes each route and each request field."""

import pytest
from nereid_client.openapi import FORMS, REQUEST_BODIES

pytestmark = pytest.mark.anyio


@pytest.fixture
async def schema(connect):
    async with connect() as client:
        response = await client.get("/openapi.json")
    assert response.status_code == 200
    return response.json()


def operations(schema):
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


async def test_each_route_has_a_summary_of_its_own_and_a_description(schema):
    summaries = [operation["summary"] for _, operation in operations(schema)]
    assert len(summaries) == len(set(summaries))
    for name, operation in operations(schema):
        assert operation["description"].endswith("."), name


async def test_each_request_field_has_a_description(schema):
    for model in set((REQUEST_BODIES | FORMS).values()):
        fields = schema["components"]["schemas"][model.__name__]["properties"]
        assert fields.keys() == model.model_fields.keys()
        for name, field in fields.items():
            assert field.get("description", "").endswith("."), f"{model.__name__}.{name}"


async def test_the_schema_of_an_upload_requires_a_file(schema):
    form = schema["components"]["schemas"]["UploadForm"]
    assert form["required"] == ["file", "purpose"]
    # The default value null would not match the type of the field, and validators would refuse the
    # whole document.
    assert "default" not in form["properties"]["file"]


async def test_each_post_route_has_its_body(schema):
    paths_with_body = {
        name.removeprefix("POST ")
        for name, _ in operations(schema)
        if name.startswith("POST") and not name.endswith(("/cancel", "/load", "/unload"))
    }
    assert paths_with_body == REQUEST_BODIES.keys() | FORMS.keys()
    for path, model in (REQUEST_BODIES | FORMS).items():
        content = schema["paths"][path]["post"]["requestBody"]["content"]
        media_type = "multipart/form-data" if path in FORMS else "application/json"
        reference = content[media_type]["schema"]["$ref"]
        assert reference == f"#/components/schemas/{model.__name__}"


def references(value):
    """Yield the text of each `$ref` in a JSON value, for example "#/components/schemas/Chat"."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


async def test_every_reference_in_the_schema_exists(schema):
    for reference in references(schema):
        node = schema
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]  # raises a KeyError if the reference is wrong
