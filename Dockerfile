# syntax=docker/dockerfile:1
# Wardian for machines without a GPU: servers of environments, the capture proxy, small runs on a CPU.
#
#   docker build --tag wardian:cpu .
#   docker run --rm --volume "$PWD/runs:/work/runs" wardian:cpu train
#
# The user in it is 65532: a folder that is mounted has to be that user's.

FROM rust:1.95.0-bookworm AS chef
# The one that is there, whatever rust-toolchain.toml asks for besides it.
ENV RUSTUP_TOOLCHAIN=1.95.0
RUN cargo install --locked cargo-chef@0.1.78
WORKDIR /build

FROM chef AS planner
COPY . .
RUN cargo chef prepare --recipe-path recipe.json

FROM chef AS builder
COPY --from=planner /build/recipe.json recipe.json
# Dependencies alone: this layer holds until Cargo.lock changes.
RUN cargo chef cook --locked --release --features k8s --recipe-path recipe.json
COPY . .
RUN cargo build --locked --release --features k8s --bin wardian

FROM debian:12.12-slim AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Wardian" \
      org.opencontainers.image.description="A WebAssembly-sandboxed gym with an embedded trainer" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# tini takes in what agents leave; their versions are those of the release that is named above.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap ca-certificates tini \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=65532 --group=65532 --mode=0700 /var/cache/wardian /work /models
COPY --from=builder /build/target/release/wardian /usr/local/bin/wardian
ENV WARDIAN_CACHE=/var/cache/wardian HF_HOME=/models HOME=/work
USER 65532:65532
WORKDIR /work
# The interpreter, compiled and started, so that no container begins with that. It is for processors like that of the
# build; another kind prepares its own, in about five seconds.
RUN ["wardian", "runtime", "build"]
ENTRYPOINT ["tini", "--", "wardian"]
CMD ["--help"]
