"""Makes toy_models.json and toy_adapter/: two toy decoders as transformers and PEFT compute them.

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2
    python tests/golden/make_toy_models.py

Weights are a formula of the tensor's place among the sorted names and of the element's index, so none
are stored. All is computed in float64, but for the rotary angles, which transformers computes in float32.
"""

import json
import pathlib

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
    rope_theta=10000.0,
    attention_bias=False,
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


def main():
    golden = dict(
        made_by="tests/golden/make_toy_models.py: torch 2.15.0, transformers 5.24.0, peft 0.21.2",
        tokens=TOKENS,
        models={},
    )
    for kind, config, build in [
        ("qwen3", Qwen3Config(**SHAPE, tie_word_embeddings=True), Qwen3ForCausalLM),
        ("llama", LlamaConfig(**SHAPE, tie_word_embeddings=False), LlamaForCausalLM),
    ]:
        model = build(config).double().eval()
        parameters = list(model.named_parameters())
        fill(parameters)
        golden["models"][kind] = evaluate(model, parameters)
        if kind == "llama":
            continue
        lora = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora).double()
        prefix, infix = "base_model.model.", ".default"
        parameters = [
            (name.removeprefix(prefix).replace(infix, ""), tensor)
            for name, tensor in adapted.named_parameters()
            if tensor.requires_grad
        ]
        fill(parameters)
        golden["models"]["qwen3_lora"] = evaluate(adapted, parameters)
        adapted.float().save_pretrained(HERE / "toy_adapter")
        (HERE / "toy_adapter" / "README.md").unlink(missing_ok=True)
    (HERE / "toy_models.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
