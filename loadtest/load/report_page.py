"""The report of a load test as one self-contained HTML file with tables and plots."""

import base64
import collections
import html
import io
import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.load.records import Record
from loadtest.load.report_tables import COLUMNS, LEGEND, Phase, outcomes, rows
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
    """Return the HTML text about one phase: its tables and its plots."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes(phase))
    heading = html.escape(f"{phase.name}: {phase.description}")
    image = base64.b64encode(picture(phase, colours)).decode()
    return (
        f"<h2>{heading}</h2><p>{html.escape(counts)}</p>"
        f"<div class=wide>{_table(COLUMNS, rows(phase))}</div><p class=legend>{_LEGEND}</p>"
        f"<img alt='plots of {html.escape(phase.name)}' src='data:image/png;base64,{image}'>"
    )


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return an HTML table."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(cells, 'td') for cells in body)}</table>"


def picture(phase: Phase, colours: dict[str, str]) -> bytes:
    """Draw six plots of a phase and return them as PNG. `colours` has the scenarios as keys."""
    by_scenario = {name: [one for one in phase.records if one.scenario == name] for name in colours}
    groups = [_Group(name, colours[name], of) for name, of in by_scenario.items() if of]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 10.5), layout="constrained")
        axes = figure.subplots(3, 2)
        _draw_throughput(axes[0, 0], phase)
        _draw_requests(axes[0, 1], phase)
        _draw_first_tokens(axes[1, 0], groups, phase.start)
        _draw_distribution(axes[1, 1], groups, "end-to-end time of complete answers", _e2e_times)
        _draw_distribution(axes[2, 0], groups, "time to first token", _first_token_times)
        _draw_distribution(axes[2, 1], groups, "inter-token latency", _gaps)
        handles, names = axes[1, 0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower center", ncols=6, frameon=False, markerscale=2.5
        )
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=110)
    return png.getvalue()


class _Group(NamedTuple):
    """The requests of one scenario, and the colour of the scenario."""

    scenario: str
    colour: str
    records: list[Record]


def _draw_throughput(axes: Axes, phase: Phase) -> None:
    """Draw the answers per second, the failures, and the tokens per second of the server."""
    fine = [one for one in phase.records if one.is_fine]
    answers = collections.Counter(int(one.ended - phase.start) for one in fine)
    seconds = range(max(answers, default=0) + 1)
    counts = [answers[second] for second in seconds]
    axes.step(seconds, counts, where="post", color=_COLOURS[0], label="answers/s")
    failures = [one.ended - phase.start for one in phase.records if not one.is_fine]
    axes.plot(failures, [0.0] * len(failures), "x", color=_COLOURS[3], label="failures")
    axes.set(title="throughput", xlabel="s", ylabel="answers/s")
    right = axes.twinx()
    right.spines["right"].set_visible(True)
    right.set_ylabel("tokens/s")
    _draw_rate(right, phase, "generation_tokens_total", "tokens/s (server)", _COLOURS[2])
    _start_at_zero(right)
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    _start_at_zero(axes, legend=handles)


def _draw_requests(axes: Axes, phase: Phase) -> None:
    """Draw the numbers of requests in the server."""
    _draw_gauge(axes, phase, "num_requests", "in the executor", _COLOURS[0])
    _draw_gauge(axes, phase, "num_requests_running", "running", _COLOURS[1])
    _draw_gauge(axes, phase, "num_requests_waiting", "waiting", _COLOURS[2])
    axes.set(title="requests in the server", xlabel="s")
    _start_at_zero(axes)


def _draw_first_tokens(axes: Axes, groups: Sequence[_Group], start: float) -> None:
    """Draw the time to first token of each stream at the time at which the stream started."""
    for group in groups:
        streams = [one for one in group.records if one.is_stream and one.ttft_s is not None]
        starts = [one.started - start for one in streams]
        times = [one.ttft_s or 0.0 for one in streams]
        axes.plot(starts, times, ".", ms=4, color=group.colour, label=group.scenario)
    axes.set(title="time to first token over the run", xlabel="s", ylabel="s", yscale="log")


def _e2e_times(records: Sequence[Record]) -> list[float]:
    return [one.e2e_s for one in records if one.outcome == "ok"]


def _first_token_times(records: Sequence[Record]) -> list[float]:
    return [one.ttft_s for one in records if one.is_stream and one.is_fine and one.ttft_s]


def _gaps(records: Sequence[Record]) -> list[float]:
    # If two chunks were read together, the time between them is almost 0. Such a time is not
    # informative.
    streams = [one for one in records if one.is_stream and one.is_fine]
    return [max(gap, 1e-4) for one in streams for gap in one.gaps_s]


def _draw_distribution(
    axes: Axes,
    groups: Sequence[_Group],
    title: str,
    times_of: Callable[[Sequence[Record]], list[float]],
) -> None:
    """Draw the cumulative distribution of the seconds that `times_of` returns for requests."""
    for group in groups:
        if times := times_of(group.records):
            axes.ecdf(times, lw=1.2, color=group.colour)
    axes.set(title=title, xlabel="s", ylabel="share", xscale="log")


def _draw_gauge(axes: Axes, phase: Phase, gauge: str, label: str, colour: str) -> None:
    """Draw the values of a gauge of the server."""
    times = [sample.at - phase.start for sample in phase.samples]
    values = [sample.gauges.get(gauge, 0.0) for sample in phase.samples]
    axes.plot(times, values, lw=1.2, color=colour, label=label)


def _draw_rate(axes: Axes, phase: Phase, counter: str, label: str, colour: str) -> None:
    """Draw the rate per second of a counter of the server."""
    ends, values = rates(phase.samples, counter, _RATE_WINDOW_S)
    axes.plot([end - phase.start for end in ends], values, lw=1, color=colour, label=label)


def _start_at_zero(axes: Axes, legend: Sequence[Artist] | None = None) -> None:
    """Let the vertical axis start at 0, and draw the legend above the lines.

    Args:
        axes: the plot. A plot without a title gets no legend.
        legend: the lines of the legend, or None for all lines of the plot.
    """
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]) * 1.2)
    if axes.get_title():
        handles = axes.get_legend_handles_labels()[0] if legend is None else legend
        axes.legend(handles=handles, frameon=False, loc="upper left", ncols=4)
