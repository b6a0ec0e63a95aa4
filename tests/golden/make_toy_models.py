"""Makes toy_models.json and the toy adapters: toy decoders as transformers and PEFT compute them.

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2
    python tests/golden/make_toy_models.py

Weights are a formula of the tensor's place among the sorted names and of the element's index, so none
are stored. All is computed in float64, but for the rotary angles, which transformers computes in float32.
"""

import json
import pathlib

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = pathlib.Path(__file__).parent
SHAPE = dict(
    vocab_size=19,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
)
THETA = 10000.0
PLAIN = dict(rope_type="default", rope_theta=THETA)
ROPES = dict(
    linear=dict(rope_type="linear", factor=4.0),
    llama3=dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    ),
    yarn=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096),
    yarn_own_factors=dict(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=128,
        beta_fast=8.0,
        beta_slow=0.5,
        attention_factor=0.9,
    ),
)
TOKENS = [[3, 14, 0, 7, 18, 2, 2, 9, 11, 5, 16, 1], [8, 1, 6, 17, 4]]


def number(place, index):
    return ((index * 7919 + place * 104729) % 1009) / 1009 - 0.5


def fill(parameters):
    for place, (name, tensor) in enumerate(sorted(parameters)):
        values = torch.tensor([number(place, i) for i in range(tensor.numel())], dtype=torch.float64)
        values = 1 + 0.4 * values if name.endswith("norm.weight") else values
        with torch.no_grad():
            tensor.copy_(values.reshape(tensor.shape))


def evaluate(model, parameters):
    """Logits of each sequence, and the gradient of the mean negative log-likelihood over all targets."""
    model.zero_grad()
    logits, losses = [], []
    for tokens in TOKENS:
        output = model(torch.tensor([tokens])).logits[0]
        logits.append(output.detach().tolist())
        losses.append(
            torch.nn.functional.cross_entropy(output[:-1], torch.tensor(tokens[1:]), reduction="none")
        )
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {
        name: dict(norm=tensor.grad.norm().item(), first=tensor.grad.flatten()[:4].tolist())
        for name, tensor in sorted(parameters)
    }
    return dict(logits=logits, loss=loss.item(), gradients=gradients)


def last_logits(model):
    """Logits behind the last three tokens of each sequence."""
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0, -3:].tolist() for tokens in TOKENS]


def toy(build, config, **fields):
    config = config(**SHAPE, **{"rope_parameters": PLAIN, **fields})
    model = build(config).double().eval()
    fill(model.named_parameters())
    return model


def qwen3():
    return toy(Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=True)


def llama():
    return toy(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False)


def adapt(config, model=qwen3):
    """Puts an adapter on a toy; returns its parameters, too, by their names in the base."""
    adapted = get_peft_model(model(), config).double()
    parameters = [
        (name.removeprefix("base_model.model.").replace(".modules_to_save", "").replace(".default", ""), tensor)
        for name, tensor in adapted.named_parameters()
        if tensor.requires_grad
    ]
    fill(parameters)
    return adapted, parameters


def save(adapted, folder):
    adapted.float().save_pretrained(HERE / folder)
    (HERE / folder / "README.md").unlink(missing_ok=True)


def main():
    golden = dict(
        made_by="tests/golden/make_toy_models.py: torch 2.15.0, transformers 5.24.0, peft 0.21.2",
        tokens=TOKENS,
        models={},
        last_logits={},
    )
    models = golden["models"]
    biases = dict(attention_bias=True, mlp_bias=True)
    for kind, model in [
        ("qwen3", qwen3()),
        ("llama", llama()),
        ("qwen2", toy(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True)),
        ("llama_biases", toy(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False, **biases)),
    ]:
        models[kind] = evaluate(model, list(model.named_parameters()))
    for kind, rope in ROPES.items():
        rope = dict(rope, rope_theta=THETA)
        model = toy(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False, rope_parameters=rope)
        golden["last_logits"][kind] = last_logits(model)

    lora = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted, parameters = adapt(lora)
    models["qwen3_lora"] = evaluate(adapted, parameters)
    save(adapted, "toy_adapter")
    lora = LoraConfig(
        r=3, lora_alpha=6, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM"
    )
    models["qwen3_rslora"] = evaluate(*adapt(lora))
    # Modules that are trained in full: of a model with a head of its own, and of one whose head is its
    # embedding, where it leaves that, where that leaves it, and where both stay one.
    for kind, model, modules, tying in [
        ("llama_saved", llama, ["lm_head", "embed_tokens"], False),
        ("qwen3_saved_head", qwen3, ["lm_head"], False),
        ("qwen3_saved_embedding", qwen3, ["embed_tokens"], False),
        ("qwen3_saved_tied", qwen3, ["embed_tokens", "lm_head"], True),
    ]:
        lora = LoraConfig(
            r=2,
            lora_alpha=3,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=modules,
            ensure_weight_tying=tying,
            task_type="CAUSAL_LM",
        )
        adapted, parameters = adapt(lora, model)
        models[kind] = evaluate(adapted, parameters)
        save(adapted, "toy_adapter_" + kind)
    lora = LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=r".*self_attn\.(q|v)_proj",
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.q_proj": 4},
        alpha_pattern={"v_proj": 5},
        task_type="CAUSAL_LM",
    )
    adapted, _ = adapt(lora)
    golden["last_logits"]["rslora"] = last_logits(adapted)
    save(adapted, "toy_adapter_rslora")
    (HERE / "toy_models.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
