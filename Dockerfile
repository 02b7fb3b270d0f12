# One image for every process of both services and for the payment provider's sandbox: the command tells which.
# Two stages on the same base: what builds the packages stays behind, and the image has neither pip's cache nor hatchling.
ARG PYTHON_IMAGE=python:3.13-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
# The environment's own pip is left out; this stage's pip installs into it. Bytecode comes along, as the image is read-only.
RUN python -m venv --without-pip /opt/chargeonce
# Changes seldom, takes longest: a layer of its own, rebuilt only when a pin changes.
COPY requirements.txt ./
RUN --mount=type=cache,target=/var/cache/pip \
    pip --cache-dir /var/cache/pip --python /opt/chargeonce/bin/python install --disable-pip-version-check --root-user-action ignore \
        --require-hashes --only-binary :all: -r requirements.txt
# hatchling, pinned and hashed with what it needs: the entries of the lab's set that are there because of it.
COPY requirements-lab.txt ./
RUN --mount=type=cache,target=/var/cache/pip \
    awk 'function end() { if (block ~ /^hatchling==|#( via)? +hatchling\n/) printf "%s", block; block = "" } \
         /^[a-z0-9]/ { end() } { block = block $0 "\n" } END { end() }' requirements-lab.txt >requirements-build.txt && \
    pip --cache-dir /var/cache/pip install --disable-pip-version-check --root-user-action ignore \
        --require-hashes --only-binary :all: -r requirements-build.txt
COPY pyproject.toml LICENSE ./
COPY alembic/ alembic/
COPY shared/ shared/
COPY payment_provider/ payment_provider/
COPY order_service/ order_service/
COPY billing_service/ billing_service/
# What the wheel needs and the image does not: the README, and the command `chargeonce`, which runs PostgreSQL and Kafka
# on a bare machine. An empty one stands for each, so that their changes rebuild nothing.
RUN touch README.md && mkdir chargeonce && touch chargeonce/__init__.py && \
    python -m hatchling build -t wheel -d /tmp/wheel && \
    pip --cache-dir /var/cache/pip --python /opt/chargeonce/bin/python install --disable-pip-version-check --root-user-action ignore \
        --no-deps --no-index --no-cache-dir /tmp/wheel/*.whl && \
    rm /opt/chargeonce/bin/chargeonce

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="chargeonce" \
      org.opencontainers.image.description="Order and billing service: every confirmed order is charged exactly once." \
      org.opencontainers.image.licenses="Apache-2.0"
# A fixed number, so that volumes keep their owner over rebuilds. The ledger's folder gives its volume that owner.
RUN groupadd --gid 10001 chargeonce && \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin chargeonce && \
    install -d -o chargeonce -g chargeonce -m 0750 /var/lib/payment-provider
COPY --from=build /opt/chargeonce /opt/chargeonce
ENV PATH=/opt/chargeonce/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORDER_SERVICE_HOST=0.0.0.0 ORDER_SERVICE_PORT=8000 \
    BILLING_SERVICE_HOST=0.0.0.0 BILLING_SERVICE_PORT=8000 \
    PAYMENT_PROVIDER_HOST=0.0.0.0 PAYMENT_PROVIDER_PORT=8000 \
    PAYMENT_PROVIDER_LEDGER=/var/lib/payment-provider/ledger.sqlite3
USER 10001:10001
WORKDIR /
EXPOSE 8000
STOPSIGNAL SIGTERM
CMD ["order-service", "--help"]
