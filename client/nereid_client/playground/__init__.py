"""The playground: a web page on which a user tries the served models.

The page is one HTML document that contains its style and its scripts, so that the browser loads no
other file.

If the server requires an API key, it sends the playground only in response to requests with the
key. A browser cannot send the key when a user opens the page, so the browser first receives the
sign-in page. The sign-in page asks the user for the key, and requests the playground with this key.
"""

import base64
import hashlib
from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse

router = APIRouter()

PATH = "/"

SCRIPTS = (
    "dom",
    "api",
    "schema_editor",
    "options",
    "message_view",
    "images",
    "chat",
    "embeddings",
    "rerank",
    "template",
    "gauges",
    "main",
)
"""The names of the playground's scripts. The scripts are joined in this order."""

_FOLDER = resources.files(__name__)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _page(name: str, style: str, script: str) -> str:
    """Insert a style sheet and a script into an HTML page, and return the page."""
    return _read(name).replace("{style}", style).replace("{script}", script)


def _hash(text: str) -> str:
    """Return the expression that allows an inline script or style in a content security policy.

    Example: `_hash("")` returns "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='".
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE = _read("style.css")
_SCRIPT = "\n".join(_read(f"scripts/{name}.js") for name in SCRIPTS)
_SIGN_IN_SCRIPT = _read("scripts/sign_in.js")
_PLAYGROUND = _page("page.html", _STYLE, _SCRIPT)
_SIGN_IN = _page("sign_in.html", _STYLE, _SIGN_IN_SCRIPT)

# The browser runs only the scripts of the playground and of the sign-in page, and connects only to
# this server. After the sign-in, the script of the sign-in page replaces the content of the page
# with the playground, but the browser continues to apply the policy of the sign-in page. This
# policy must therefore also allow the scripts of the playground.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    f"style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)} {_hash(_SIGN_IN_SCRIPT)}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get(PATH, include_in_schema=False)
@router.head(PATH, include_in_schema=False)
async def playground_page() -> HTMLResponse:
    """Return the page of the playground."""
    return HTMLResponse(_PLAYGROUND, headers=_HEADERS)


def sign_in_page() -> HTMLResponse:
    """Return the page that asks the user for the API key, with the status 401."""
    return HTMLResponse(_SIGN_IN, status_code=401, headers=_HEADERS)
