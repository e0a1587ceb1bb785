#!/usr/bin/env bash
# Stream a text completion from the Triton server's own HTTP endpoint, `generate_stream`.
#
#   client/examples/generate_stream.sh "Once upon a time"
#   HTTP_URL=http://127.0.0.1:8000 MAX_TOKENS=64 client/examples/generate_stream.sh "Hello"
#
# Needs curl and python3.
set -euo pipefail

url=${HTTP_URL:-http://127.0.0.1:8000}
prompt=${1:-Once upon a time}
max_tokens=${MAX_TOKENS:-32}

quoted=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$prompt")
body='{"text_input": '$quoted', "stream": true,
       "sampling_parameters": "{\"max_tokens\": '$max_tokens', \"temperature\": 0}"}'

# Each line that starts with "data:" is one response in JSON; text_output is the new text.
curl --silent --show-error --no-buffer --fail-with-body \
  -H 'Content-Type: application/json' -d "$body" "$url/v2/models/llm/generate_stream"
