r"""Infers the output syntax of a model from its chat template. Start at `analyze_template`.

The analysis does not read the logic of a template. It renders *probes*, which are conversations
with texts that occur in no template, and compares the renderings. Two probes that differ in one
thing show one part of the format. An example:

    >>> template = '''
    ... {%- for m in messages %}
    ... {{- '<|im_start|>' + m.role + '\n' }}
    ... {%- if m.reasoning %}{{ '<think>' + m.reasoning + '</think>' }}{% endif %}
    ... {{- m.content }}
    ... {%- for c in m.tool_calls %}
    ... {{- '<tool_call>' + c.function | tojson + '</tool_call>' }}
    ... {%- endfor %}
    ... {{- '<|im_end|>\n' }}
    ... {%- endfor %}
    ... {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}'''

    Probe                 user: "Quokka asks for something."
                          assistant: "Wombat gives the answer."
    Rendered answer       <|im_start|>assistant\nWombat gives the answer.<|im_end|>\n
    Changed probe         The assistant's message has the reasoning "Numbat thinks about it."
    Rendered answer       <|im_start|>assistant\n<think>Numbat thinks about it.</think>Wombat
                          gives the answer.<|im_end|>\n
    Added text            <think>Numbat thinks about it.</think>
    Derived markers       `<think>` opens reasoning, and `</think>` closes reasoning.

    >>> analyze_template(template).format.layout.reasoning.closes
    ('</think>',)

The analysis has seven phases, and each phase is a module. For each comparison, the table shows what
differs between the two probes, and what the analysis finds for the template of the example.

    probe.py       Find a form of messages that the template renders, see conversation.py.
    header.py      Find the text that opens the model's turn.
                     G   the generation prompt       <|im_start|>assistant\n is the header
    reasoning.py   Find the markers of reasoning. R2 to R4 are needed only if R1 finds no markers.
                     R1  reasoning in a message      <think> and </think> are the markers
                     R2  a thinking switch           (the template has no switch)
                     R3  a thinking switch           (the template has no switch)
                     R4  (searches the source)       (not needed)
                     R5  reasoning before a call     </think> is written there, too
    content.py     Find the markers around content, and what ends a turn.
                     C1  an answer                   no markers; <|im_end|> ends the turn
                     C2  content before a call       no markers
    tools.py       Find the markup of tool calls. The modules of calls/ infer its format.
                     T1  a call instead of content   <tool_call>{..}</tool_call> is a call
                     T2  a second call               calls follow each other without a separator
                     T3  another function            the key `name` contains the name
                     T4 to T7  other arguments       the key `arguments` contains the arguments
                     T8  content before a call       a message can have content and calls
    verify_format.py
                   Parse the renderings with the format. The result must be equal to the probes.
    report.py      Show the comparisons, the format and the samples.

The module build_format.py combines the findings into a format. For the example, the format has
the layout `Sections(Reasoning("<think>", "</think>"), None, tools)`.
Here `tools` declares that each call is a JSON object between `<tool_call>` and `</tool_call>`.

The comparisons cannot show everything. The module quarantine.py declares the formats of templates
whose renderings are ambiguous. The module known_formats.py declares the forms of tool calls that a
model writes but its template does not render.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from nereid_parsers.template.build_format import (
    CheckedFormat,
    Findings,
    check_format,
    make_checked_format,
)
from nereid_parsers.template.calls.call_renderer import CallRenderer
from nereid_parsers.template.content import find_content_markers, find_content_markers_beside_calls
from nereid_parsers.template.conversation import BOS_TOKEN, EOS_TOKEN, InputForm
from nereid_parsers.template.header import find_model_turn
from nereid_parsers.template.model_turn import ModelTurn
from nereid_parsers.template.probe import Prober
from nereid_parsers.template.quarantine import QuarantineEntry, find_quarantined
from nereid_parsers.template.reasoning.reasoning import find_reasoning
from nereid_parsers.template.reasoning.rendered_reasoning import find_rendered_reasoning
from nereid_parsers.template.report import Supports, TemplateAnalysis
from nereid_parsers.template.sandbox.compile_template import CompiledTemplate
from nereid_parsers.template.sandbox.limits import Budget
from nereid_parsers.template.tools import (
    NO_CALLS,
    ToolFindings,
    find_tools,
    record_one_call,
    record_two_calls,
    render_one_call,
    render_two_calls,
)

# If quarantine.py declares the format of the tool calls, the report shows this word. Otherwise, the
# format is inferred, and the report shows its syntax, such as "JSON".
_DECLARED_FORM = "recognised"


def analyze_template(
    jinja_source: str,
    bos_token: str = "",
    eos_token: str = "",
    **template_kwargs: Any,  # noqa: ANN401  # a template may read variables of any type
) -> TemplateAnalysis:
    """Infer from a chat template how the model writes reasoning, content and tool calls.

    The main result is a `Format`. With this format, the parser splits the output of the model into
    reasoning, content and tool calls. Example: if the template renders an answer as
    `<think>REASONING</think>CONTENT`, then `<think>` and `</think>` enclose reasoning in the
    format. The result also contains the comparisons of renderings that show the format.

    Args:
        jinja_source: The template.
        bos_token: The tokenizer's token for the beginning of a text, if known.
        eos_token: The tokenizer's token for the end of a turn, if known.
        template_kwargs: Template variables that are set in every rendering. The analysis does not
            try other values of these variables.

    Raises:
        TemplateError: The template does not compile.
        LimitError: The template exceeds a limit of `template/sandbox/limits.py`. A LimitError is a
            TemplateError.
    """
    return analyze_checkpoint_template(jinja_source, bos_token, eos_token, template_kwargs)


def analyze_checkpoint_template(
    jinja_source: str,
    bos_token: str = "",
    eos_token: str = "",
    template_kwargs: Mapping[str, Any] | None = None,
    added_tokens: Collection[str] = (),
) -> TemplateAnalysis:
    """Infer the output format from a chat template and from the tokens added to the tokenizer.

    If the template renders no tool calls, added tokens such as "<tool_call>" can show the format of
    the tool calls.

    Args:
        jinja_source: The template.
        bos_token: The tokenizer's token for the beginning of a text, if known.
        eos_token: The tokenizer's token for the end of a turn, if known.
        template_kwargs: Template variables that are set in every rendering.
        added_tokens: The tokens that were added to the tokenizer's vocabulary.
    """

    def analyze(declared_format: QuarantineEntry | None) -> TemplateAnalysis:
        # The prober renders test conversations with the template, and stores the findings for the
        # report.
        prober = Prober(
            CompiledTemplate(jinja_source, Budget()),
            bos=bos_token or BOS_TOKEN,
            eos=eos_token or EOS_TOKEN,
            kwargs=template_kwargs or {},
            added_tokens=frozenset(added_tokens),
        )
        return _analyze(prober, declared_format)

    inferred = analyze(None)
    # The format of a few templates cannot be inferred. For these templates, quarantine.py declares
    # the format. For all other templates, the result of the search is None.
    declared_format = find_quarantined(jinja_source)
    if declared_format is None:
        return inferred
    # quarantine.py recognises a template by texts in its source. Another template may contain the
    # same texts, although the declared format does not fit. Therefore, both formats parse rendered
    # messages, and the inferred format is used if it parses fewer of them wrongly.
    declared = analyze(declared_format)
    is_inferred_better = _num_wrong_messages(inferred) < _num_wrong_messages(declared)
    return inferred if is_inferred_better else declared


def _num_wrong_messages(analysis: TemplateAnalysis) -> int:
    """Return the number of rendered messages that the inferred format parses wrongly."""
    return sum(bool(proof.differs) for proof in analysis.proofs)


def _analyze(prober: Prober, declared_format: QuarantineEntry | None) -> TemplateAnalysis:
    """Infer the format of a model's output, unless the format is declared. Check the format.

    `declared_format` is the entry of quarantine.py for a template whose format cannot be inferred.
    For all other templates, it is None.

    Mutates: `prober`, which renders all conversations. It stores the form in which the template
    expects messages (`prober.form`), the comparisons, and sentences that state what could not be
    inferred (`prober.undecided`).
    """
    prober.choose_content_form()  # Sets `prober.form`, the form for messages without tool calls.
    form_with_calls = prober.find_call_form(content_form=prober.form)
    renders_calls = form_with_calls is not None
    # If the template renders tool calls, the form for tool calls is used for all messages.
    prober.form = form_with_calls or prober.form
    turn = find_model_turn(prober)  # The text around the model's answers.
    if declared_format is None:
        checked = _infer_format(turn)
    else:
        checked = _check_declared_format(turn, declared_format, renders_calls=renders_calls)
    return _make_analysis(prober, checked)


def _make_analysis(prober: Prober, checked: CheckedFormat) -> TemplateAnalysis:
    """Combine the checked format with the comparisons and problems that `prober` has recorded."""
    return TemplateAnalysis(
        checked.format,
        comparisons=tuple(prober.comparisons),
        supports=_supported_features(checked.findings, prober.form),
        undecided=(*_problems_of_template(prober.template), *prober.undecided, *checked.problems),
        proofs=tuple(checked.proofs),
    )


def _problems_of_template(template: CompiledTemplate) -> list[str]:
    """Return a sentence for the report if the template has statements that transformers forbids."""
    if template.changes_lists:
        return ["The template changes lists, which the sandbox of transformers forbids."]
    return []


def _infer_format(turn: ModelTurn) -> CheckedFormat:
    """Infer the format of a model's output from rendered conversations, and check the format.

    Each step compares renderings of conversations to find one part of the format: reasoning, then
    content, then tool calls. Example: a template that renders `<think>REASONING</think>CONTENT`
    gives a format in which `<think>` and `</think>` enclose reasoning. To check the format, the
    parser parses rendered messages with this format.

    Mutates: `turn.prober`, which stores the comparisons and problems for the report.
    """
    reasoning = find_reasoning(turn)
    content = find_content_markers(turn, reasoning)
    # From now on, the markers that end an assistant message, such as `<|im_end|>`, are known.
    turn_with_ends = replace(turn, end_markers=content.end_markers)
    # Some templates write markers around the content, such as `<answer>`, only in messages that
    # also contain tool calls.
    wrapper = content.wrapper or find_content_markers_beside_calls(turn_with_ends, reasoning.part)
    tools = find_tools(turn_with_ends, reasoning.part, wrapper)
    return make_checked_format(turn_with_ends, Findings(reasoning, tools, wrapper))


def _check_declared_format(
    turn: ModelTurn, declared_format: QuarantineEntry, *, renders_calls: bool
) -> CheckedFormat:
    """Check a declared format: parse rendered messages with it. Return the format and the messages.

    `declared_format` is an entry of quarantine.py, which declares formats that the analysis cannot
    infer. Two things are not declared, and are therefore inferred: the markers that end a message,
    such as `<|im_end|>`, which are added to the format, and the features of the template, such as
    several tool calls in one message. `renders_calls` states whether the template renders tool
    calls. In the result, `problems` contains the reason why the format is declared.

    Mutates: `turn.prober`. Its `form` becomes the form of messages from which the template reads
    reasoning. The prober also stores the comparisons for the report.
    """
    reasoning = find_rendered_reasoning(turn)
    turn.prober.form = reasoning.form  # All conversations below are rendered in this form.
    tools = _find_features_of_calls(turn, renders_calls=renders_calls)
    end_markers = find_content_markers(turn, reasoning).end_markers
    format_with_ends = declared_format.make_format(end_markers)
    turn_with_ends = replace(turn, end_markers=end_markers)
    # The declaration already contains the markers around the content, so the findings omit them.
    checked = check_format(format_with_ends, turn_with_ends, Findings(reasoning, tools))
    return checked._replace(problems=(*checked.problems, _describe_declaration(declared_format)))


def _describe_declaration(entry: QuarantineEntry) -> str:
    """Return text for the report that names the model, and states why its format is declared."""
    return f"The format was recognised, not inferred ({entry.model}). {entry.reason}"


def _find_features_of_calls(turn: ModelTurn, *, renders_calls: bool) -> ToolFindings:
    """Find out whether the template renders several tool calls in one message.

    The declared format contains the markup of tool calls, but not whether a message can have
    several tool calls. Therefore, a message with two tool calls is rendered. The attribute `part`
    of the result, the markup, is None. `renders_calls` is true if the template renders tool calls.

    Mutates: `turn.prober`, which records two comparisons for the report: "T1" adds a tool call to a
        message, and "T2" adds a second tool call.
    """
    renderer = CallRenderer(turn)
    one_call = render_one_call(renderer)
    record_one_call(turn.prober, one_call)
    two_calls = render_two_calls(renderer)  # "" if a message can have only one tool call.
    record_two_calls(turn.prober, two_calls)
    return ToolFindings(
        form=_DECLARED_FORM if renders_calls else NO_CALLS,
        is_parallel=bool(two_calls),
    )


def _supported_features(findings: Findings, form: InputForm) -> Supports:
    """Return which features a template supports, such as several tool calls in one message."""
    reasoning = findings.reasoning
    tools = findings.tools
    return Supports(
        content=True,  # Every format contains content.
        reasoning=reasoning.fields,
        switches=reasoning.switches,
        calls=tools.form,
        parallel_calls=tools.is_parallel,
        content_with_calls=tools.with_content,
        arguments=form.arguments,
        ids=form.ids,
    )
