# Two images with the Triton server, the OpenAI frontend and their supervisor:
#
#   docker build -t nereid .                      for GPUs, on NVIDIA's Triton image
#   docker build -t nereid-cpu --target cpu .     for CPUs, on Debian, with the embedded Triton server
#   docker run --rm -p 9000:9000 --shm-size 1g -v /path/to/checkpoint:/model:ro -e NEREID_MODEL=/model nereid-cpu
#
# Environment variables configure both images. Without NEREID_MODEL, the demo models are served. Only the
# frontend's port is open, because the Triton server's own ports cannot check API keys. The log goes to the
# standard output, and has one JSON object on each line with NEREID_LOG_FORMAT=json.
ARG TRITON_TAG=26.09-py3

FROM debian:12-slim AS cpu
# Debian removes old versions of packages, so a pinned version would soon be missing.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv libpython3-dev g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home nereid
ENV PATH=/opt/nereid/.venv/bin:$PATH
WORKDIR /opt/nereid

# torch has a layer of its own, because it is large and changes rarely.
COPY constraints.txt ./
RUN python3 -m venv .venv \
    && pip install --no-cache-dir --constraint constraints.txt torch
COPY parsers/ parsers/
COPY backend/ backend/
COPY client/ client/
RUN pip install --no-cache-dir --constraint constraints.txt ./parsers "./backend[tracing]" "./client[tracing]" "numpy<2" \
    && nereid install-server
COPY model_repository/ model_repository/
COPY demo/ demo/

# Everything that is written at run time goes to this folder, so the root file system may be read-only.
# Mount a volume there to keep the compiled kernels.
ENV XDG_CACHE_HOME=/var/lib/nereid XDG_STATE_HOME=/var/lib/nereid NEREID_OPENAI_HOST=0.0.0.0
RUN install --directory --owner=1000 --group=1000 /var/lib/nereid
USER 1000
EXPOSE 9000
# A large checkpoint needs minutes to load. Until then the container is neither ready nor unhealthy. The check ignores
# variables such as http_proxy, because a proxy cannot reach the server.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('NEREID_OPENAI_PORT', '9000') + '/health/ready', timeout=4)"]
ENTRYPOINT ["nereid", "serve", "--log-file", "-"]

FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG} AS gpu
WORKDIR /opt/nereid
COPY constraints.txt ./
RUN pip install --no-cache-dir --break-system-packages --constraint constraints.txt torch
COPY parsers/ parsers/
COPY backend/ backend/
COPY client/ client/
RUN pip install --no-cache-dir --break-system-packages --constraint constraints.txt \
    ./parsers "./backend[tracing]" "./client[tracing]"
COPY model_repository/ model_repository/
COPY demo/ demo/
ENV XDG_CACHE_HOME=/var/lib/nereid XDG_STATE_HOME=/var/lib/nereid NEREID_OPENAI_HOST=0.0.0.0
RUN install --directory --owner=1000 --group=1000 /var/lib/nereid
USER 1000
EXPOSE 9000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('NEREID_OPENAI_PORT', '9000') + '/health/ready', timeout=4)"]
ENTRYPOINT ["nereid", "serve", "--log-file", "-"]
