# docker build -t splittime .
#   --build-arg TORCH_INDEX=URL: PyTorch's index of builds for CPUs; without it the image holds gigabytes for cards.
# docker run --init -p 8000:8000 -e SPLITTIME_API_KEY=... splittime
# An address that other machines reach needs a key: without SPLITTIME_API_KEY the server says so and ends.
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in constraints.txt README.md LICENSE NOTICE ./
COPY src src
RUN ST_BUILD_KERNELS=require pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
ARG TORCH_INDEX
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --constraint /tmp/constraints.txt /tmp/wheels/*.whl \
    && rm -r /tmp/wheels /tmp/constraints.txt \
    && splittime --version \
    && useradd --create-home --uid 1000 splittime \
    && install --directory --owner splittime /var/lib/splittime
USER splittime
WORKDIR /home/splittime
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["splittime"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
