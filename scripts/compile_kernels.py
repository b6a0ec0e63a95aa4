#!/usr/bin/env python3
"""Compiles the engine's CUDA kernels to PTX with NVRTC, as a GPU's machine does at run time. No GPU is needed.

    scripts/compile_kernels.py LIBNVRTC [compute_90 ...]

Prints, for each kernel, its shared memory that is not asked for at launch, and its local memory: an array that did
not become registers. With `-q` it prints their number.
"""

import ctypes
import re
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent / "src/engine/model/cuda"
TYPES = ["REAL_F32", "REAL_BF16", "REAL_F64"]
# What `Variant`s of each source define, for models that are of interest: Qwen3 and Llama, tokens and prompts.
DEFINES = {
    "attention": [
        {"HEAD_DIM": d, "GROUP": g, "ROWS": rows} for d, g in ((128, 2), (64, 3), (6, 2)) for rows in (1, 4)
    ],
    "blocks": [{}],
    "layer": [{}],
    "sample": [{}],
}


def compile_ptx(nvrtc, name, text, options):
    program = ctypes.c_void_p()
    source = text.encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None):
        sys.exit(f"{name}: no program")
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if failed or b"warning" in log.value:
        sys.exit(f"{name} {' '.join(options)}:\n{log.value.decode()}")
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()


def describe(ptx):
    """Yields each kernel's name and its arrays outside registers."""
    for entry in ptx.split(".visible .entry ")[1:]:
        arrays = re.findall(r"\.(shared|local) \.align \d+ \.b8 \w+\[(\d+)\]", entry)
        yield re.match(r"\w+", entry)[0], ", ".join(f"{size} bytes {space}" for space, size in arrays)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "-q"]
    if not arguments:
        sys.exit(__doc__)
    nvrtc = ctypes.CDLL(arguments[0])
    common = "".join((KERNELS / name).read_text() for name in ("device.cuh", "common.cuh"))
    count = 0
    for architecture in arguments[1:] or ["compute_80", "compute_90"]:
        for path in sorted(KERNELS.glob("*.cu")):
            for real in TYPES if path.stem != "sample" else TYPES[:1]:
                for defines in DEFINES[path.stem]:
                    options = [f"-D{real}", *(f"-D{name}={value}u" for name, value in defines.items())]
                    options += [f"--gpu-architecture={architecture}", "--fmad=false"]
                    ptx = compile_ptx(nvrtc, path.name, common + path.read_text(), options)
                    for kernel, arrays in describe(ptx):
                        count += 1
                        if "-q" not in sys.argv:
                            print(f"{kernel:<14} {' '.join(options[:-1])} {arrays}")
    print(f"{count} kernels compiled")


if __name__ == "__main__":
    main()
