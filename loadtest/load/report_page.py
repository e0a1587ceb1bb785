"""The report of a load test as one self-contained HTML file with tables and plots."""

import base64
import html
import io
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.load.records import Record
from loadtest.load.report_tables import COLUMNS, LEGEND, Phase, gauge_rows, outcomes, rows
from loadtest.server.gauges import rates

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto;
       padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.6rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid #d0d7de; padding-top: 1rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { padding: 3px 9px; text-align: right; border-bottom: 1px solid #e4e8ec;
         white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
tr:last-child td { font-weight: 600; }
.verdict { padding: .6rem 1rem; border-radius: 6px; font-weight: 600; }
.good { background: #dafbe1; } .bad { background: #ffebe9; }
img { width: 100%; } .wide { overflow-x: auto; } .legend { color: #57606a; font-size: 13px; }
li { font-family: ui-monospace, monospace; font-size: 13px; }
"""
_LEGEND = re.sub("`(.+?)`", r"<code>\1</code>", html.escape(LEGEND))
_MAX_FAILURES = 100
# The server publishes counters every second, so a rate over a shorter window would be random.
_RATE_WINDOW_S = 2.0
# Most people can distinguish the colours of Okabe and Ito.
_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B8A800",
    "#7F3C8D", "#8C564B", "#888888",
)  # fmt: skip


def page(phases: Sequence[Phase], title: str, facts: Sequence[str]) -> str:
    """Return the HTML text of the report.

    Args:
        phases: the phases of the load test.
        title: the heading of the page.
        facts: lines below the heading, such as the machine and the command.
    """
    failures = [failure for phase in phases for failure in phase.failures]
    verdict = f"There were {len(failures)} failures." if failures else "There were no failures."
    shown = "".join(f"<li>{html.escape(failure)}</li>" for failure in failures[:_MAX_FAILURES])
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p class=legend>{html.escape(fact)}</p>" for fact in facts),
        f"<p class='verdict {'bad' if failures else 'good'}'>{verdict}</p>",
        f"<ul>{shown}</ul>" if failures else "",
        *(_section(phase, _colours(phases)) for phase in phases),
    ]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _colours(phases: Sequence[Phase]) -> dict[str, str]:
    """Return a colour for each scenario. A scenario has the same colour in all phases."""
    names = sorted({one.scenario for phase in phases for one in phase.records})
    return dict(zip(names, itertools.cycle(_COLOURS), strict=False))


def _section(phase: Phase, colours: dict[str, str]) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes(phase))
    heading = html.escape(f"{phase.name}: {phase.description}")
    image = base64.b64encode(picture(phase, colours)).decode()
    return (
        f"<h2>{heading}</h2><p>{html.escape(counts)}</p>"
        f"<div class=wide>{_table(COLUMNS, rows(phase))}</div><p class=legend>{_LEGEND}</p>"
        f"<img alt='plots of {html.escape(phase.name)}' src='data:image/png;base64,{image}'>"
        f"<details><summary>The server's metrics during the run</summary>"
        f"{_table(('metric', 'mean or increase', 'maximum or rate'), gauge_rows(phase))}</details>"
    )


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(cells, 'td') for cells in body)}</table>"


def picture(phase: Phase, colours: dict[str, str]) -> bytes:
    """Draw eight plots of a phase and return them as PNG."""
    colours = {name: colour for name, colour in colours.items() if name in _scenarios(phase)}
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 14), layout="constrained")
        axes = figure.subplots(4, 2)
        _throughput(axes[0, 0], phase)
        _gauges(axes[0, 1], phase)
        _firsts(axes[1, 0], phase, colours)
        for place, title, values_of in (
            (axes[1, 1], "end-to-end time of complete answers", _end_to_end_times),
            (axes[2, 0], "time to first token", _first_token_times),
            (axes[2, 1], "inter-token latency", _gaps),
        ):
            _distribution(place, phase, colours, title, values_of)
        _cache(axes[3, 0], phase)
        _merging(axes[3, 1], phase)
        handles, labels = axes[1, 0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=6, frameon=False, markerscale=2.5
        )
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _throughput(axes: Axes, phase: Phase) -> None:
    zero = _zero(phase)
    ends = [one.started + one.e2e_s - zero for one in phase.records if one.is_fine]
    counts = [0.0] * (int(max(ends, default=0.0)) + 1)
    for end in ends:
        counts[max(0, int(end))] += 1
    axes.step(range(len(counts)), counts, where="post", color=_COLOURS[0], label="answers/s")
    failed = [one.started + one.e2e_s - zero for one in phase.records if not one.is_fine]
    axes.plot(failed, [0.0] * len(failed), "x", color="#D55E00", label="failures")
    axes.set(title="throughput", xlabel="s", ylabel="answers/s")
    at, tokens = rates(phase.samples, "generation_tokens_total", _RATE_WINDOW_S)
    right = axes.twinx()
    right.spines["right"].set_visible(True)
    right.plot([t - zero for t in at], tokens, color=_COLOURS[2], lw=1, label="tokens/s (server)")
    right.set_ylabel("tokens/s")
    _from_zero(right)
    lines = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    _from_zero(axes, handles=lines)


def _gauges(axes: Axes, phase: Phase) -> None:
    for colour, name in zip(_COLOURS, ("in the executor", "running", "waiting"), strict=False):
        gauge = "num_requests" if name == "in the executor" else f"num_requests_{name}"
        _line(axes, phase, gauge, name, colour)
    axes.set(title="requests in the server", xlabel="s")
    _from_zero(axes)


def _firsts(axes: Axes, phase: Phase, colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        of_one = [
            (r.started - _zero(phase), r.ttft_s)
            for r in phase.records
            if r.scenario == name and r.is_stream and r.ttft_s is not None
        ]
        at, values = zip(*of_one, strict=True) if of_one else ((), ())
        axes.plot(at, values, ".", ms=4, color=colour, label=name)
    axes.set(title="time to first token over the run", xlabel="s", ylabel="s")
    axes.set_yscale("log")


def _end_to_end_times(records: Sequence[Record]) -> list[float]:
    return [one.e2e_s for one in records if one.outcome == "ok"]


def _first_token_times(records: Sequence[Record]) -> list[float]:
    return [one.ttft_s for one in records if one.is_stream and one.is_fine and one.ttft_s]


def _gaps(records: Sequence[Record]) -> list[float]:
    # If two chunks were read together, the time between them is almost 0. Such a time is not
    # informative.
    streams = [one for one in records if one.is_stream and one.is_fine]
    return [max(gap, 1e-4) for one in streams for gap in one.gaps_s]


def _distribution(
    axes: Axes,
    phase: Phase,
    colours: dict[str, str],
    title: str,
    values_of: Callable[[Sequence[Record]], list[float]],
) -> None:
    """Draw the cumulative distribution of a quantity in seconds, with a line for each scenario."""
    for name, colour in colours.items():
        if values := values_of([one for one in phase.records if one.scenario == name]):
            axes.ecdf(values, lw=1.2, color=colour)
    axes.set(title=title, xlabel="s", ylabel="share", xscale="log")


def _cache(axes: Axes, phase: Phase) -> None:
    _line(axes, phase, "kv_cache_blocks_used", "blocks used by requests", _COLOURS[0])
    axes.set(title="KV cache", xlabel="s", ylabel="blocks")
    _from_zero(axes)


def _merging(axes: Axes, phase: Phase) -> None:
    names = {
        "merged_responses_total": "merged updates",
        "heartbeats_total": "heartbeats",
        "requests_disconnected_total": "disconnected clients",
    }
    for colour, (name, label) in zip(_COLOURS, names.items(), strict=False):
        at, values = rates(phase.samples, name, _RATE_WINDOW_S)
        axes.plot([t - _zero(phase) for t in at], values, lw=1, color=colour, label=label)
    axes.set(title="responses", xlabel="s", ylabel="per second")
    _from_zero(axes)


def _from_zero(axes: Axes, handles: Sequence[Artist] | None = None) -> None:
    """Let the vertical axis start at 0 and reserve space for a legend above the lines."""
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]) * 1.2)
    if handles is None:
        handles = axes.get_legend_handles_labels()[0]
    if axes.get_title():
        axes.legend(handles=handles, frameon=False, loc="upper left", ncols=4)


def _line(axes: Axes, phase: Phase, name: str, label: str, colour: str) -> None:
    zero = _zero(phase)
    at = [sample.at - zero for sample in phase.samples]
    values = [sample.gauges.get(name, 0.0) for sample in phase.samples]
    axes.plot(at, values, lw=1.2, color=colour, label=label)


def _scenarios(phase: Phase) -> set[str]:
    return {one.scenario for one in phase.records}


def _zero(phase: Phase) -> float:
    return min((one.started for one in phase.records), default=0.0)


def write(path: Path, phases: Sequence[Phase], title: str, facts: Sequence[str]) -> None:
    """Write the report to a file."""
    path.write_text(page(phases, title, facts), encoding="utf-8")
