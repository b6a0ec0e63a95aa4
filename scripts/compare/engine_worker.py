"""Measures one peer of engine.py; runs in the peer's own environment.

    engine_worker.py torch GGUF          transformers on torch
    engine_worker.py llama_cpp GGUF      llama.cpp through llama-cpp-python

Reads requests and prints answers, one JSON object a line:

    {"what": "describe"}                                        versions and settings
    {"what": "prefill", "setting": .., "sequences": 8, "length": 128}    {"seconds": ..}
    {"what": "decode", "setting": .., "sequences": 8, "steps": 16}       {"seconds": ..}

A prefill computes whole prompts and chooses each one's first token; a decoding step computes one
token of every sequence behind a prompt of 128 tokens and chooses the next, the likeliest one. The
weights are those of the GGUF file, dequantised to f32.
"""

import json
import os
import sys
import tempfile
import time
import traceback

THREADS = int(os.environ.get("WARDIAN_COMPARE_THREADS", "2"))
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = str(THREADS)

import numpy as np  # noqa: E402  (after the number of threads is set)

CONTEXT = 128
VOCABULARY = 49152


def prompts(sequences, length):
    """The same tokens as in benches/engine.rs."""
    return [
        [(index * 7919 + t * 104729) % VOCABULARY for t in range(length)]
        for index in range(sequences)
    ]


def read_gguf(path):
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    tensors = {
        tensor.name: np.ascontiguousarray(
            dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        )
        for tensor in reader.tensors
    }
    return reader, tensors


class Torch:
    # Each is tried; the comparison takes the fastest for each measurement.
    SETTINGS = ("eager", "compiled", "bf16", "bf16 compiled")

    def __init__(self, path):
        import torch
        import transformers

        torch.set_num_threads(THREADS)
        transformers.logging.set_verbosity_error()
        self.torch, self.transformers = torch, transformers
        self.path = path
        self.models = {}

    def describe(self):
        return {
            "version": f"torch {self.torch.__version__}, transformers "
            f"{self.transformers.__version__}",
            "settings": list(self.SETTINGS),
        }

    def model(self, is_half):
        """Builds the model from the GGUF file's tensors, whose rotary halves are interleaved."""
        torch = self.torch
        if is_half in self.models:
            return self.models[is_half]
        reader, tensors = read_gguf(self.path)

        def number(key):
            return reader.get_field(f"llama.{key}").contents()

        heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
        layers = number("block_count")

        def halves(weight, heads):
            rows, columns = weight.shape
            shape = (heads, rows // heads // 2, 2, columns)
            return weight.reshape(shape).swapaxes(1, 2).reshape(rows, columns)

        state = {
            "model.embed_tokens.weight": tensors["token_embd.weight"],
            "lm_head.weight": tensors["token_embd.weight"],
            "model.norm.weight": tensors["output_norm.weight"],
        }
        for layer in range(layers):
            source, target = f"blk.{layer}.", f"model.layers.{layer}."
            for ours, theirs in (
                ("self_attn.q_proj", "attn_q"),
                ("self_attn.k_proj", "attn_k"),
                ("self_attn.v_proj", "attn_v"),
                ("self_attn.o_proj", "attn_output"),
                ("mlp.gate_proj", "ffn_gate"),
                ("mlp.up_proj", "ffn_up"),
                ("mlp.down_proj", "ffn_down"),
                ("input_layernorm", "attn_norm"),
                ("post_attention_layernorm", "ffn_norm"),
            ):
                weight = tensors[f"{source}{theirs}.weight"]
                if theirs in ("attn_q", "attn_k"):
                    weight = halves(weight, heads if theirs == "attn_q" else kv_heads)
                state[f"{target}{ours}.weight"] = weight
        config = self.transformers.LlamaConfig(
            vocab_size=len(tensors["token_embd.weight"]),
            hidden_size=number("embedding_length"),
            intermediate_size=number("feed_forward_length"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=number("context_length"),
            rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
            rope_theta=number("rope.freq_base"),
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        model = self.transformers.LlamaForCausalLM(config)
        state = {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
        model.load_state_dict(state)
        model = model.eval()
        if is_half:
            model = model.to(torch.bfloat16)
        compiled = torch.compile(model.forward, dynamic=False)
        self.models[is_half] = (model, compiled)
        return self.models[is_half]

    def forward(self, setting):
        model, compiled = self.model("bf16" in setting)
        return compiled if "compiled" in setting else model.forward

    def cache(self, setting, length):
        if "compiled" not in setting:
            return self.transformers.DynamicCache()
        config = self.model("bf16" in setting)[0].config
        return self.transformers.StaticCache(config=config, max_cache_len=length)

    def prefill(self, setting, sequences, length):
        torch, forward = self.torch, self.forward(setting)
        tokens = torch.tensor(prompts(sequences, length))
        with torch.inference_mode():
            start = time.perf_counter()
            cache = self.cache(setting, length)
            output = forward(tokens, cache=cache, use_cache=True, logits_to_keep=1)
            output.logits[:, -1].argmax(-1).tolist()
            return time.perf_counter() - start

    def decode(self, setting, sequences, steps):
        torch, forward = self.torch, self.forward(setting)
        model = self.model("bf16" in setting)[0]
        tokens = torch.tensor(prompts(sequences, CONTEXT))
        with torch.inference_mode():
            cache = self.cache(setting, CONTEXT + steps + 4)
            output = model.forward(tokens, cache=cache, use_cache=True, logits_to_keep=1)
            chosen = output.logits[:, -1].argmax(-1, keepdim=True)
            # Two more steps than the prompts take, to warm up.
            for step in range(steps + 2):
                if step == 2:
                    start = time.perf_counter()
                output = forward(chosen, cache=cache, use_cache=True)
                chosen = output.logits[:, -1].argmax(-1, keepdim=True)
            chosen.tolist()
            return time.perf_counter() - start

    def greedy(self, prompt, count):
        """The likeliest continuation, to compare with the others'."""
        model, _ = self.model(False)
        with self.torch.inference_mode():
            tokens = self.torch.tensor([prompt])
            cache = self.transformers.DynamicCache()
            chosen = []
            for _ in range(count):
                logits = model.forward(tokens, cache=cache, use_cache=True).logits
                tokens = logits[:, -1].argmax(-1, keepdim=True)
                chosen.append(int(tokens[0, 0]))
            return chosen


class LlamaCpp:
    SETTINGS = ("f32", "f16")

    def __init__(self, path):
        import llama_cpp

        self.api = llama_cpp
        self.path = path
        self.folder = tempfile.TemporaryDirectory(prefix="wardian-compare-")
        self.models = {}
        self.log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.log, None)
        llama_cpp.llama_backend_init()

    def describe(self):
        system = self.api.llama_print_system_info().decode()
        return {
            "version": f"llama-cpp-python {self.api.__version__}",
            "settings": list(self.SETTINGS),
            "system": system,
        }

    def convert(self, setting):
        """Writes the file again with its matrices in f32 or f16."""
        import gguf

        reader, tensors = read_gguf(self.path)
        path = os.path.join(self.folder.name, f"{setting}.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        kind = gguf.LlamaFileType.ALL_F32 if setting == "f32" else gguf.LlamaFileType.MOSTLY_F16
        writer.add_file_type(kind)
        skipped = ("GGUF.", "general.architecture", "general.file_type")
        for name, field in reader.fields.items():
            if name.startswith(skipped):
                continue
            kinds = [*field.types, None]
            writer.add_key_value(name, field.contents(), kinds[0], kinds[1])
        for name, values in tensors.items():
            if setting == "f16" and values.ndim == 2:
                values = values.astype(np.float16)
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def context(self, setting):
        api = self.api
        if setting not in self.models:
            model = api.llama_model_load_from_file(
                self.convert(setting).encode(), api.llama_model_default_params()
            )
            params = api.llama_context_default_params()
            params.n_ctx = 32 * 512
            params.n_batch = params.n_ubatch = 2048
            params.n_seq_max = 32
            params.n_threads = params.n_threads_batch = THREADS
            params.kv_unified = True
            context = api.llama_init_from_model(model, params)
            if not context:
                raise RuntimeError("llama.cpp made no context")
            self.models[setting] = (model, context, api.llama_batch_init(2048, 0, 1))
        _, context, batch = self.models[setting]
        api.llama_memory_clear(api.llama_get_memory(context), True)
        return context, batch

    def run(self, context, batch, rows):
        """Computes (token, position, sequence, wants logits) and returns the likeliest next tokens."""
        chosen = []
        for first in range(0, len(rows), 2048):
            part = rows[first : first + 2048]
            wanted = []
            for at, (token, position, sequence, wants) in enumerate(part):
                batch.token[at] = token
                batch.pos[at] = position
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence
                batch.logits[at] = wants
                if wants:
                    wanted.append(at)
            batch.n_tokens = len(part)
            if self.api.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for at in wanted:
                logits = self.api.llama_get_logits_ith(context, at)
                chosen.append(int(np.ctypeslib.as_array(logits, (VOCABULARY,)).argmax()))
        return chosen

    def prompt_rows(self, sequences, length):
        return [
            (token, position, sequence, position == length - 1)
            for sequence, tokens in enumerate(prompts(sequences, length))
            for position, token in enumerate(tokens)
        ]

    def prefill(self, setting, sequences, length):
        context, batch = self.context(setting)
        rows = self.prompt_rows(sequences, length)
        start = time.perf_counter()
        self.run(context, batch, rows)
        return time.perf_counter() - start

    def decode(self, setting, sequences, steps):
        context, batch = self.context(setting)
        chosen = self.run(context, batch, self.prompt_rows(sequences, CONTEXT))
        for step in range(steps + 2):
            if step == 2:
                start = time.perf_counter()
            rows = [(token, CONTEXT + step, index, True) for index, token in enumerate(chosen)]
            chosen = self.run(context, batch, rows)
        return time.perf_counter() - start

    def greedy(self, prompt, count):
        context, batch = self.context("f32")
        rows = [(token, at, 0, at == len(prompt) - 1) for at, token in enumerate(prompt)]
        chosen = self.run(context, batch, rows)
        while len(chosen) < count:
            chosen += self.run(context, batch, [(chosen[-1], len(prompt) + len(chosen) - 1, 0, True)])
        return chosen


def main():
    name, path = sys.argv[1:]
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = {"torch": Torch, "llama_cpp": LlamaCpp}[name](path)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            what = request.pop("what")
            if what == "describe":
                answer = peer.describe()
            elif what == "greedy":
                answer = {"tokens": peer.greedy(**request)}
            else:
                answer = {"seconds": getattr(peer, what)(**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
