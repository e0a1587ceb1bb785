"""The names of all formats, the modules that declare these names, and the aliases of the names."""

from __future__ import annotations


def _by_name(modules: dict[str, str]) -> dict[str, str]:
    """Return the module that declares each name.

    Example: `{"m": "a b"}` gives `{"a": "m", "b": "m"}`.
    """
    return {name: module for module, names in modules.items() for name in names.split()}


REASONING_MODULES = _by_name(
    {
        "apertus": "apertus2509",
        "channels": "inkling muse plamo3",
        "cohere": "cohere_command3 cohere_command4",
        "deepseek": "deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 gigachat35",
        "gemma": "gemma4",
        "glm": "glm45 glm47 hy_v3 hy_v4 iquest_q1 k2_horizon ling3 poolside_v1",
        "gpt_oss": "gpt_oss",
        "granite": "granite granite_thinking_parser",
        "kimi": "kimi kimi_k2 kimi_k3",
        "minimax": "minimax_m2 minimax_m2_append_think minimax_m3",
        "mistral": "mistral",
        "nemotron": "nemotron_v3",
        "qwen": "qwen3 qwen3_thinking",
        "seed": "seed_oss",
        "step": "step3 step3p5 step5",
        "think": "dots ernie45 holo2 hunyuan_a13b interns1 mimo minicpmv nanbeige olmo3",
    }
)

TOOL_MODULES = _by_name(
    {
        "apertus": "apertus",
        "arrays": "gigachat3 hunyuan_a13b internlm interns1 jamba phi4_mini_json xlam",
        "channels": "functionary_v3_1 functionary_v3_2 inkling muse plamo3",
        "cohere": "cohere_command3 cohere_command4",
        "deepseek": "deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 gigachat35",
        "gemma": "functiongemma gemma4",
        "glm": "glm45 glm47 hy_v3 hy_v4 iquest_q1 k2_horizon ling3 poolside_v1 spark25",
        "gpt_oss": "gpt_oss",
        "granite": "granite granite_20b_fc granite4",
        "hermes": "ernie45 hermes longcat trinity",
        "kimi": "kimi_k2 kimi_k3",
        "llama": "llama3_json llama4_json",
        "minimax": "dots minimax_m2 minimax_m3",
        "mistral": "mistral",
        "pythonic": "lfm2 llama4_pythonic olmo3 pythonic",
        "qwen": "mimo minicpm5 nanbeige qwen3_coder",
        "seed": "seed_oss",
        "step": "step3 step3p5 step5",
    }
)

REASONING_ALIASES = {
    "apertus": "apertus2509",
    "hunyuan": "hy_v3",
    "minimax": "minimax_m2",
    "minimax_append_think": "minimax_m2_append_think",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
    "nano_v3": "nemotron_v3",
    "nemotron_3": "nemotron_v3",
    "openai_gptoss": "gpt_oss",
}

TOOL_ALIASES = {
    "apertus2509": "apertus",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "deepseekv41": "deepseek_v41",
    "glm": "glm45",
    "hunyuan": "hy_v3",
    "llama3": "llama3_json",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
    "openai": "gpt_oss",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
}
