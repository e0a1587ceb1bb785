"""A formatter for the documentation site that draws Mermaid diagrams as SVG.

Code hosts draw Mermaid diagrams in the reader's browser with a script from another server. The
documentation site must not load anything from other servers, so its diagrams are drawn here.
"""

from typing import Any

import mmdr


def draw(source: str, *_: object, **__: Any) -> str:  # noqa: ANN401 - the interface of pymdownx
    r"""Return a Mermaid diagram as an SVG element, for `pymdownx.superfences`.

    Args:
        source: the text of the fenced code block, for example "flowchart LR\n  a --> b".
    """
    return f'<div class="diagram">{mmdr.render(source).svg()}</div>'
