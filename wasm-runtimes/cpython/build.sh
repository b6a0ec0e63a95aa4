#!/bin/bash
# Builds python.wasm.zst, the CPython guest, from Debian's sources with Debian's compiler.
#
#   build.sh            build and replace python.wasm.zst, BUILDINFO and LICENSES/
#   build.sh --check    build and compare with the committed python.wasm.zst; exit 1 when they differ
#   build.sh --clean    as the first, from an empty work directory
#   build.sh --profile  train anew and replace python.profdata.zst, from which the other modes optimize
#
# Needs Debian bookworm with gcc, make, patch, zstd and apt; root is not needed, nothing is installed. The compiler and the
# sources come as packages through a private apt directory, with signature checks on. WORK (default: build/ beside this
# file) is where everything happens; a stage that has finished there is not repeated, so a change to shim.c costs seconds.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${WORK:-$HERE/build}
JOBS=${JOBS:-$(nproc)}

PYTHON=3.13.5
PYTHON_TARBALL=python3.13_$PYTHON.orig.tar.xz
PYTHON_SHA256=93e583f243454e6e9e4588ca2c2662206ad961659863277afcdb96801647d640
WASI_LIBC_DEB='wasi-libc_0.0~git20241209.574b88d-2_all.deb'
WASI_LIBC_SHA256=b7716260051d289248b7667f81fa2792c125d888ff51da3fa09c6272cc0bd11d
# Compression, for the modules zlib, bz2 and lzma.
ZLIB_TARBALL=zlib_1.3.dfsg+really1.3.1.orig.tar.gz
ZLIB_SHA256=60dd315c07f616887caa029408308a018ace66e3d142726a97db164b3b8f69fb
BZIP2_TARBALL=bzip2_1.0.8.orig.tar.gz
BZIP2_SHA256=ab5a03176ee106d3f0fa90e381da478ddae405918153cca248e682cd0c4a2269
XZ_TARBALL=xz-utils_5.8.1.orig.tar.xz
XZ_SHA256=0b54f79df85912504de0b14aec7971e3f964491af1812d83447005807513cd9e
# The database of the module sqlite3.
SQLITE_TARBALL=sqlite3_3.46.1.orig.tar.xz
SQLITE_SHA256=d0cdd2ece271b29e7ce18095745d892517ee26d0f270065b3a25c2e9eb11639c
# Time zones, compiled: the package's files, in an index of our own.
TZDATA_VERSION=2026f-0+deb13u1
TZDATA_SHA256=2c1c561091402883430d0d47c57a3c0aa00b44afc8a6239265065a87211a5c11
TZDATA_LEGACY_SHA256=92bb8f5ee8f87e6ee641ec3b24876d2d83b64dd1d7fe864b1cceac4cea7f1549
LLVM=22
LLVM_VERSION='1:22.1.8-1~deb12u1'

# What the compiler and the binary utilities need at run time; the rest is in every Debian.
TOOLCHAIN=(
    "clang-$LLVM" "libclang-common-$LLVM-dev" "libclang-cpp$LLVM" "libclang1-$LLVM" "libllvm$LLVM" "llvm-$LLVM" "lld-$LLVM"
    "libclang-rt-$LLVM-dev-wasm32"
)

# What makes one file of SQLite's sources.
TCL=(tcl8.6/bookworm libtcl8.6/bookworm)

# For --profile: what a native program needs to count with.
PROFILE_RUNTIME=libclang-rt-$LLVM-dev

# Changes to CPython; each says why.
PATCHES=(meter.patch interpreter.patch obmalloc.patch integer.patch)

# What the interpreter is trained on: tests of CPython's own, for the language, for its most used modules, and for
# compiling and failing, as most of what a short program does is that.
TRAINING=(
    test_re test_json test_dict test_list test_generators test_float test_set test_collections test_functools
    test_dataclasses test_statistics test_heapq test_bisect test_itertools test_sort test_string test_operator test_struct
    test_base64 test_copy test_descr test_scope test_fstring test_contextlib test_difflib test_textwrap test_grammar
    test_syntax test_traceback test_exceptions test_str test_int test_math test_datetime test_pickle test_typing test_enum
    test_patma test_augassign test_deque test_tuple test_bytes test_iter test_builtin test_random test_decimal
    test_fractions test_abc
)

# The date in `sys.version` and in every __DATE__: that of the 3.13.5 release.
export SOURCE_DATE_EPOCH=1749600000
export LC_ALL=C TZ=UTC PYTHONHASHSEED=0
# Nothing in the user's environment may reach a compiler or an interpreter.
unset CC CXX CPP CFLAGS CPPFLAGS CXXFLAGS LDFLAGS PYTHONPATH PYTHONHOME MAKEFLAGS

say() { echo "== $*" >&2; }
die() { echo "build.sh: $*" >&2; exit 1; }

# once NAME: runs the function NAME unless it has already succeeded in this work directory.
once() {
    [[ -e $WORK/.done-$1 ]] && return
    say "$1"
    "$1"
    touch "$WORK/.done-$1"
}

# Prints the address that the machine's own apt configuration gives for a release of Debian.
archive_of() {
    apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
        awk -v release="$1" '$1 == release { print $2; exit }'
}

# Makes $WORK/apt: bookworm and its security updates for the compiler, trixie for the sources.
private_apt() {
    local apt=$WORK/apt main security
    main=$(archive_of bookworm)
    security=$(archive_of bookworm-security)
    [[ -n $main && -n $security ]] || die "no bookworm and bookworm-security archive in this machine's apt configuration"
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$apt/parts"
    local signed='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]'
    cat > "$apt/sources.list" <<EOF
deb $signed $main bookworm main
deb $signed $security bookworm-security main
deb $signed $main trixie main
deb-src $signed $main trixie main
EOF
    cat > "$apt/apt.conf" <<EOF
Dir::Etc::SourceList "$apt/sources.list";
Dir::Etc::SourceParts "$apt/parts";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "$apt/parts";
Dir::State::Lists "$apt/lists";
Dir::Cache "$apt";
Dir::Cache::Archives "$apt/archives";
APT::Sandbox::User "";
Acquire::Languages "none";
Debug::NoLocking "true";
EOF
    APT_CONFIG=$apt/apt.conf apt-get -qq update
}

fetch() {
    mkdir -p "$WORK/fetched"
    cd "$WORK/fetched"
    export APT_CONFIG=$WORK/apt/apt.conf
    apt-get -qq source --tar-only python3.13/trixie
    apt-get -qq source --tar-only zlib/trixie bzip2/trixie xz-utils/trixie sqlite3/trixie
    apt-get -qq download wasi-libc/trixie "tzdata=$TZDATA_VERSION" "tzdata-legacy=$TZDATA_VERSION"
    apt-get -qq download "${TOOLCHAIN[@]/%/=$LLVM_VERSION}" "${TCL[@]}"
    sha256sum --check --quiet <<EOF
$PYTHON_SHA256  $PYTHON_TARBALL
$ZLIB_SHA256  $ZLIB_TARBALL
$BZIP2_SHA256  $BZIP2_TARBALL
$XZ_SHA256  $XZ_TARBALL
$SQLITE_SHA256  $SQLITE_TARBALL
$TZDATA_SHA256  tzdata_${TZDATA_VERSION}_all.deb
$TZDATA_LEGACY_SHA256  tzdata-legacy_${TZDATA_VERSION}_all.deb
$WASI_LIBC_SHA256  $WASI_LIBC_DEB
EOF
}

unpack() {
    cd "$WORK"
    rm -rf "Python-$PYTHON" sysroot toolchain zlib bzip2 xz sqlite tzdata
    tar xf "fetched/$PYTHON_TARBALL"
    local patch
    for patch in "${PATCHES[@]}"; do
        patch -s -p1 -d "Python-$PYTHON" < "$HERE/$patch"
    done
    dpkg -x "fetched/$WASI_LIBC_DEB" sysroot
    mkdir zlib bzip2 xz sqlite
    tar xf "fetched/$ZLIB_TARBALL" --strip-components=1 -C zlib
    tar xf "fetched/$BZIP2_TARBALL" --strip-components=1 -C bzip2
    tar xf "fetched/$XZ_TARBALL" --strip-components=1 -C xz
    tar xf "fetched/$SQLITE_TARBALL" --strip-components=1 -C sqlite
    local deb
    for deb in fetched/*.deb; do
        case $deb in
            */wasi-libc_*) dpkg -x "$deb" sysroot ;;
            */tzdata*) dpkg -x "$deb" tzdata ;;
            *) dpkg -x "$deb" toolchain ;;
        esac
    done
    local missing
    missing=$(LD_LIBRARY_PATH=$(toolchain_libs) ldd toolchain/usr/lib/llvm-$LLVM/bin/{clang,lld,llvm-ar} |
        awk '/not found/ { print $1 }' | sort -u | tr '\n' ' ')
    [[ -z $missing ]] || die "the compiler needs these libraries from the machine: $missing"
}

toolchain_libs() {
    echo "$WORK/toolchain/usr/lib/x86_64-linux-gnu:$WORK/toolchain/usr/lib/llvm-$LLVM/lib"
}

# The same Python for this machine: it runs the cross build's generators, and compiles the standard library, whose
# bytecode only this very version reads.
native_python() {
    rm -rf "$WORK/native"
    mkdir "$WORK/native"
    cd "$WORK/native"
    PKG_CONFIG=/bin/false CFLAGS="-O1 -g0" "../Python-$PYTHON/configure" -q --disable-test-modules --with-ensurepip=no \
        > configure.log 2>&1
    make -s -j"$JOBS" python pybuilddir.txt > make.log 2>&1
    ./python -c "import marshal, sys; assert sys.version_info[:3] == tuple(map(int, '$PYTHON'.split('.')))"
}

compiler_path() {
    export PATH=$WORK/toolchain/usr/lib/llvm-$LLVM/bin:$WORK/toolchain/usr/bin:$PATH
    LD_LIBRARY_PATH=$(toolchain_libs)
    export LD_LIBRARY_PATH
}

# Counts what a native interpreter of the same sources does in training. clang keys the counts by syntax tree, so they
# fit the guest, whose target has no profiling runtime. A native run is not reproducible, which is why its result is
# committed.
train() (
    cd "$WORK/fetched"
    APT_CONFIG=$WORK/apt/apt.conf apt-get -qq download "$PROFILE_RUNTIME=$LLVM_VERSION"
    dpkg -x "$WORK/fetched/$PROFILE_RUNTIME"_*.deb "$WORK/toolchain"
    compiler_path
    rm -rf "$WORK/profile"
    mkdir "$WORK/profile"
    cd "$WORK/profile"
    # --without-computed-gotos: the guest has none, and the syntax trees must agree.
    PKG_CONFIG=/bin/false CC=clang CFLAGS="-O1 -g0 -fprofile-instr-generate" LDFLAGS=-fprofile-instr-generate \
        "../Python-$PYTHON/configure" -q --without-computed-gotos --disable-test-modules --with-ensurepip=no \
        > configure.log 2>&1
    make -s -j"$JOBS" python sharedmods > make.log 2>&1
    # An empty cache folder: all that is imported is compiled, which is training too.
    LLVM_PROFILE_FILE="$PWD/counts/%4m.profraw" PYTHONPYCACHEPREFIX=$PWD/pycache \
        ./python -m test --pgo "${TRAINING[@]}" > test.log 2>&1
    llvm-profdata merge -o python.profdata counts/*.profraw
    zstd -q -19 -f python.profdata -o "$HERE/python.profdata.zst"
)

# Sets the compiler for the guest. A relative sysroot would not survive CPython's sub-directories; the absolute one is
# kept out of the objects by the prefix map.
#
# -fno-wrapv-pointer: CPython's -fno-strict-overflow makes clang >= 20 treat pointer arithmetic as wrapping, which stops
#   it from folding field offsets into loads and stores (about 3 % of the interpreter's speed).
# -fprofile-instr-use: see train(). What the training does not run, or counts for another target, is compiled without.
# --no-wasm-opt: clang runs whatever `wasm-opt` is in PATH; the result must not depend on that.
# PKG_CONFIG=/bin/false: keeps configure from finding this machine's zlib, uuid and readline.
cross_env() {
    compiler_path
    local target="--target=wasm32-wasip1 --sysroot=$WORK/sysroot/usr"
    export CC="clang $target" CPP="clang -E $target" CXX="clang++ $target" AR=llvm-ar RANLIB=llvm-ranlib NM=llvm-nm
    export CFLAGS="-O3 -g0 -fno-wrapv-pointer -ffile-prefix-map=$WORK=/build"
    zstd -qdf "$HERE/python.profdata.zst" -o "$WORK/python.profdata"
    CFLAGS+=" -fprofile-instr-use=$WORK/python.profdata -Wno-profile-instr-unprofiled -Wno-profile-instr-out-of-date"
    export LDFLAGS="--no-wasm-opt"
    export PKG_CONFIG=/bin/false HOSTRUNNER=/bin/true
    export CONFIG_SITE="$WORK/Python-$PYTHON/Tools/wasm/config.site-wasm32-wasi $HERE/config.site"
}

# SQLite as one C file, which its own build makes with Tcl.
sqlite_source() {
    rm -rf "$WORK/sqlite-build"
    mkdir "$WORK/sqlite-build"
    cd "$WORK/sqlite-build"
    (
        export PATH=$WORK/toolchain/usr/bin:$PATH LD_LIBRARY_PATH=$WORK/toolchain/usr/lib/x86_64-linux-gnu
        export TCL_LIBRARY=$WORK/toolchain/usr/share/tcltk/tcl8.6
        ../sqlite/configure -q --disable-tcl --disable-readline > configure.log 2>&1
        make -s TCLSH_CMD=tclsh8.6 sqlite3.c > make.log 2>&1
    )
}

# One thread, one process, no native code; and no memory shared between processes, which write-ahead logs need. For size:
# it is a fifth of the guest's code as it is.
SQLITE_OPTIONS=(
    -Os -DSQLITE_THREADSAFE=0 -DSQLITE_OMIT_LOAD_EXTENSION -DSQLITE_OMIT_WAL -DSQLITE_MAX_MMAP_SIZE=0
    -DSQLITE_ENABLE_MATH_FUNCTIONS -DSQLITE_ENABLE_FTS5 -DSQLITE_ENABLE_COLUMN_METADATA
    -D_WASI_EMULATED_SIGNAL -D_WASI_EMULATED_GETPID -D_WASI_EMULATED_MMAN
)

# The libraries of modules. Of those for compression, less what is for files: the modules use them on memory.
libraries() (
    cross_env
    rm -rf "$WORK/libraries"
    mkdir -p "$WORK/libraries/lib" "$WORK/libraries/include" "$WORK/libraries/objects"
    cd "$WORK/libraries/objects"
    local name
    for name in adler32 compress crc32 deflate inffast inflate inftrees trees uncompr zutil; do
        # shellcheck disable=SC2086  # both are lists of options
        $CC $CFLAGS -c "$WORK/zlib/$name.c" -o "z-$name.o"
    done
    for name in blocksort huffman crctable randtable compress decompress bzlib; do
        # shellcheck disable=SC2086
        $CC $CFLAGS -c "$WORK/bzip2/$name.c" -o "bz2-$name.o"
    done
    $AR rcsD ../lib/libz.a z-*.o
    $AR rcsD ../lib/libbz2.a bz2-*.o
    # shellcheck disable=SC2086
    $CC $CFLAGS "${SQLITE_OPTIONS[@]}" -c "$WORK/sqlite-build/sqlite3.c" -o sqlite3.o
    $AR rcsD ../lib/libsqlite3.a sqlite3.o
    cp "$WORK/sqlite-build/sqlite3.h" ../include/
    cp "$WORK"/zlib/{zlib,zconf}.h "$WORK/bzip2/bzlib.h" ../include/

    rm -rf "$WORK/xz-build"
    mkdir "$WORK/xz-build"
    cd "$WORK/xz-build"
    # No maintainer mode: the dates of unpacked files must not start autotools.
    ../xz/configure -q --host=wasm32-unknown-wasi --prefix="$WORK/libraries" --disable-shared --disable-threads \
        --disable-assembler --disable-clmul-crc --disable-nls --disable-doc --disable-xz --disable-xzdec \
        --disable-lzmadec --disable-lzmainfo --disable-lzma-links --disable-scripts --disable-maintainer-mode \
        > configure.log 2>&1
    make -s -j"$JOBS" -C src/liblzma install > make.log 2>&1
)

ARCHIVES=(
    libpython3.13.a Modules/expat/libexpat.a Modules/_decimal/libmpdec/libmpdec.a Modules/_hacl/libHacl_Hash_SHA2.a
)

# --with-pymalloc, --enable-big-digits=30: what native builds have; off by default for WASI and for 32-bit targets.
cross_python() (
    cross_env
    rm -rf "$WORK/cross"
    mkdir "$WORK/cross"
    cd "$WORK/cross"
    # Naming the libraries to configure is what turns their modules on.
    local libraries=$WORK/libraries
    export ZLIB_CFLAGS="-I$libraries/include" ZLIB_LIBS="-L$libraries/lib -lz"
    export BZIP2_CFLAGS="-I$libraries/include" BZIP2_LIBS="-L$libraries/lib -lbz2"
    export LIBLZMA_CFLAGS="-I$libraries/include" LIBLZMA_LIBS="-L$libraries/lib -llzma"
    export LIBSQLITE3_CFLAGS="-I$libraries/include" LIBSQLITE3_LIBS="-L$libraries/lib -lsqlite3"
    "../Python-$PYTHON/configure" -q --host=wasm32-unknown-wasi --build=x86_64-linux-gnu \
        --with-build-python="$WORK/native/python" --disable-test-modules --with-ensurepip=no --prefix=/ \
        --with-pymalloc --enable-big-digits=30 \
        > configure.log 2>&1
    make -s -j"$JOBS" "${ARCHIVES[@]}" pybuilddir.txt > make.log 2>&1
)

# The guest itself: seconds, so it is never skipped.
link_guest() (
    cross_env
    mkdir -p "$WORK/guest"
    cd "$WORK/guest"
    local cross=$WORK/cross pybuilddir sysconfigdata
    pybuilddir=$cross/$(cat "$cross/pybuilddir.txt")
    sysconfigdata=_sysconfigdata__wasi_wasm32-wasi.py
    # What sysconfig reports names this machine's directories; in the guest they would be neither true nor reproducible.
    sed "s#$WORK#/build#g" "$pybuilddir/$sysconfigdata" > "$sysconfigdata"
    # -E: as for the cross build, nothing of the user's environment. LD_LIBRARY_PATH is for the compiler alone.
    env -u LD_LIBRARY_PATH "$WORK/native/python" -E -s "$HERE/pack_stdlib.py" "$WORK/Python-$PYTHON/Lib" "$sysconfigdata" \
        "$HERE/stage0.py" .
    env -u LD_LIBRARY_PATH "$WORK/native/python" -E -s "$HERE/pack_zoneinfo.py" "$WORK/tzdata/usr/share/zoneinfo" .

    local source
    for source in shim codec stdlib snapshot vfs posix locks; do
        # shellcheck disable=SC2086  # both are lists of options
        $CC $CFLAGS -std=c23 -Wall -Wextra -Wno-unused-parameter -fvisibility=hidden --embed-dir=. \
            -I"$HERE" -I"$WORK/Python-$PYTHON/Include" -I"$cross" -c "$HERE/$source.c" -o "$source.o"
    done
    # 8 MiB of C stack, below the data: an overflow then runs into address 0 and traps instead of overwriting data.
    # shellcheck disable=SC2086
    $CC $CFLAGS $LDFLAGS -mexec-model=reactor -z stack-size=8388608 -Wl,--stack-first -Wl,--export=__stack_pointer \
        -Wl,--initial-memory=33554432 -Wl,--strip-all -Wl,--wrap=chdir,--wrap=chmod,--wrap=fchmod \
        -Wl,--wrap=__wasilibc_find_relpath_alloc,--wrap=_PyMutex_LockTimed \
        shim.o codec.o stdlib.o snapshot.o vfs.o posix.o locks.o \
        "${ARCHIVES[@]/#/$cross/}" "$WORK"/libraries/lib/lib{z,bz2,lzma,sqlite3}.a \
        -ldl -lwasi-emulated-signal -lwasi-emulated-getpid -lwasi-emulated-process-clocks -lwasi-emulated-mman -lm \
        -o python.wasm
    zstd -q -19 -f python.wasm -o python.wasm.zst
)

sha256() { sha256sum "$1" | cut -d' ' -f1; }

# Facts about the build, and nothing that differs between two builds of the same sources.
write_buildinfo() {
    local wasm=$WORK/guest/python.wasm
    cat > "$HERE/BUILDINFO" <<EOF
python              $PYTHON
python source       $PYTHON_TARBALL sha256 $PYTHON_SHA256
zlib source         $ZLIB_TARBALL sha256 $ZLIB_SHA256
bzip2 source        $BZIP2_TARBALL sha256 $BZIP2_SHA256
xz source           $XZ_TARBALL sha256 $XZ_SHA256
sqlite source       $SQLITE_TARBALL sha256 $SQLITE_SHA256
tzdata              tzdata_${TZDATA_VERSION}_all.deb sha256 $TZDATA_SHA256
                    tzdata-legacy_${TZDATA_VERSION}_all.deb sha256 $TZDATA_LEGACY_SHA256
wasi-libc           $WASI_LIBC_DEB sha256 $WASI_LIBC_SHA256
compiler            clang-$LLVM, lld-$LLVM, libclang-rt-$LLVM-dev-wasm32 $LLVM_VERSION
target              wasm32-wasip1, static reactor
patches             ${PATCHES[*]}
profile             python.profdata.zst sha256 $(sha256 "$HERE/python.profdata.zst")
cflags              -O3 -g0 -fno-wrapv-pointer -fprofile-instr-use (CPython adds its own)
ldflags             --no-wasm-opt -z stack-size=8388608 --stack-first --initial-memory=33554432 --strip-all
source date epoch   $SOURCE_DATE_EPOCH
configure           --with-pymalloc --enable-big-digits=30
python.wasm         $(stat -c %s "$wasm") bytes sha256 $(sha256 "$wasm")
python.wasm.zst     $(stat -c %s "$wasm.zst") bytes sha256 $(sha256 "$wasm.zst")
EOF
}

write_licenses() {
    local python=$WORK/Python-$PYTHON out=$HERE/LICENSES
    rm -rf "$out"
    mkdir "$out"
    cp "$python/LICENSE" "$out/CPython.txt"
    cp "$python/Doc/license.rst" "$out/CPython-incorporated-software.rst"
    cp "$python/Modules/expat/COPYING" "$out/expat.txt"
    # libmpdec and HACL* carry their licences in their sources: the first comment of a file that has it.
    first_comment "$python/Modules/_decimal/libmpdec/mpdecimal.c" > "$out/libmpdec.txt"
    first_comment "$python/Modules/_hacl/Hacl_Hash_SHA2.c" > "$out/HACL-star.txt"
    cp "$WORK/zlib/LICENSE" "$out/zlib.txt"
    cp "$WORK/bzip2/LICENSE" "$out/bzip2.txt"
    cp "$WORK/xz/COPYING.0BSD" "$out/liblzma.txt"
    cp "$WORK/sqlite/LICENSE.md" "$out/sqlite.txt"
    cp "$WORK/tzdata/usr/share/doc/tzdata/copyright" "$out/tzdata.txt"
    cp "$WORK/sysroot/usr/share/doc/wasi-libc/copyright" "$out/wasi-libc.txt"
    cp "$WORK/toolchain/usr/share/doc/libclang-rt-$LLVM-dev-wasm32/copyright" "$out/compiler-rt.txt"
}

first_comment() { sed -n '/\/\*/,/\*\// { p; /\*\//q }' "$1"; }

main() {
    local mode=${1:-build}
    case $mode in
        build | --check | --profile) ;;
        # By name: WORK may be a directory that holds other things.
        --clean) rm -rf "$WORK"/{.done-*,apt,fetched,"Python-$PYTHON",sysroot,toolchain,native} \
            "$WORK"/{zlib,bzip2,xz,xz-build,sqlite,sqlite-build,tzdata,libraries,profile,cross,guest} ;;
        *) die "usage: build.sh [--check | --clean | --profile]" ;;
    esac

    mkdir -p "$WORK"
    WORK=$(cd "$WORK" && pwd)
    once private_apt
    once fetch
    once unpack
    if [[ $mode == --profile ]]; then
        say train
        train
        rm -f "$WORK/.done-cross_python"
        say "wrote python.profdata.zst"
        return
    fi
    once native_python
    once sqlite_source
    once libraries
    once cross_python
    say link_guest
    link_guest

    if [[ $mode == --check ]]; then
        local built committed
        built=$(sha256 "$WORK/guest/python.wasm")
        committed=$(zstd -qdc "$HERE/python.wasm.zst" | sha256sum | cut -d' ' -f1)
        [[ $built == "$committed" ]] || die "python.wasm differs: built $built, committed $committed"
        grep -q "sha256 $built\$" "$HERE/BUILDINFO" || die "BUILDINFO does not name $built"
        say "python.wasm is the committed one: $built"
    else
        install -m 644 "$WORK/guest/python.wasm.zst" "$HERE/python.wasm.zst"
        write_buildinfo
        write_licenses
        say "wrote python.wasm.zst, BUILDINFO and LICENSES/"
    fi
}

main "$@"
