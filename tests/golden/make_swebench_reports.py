#!/usr/bin/env python3
"""Makes swebench_reports.json: what the official harness reads in logs of tests, and its report.

    pip install unidiff && pip install --no-deps swebench==5.0.2
    python3 tests/golden/make_swebench_reports.py

The logs in tests/data/swebench/recorded were printed by pytest 9.2, Django's and SymPy's runners; the others are
made here, one for each thing that a reader of logs can get wrong. Only the package's readers and its grading are
imported, without what runs containers.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import tempfile
import types

HERE = pathlib.Path(__file__).parent
RECORDED = HERE.parent / "data" / "swebench" / "recorded"
START, END, EXIT = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"


def harness():
    """Imports the grading without the packages' own `__init__`, which import docker and datasets."""
    root = pathlib.Path(importlib.util.find_spec("swebench").submodule_search_locations[0])
    for name in ["swebench", "swebench.harness"]:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    return importlib.import_module("swebench.harness.grading"), importlib.import_module("swebench.types")


def wrapped(body, code=0, before="", after=""):
    exit_line = "" if code is None else f"{EXIT}: {code}\n"
    return f"{before}+ : '{START}'\n{body}\n+ : '{END}'\n{exit_line}{after}"


def recorded(name):
    return wrapped((RECORDED / f"{name}.log").read_text(), 1)


DJANGO_SPLIT = """test_a (app.T) ... Testing against Django installed in '/testbed/django' with up to 4 processes
Importing application app
System check identified no issues (0 silenced).
ok
test_b (app.T) ... Internal Server Error: /path/
ok
test_c (app.T) ... System check identified no issues (0 silenced)
ok
test_d (app.T) ... Testing against Django installed in '/x' (3 silenced).
ok"""

# name: (parser, log, FAIL_TO_PASS, PASS_TO_PASS, eval type)
BOTH, FAILURES = "pass_and_fail", "fail_only"
CASES = {
    # What runners print.
    "recorded_pytest": ("parse_log_pytest", recorded("pytest_summary"), ["test_sample.py::test_pass"], ["test_sample.py::test_param[/tmp/x/y]", "test_sample.py::test_xfail"], BOTH),
    "recorded_pytest_failed": ("parse_log_pytest", recorded("pytest_summary"), ["test_sample.py::test_pass", "test_sample.py::test_fail"], [], BOTH),
    "recorded_flask": ("parse_log_flask", recorded("pytest_verbose"), ["test_sample.py::test_error"], ["test_sample.py::test_pass"], BOTH),
    "recorded_options": ("parse_log_pytest_options", recorded("pytest_summary"), ["test_sample.py::test_param[/y]"], ["test_sample.py::test_param[[z]]"], BOTH),
    "recorded_v2_classic": ("parse_log_astropy", recorded("pytest_classic"), ["test_sample.py::test_param[a b]", "test_sample.py::test_param[x - y]"], ["test_sample.py::test_xfail"], BOTH),
    "recorded_v2_colors": ("parse_log_scikit", recorded("pytest_colors"), ["test_sample.py::test_param[a b]"], ["test_sample.py::test_pass"], BOTH),
    "recorded_pytest_colors": ("parse_log_pytest", recorded("pytest_colors"), ["test_sample.py::test_pass"], [], BOTH),
    "recorded_v2_verbose": ("parse_log_sphinx", recorded("pytest_verbose"), ["test_sample.py::TestGroup::test_inner"], ["test_sample.py::test_fail"], BOTH),
    "recorded_seaborn": ("parse_log_seaborn", recorded("pytest_verbose"), ["test_sample.py::test_pass"], ["test_sample.py::test_fail"], BOTH),
    "recorded_matplotlib": ("parse_log_matplotlib", recorded("pytest_summary"), ["test_sample.py::test_pass"], [], BOTH),
    "recorded_django": ("parse_log_django", recorded("django"), ["test_ok (app.tests.SampleTests.test_ok)"], ["A test with words of its own.", "test_prints (app.tests.SampleTests.test_prints)"], BOTH),
    "recorded_django_failed": ("parse_log_django", recorded("django"), ["test_raises (app.tests.SampleTests.test_raises)", "test_sub"], [], BOTH),
    "recorded_sympy": ("parse_log_sympy", recorded("sympy"), ["test_good"], ["test_skipped"], BOTH),
    "recorded_sympy_failed": ("parse_log_sympy", recorded("sympy"), ["test_good", "test_bad", "test_raises"], [], BOTH),
    # The readers of pytest's summary.
    "dash_in_a_failure": ("parse_log_pytest", wrapped("FAILED a.py::t - b - c\nFAILED b.py::u[x - y] - z", 1), ["a.py::t"], ["b.py::u[x"], BOTH),
    "status_alone": ("parse_log_pytest", wrapped("PASSED\nPASSED \nFAILED -\nPASSED a.py::t"), ["a.py::t"], [], BOTH),
    "odd_blanks": ("parse_log_pytest", wrapped("PASSED\u00a0a.py::t\nPASSED\x1cb.py::t\nPASSED\tc.py::t\nPASSED\x0bd.py::t"), ["a.py::t", "b.py::t"], ["c.py::t", "d.py::t"], BOTH),
    "later_line_counts": ("parse_log_pytest", wrapped("FAILED a.py::t\nPASSED a.py::t\nPASSED b.py::t\nFAILED b.py::t", 1), ["a.py::t"], ["b.py::t"], BOTH),
    "skip_count_is_no_test": ("parse_log_pytest", wrapped("SKIPPED [1] a.py:3: no\nSKIPPED [x] b\nPASSED [100%]\nSKIPPED a.py::t"), ["a.py::t"], ["[100%]", "[x]"], BOTH),
    "line_ends": ("parse_log_pytest", wrapped("PASSED a.py::t\r\nPASSED b.py::t\rPASSED c.py::t"), ["a.py::t", "b.py::t"], ["c.py::t"], BOTH),
    "options_paths": ("parse_log_requests", wrapped("PASSED a.py::t[/x/y.z]\nPASSED a.py::t[//x/y]\nPASSED a.py::t[/x/*/y]\nPASSED a.py::u[/a]b[/c]d\nPASSED a.py::v]w["), ["a.py::t[/y.z]", "a.py::t[//x/y]", "a.py::t[/x/*/y]"], ["a.py::u[/c]", "a.py::v]w["], BOTH),
    "matplotlib_buttons": ("parse_log_matplotlib", wrapped("PASSED a.py::t[MouseButton.LEFT]\nFAILED a.py::t[MouseButton.RIGHT] - x", 1), ["a.py::t[1]"], ["a.py::t[3]"], BOTH),
    "v2_progress": ("parse_log_pytest_v2", wrapped("a.py::t PASSED\nb.py::u v FAILED\nc.py::w xPASSED\nPASSED\nFAILED a b - c - d\nSKIPPED [2] x", 1), ["a.py::t"], ["b.py::u v"], BOTH),
    "v2_escapes": ("parse_log_astropy", wrapped("\x1b[32mPASSED\x1b[0m a.py::\x1b[1mt[1m]\x1b[0m\n[31mFAILED[0m b\x07.py::u - x", 1), ["a.py::t[1m]", "a.py::t]"], ["b.py::u"], BOTH),
    "seaborn_both_ways": ("parse_log_seaborn", wrapped("a.py::t PASSED [ 1%]\nx a.py::u PASSED [ 2%]\nPASSED b.py::t\nFAILED c.py::t - x\nPASSED", 1), ["a.py::t"], ["b.py::t"], BOTH),
    # Django.
    "django_split_results": ("parse_log_django", wrapped(DJANGO_SPLIT), ["test_a (app.T)", "test_b (app.T)"], ["test_c (app.T)", "test_d (app.T)"], BOTH),
    "django_odd_lines": ("parse_log_django", wrapped("  --version is equivalent to version ... x\nApplying sites.0002_alter_domain_unique...test_no_migrations (a.B) ... ok\nt (a.B) ...  OK\nu (a.B) ... OK\nv (a.B) ... skipped 'x ... ok'\nok later"), ["--version is equivalent to version", "test_no_migrations (a.B)"], ["t (a.B)", "v (a.B)"], BOTH),
    "django_ok_before_any": ("parse_log_django", wrapped("ok\ntest (a.B) ... ERROR\nERROR: test_x (a.B)\nFAIL: test_y (a.B)", 1), ["test (a.B)"], ["test_x"], BOTH),
    # SymPy.
    "sympy_heads": ("parse_log_sympy", wrapped("____ sympy/core/tests/test_a.py:test_x ____\ntest_y ok\ntest_z F\ntest_w E\ntest_v f\n test_u ok ", 1), ["test_y"], ["test_u", "sympy/core/tests/test_a.py:test_x"], BOTH),
    # Which tests count, and how.
    "xfail_mends": ("parse_log_pytest", wrapped("XFAIL a\nXFAIL b"), ["a"], ["b"], BOTH),
    "skip_does_not_mend": ("parse_log_pytest", wrapped("SKIPPED a\nPASSED b"), ["a"], ["b"], BOTH),
    "skip_keeps": ("parse_log_pytest", wrapped("PASSED a\nSKIPPED b"), ["a"], ["b"], BOTH),
    "missing_is_failed": ("parse_log_pytest", wrapped("PASSED a"), ["a"], ["gone"], BOTH),
    "partly": ("parse_log_pytest", wrapped("PASSED a\nFAILED b\nPASSED c", 1), ["a", "b"], ["c"], BOTH),
    "cut_id_agrees": ("parse_log_pytest", wrapped("PASSED t[ab]\nXFAIL t[ac]"), ["t[a"], [], BOTH),
    "cut_id_disagrees": ("parse_log_pytest", wrapped("PASSED t[ab]\nFAILED t[ac]", 1), ["t[a"], [], BOTH),
    "cut_id_skipped": ("parse_log_pytest", wrapped("PASSED a\nSKIPPED t[ab]\nFAILED t[ac]", 1), ["a"], ["t[a"], BOTH),
    "whole_id_is_no_start": ("parse_log_pytest", wrapped("PASSED t[a]b\nPASSED c"), ["t[a]"], ["c"], BOTH),
    "no_mended_tests": ("parse_log_pytest", wrapped("PASSED a"), [], ["a"], BOTH),
    "fail_only": ("parse_log_pytest", wrapped("ERROR a\nSKIPPED b", 1), ["a", "gone"], ["b"], FAILURES),
    "fail_only_failed": ("parse_log_pytest", wrapped("FAILED b", 1), ["a"], ["b"], FAILURES),
    "fail_only_silent": ("parse_log_pytest", wrapped("3 passing (2s)"), ["a"], ["b"], FAILURES),
    "fail_only_never_ran": ("parse_log_pytest", wrapped("Executed 0 of 0", 1), ["a"], ["b"], FAILURES),
    # Which logs are evidence.
    "patch_failed": ("parse_log_pytest", wrapped("PASSED a", before=">>>>> Patch Apply Failed\n"), ["a"], [], BOTH),
    "reset_failed": ("parse_log_pytest", wrapped("PASSED a", after=">>>>> Reset Failed\n"), ["a"], [], BOTH),
    "tests_errored": ("parse_log_pytest", wrapped("PASSED a\n>>>>> Tests Errored"), ["a"], [], BOTH),
    "tests_timed_out": ("parse_log_pytest", wrapped("PASSED a\n>>>>> Tests Timed Out"), ["a"], [], BOTH),
    "no_start": ("parse_log_pytest", f"PASSED a\n{END}\n", ["a"], [], BOTH),
    "no_end": ("parse_log_pytest", f"{START}\nPASSED a\n", ["a"], [], BOTH),
    "empty": ("parse_log_pytest", "", ["a"], [], BOTH),
    "outside_is_not_read": ("parse_log_pytest", wrapped("PASSED a\nFAILED b", 1, before="FAILED a\n", after="PASSED b\n"), ["a"], ["b"], BOTH),
    "outside_is_read_where_inside_is_empty": ("parse_log_pytest", wrapped("", after="PASSED a\n"), ["a"], [], BOTH),
    "marks_are_there_twice": ("parse_log_pytest", f"FAILED a\n+ echo '{START}'\n{START}\nPASSED a\n+ echo '{END}'\n{END}\n{EXIT}: 0\nFAILED a\n", ["a"], [], BOTH),
    "no_tests": ("parse_log_pytest", wrapped("SyntaxError: invalid syntax", 1), ["a"], [], BOTH),
    "exit_contradicts": ("parse_log_pytest", wrapped("PASSED a\nPASSED b", 1), ["a"], ["b"], BOTH),
    "exit_agrees": ("parse_log_pytest", wrapped("PASSED a\nFAILED c", 1), ["a"], [], BOTH),
    "exit_unknown": ("parse_log_pytest", wrapped("PASSED a", None), ["a"], [], BOTH),
    "exit_negative": ("parse_log_pytest", wrapped("PASSED a", -9), ["a"], [], BOTH),
    "exit_of_a_suite_without_names": ("parse_log_pytest", wrapped("3 passing", 1), ["a"], [], FAILURES),
    # Signs of a broken environment.
    "out_of_memory": ("parse_log_pytest", wrapped("Killed", 137), ["a"], [], BOTH),
    "no_network": ("parse_log_pytest", wrapped("fatal: Could not resolve host: x", 128), ["a"], [], BOTH),
    "no_module": ("parse_log_pytest", wrapped("ModuleNotFoundError: No module named 'x'", 4), ["a"], [], BOTH),
    "nothing_collected": ("parse_log_pytest", wrapped("collected 0 items", 5), ["a"], [], BOTH),
    "took_too_long": ("parse_log_pytest", f"{START}\nPASSED a\n\n\nTimeout error: 1800 seconds exceeded.", ["a"], [], BOTH),
    # Where ours is stricter, by the name that the test gives the difference.
    "word_is_no_status": ("parse_log_pytest", wrapped("PASSED a\nERRORS b\nPASSED: c"), ["a"], ["b", "c"], BOTH),
    "cut_id_word_is_no_status": ("parse_log_pytest", wrapped("PASSED a\nERRORS t[ab]"), ["a", "t[a"], [], BOTH),
}


def main():
    grading, kinds = harness()
    cases = []
    for name, (parser, log, mended, kept, eval_type) in CASES.items():
        spec = kinds.TestSpec("case", "", [], "", "", mended, kept, log_parser=parser, eval_type=eval_type)
        with tempfile.NamedTemporaryFile("w", newline="", encoding="utf-8") as file:
            file.write(log)
            file.flush()
            statuses, found = grading.get_logs_eval(spec, file.name)
            prediction = {"instance_id": "case", "model_patch": ""}
            report = grading.get_eval_report(spec, prediction, file.name, True)["case"]
        tests = report.get("tests_status", {})
        cases.append({
            "name": name,
            "parser": parser,
            "eval_type": eval_type,
            "log": log,
            "FAIL_TO_PASS": mended,
            "PASS_TO_PASS": kept,
            "found": found,
            "statuses": statuses,
            "resolved": report["resolved"],
            "status": grading.get_resolution_status(tests) if tests else None,
            "tests": {kind: tests[kind] for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")} if tests else None,
            "infra_failure": report["infra_failure"],
            "infra_failure_reason": report.get("infra_failure_reason"),
        })
    made_with = f"swebench {importlib.metadata.version('swebench')}, CPython {sys.version.split()[0]}"
    text = json.dumps({"made_with": made_with, "cases": cases}, indent=1, ensure_ascii=True)
    (HERE / "swebench_reports.json").write_text(text + "\n")
    print(f"{len(cases)} cases, {sum(case['resolved'] for case in cases)} resolved")


if __name__ == "__main__":
    main()
