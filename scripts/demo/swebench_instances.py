#!/usr/bin/env python3
"""Builds three instances of SWE-bench from source packages, and finds which of their tests count.

    python3 scripts/demo/swebench_instances.py build FOLDER       # repositories and what they need
    python3 scripts/demo/swebench_instances.py validate FOLDER    # red before, green after: writes the rows

They reproduce marshmallow-1359, marshmallow-1343 and flask-5014 from the packages that were published before and
after each was mended; they are not the official instances, whose base commits are others. The issues and the tests
are in our own words. FOLDER/ID/testbed is the repository, with its base tagged `base`, and FOLDER/ID/deps what it
needs besides. `validate` runs the tests twice, without and with the reference, on this machine and with no sandbox:
it writes examples/swebench/instances.jsonl where at least one test is mended and none is broken.
"""

import difflib
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ROWS = ROOT / "examples" / "swebench" / "instances.jsonl"

# Names that Python 3.10 took out of `collections`; the package of that time still uses them there.
OLD_NAMES = """import collections
import collections.abc

for name in ("Mapping", "MutableMapping", "Iterable", "Sequence", "Set", "MutableSet", "Hashable", "Callable"):
    if not hasattr(collections, name):
        setattr(collections, name, getattr(collections.abc, name))
"""

INSTANCES = {
    "marshmallow-code__marshmallow-1359": {
        "repo": "marshmallow-code/marshmallow",
        "version": "3.0",
        "package": ("marshmallow", "3.0.0"),
        "needs": ["pytest==7.4.4", "pytz==2023.3", "simplejson==3.19.2", "python-dateutil==2.8.2"],
        "path": "src",
        "problem_statement": "A `DateTime` inside a `List` or a `Tuple` cannot be bound to its schema. As soon as such a"
        " schema is made, an error says that the list has no `opts`. A `DateTime` directly in the schema works. The"
        " field looks for its default format in whatever it was bound to, and that need not be the schema itself.",
        "reference": (
            "src/marshmallow/fields.py",
            "            or getattr(schema.opts, self.SCHEMA_OPTS_VAR_NAME)\n",
            "            or getattr(self.root.opts, self.SCHEMA_OPTS_VAR_NAME)\n",
        ),
        "tests": (
            "tests/test_fields.py",
            "\n\nclass TestMetadata:\n",
            '''
    def test_datetime_list_inner_format(self):
        class Times(Schema):
            listed = fields.List(fields.DateTime())
            paired = fields.Tuple((fields.DateTime(),))

            class Meta:
                datetimeformat = "iso8601"

        made = Times()
        assert made.fields["listed"].inner.format == "iso8601"
        assert made.fields["paired"].tuple_fields[0].format == "iso8601"


class TestMetadata:
''',
        ),
    },
    "marshmallow-code__marshmallow-1343": {
        "repo": "marshmallow-code/marshmallow",
        "version": "2.20",
        "package": ("marshmallow", "2.20.0"),
        "needs": ["pytest==7.4.4", "pytz==2023.3", "simplejson==3.19.2", "python-dateutil==2.8.2"],
        "sitecustomize": OLD_NAMES,
        "path": "src",
        "problem_statement": "A nested schema with a method under `@validates` raises a `TypeError` when a text is given"
        " where its object should be. Without such a method the same input is a `ValidationError` that says `Invalid"
        " input type.` The methods are called although nothing could be deserialized, and look up their field in what"
        " is no mapping.",
        "reference": (
            "src/marshmallow/schema.py",
            "field_name]\n@except KeyError:\n",
            "field_name]\n@except (KeyError, TypeError):\n",
        ),
        "tests": (
            "tests/test_marshalling.py",
            None,
            '''
    def test_deserialize_wrong_nested_type_with_validates_method(self, unmarshal):
        from marshmallow import validates

        class Inner(Schema):
            word = fields.String()

            @validates('word')
            def check(self, word):
                pass

        with pytest.raises(ValidationError) as caught:
            unmarshal.deserialize({'inner': 'a text'}, {'inner': fields.Nested(Inner, required=True)})
        assert caught.value.messages == {'inner': {'_schema': ['Invalid input type.']}}
''',
        ),
    },
    "pallets__flask-5014": {
        "repo": "pallets/flask",
        "version": "2.3",
        "package": ("Flask", "2.2.3"),
        "needs": ["pytest==7.4.4", "werkzeug==2.2.3", "jinja2==3.1.2", "itsdangerous==2.1.2", "click==8.1.3"],
        "path": "src",
        "problem_statement": "A blueprint may be made with an empty name. Nothing works with it afterwards, and nothing"
        " says why: its endpoints begin with a dot. `Blueprint` should raise a `ValueError` for an empty name.",
        "reference": (
            "src/flask/blueprints.py",
            '        if "." in name:\n',
            '        if not name:\n            raise ValueError("\'name\' may not be empty.")\n\n        if "." in name:\n',
        ),
        "tests": (
            "tests/test_blueprints.py",
            "\n\ndef test_dotted_names_from_app(",
            '''

def test_empty_name_not_allowed():
    with pytest.raises(ValueError):
        flask.Blueprint("", __name__)


def test_dotted_names_from_app(''',
        ),
    },
}


def run(*command, cwd=None, env=None):
    subprocess.run(command, cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL)


def build(folder):
    for name, instance in INSTANCES.items():
        place = folder / name
        if (place / "testbed").exists():
            continue
        package, version = instance["package"]
        place.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        run(*pip, "install", "--target", str(place / "deps"), *instance["needs"])
        with tempfile.TemporaryDirectory() as work:
            work = pathlib.Path(work)
            run(*pip, "download", "--no-deps", "--no-binary", package, f"{package}=={version}", "--dest", str(work))
            with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
                archive.extractall(work / "unpacked", filter="data")
            (next((work / "unpacked").iterdir())).rename(place / "testbed")
        if "sitecustomize" in instance:
            (place / "deps" / "sitecustomize.py").write_text(instance["sitecustomize"])
        # The same commit wherever it is made.
        author = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in
                  [("NAME", "demo"), ("EMAIL", "demo@localhost"), ("DATE", "2026-01-01T00:00:00Z")]}
        env = {**os.environ, **author, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
        testbed = place / "testbed"
        run("git", "init", "--quiet", "--initial-branch=main", cwd=testbed, env=env)
        run("git", "add", "--all", "--force", cwd=testbed, env=env)
        run("git", "commit", "--quiet", "--no-verify", "--message=base", cwd=testbed, env=env)
        run("git", "tag", "base", cwd=testbed, env=env)
        print(f"built {place}")


def changed(text, change):
    _, old, new = change
    if old is None:
        return text.rstrip("\n") + "\n" + new
    # `@` stands for the indentation of its line, which may differ from place to place.
    pattern = re.escape(old).replace("@", "(?P<indent> +)")
    text, count = re.subn(pattern, lambda found: new.replace("@", found.groupdict().get("indent", "")), text)
    if not count:
        raise SystemExit(f"{change[0]} has no {old!r}")
    return text


def diff(testbed, change):
    path = change[0]
    old = (testbed / path).read_text()
    lines = [text.splitlines(keepends=True) for text in (old, changed(old, change))]
    body = "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}"))
    return f"diff --git a/{path} b/{path}\n{body}"


def row_of(folder, name):
    instance = INSTANCES[name]
    testbed = folder / name / "testbed"
    return {
        "repo": instance["repo"],
        "instance_id": name,
        "base_commit": "base",
        "version": instance["version"],
        "problem_statement": instance["problem_statement"],
        "patch": diff(testbed, instance["reference"]),
        "test_patch": diff(testbed, instance["tests"]),
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
        "workdir": "/testbed",
        "environment": [
            f"export PYTHONPATH=/deps:/testbed/{instance['path']}",
            "export PYTHONDONTWRITEBYTECODE=1",
        ],
        "test_command": f"python3 -m pytest -rA -p no:cacheprovider {instance['tests'][0]}",
    }


def statuses(folder, name, row, patches):
    """Runs the tests of a copy with these patches, as the evaluation does, and returns who passed."""
    with tempfile.TemporaryDirectory() as work:
        testbed = pathlib.Path(work) / "testbed"
        run("git", "clone", "--quiet", str(folder / name / "testbed"), str(testbed))
        for patch in patches:
            subprocess.run(["git", "apply", "-"], cwd=testbed, input=patch, text=True, check=True)
        script = "\n".join([*row["environment"], "cd /testbed", row["test_command"]])
        script = script.replace("/testbed", str(testbed)).replace("/deps", str(folder.resolve() / name / "deps"))
        script = script.replace("python3", sys.executable)
        output = subprocess.run(["bash", "-c", script], text=True, capture_output=True).stdout
    lines = [line.split() for line in output.splitlines()]
    return {words[1] for words in lines if len(words) > 1 and words[0] in ("PASSED", "XFAIL")}


def validate(folder):
    rows = []
    for name in INSTANCES:
        row = row_of(folder, name)
        before = statuses(folder, name, row, [row["test_patch"]])
        after = statuses(folder, name, row, [row["patch"], row["test_patch"]])
        if before - after or not after - before:
            raise SystemExit(f"{name}: {len(after - before)} mended, broken: {sorted(before - after)}")
        row["FAIL_TO_PASS"], row["PASS_TO_PASS"] = sorted(after - before), sorted(before & after)
        rows.append(row)
        print(f"{name}: {len(after - before)} mended, {len(before)} kept")
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    commands = {"build": build, "validate": validate}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        raise SystemExit(__doc__)
    commands[sys.argv[1]](pathlib.Path(sys.argv[2]))


if __name__ == "__main__":
    main()
