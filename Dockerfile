# Nereid on NVIDIA's Triton server image.
#
#   docker build -t nereid .
#   docker run --gpus all -p 8000:8000 -p 8001:8001 -p 8002:8002 \
#     -v /path/to/checkpoint:/model:ro -e NEREID_MODEL=/model nereid
#
# The OpenAI frontend is a second container of the same image:
#   docker run -p 9000:9000 -e NEREID_OPENAI_HOST=0.0.0.0 -e NEREID_GRPC_URL=host:8001 \
#     --entrypoint python3 nereid -m nereid_client
ARG TRITON_TAG=26.09-py3
FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/nereid

# torch first, in a layer of its own: it is large and changes rarely.
COPY constraints.txt ./
RUN pip install --no-cache-dir --break-system-packages --constraint constraints.txt torch

COPY parsers/ parsers/
COPY backend/ backend/
COPY client/ client/
RUN pip install --no-cache-dir --break-system-packages --constraint constraints.txt \
    ./parsers ./backend ./client

COPY model_repository/ model_repository/
COPY demo/chat/ demo/chat/
COPY demo/embed/ demo/embed/
COPY demo/rerank/ demo/rerank/

# The image's own user triton-server; neither the server nor the engine needs more.
USER 1000

EXPOSE 8000 8001 8002 9000
# Loading a large checkpoint takes minutes; until then the server is not ready and not unhealthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["curl", "--fail", "--silent", "http://127.0.0.1:8000/v2/health/ready"]

ENTRYPOINT ["tritonserver", "--model-repository", "/opt/nereid/model_repository"]
