#!/bin/sh
# Builds `helper-x86_64` and `mend-x86_64.so` into this folder, or into the one that is given.
# The committed files are of Debian 12's gcc 12.2 and binutils 2.40.
set -eu
cd "$(dirname "$0")"
out=${1:-.}
build() {
    cc -Os -std=c11 -Wall -Wextra -Werror -ffreestanding -nostdlib -fno-stack-protector \
        -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns -s \
        -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-z,noexecstack "$@"
}
build -static -fno-pie -no-pie -o "$out/helper-x86_64" helper.c
build -shared -fPIC -Wl,--hash-style=both -o "$out/mend-x86_64.so" mend.c
