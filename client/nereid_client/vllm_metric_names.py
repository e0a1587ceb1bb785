"""Converts the names and labels of the Triton server's metrics to the names and labels of vLLM.

Routers and dashboards for vLLM can then read the metrics.
"""

import re

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
_TRITON_LABEL = 'model_name="llm"'
"""The label of a metric on the Triton server, where the language model has the name "llm"."""


def with_vllm_names(page: str, model_name: str) -> str:
    """Rename the Triton server's metrics to vLLM's names, and change the labels.

    The label `model_name` gets the name of the model in requests. The label `engine`, the number of
    the engine in vLLM, is added if it is missing. Metrics that vLLM does not have do not change.

    Example: with the model name "chat", the line `nereid:num_requests_running{model_name="llm"} 1`
    becomes `vllm:num_requests_running{model_name="chat",engine="0"} 1`.

    Args:
        page: the metrics of the Triton server, in the text format of Prometheus.
        model_name: the name of the language model in requests.
    """
    escaped = model_name.replace("\\", r"\\").replace('"', r"\"")
    model_label = f'model_name="{escaped}"'
    return _LINE.sub(lambda match: _renamed(match, model_label), page)


def _renamed(line: re.Match[str], model_label: str) -> str:
    """Return one line of a metrics page, with the name and the labels that the metric has in vLLM.

    Example: with the label 'model_name="chat"', the line `nereid:num_requests_running{
    model_name="llm"} 1` becomes `vllm:num_requests_running{model_name="chat",engine="0"} 1`. In
    comments, such as `# TYPE nereid:num_requests_running gauge`, only the name changes.

    Args:
        line: a match of `_LINE`: the beginning of the line, the name of the metric, and the rest.
        model_label: the label of the model, such as 'model_name="chat"'.
    """
    start, name, rest = line.groups()
    if name not in VLLM_METRICS:
        return line[0]  # the whole line, unchanged
    # A server with several engine processes has already added the label `engine` to its gauges.
    has_engine = 'engine="' in rest
    labels = model_label if has_engine else f'{model_label},engine="0"'
    return f"{start}vllm:{name}{rest.replace(_TRITON_LABEL, labels, 1)}"
