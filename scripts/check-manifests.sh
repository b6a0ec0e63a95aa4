#!/bin/bash
# Checks the manifests of deploy/kubernetes without a cluster: every overlay, and every component over the base, is
# rendered and held against Kubernetes' schemas.
#
#   scripts/check-manifests.sh [KUBERNETES_VALIDATE]    fetched from PyPI unless it is given
#
# Without kubectl nothing is rendered, and the files are checked by themselves. Kinds of other groups have no schema
# here: of those (Sandbox…, ServiceMonitor) only `cargo test --test it deploy` looks at the pods.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
version=1.33

validator=${1:-}
if [[ -z $validator ]]; then
    python3 -m venv "$scratch/venv"
    "$scratch/venv/bin/pip" install --quiet kubernetes-validate==1.37.0
    validator=$scratch/venv/bin/kubernetes-validate
fi

# Leaves out the kinds that Kubernetes does not bring.
known() {
    awk 'BEGIN { RS = "---\n"; ORS = "---\n" }
         match("\n" $0, /\napiVersion: [^\n]*/) {
             group = substr("\n" $0, RSTART + 13, RLENGTH - 13)
             if (group !~ /\./ || (group ~ /\.k8s\.io\// && group !~ /\.x-k8s\.io\//)) print
         }' "$1"
}

mkdir "$scratch/rendered"
if command -v kubectl >/dev/null; then
    for overlay in deploy/kubernetes/overlays/*; do
        kubectl kustomize "$overlay" > "$scratch/rendered/$(basename "$overlay").yaml"
    done
    cp -r deploy/kubernetes "$scratch/tree"
    mkdir "$scratch/tree/overlays/one"
    for component in deploy/kubernetes/components/*; do
        name=$(basename "$component")
        printf 'resources: [../../base]\ncomponents: [../../components/%s]\n' "$name" \
            > "$scratch/tree/overlays/one/kustomization.yaml"
        kubectl kustomize "$scratch/tree/overlays/one" > "$scratch/rendered/with-$name.yaml"
    done
else
    echo "there is no kubectl: nothing is rendered"
    for file in deploy/kubernetes/base/*.yaml; do
        [[ $file == */kustomization.yaml ]] || cp "$file" "$scratch/rendered"
    done
fi
for file in "$scratch"/rendered/*.yaml; do
    known "$file" > "$scratch/known.yaml"
    [[ -s $scratch/known.yaml ]] || { echo "$(basename "$file"): nothing to check" >&2; exit 1; }
    # The certificates that Substrate's pods are given came later.
    of=$version
    if grep -q podCertificate "$file"; then of=1.37; fi
    "$validator" --strict --quiet -k "$of" "$scratch/known.yaml" ||
        { echo "$(basename "$file") does not hold" >&2; exit 1; }
    echo "$(basename "$file" .yaml): $(grep -c '^kind:' "$scratch/known.yaml") of $(grep -c '^kind:' "$file") objects hold"
done
