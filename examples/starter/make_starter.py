#!/usr/bin/env python3
"""Writes the starter: a task family, flawed demonstrations, a tokenizer and a model config.

The starter is the smallest set of files on which `wardian train` visibly learns on a laptop CPU.
Tasks ask for a one-line function made of one or two arithmetic steps ("adds 3, then multiplies
by 2"). The demonstrations show the right *format* of a tool-using episode but mostly wrong
*programs*: a model fine-tuned on them solves a minority of the tasks, and only the execution
reward can tell it which of its programs are right.

Files, all a pure function of `--seed`:

    tasks/train.jsonl     tasks for GRPO and for the demonstrations   } rows in the schema of
    tasks/valid.jsonl     tasks to gate supervised fine-tuning        } sanitized MBPP
    tasks/heldout.jsonl   tasks for the reported pass rate            }
    demos.jsonl           {"messages": [...]}, one episode a row
    model/                tokenizer.json, tokenizer_config.json, config.json, generation_config.json

The three task files share no (operation, constant) sequence, and the demonstrations use training
tasks only. Needs Python 3.9 or later and the `tokenizers` package.
"""

import argparse
import contextlib
import io
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# --- Tasks -------------------------------------------------------------------------------------

# Python operator -> the words that ask for it. The constant follows the words.
PHRASES = {
    "+": " adds ",
    "-": " subtracts ",
    "*": " multiplies by ",
    "//": " floor-divides by ",
    "%": " takes the remainder modulo ",
}
CONSTANTS = range(2, 10)
ADDITIVE, MULTIPLICATIVE = ("+", "-"), ("*", "//", "%")

PROMPT_HEAD = "Write a function f(x) that takes x,"
PROMPT_JOIN = ", then"
PROMPT_TAIL = " and returns the result."
# How the environment shows a task to the model; only the first test is shown.
TEST_NOTICE = "\n\nYour code should pass this test:\n\n"

# The shown input has one digit; the hidden ones tell every wrong program we plant from the right
# one (see `draw_flaw`) and are never shown.
SHOWN_INPUTS = range(3, 10)
HIDDEN_INPUTS = range(-20, 60)
HIDDEN_TESTS = 7


def expression(steps, grouped=True):
    """Returns the Python expression that applies `steps`, a sequence of (operator, constant)."""
    text = "x"
    for index, (operator, constant) in enumerate(steps):
        if index > 0 and grouped:
            text = f"({text})"
        text = f"{text} {operator} {constant}"
    return text


def program(expr):
    """Returns the one-line function that a solution consists of."""
    return f"def f(x):\n    return {expr}"


def values(expr, inputs):
    """Evaluates an expression in `x` at each input."""
    compiled = compile(expr, "expression", "eval")
    return [eval(compiled, {"__builtins__": {}}, {"x": x}) for x in inputs]


def needs_parentheses(steps):
    """Tells whether Python's precedence differs from the order of `steps`."""
    return len(steps) == 2 and steps[0][0] in ADDITIVE and steps[1][0] in MULTIPLICATIVE


def is_degenerate(steps):
    """Tells whether a shorter program computes the same function."""
    inputs = list(HIDDEN_INPUTS)
    result = values(expression(steps), inputs)
    if len(set(result)) < 3:
        return True
    shorter = [steps[:1], steps[1:]] if len(steps) == 2 else []
    return any(result == values(expression(other), inputs) for other in shorter)


def all_steps():
    """Returns the sequences of one step, and those of two steps that no shorter one equals."""
    steps = [(operator, constant) for operator in PHRASES for constant in CONSTANTS]
    pairs = [(first, second) for first in steps for second in steps]
    return [(step,) for step in steps], [pair for pair in pairs if not is_degenerate(pair)]


def make_task(task_id, steps, rng):
    """Builds one row in the schema of sanitized MBPP."""
    asked = PROMPT_JOIN.join(f"{PHRASES[operator]}{constant}" for operator, constant in steps)
    expr = expression(steps)
    shown = rng.choice(SHOWN_INPUTS)
    hidden = rng.sample([x for x in HIDDEN_INPUTS if x != shown], HIDDEN_TESTS)
    inputs = [shown, *hidden]
    return {
        "task_id": task_id,
        "prompt": f"{PROMPT_HEAD}{asked}{PROMPT_TAIL}",
        "code": program(expr),
        "test_imports": [],
        "test_list": [f"assert f({x}) == {y}" for x, y in zip(inputs, values(expr, inputs))],
    }


def draw_splits(sizes, parenthesised, rng):
    """Draws disjoint step sequences for each split.

    `parenthesised` is the share of tasks whose program needs parentheses. Single steps go to the
    training split only: there are too few of them to hold any out.
    """
    singles, pairs = all_steps()
    hard = [pair for pair in pairs if needs_parentheses(pair)]
    easy = [pair for pair in pairs if not needs_parentheses(pair)]
    rng.shuffle(hard)
    rng.shuffle(easy)
    splits = {}
    for name, size in sizes.items():
        chosen = list(singles) if name == "train" else []
        wanted = round(size * parenthesised)
        chosen += [hard.pop() for _ in range(wanted)]
        chosen += [easy.pop() for _ in range(size - len(chosen))]
        rng.shuffle(chosen)
        splits[name] = chosen
    return splits


# --- Demonstrations ----------------------------------------------------------------------------

# Which operator a careless author writes instead.
CONFUSED = {"+": "-", "-": "+", "*": "+", "//": "%", "%": "//"}


def draw_flaw(steps, rng):
    """Returns a wrong program's expression: a usual mistake that changes some tested value.

    Where the program needs parentheses they are mostly left out; elsewhere one operator is confused
    with its neighbour. Constants stay right, which teaches copying early. The mistakes vary on
    purpose: with one fixed mistake a task, groups of rollouts can settle on it and all fail alike,
    and then the reward carries no signal.
    """
    inputs = list(HIDDEN_INPUTS)
    right = values(expression(steps), inputs)
    while True:
        if needs_parentheses(steps) and rng.random() < 0.8:
            flawed = expression(steps, grouped=False)
        else:
            changed = [list(step) for step in steps]
            target = rng.choice(changed)
            target[0] = CONFUSED[target[0]]
            flawed = expression(changed)
        if values(flawed, inputs) != right:
            return flawed


def run_output(expr, shown):
    """Returns what `run_python` prints for the draft."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(f"{program(expr)}\nprint(f({shown}))", {})
    return output.getvalue().strip()


def tool_call(name, code):
    """Returns an assistant message that calls one tool."""
    function = {"name": name, "arguments": {"code": code}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def make_demo(task, steps, flaw_rate, repair_rate, rng):
    """Builds one episode: run a draft on the shown input, read the output, submit."""
    right = expression(steps)
    draft = draw_flaw(steps, rng) if rng.random() < flaw_rate else right
    shown_test = task["test_list"][0]
    shown = int(shown_test[len("assert f(") : shown_test.index(")")])
    output = run_output(draft, shown)
    mismatch = output != shown_test.split(" == ")[1]
    final = right if mismatch and rng.random() < repair_rate else draft
    return {
        "messages": [
            {"role": "user", "content": task["prompt"] + TEST_NOTICE + shown_test},
            tool_call("run_python", f"{program(draft)}\nprint(f({shown}))"),
            {"role": "tool", "content": output},
            tool_call("submit_solution", program(final)),
        ]
    }


# --- Tokenizer and model -----------------------------------------------------------------------

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not "special", as in Qwen3: they stay in decoded text, where tool calls are looked for.
TOOL_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# ChatML as in Qwen3, append-only: the rendering of an episode's first turns is a prefix of the
# rendering of all of them. Tools are announced by name only, which keeps prompts short.
CHAT_TEMPLATE = r"""
{%- set has_system = messages[0].role == 'system' %}
{%- if tools or has_system %}
    {{- '<|im_start|>system\n' }}
    {%- if has_system %}
        {{- messages[0].content }}
        {%- if tools %}
            {{- '\n' }}
        {%- endif %}
    {%- endif %}
    {%- if tools %}
        {{- 'Tools:' }}
        {%- for tool in tools %}
            {%- if tool.function %}
                {%- set tool = tool.function %}
            {%- endif %}
            {{- ' ' + tool.name }}
            {%- if not loop.last %}
                {{- ',' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if call.function %}
                    {%- set call = call.function %}
                {%- endif %}
                {%- if message.content or not loop.first %}
                    {{- '\n' }}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
                {%- if call.arguments is string %}
                    {{- call.arguments }}
                {%- else %}
                    {{- call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""


def phrases():
    """Returns the constant pieces of an episode, the whole training text of the tokenizer.

    Byte-pair merges never cross two entries of the training text. Listing the pieces one by one
    thus makes each of them a single token and no token spans two of them, so an episode is short
    and its variable parts (operators, constants) keep tokens of their own. The variable parts are
    listed often: their merges come first and win over those of the neighbouring pieces.
    """

    def call(name):
        return f'\n{{"name": "{name}", "arguments": {{"code": "def f(x):\\n    return '

    return [
        "system\nTools: run_python, submit_solution",
        "user",
        "user\n",
        "assistant\n",
        PROMPT_HEAD,
        PROMPT_JOIN,
        PROMPT_TAIL,
        f"{PROMPT_TAIL}{TEST_NOTICE}assert f(",
        ") == ",
        call("run_python"),
        call("submit_solution"),
        "\\nprint(f(",
        '))"}}\n',
        '"}}\n',
        *[*PHRASES.values(), *(f" {operator} " for operator in PHRASES)] * 100,
    ]


def make_tokenizer():
    """Trains the byte-level BPE tokenizer; any text can be encoded, digits one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # never reached: training ends when every phrase is one token
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(phrases(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END_OF_TEXT, IM_START, IM_END)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TOOL_TOKENS])
    return tokenizer


def tokenizer_config():
    """Returns `tokenizer_config.json` as Hugging Face's loaders read it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 256,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def model_config(tokenizer):
    """Returns `config.json` of a Qwen3 model small enough to train on two CPU cores."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(IM_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "torch_dtype": "float32",
    }


def generation_config(tokenizer):
    """Returns `generation_config.json`: plain sampling at temperature 1."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


# --- Files -------------------------------------------------------------------------------------


def write_json(path, value):
    """Writes one JSON document."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_jsonl(path, rows):
    """Writes one JSON document a line."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "build")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=512, help="number of training tasks")
    parser.add_argument("--valid", type=int, default=96, help="number of validation tasks")
    parser.add_argument("--heldout", type=int, default=160, help="number of held-out tasks")
    parser.add_argument("--parenthesised", type=float, default=0.45, help="share of tasks that need parentheses")
    parser.add_argument("--demos-per-task", type=int, default=6)
    parser.add_argument("--flaw-rate", type=float, default=0.62, help="share of drafts that are wrong")
    parser.add_argument("--repair-rate", type=float, default=0.15, help="share of visible failures then repaired")
    args = parser.parse_args()

    rng = random.Random(args.seed)
    tasks_dir, model_dir = args.out / "tasks", args.out / "model"
    tasks_dir.mkdir(parents=True, exist_ok=True)
    model_dir.mkdir(parents=True, exist_ok=True)

    sizes = {"train": args.train, "valid": args.valid, "heldout": args.heldout}
    splits = draw_splits(sizes, args.parenthesised, rng)
    task_id, demos = 1, []
    for name, sequences in splits.items():
        rows = []
        for steps in sequences:
            rows.append(make_task(task_id, steps, rng))
            task_id += 1
        write_jsonl(tasks_dir / f"{name}.jsonl", rows)
        if name == "train":
            for row, steps in zip(rows, sequences):
                for _ in range(args.demos_per_task):
                    demos.append(make_demo(row, steps, args.flaw_rate, args.repair_rate, rng))
    rng.shuffle(demos)
    write_jsonl(args.out / "demos.jsonl", demos)

    tokenizer = make_tokenizer()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    write_json(model_dir / "tokenizer_config.json", tokenizer_config())
    write_json(model_dir / "config.json", model_config(tokenizer))
    write_json(model_dir / "generation_config.json", generation_config(tokenizer))


if __name__ == "__main__":
    main()
