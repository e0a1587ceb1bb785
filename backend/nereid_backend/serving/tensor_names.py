# SPDX-License-Identifier: Apache-2.0
"""The names of the ensemble's tensors. model_repository/*/config.pbtxt declares these names."""

# Inputs of the ensemble `llm`
TEXT_INPUT = "text_input"
INPUT_IDS = "input_ids"
CHAT_REQUEST = "chat_request"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
EXCLUDE_INPUT = "exclude_input_in_output"
IMAGE = "image"
RETURN_PREFIX = "return_"

# Outputs of the ensemble `llm`
TEXT_OUTPUT = "text_output"
DELTA = "delta"
FINISH_REASON = "finish_reason"
CUMULATIVE_LOGPROB = "cumulative_logprob"
LOGPROBS = "logprobs"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
RETURNABLE = (
    FINISH_REASON,
    CUMULATIVE_LOGPROB,
    LOGPROBS,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
)

# Tensors between the steps of the ensemble
PROMPT_TOKEN_IDS = "prompt_token_ids"
ENVELOPE = "envelope"
STATE = "state"
