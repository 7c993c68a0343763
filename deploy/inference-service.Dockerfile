# The inference service, on the CPU (target cpu) or an NVIDIA GPU (target gpu). Build from the repository's root:
#   docker build -f deploy/inference-service.Dockerfile --target cpu -t lorikeet-inference:cpu .
# Base images are pinned to a release series, so that a rebuild takes its security fixes.

FROM python:3.12-slim-bookworm AS build
# pip's own variables, empty by default and then ignored. An extra index with CPU builds of torch saves the
# cpu image several gigabytes.
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/lorikeet
# Dependencies first: this layer stays until pyproject.toml changes. torch is the release that the tests run on.
COPY pyproject.toml constraints-cpu.txt ./
COPY deploy/requirements.py deploy/requirements.py
RUN python deploy/requirements.py > requirements.txt \
 && grep '^torch' constraints-cpu.txt > constraints.txt \
 && /opt/lorikeet/bin/pip install -r requirements.txt -c constraints.txt
COPY README.md LICENSE ./
COPY protos protos
COPY kernels kernels
COPY inference_service inference_service
COPY adapter_manager adapter_manager
COPY clients clients
RUN /opt/lorikeet/bin/pip install --no-deps .

FROM python:3.12-slim-bookworm AS runtime
# The same ids as in the manager's image: the artifact store is a volume of both. Volumes take over the owner of
# the directory that they are mounted on when they are new.
RUN groupadd --gid 10001 lorikeet \
 && useradd --uid 10001 --gid lorikeet --no-create-home --home-dir /var/lib/lorikeet lorikeet \
 && mkdir -p /var/lib/lorikeet/node /var/lib/lorikeet/artifacts /models/base \
 && chown -R lorikeet:lorikeet /var/lib/lorikeet
COPY --from=build /opt/lorikeet /opt/lorikeet
ENV PATH=/opt/lorikeet/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/lorikeet
EXPOSE 50051 9401
STOPSIGNAL SIGTERM
ENTRYPOINT ["lorikeet-inference"]

FROM runtime AS gpu
# Triton compiles its launchers with the C compiler when the kernels are warmed up.
USER root
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
USER 10001:10001

FROM runtime AS cpu
