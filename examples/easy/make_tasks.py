"""Writes easy tasks in MBPP's schema, made by rule: `train.jsonl` and `test.jsonl`.

    python3 examples/easy/make_tasks.py

Each family is a function with a parameter or two. The families of the test split are in no task of
the other: what is measured is whether a model has learned to write the function that is asked for, not
whether it remembers one. The tests of a task come from running its solution.
"""

import json
import pathlib
import random

# name, prompt, solution; `{k}` is a small number, `{c}` a letter, `{w}` a word.
TRAIN = [
    ("add_{k}", "add {k} to a number", "return x + {k}", "x", "int"),
    ("times_{k}", "multiply a number by {k}", "return x * {k}", "x", "int"),
    ("subtract_{k}", "subtract {k} from a number", "return x - {k}", "x", "int"),
    ("remainder_{k}", "find the remainder of a number divided by {k}", "return x % {k}", "x", "int"),
    ("is_multiple_of_{k}", "check whether a number is divisible by {k}", "return x % {k} == 0", "x", "int"),
    ("greater_than_{k}", "check whether a number is greater than {k}", "return x > {k}", "x", "int"),
    ("power_{k}", "raise a number to the power of {k}", "return x ** {k}", "x", "int"),
    ("first_{k}", "get the first {k} elements of a list", "return items[:{k}]", "items", "list"),
    ("last_{k}", "get the last {k} elements of a list", "return items[-{k}:]", "items", "list"),
    ("drop_{k}", "remove the first {k} elements of a list", "return items[{k}:]", "items", "list"),
    ("count_{k}", "count how often {k} occurs in a list", "return items.count({k})", "items", "list"),
    ("contains_{k}", "check whether a list contains {k}", "return {k} in items", "items", "list"),
    ("append_{k}", "add {k} at the end of a list and return the list", "return items + [{k}]", "items", "list"),
    ("repeat_{k}", "repeat a string {k} times", "return text * {k}", "text", "str"),
    ("prefix_{k}", "get the first {k} characters of a string", "return text[:{k}]", "text", "str"),
    ("suffix_{k}", "get the last {k} characters of a string", "return text[-{k}:]", "text", "str"),
    ("count_{c}", "count how often the letter {c} occurs in a string", "return text.count('{c}')", "text", "str"),
    ("has_{c}", "check whether a string contains the letter {c}", "return '{c}' in text", "text", "str"),
    ("without_{c}", "remove every letter {c} from a string", "return text.replace('{c}', '')", "text", "str"),
    ("starts_with_{c}", "check whether a string starts with the letter {c}", "return text.startswith('{c}')", "text", "str"),
    ("greet_{w}", "put the word {w} and a space before a string", "return '{w} ' + text", "text", "str"),
    ("double", "double a number", "return 2 * x", "x", "int"),
    ("square", "find the square of a number", "return x * x", "x", "int"),
    ("negate", "change the sign of a number", "return -x", "x", "int"),
    ("is_even", "check whether a number is even", "return x % 2 == 0", "x", "int"),
    ("list_sum", "find the sum of a list of numbers", "return sum(items)", "items", "list"),
    ("list_length", "find the length of a list", "return len(items)", "items", "list"),
    ("list_max", "find the largest number of a list", "return max(items)", "items", "list"),
    ("reverse_list", "reverse a list", "return items[::-1]", "items", "list"),
    ("first_element", "get the first element of a list", "return items[0]", "items", "list"),
    ("upper_case", "convert a string to upper case", "return text.upper()", "text", "str"),
    ("string_length", "find the length of a string", "return len(text)", "text", "str"),
]
TEST = [
    ("subtract_from_{k}", "subtract a number from {k}", "return {k} - x", "x", "int"),
    ("divide_by_{k}", "divide a number by {k} and round the result down", "return x // {k}", "x", "int"),
    ("less_than_{k}", "check whether a number is less than {k}", "return x < {k}", "x", "int"),
    ("equals_{k}", "check whether a number is equal to {k}", "return x == {k}", "x", "int"),
    ("prepend_{k}", "add {k} at the start of a list and return the list", "return [{k}] + items", "items", "list"),
    ("element_{k}", "get the element of a list at index {k}", "return items[{k}]", "items", "list"),
    ("without_last_{k}", "remove the last {k} elements of a list", "return items[:-{k}]", "items", "list"),
    ("ends_with_{c}", "check whether a string ends with the letter {c}", "return text.endswith('{c}')", "text", "str"),
    ("drop_prefix_{k}", "remove the first {k} characters of a string", "return text[{k}:]", "text", "str"),
    ("append_{w}", "put a space and the word {w} behind a string", "return text + ' {w}'", "text", "str"),
    ("cube", "find the cube of a number", "return x ** 3", "x", "int"),
    ("is_odd", "check whether a number is odd", "return x % 2 == 1", "x", "int"),
    ("absolute_value", "find the absolute value of a number", "return abs(x)", "x", "int"),
    ("list_min", "find the smallest number of a list", "return min(items)", "items", "list"),
    ("last_element", "get the last element of a list", "return items[-1]", "items", "list"),
    ("sorted_list", "sort a list in ascending order", "return sorted(items)", "items", "list"),
    ("lower_case", "convert a string to lower case", "return text.lower()", "text", "str"),
    ("reverse_string", "reverse a string", "return text[::-1]", "text", "str"),
]
WORDS = ["hello", "good", "dear", "new"]
TEXTS = ["banana", "Tree house", "level", "sandbox", "One two", "planet", "grass", "moss and fern"]


def argument(kind, value, random):
    if kind == "int":
        # Around the parameter too, for what compares with it.
        return random.choice([random.randint(0, 40), value.get("k", 7) * random.randint(0, 2)])
    if kind == "list":
        return [random.randint(0, 9) for _ in range(random.randint(10, 12))]
    letter = value.get("c", "w")
    return random.choice([*TEXTS, f"{letter}ild fig", f"fern {letter}"])


def values(name, random):
    """The parameters of a family's tasks."""
    if "{k}" in name:
        return [{"k": k} for k in random.sample(range(2, 10), 6)]
    if "{c}" in name:
        return [{"c": c} for c in random.sample("aeglnst", 6)]
    if "{w}" in name:
        return [{"w": word} for word in WORDS]
    return [{}]


def tasks(families, seed, first_id):
    generator = random.Random(seed)
    rows = []
    for name, prompt, body, parameter, kind in families:
        for value in values(name, generator):
            function = name.format(**value)
            code = f"def {function}({parameter}):\n    {body.format(**value)}"
            scope = {}
            exec(code, scope)  # noqa: S102: written above
            tests, results = [], []
            while len(tests) < 3:
                given = argument(kind, value, generator)
                result = scope[function](given)
                test = f"assert {function}({given!r}) == {result!r}"
                # A function that always answers alike must not pass.
                is_last = len(tests) == 2
                if test not in tests and not (is_last and set(map(repr, results)) == {repr(result)}):
                    tests.append(test)
                    results.append(result)
            rows.append({
                "task_id": first_id + len(rows),
                "prompt": f"Write a python function to {prompt.format(**value)}.",
                "code": code,
                "test_imports": [],
                "test_list": tests,
            })
    generator.shuffle(rows)
    return rows


def main():
    folder = pathlib.Path(__file__).parent / "tasks"
    folder.mkdir(exist_ok=True)
    for split, families, seed, first_id in (("train", TRAIN, 1, 1), ("test", TEST, 2, 1001)):
        rows = tasks(families, seed, first_id)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
        print(split, len(rows))


if __name__ == "__main__":
    main()
