#!/bin/bash
# Checks the CUDA build on a machine without a GPU.
#
#   scripts/check-cuda.sh             type-checks everything behind the features `cuda` and `nccl`; no CUDA is needed
#   scripts/check-cuda.sh --kernels   compiles our own kernels with NVRTC, as a GPU's machine does at run time
#   scripts/check-cuda.sh --link      both, and compiles candle's kernels and links the binary, with NVIDIA's compiler
#
# The first takes a stand-in for nvcc, whose kernels are empty: seconds, once the dependencies are checked. The others
# fetch from PyPI: the second 90 MB, for a minute's work; the third 1.2 GB, for ten on two cores. None runs a kernel.
# WORK (default: target/cuda-check) holds what is fetched and built, TARGET (default: in WORK) what cargo builds.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
WORK=${WORK:-$PWD/target/cuda-check}
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
        --list-gpu-code | --list-gpu-arch) printf 'sm_199\n'; exit ;;
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
    # A GPU that there is not: what candle has compiled for it, which is empty, is taken for no other.
    export CUDA_HOME=$WORK/stand-in CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=199
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
    # Any that candle supports; the kernels of an image are compiled for the GPU that it is for.
    export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-89}
    export CUDA_HOME=$home LIBRARY_PATH=$home/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
}

# Compiles our kernels with the NVRTC in a folder of libraries.
compile_kernels() {
    LD_LIBRARY_PATH=$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
        python3 scripts/compile_kernels.py -q "$(find -L "$1" -name 'libnvrtc.so.*' | head -1)"
}

case ${1:-} in
    '')
        stand_in_nvcc
        arguments=(clippy --all-targets --features nccl)
        lints=(-- -D warnings)
        ;;
    --kernels)
        if [[ ! -d $WORK/nvrtc ]]; then
            python3 -m pip install --quiet --target "$WORK/nvrtc.partial" --no-deps "nvidia-cuda-nvrtc==$CUDA.*"
            mv "$WORK/nvrtc.partial" "$WORK/nvrtc"
        fi
        compile_kernels "$WORK/nvrtc/nvidia/cu13/lib"
        exit
        ;;
    --link)
        fetched_cuda
        compile_kernels "$CUDA_HOME/lib"
        arguments=(build --bin wardian --features cuda)
        lints=()
        ;;
    *) die "usage: check-cuda.sh [--kernels | --link]" ;;
esac
export CUDA_PATH=$CUDA_HOME NVCC=$CUDA_HOME/bin/nvcc PATH=$CUDA_HOME/bin:$PATH
cargo "${arguments[@]}" --target-dir "${TARGET:-$WORK/target}" "${lints[@]}"
echo "check-cuda.sh: ${arguments[0]} passed" >&2
