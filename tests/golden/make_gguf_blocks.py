"""Makes gguf_blocks.json: blocks of every GGUF tensor type that is read, and the numbers in them.

    pip install gguf==0.19.0 numpy==2.4.6
    python tests/golden/make_gguf_blocks.py

Types that the package quantises are made from normal numbers. Of the K types it can only read blocks,
and any bytes are a block: theirs are random but for the scales, half-precision numbers between 0.001
and 0.1.
"""

import json
import pathlib

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

HERE = pathlib.Path(__file__).parent
QUANTISED = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
# Where in a block its half-precision scales lie.
SCALES = {
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
}


def main():
    random = np.random.default_rng(0)
    types = {}
    for kind in QUANTISED:
        numbers = random.normal(size=(1, 256)).astype(np.float32)
        data = gguf.quantize(numbers, kind)
        types[kind.name] = (data, gguf.dequantize(data, kind))
    for kind, places in SCALES.items():
        data = random.integers(0, 256, size=(2, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        for place in places:
            scales = random.uniform(0.001, 0.1, size=(2, 1)).astype(np.float16)
            data[:, place : place + 2] = scales.view(np.uint8)
        types[kind.name] = (data, gguf.dequantize(data, kind))
    lines = [
        f"  {json.dumps(name)}: "
        + json.dumps(
            dict(
                bytes=data.tobytes().hex(),
                values=[float(f"{value:.9g}") for value in values.flatten()],
            )
        )
        for name, (data, values) in types.items()
    ]
    made_by = "tests/golden/make_gguf_blocks.py: gguf 0.19.0, numpy 2.4.6"
    text = f'{{"made_by": {json.dumps(made_by)},\n "types": {{\n' + ",\n".join(lines) + "\n}}\n"
    (HERE / "gguf_blocks.json").write_text(text)


if __name__ == "__main__":
    main()
