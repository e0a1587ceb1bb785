"""Converts the names and labels of the Triton server's metrics to the names and labels of vLLM.

Routers and dashboards for vLLM can then read the metrics.
"""

import re
from collections.abc import Mapping

VLLM_METRICS = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "request_success_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    }
)
"""The names, without the prefix, of the metrics that have the same meaning in vLLM."""

_LINE = re.compile(r"^((?:# (?:HELP|TYPE) )?)nereid:(\w+?)((?:_bucket|_sum|_count)?[{ ].*)$", re.M)
"""Matches a line with a metric of Nereid.

The groups are "# HELP ", "# TYPE " or "", the name of the metric without "nereid:", and the rest.
"""
_MODEL_LABEL = re.compile(r'model_name="([^"]*)"')
"""Matches the label with the name of the language model in the model repository."""


def with_vllm_names(page: str, model_names: Mapping[str, str]) -> str:
    """Rename the Triton server's metrics to vLLM's names, and change the labels.

    The label `model_name` gets the name of the model in requests. The label `engine`, the number of
    the engine in vLLM, is added if it is missing. Metrics that vLLM does not have do not change.

    Example: with the model names {"llm": "chat"}, the line `nereid:num_requests_running{
    model_name="llm"} 1` becomes `vllm:num_requests_running{model_name="chat",engine="0"} 1`.

    Args:
        page: the metrics of the Triton server, in the text format of Prometheus.
        model_names: maps the name of each language model in the model repository to its name in
            requests.
    """
    return _LINE.sub(lambda match: _renamed(match, model_names), page)


def _renamed(line: re.Match[str], model_names: Mapping[str, str]) -> str:
    """Return one line of a metrics page, with the name and the labels that the metric has in vLLM.

    In comments, such as `# TYPE nereid:num_requests_running gauge`, only the name changes.
    """
    start, name, rest = line.groups()
    if name not in VLLM_METRICS:
        return line[0]  # the whole line, unchanged
    # A server with several engine processes has already added the label `engine` to its gauges.
    has_engine = 'engine="' in rest
    engine_label = "" if has_engine else ',engine="0"'

    def changed_label(label: re.Match[str]) -> str:
        model_name = model_names.get(label[1], label[1])
        escaped = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        return f'model_name="{escaped}"{engine_label}'

    return f"{start}vllm:{name}{_MODEL_LABEL.sub(changed_label, rest, count=1)}"
