"""Which module declares a name, and which names are other spellings of one."""

from __future__ import annotations

REASONING_MODULES = {
    "apertus2509": "apertus",
    "cohere_command3": "cohere",
    "deepseek_r1": "deepseek",
    "deepseek_v3": "deepseek",
    "glm45": "glm",
    "glm47": "glm",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "kimi_k2": "kimi",
    "minimax_m2": "minimax",
    "mistral": "mistral",
    "nemotron_v3": "nemotron",
    "qwen3": "qwen",
    "seed_oss": "seed",
    "step3p5": "step",
}

TOOL_MODULES = {
    "apertus": "apertus",
    "cohere_command3": "cohere",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "glm45": "glm",
    "glm47": "glm",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "granite4": "granite",
    "hermes": "hermes",
    "kimi_k2": "kimi",
    "llama3_json": "llama",
    "minimax_m2": "minimax",
    "mistral": "mistral",
    "qwen3_coder": "qwen",
    "seed_oss": "seed",
    "step3p5": "step",
}

REASONING_ALIASES = {"openai_gptoss": "gpt_oss"}

TOOL_ALIASES = {"openai": "gpt_oss"}
