# The inference service, on the CPU (target cpu) or an NVIDIA GPU (target gpu). Build from the repository's root:
#   docker build -f deploy/inference-service.Dockerfile --target cpu -t lorikeet-inference:cpu .
# Base images are pinned to a release series, so that a rebuild takes its security fixes.

FROM python:3.12-slim-bookworm AS source
# pip's own variables, empty by default and then ignored.
ARG PIP_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/lorikeet
COPY pyproject.toml ./
COPY deploy/requirements.py deploy/requirements.py
RUN python deploy/requirements.py > requirements.txt

FROM source AS wheel
COPY README.md LICENSE ./
COPY protos protos
COPY kernels kernels
COPY inference_service inference_service
COPY adapter_manager adapter_manager
COPY clients clients
RUN /opt/lorikeet/bin/pip wheel --no-deps --wheel-dir /wheels .

# Dependencies first: their layers stay until pyproject.toml or the constraints change.
FROM source AS build-cpu
# An extra index with CPU builds of torch saves several gigabytes. torch is the release that the tests run on.
ARG PIP_EXTRA_INDEX_URL=""
COPY constraints-cpu.txt ./
RUN grep '^torch' constraints-cpu.txt > constraints.txt \
 && /opt/lorikeet/bin/pip install -r requirements.txt -c constraints.txt
COPY --from=wheel /wheels /wheels
RUN /opt/lorikeet/bin/pip install --no-deps /wheels/*.whl

FROM source AS build-gpu
# Without the extra index: pip would prefer its CPU build. torch and triton are the pair that was measured.
COPY constraints-gpu.txt ./
RUN /opt/lorikeet/bin/pip install -r requirements.txt -c constraints-gpu.txt
COPY --from=wheel /wheels /wheels
RUN /opt/lorikeet/bin/pip install --no-deps /wheels/*.whl

FROM python:3.12-slim-bookworm AS runtime
# The same ids as in the manager's image: the artifact store is a volume of both. Volumes take over the owner of
# the directory that they are mounted on when they are new.
RUN groupadd --gid 10001 lorikeet \
 && useradd --uid 10001 --gid lorikeet --no-create-home --home-dir /var/lib/lorikeet lorikeet \
 && mkdir -p /var/lib/lorikeet/node /var/lib/lorikeet/artifacts /models/base \
 && chown -R lorikeet:lorikeet /var/lib/lorikeet
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
COPY --from=build-gpu /opt/lorikeet /opt/lorikeet
USER 10001:10001

FROM runtime AS cpu
COPY --from=build-cpu /opt/lorikeet /opt/lorikeet
