# The adapter manager and the `lorikeet` command, without torch. Build from the repository's root:
#   docker build -f deploy/adapter-manager.Dockerfile -t lorikeet-adapter-manager .
# Base images are pinned to a release series, so that a rebuild takes its security fixes.

FROM python:3.12-slim-bookworm AS build
# pip's own variables, empty by default and then ignored.
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/lorikeet
# Dependencies first: this layer stays until pyproject.toml changes. The manager computes with nothing but bytes.
COPY pyproject.toml ./
COPY deploy/requirements.py deploy/requirements.py
RUN python deploy/requirements.py --without torch --without triton > requirements.txt \
 && /opt/lorikeet/bin/pip install -r requirements.txt
COPY README.md LICENSE ./
COPY protos protos
COPY kernels kernels
COPY inference_service inference_service
COPY adapter_manager adapter_manager
COPY clients clients
RUN /opt/lorikeet/bin/pip install --no-deps .

FROM python:3.12-slim-bookworm AS runtime
# The same ids as in the inference service's image: the artifact store is a volume of both. Volumes take over the
# owner of the directory that they are mounted on when they are new.
RUN groupadd --gid 10001 lorikeet \
 && useradd --uid 10001 --gid lorikeet --no-create-home --home-dir /var/lib/lorikeet lorikeet \
 && mkdir -p /var/lib/lorikeet/manager /var/lib/lorikeet/artifacts \
 && chown -R lorikeet:lorikeet /var/lib/lorikeet \
 && chmod 0700 /var/lib/lorikeet/manager
COPY --from=build /opt/lorikeet /opt/lorikeet
ENV PATH=/opt/lorikeet/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/lorikeet
EXPOSE 50052 9402
STOPSIGNAL SIGTERM
ENTRYPOINT ["lorikeet-adapter-manager"]
