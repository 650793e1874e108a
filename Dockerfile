# One image for both: `python -m engine serve` and `monitor serve`.
FROM python:3.11-slim

# More for pip, such as an index that has a CPU build of torch: the default build brings CUDA's gigabytes.
ARG PIP_ARGS=""

WORKDIR /kvscope
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docs/runbooks docs/runbooks
# Editable, so that engine and kernels, which are no part of the wheel, are imported from here too.
RUN PIP_CONSTRAINT=constraints.txt pip install --no-cache-dir ${PIP_ARGS} --editable '.[monitor,engine]'
COPY . .

# The socket's directory belongs to the user, so that a volume mounted over it does too.
RUN useradd --create-home --uid 10001 kvscope && install -d -o kvscope -g kvscope -m 0700 /run/kvscope
USER kvscope

CMD ["monitor", "serve"]
