#!/bin/bash
# Checks the CUDA build on a machine without a GPU.
#
#   scripts/check-cuda.sh           type-checks everything behind the features `cuda` and `nccl`; no CUDA is needed
#   scripts/check-cuda.sh --link    compiles candle's kernels and links the binary, with NVIDIA's compiler from PyPI
#
# The first takes a stand-in for nvcc, whose kernels are empty: seconds, once the dependencies are checked. The second
# fetches 1.2 GB and takes ten minutes on two cores. Neither runs a kernel. WORK (default: target/cuda-check) holds what
# is fetched and built.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
WORK=${WORK:-$PWD/target/cuda-check}
# Any that candle supports; the kernels of an image are compiled for the GPU that it is for.
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-89}
CUDA=13.0

die() { echo "check-cuda.sh: $*" >&2; exit 1; }

# Answers as nvcc does, and makes the files that are asked for, empty.
stand_in_nvcc() {
    mkdir -p "$WORK/stand-in/bin" "$WORK/stand-in/include"
    cat > "$WORK/stand-in/bin/nvcc" <<'NVCC'
#!/bin/bash
output='' folder=. kind=object
while (($#)); do
    case $1 in
        --version | -V) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit ;;
        --list-gpu-code | --list-gpu-arch) printf 'sm_80\nsm_89\nsm_90\nsm_100\n'; exit ;;
        -o) output=$2; shift ;;
        --output-directory) folder=$2; shift ;;
        -ptx | --ptx) kind=ptx ;;
        --lib | -lib) kind=library ;;
        *.cu) source=$1 ;;
    esac
    shift
done
case $kind in
    ptx) : > "${output:-$folder/$(basename "${source%.cu}").ptx}" ;;
    library) ar crs "$output" ;;
    object) echo | cc -x c -c -o "$output" - ;;
esac
NVCC
    chmod +x "$WORK/stand-in/bin/nvcc"
    export CUDA_HOME=$WORK/stand-in CUDARC_CUDA_VERSION=13000
}

# NVIDIA's compiler and libraries out of their wheels, laid out as CUDA is, with an empty driver to link against.
fetched_cuda() {
    local packages=$WORK/packages home=$WORK/cuda library
    if [[ ! -e $home/.complete ]]; then
        rm -rf "$packages" "$home"
        python3 -m pip install --quiet --target "$packages" --no-deps \
            "nvidia-cuda-nvcc==$CUDA.*" "nvidia-cuda-runtime==$CUDA.*" "nvidia-cuda-cccl==$CUDA.*" "nvidia-cublas==$CUDA.*" \
            "nvidia-cuda-nvrtc==$CUDA.*" "nvidia-nvvm==$CUDA.*" "nvidia-cuda-crt==$CUDA.*" nvidia-curand
        cp -as "$packages/nvidia/cu13" "$home"
        ln -s lib "$home/lib64"
        for library in "$home"/lib/lib*.so.*; do
            ln -sf "$(basename "$library")" "${library%%.so.*}.so"
        done
        # Every function of the driver that the headers declare, by all names that it may be asked for.
        grep -ohE '\bcu[A-Z][A-Za-z0-9_]+' "$home/include/cuda.h" | sort -u |
            awk '{ for (i = split("  _v2 _v3 _v4 _ptsz _v2_ptsz _ptds _v2_ptds", s, " "); i >= 0; i--)
                       print "int " $1 (i ? s[i] : "") "(void) { return 100; }" }' | sort -u > "$WORK/driver.c"
        cc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$home/lib/libcuda.so" "$WORK/driver.c"
        touch "$home/.complete"
    fi
    export CUDA_HOME=$home LIBRARY_PATH=$home/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
}

case ${1:-} in
    '')
        stand_in_nvcc
        arguments=(check --all-targets --features nccl)
        ;;
    --link)
        fetched_cuda
        arguments=(build --bin wardian --features cuda)
        ;;
    *) die "usage: check-cuda.sh [--link]" ;;
esac
export CUDA_PATH=$CUDA_HOME NVCC=$CUDA_HOME/bin/nvcc PATH=$CUDA_HOME/bin:$PATH
cargo "${arguments[@]}" --target-dir "$WORK/target"
echo "check-cuda.sh: ${arguments[0]} passed" >&2
