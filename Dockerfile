# Two images. `docker build --target monitor .` has the service, agent and hub. The whole file adds kvscope's own engine,
# with torch.

# By tag, since its digest could not be looked up when this was written: pin it with
# --build-arg PYTHON=python:3.11-slim@sha256:… (`docker buildx imagetools inspect python:3.11-slim` shows it).
ARG PYTHON=python:3.11-slim
FROM ${PYTHON} AS monitor

WORKDIR /kvscope
# The dependencies stay in this layer while the code, copied below, changes.
COPY monitor.lock ./
RUN pip install --no-cache-dir --require-hashes -r monitor.lock
COPY . .
RUN pip install --no-cache-dir --no-index --no-deps --no-build-isolation --editable .

# These belong to the user, so that volumes mounted over them do too; what libraries cache goes to /tmp.
RUN useradd --uid 10001 kvscope && install -d -o kvscope -g kvscope -m 0700 /run/kvscope /var/lib/kvscope
USER kvscope
ENV HOME=/tmp

CMD ["monitor", "serve"]

FROM monitor AS engine
# More for pip, such as an index that has a CPU build of torch: the default build brings CUDA's gigabytes. Each build of
# torch has other hashes, so torch and what it brings are pinned by version alone.
ARG PIP_ARGS=""
USER root
RUN pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt "$(grep '^torch==' constraints.txt)"
RUN pip install --no-cache-dir --require-hashes -r engine.lock
USER kvscope
