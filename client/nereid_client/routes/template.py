"""POST /template/inspect."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from fastapi import APIRouter, Request, Response
from nereid_parsers.errors import NereidParsersError

from nereid_client.errors import ApiError
from nereid_client.protocol.operations.template_request import InspectRequest
from nereid_client.request_context import check_unicode, read_body, validate

router = APIRouter(tags=["Operation"])

# An analysis takes up to about a second and slows down all other requests. This executor therefore
# runs only one analysis at a time.
_EXECUTOR = ThreadPoolExecutor(1, "template")


@router.post("/template/inspect", summary="Inspect a chat template")
async def inspect_template(request: Request) -> Response:
    """Infer the chat format from a template, and describe the format as text and as JSON.

    The response is the report of `nereid template inspect --json`, with the additional key `text`.
    The analysis limits the time and the memory that a template may use.
    """
    template = validate(InspectRequest, await read_body(request)).template
    check_unicode(template)
    try:
        report = await asyncio.get_running_loop().run_in_executor(_EXECUTOR, _inspect, template)
    except NereidParsersError as error:
        raise ApiError(
            400, f"template cannot be analysed: {error}", param="template", code="invalid_template"
        ) from None
    return Response(report, media_type="application/json")


def _inspect(template: str) -> str:
    """Return a report about a chat template as JSON.

    Raises: NereidParsersError if the template is wrong or exceeds a limit.
    """
    # These modules import jinja2, which most servers never need, so they are imported only here.
    from nereid_parsers.template import analyze_template
    from nereid_parsers.template.report import report_json, report_of, report_text

    analysis = analyze_template(template)
    report = report_of("", "", analysis.format, analysis)
    return json.dumps({**json.loads(report_json(report)), "text": report_text(report)})
