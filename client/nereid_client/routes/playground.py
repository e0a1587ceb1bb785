"""GET /."""

from fastapi import APIRouter, Response

from nereid_client.playground import PATH, playground_page

router = APIRouter()


@router.get(PATH, include_in_schema=False)
@router.head(PATH, include_in_schema=False)
async def playground() -> Response:
    """Return the page with which a user tries the served models in a browser."""
    return playground_page()
