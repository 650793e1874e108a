# One image for both: `kvscope engine serve` and `monitor serve`.
FROM python:3.11-slim

# More for pip, such as an index that has a CPU build of torch: the default build brings CUDA's gigabytes.
ARG PIP_ARGS=""

WORKDIR /kvscope
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docs/runbooks docs/runbooks
# Editable: the dependencies stay in this layer while the code, copied below, changes.
RUN PIP_CONSTRAINT=constraints.txt pip install --no-cache-dir ${PIP_ARGS} --editable '.[monitor,engine,fleet]'
COPY . .

# These belong to the user, so that volumes mounted over them do too; what libraries cache goes to /tmp.
RUN useradd --uid 10001 kvscope && install -d -o kvscope -g kvscope -m 0700 /run/kvscope /var/lib/kvscope
USER kvscope
ENV HOME=/tmp

CMD ["monitor", "serve"]
