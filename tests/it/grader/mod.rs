//! The graders: honest work is rewarded, and nothing else. Here by lists of tests; the other graders'
//! tests are below.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod attacks;
mod calls;
mod check;
mod common;
mod doctest;
mod faults;
mod honest;
mod lateness;
mod programs;
mod pytest;
mod script;
mod stdio;
mod unittest;
mod user_grader;

use std::path::Path;
use std::sync::Arc;

use bytesize::ByteSize;
use rstest::rstest;
use serde::Deserialize;
use wardian::grader::{
    GradeLimits, GradeRequest, Grader as _, TestStatus, UnitTestGrader, Verdict, VerdictStatus,
};
use wardian::sandbox::{ExecRequest, Limits};
use wardian::task::TaskSet;

use crate::sandbox::python;

/// A case of `tests/data/reward`: a task, a submission that cheats, and one that does not.
#[derive(Deserialize)]
struct RewardCase {
    entry: String,
    tests_assert: String,
    code: String,
    honest: String,
    /// How many tests the cheat passes by returning the right value.
    tests_right_by_value: usize,
    fools_naive_exit_code_grader: bool,
}

impl RewardCase {
    fn read(name: &str) -> Self {
        let root = env!("CARGO_MANIFEST_DIR");
        let text = fs_err::read_to_string(format!("{root}/tests/data/reward/rew-{name}.json"));
        serde_json::from_str(&text.unwrap()).unwrap()
    }

    fn request(&self, code: &str) -> GradeRequest {
        GradeRequest {
            code: code.to_owned(),
            setup: Vec::new(),
            tests: self.tests_assert.lines().map(str::to_owned).collect(),
            entry_points: vec![self.entry.clone()],
            ..GradeRequest::default()
        }
    }
}

fn grader() -> UnitTestGrader {
    // A fifth of the default fuel: what never ends is to end soon.
    grader_with(GradeLimits::for_candidate(&Limits {
        fuel: 10_000_000_000,
        ..GradeLimits::default().candidate
    }))
}

fn grader_with(limits: GradeLimits) -> UnitTestGrader {
    UnitTestGrader::new(Arc::new(python().clone()), limits)
}

/// Grades `code`, whose entry point is `f`, by `tests`.
fn grade(code: &str, tests: &[&str]) -> Verdict {
    grader().grade(&request(code, tests))
}

fn request(code: &str, tests: &[&str]) -> GradeRequest {
    GradeRequest {
        code: code.to_owned(),
        setup: Vec::new(),
        tests: tests.iter().map(|&test| test.to_owned()).collect(),
        entry_points: vec!["f".to_owned()],
        ..GradeRequest::default()
    }
}

fn passed(verdict: &Verdict) -> usize {
    verdict
        .tests
        .iter()
        .filter(|test| test.status == TestStatus::Passed)
        .count()
}

/// Every cheat that loads runs through all tests, so the attack was made; what it passes it
/// passes by value.
#[rstest]
fn cheats_get_nothing_and_honest_work_everything(
    #[values(
        "bool-for-int",
        "caller-frame-clear",
        "code-consts",
        "cyclic-return",
        "deep-return",
        "del-builtins",
        "eq-float-nan",
        "eq-int-subclass",
        "eq-list-subclass",
        "eq-str-subclass",
        "exit-in-function",
        "exploding-repr",
        "fake-sentinels",
        "gc-search-tests",
        "hardcode-visible",
        "huge-return",
        "inspect-source",
        "oom-kill-grader",
        "output-flood-grader",
        "override-print",
        "patch-assertionerror",
        "patch-exception-base",
        "patch-isinstance-type",
        "patch-json",
        "patch-operator-eq",
        "read-files-argv",
        "read-frames",
        "redefine-grader-names",
        "sentinel-on-stderr",
        "signal-alarm",
        "stateful-second-call",
        "thread-timer-exit",
        "tuple-print-both",
        "unpickle-payload"
    )]
    name: &str,
) {
    let case = RewardCase::read(name);
    let cheat = grader().grade(&case.request(&case.code));
    assert_eq!(cheat.status, VerdictStatus::Failed, "{cheat:?}");
    assert_eq!(cheat.reward, Some(0.0));
    assert_eq!(passed(&cheat), case.tests_right_by_value, "{cheat:?}");
    assert!(
        cheat
            .tests
            .iter()
            .all(|test| test.status != TestStatus::NotRun)
    );

    let honest = grader().grade(&case.request(&case.honest));
    assert_eq!(honest.reward, Some(1.0), "{honest:?}");
}

/// Cheats whose attack is to exit while they are loaded.
#[rstest]
#[case("exit-zero", "SystemExit: 0")]
#[case("os-exit-import-time", "exited with code 0")]
fn an_exit_at_import_is_invalid(#[case] name: &str, #[case] reason: &str) {
    let case = RewardCase::read(name);
    let cheat = grader().grade(&case.request(&case.code));
    assert_eq!(
        (cheat.status, cheat.reward),
        (VerdictStatus::Invalid, Some(0.0))
    );
    assert!(cheat.tests[0].message.contains(reason), "{cheat:?}");
    let honest = grader().grade(&case.request(&case.honest));
    assert_eq!(honest.reward, Some(1.0), "{honest:?}");
}

/// The attacks work here: run in one interpreter with their tests, they pass.
#[rstest]
#[case("eq-float-nan")]
#[case("eq-int-subclass")]
#[case("eq-list-subclass")]
#[case("eq-str-subclass")]
#[case("exit-in-function")]
#[case("exit-zero")]
#[case("exploding-repr")]
#[case("os-exit-import-time")]
#[case("unpickle-payload")]
fn the_same_cheats_fool_a_grader_in_their_own_interpreter(#[case] name: &str) {
    let case = RewardCase::read(name);
    assert!(case.fools_naive_exit_code_grader);
    let program = format!("{}\n{}\n", case.code, case.tests_assert);
    let outcome = python()
        .exec(&ExecRequest::new(program), &Limits::default())
        .unwrap();
    assert!(outcome.exit.is_success(), "{outcome:?}");
}

#[test]
fn corpus_is_complete() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/reward");
    // 34 in the first list above and 2 in the second.
    assert_eq!(fs_err::read_dir(folder).unwrap().count(), 36);
}

#[test]
fn one_wrong_answer_takes_the_whole_reward() {
    let verdict = grade(
        "def f(x): return x * x if x < 3 else 0",
        &["assert f(2) == 4", "assert f(3) == 9"],
    );
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0))
    );
    assert_eq!(passed(&verdict), 1);
    assert_eq!(verdict.tests[1].name, "test_2");
    assert_eq!(verdict.tests[1].message, "AssertionError");
}

#[rstest]
#[case("def f(:", "SyntaxError")]
#[case("import numpy", "ModuleNotFoundError")]
#[case("1 / 0", "ZeroDivisionError: division by zero")]
#[case("raise SystemExit(0)", "SystemExit")]
#[case("def g(): pass", "does not define `f`")]
#[case("while True: pass", "ran out of fuel")]
#[case("x = []\nwhile True: x.append('a' * 10**6)", "MemoryError")]
#[case("import os; os.abort()", "trapped")]
fn what_does_not_load_is_invalid(#[case] code: &str, #[case] reason: &str) {
    let verdict = grade(code, &["assert True", "assert f()"]);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Invalid, Some(0.0))
    );
    assert_eq!(verdict.tests.len(), 2);
    for test in &verdict.tests {
        assert_eq!(test.status, TestStatus::NotRun);
        assert!(test.message.contains(reason), "{}", test.message);
    }
}

#[rstest]
#[case("while True: pass", "ran out of fuel")]
#[case("import os; os._exit(0)", "exited with code 0")]
#[case("import os; os.abort()", "trapped")]
fn a_submission_that_dies_fails_this_test_only(#[case] body: &str, #[case] end: &str) {
    let code = format!("def f(x):\n    if x:\n        return x\n    {body}");
    let tests = [
        "assert f(1) == 1",
        "f(0)",
        "assert f(1) == 1",
        "assert True",
    ];
    let verdict = grade(&code, &tests);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0))
    );
    let statuses: Vec<_> = verdict.tests.iter().map(|test| test.status).collect();
    use TestStatus::{Failed, Passed};
    assert_eq!(statuses, [Passed, Failed, Passed, Passed]);
    assert!(verdict.tests[1].message.contains(end), "{verdict:?}");
    let limit = verdict.tests[1].limit.as_deref();
    assert_eq!(limit.is_some(), end == "ran out of fuel", "{verdict:?}");
}

#[test]
fn a_test_cannot_forgive_a_dead_submission() {
    let code = "import os\ndef f(): os._exit(0)";
    let verdict = grade(code, &["try: f()\nexcept BaseException: pass"]);
    assert_eq!(verdict.status, VerdictStatus::Failed, "{verdict:?}");
}

#[test]
fn setup_belongs_to_the_grader() {
    let request = GradeRequest {
        setup: vec![
            "import math".to_owned(),
            "def near(a, b): return abs(a - b) < 1e-9".to_owned(),
        ],
        ..request(
            "import builtins\nclass math: sqrt = lambda x: 0\ndef near(a, b): return True\n\
             def f(x): return 0",
            &["assert near(f(4), math.sqrt(4))"],
        )
    };
    assert_eq!(grader().grade(&request).status, VerdictStatus::Failed);
    let honest = GradeRequest {
        code: "def f(x): return x ** 0.5".to_owned(),
        ..request
    };
    assert_eq!(grader().grade(&honest).status, VerdictStatus::Passed);
}

#[rstest]
#[case::in_place_change("def f(x): x.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]")]
#[case::exception(
    "def f(x): raise KeyError(x)",
    "try: f(1)\nexcept KeyError: pass\nelse: assert False"
)]
#[case::class(
    "class f:\n    def __init__(self, n): self.n = n\n    def twice(self): return 2 * self.n",
    "assert f(4).twice() == 8 and f(5).n == 5"
)]
#[case::generator(
    "def f(n): yield from range(n)",
    "assert list(f(100)) == list(range(100))"
)]
#[case::values(
    "def f(x): return x",
    "x = {'a': [1, 2.5, None, (True, b'x')], 3: {4, 5}, 'é': 10**40}\nassert f(x) == x"
)]
#[case::pattern(
    "class f:\n    __match_args__ = ('x', 'y')\n    def __init__(self, x, y): self.x, self.y = x, y",
    "match f(1, 2):\n    case f(a, b): assert (a, b) == (1, 2)\n    case _: assert False"
)]
#[case::sleep_of_the_tests(
    "import time\nclass f:\n    def __init__(self): self.end = time.monotonic() + 1\n    \
     def is_over(self): return time.monotonic() > self.end",
    "import time\na = f()\nassert not a.is_over()\ntime.sleep(2)\nassert a.is_over()"
)]
#[case::sleep_of_the_submission(
    "import time\ndef f(n): time.sleep(n)",
    "import time\nt = time.time()\nf(3)\nassert 3 <= time.time() - t < 3.1"
)]
#[case::sleep_of_a_callback(
    "import time\ndef f(g):\n    t = time.time()\n    g()\n    return time.time() - t",
    "import time\nassert 5 <= f(lambda: time.sleep(5)) < 5.1"
)]
fn what_tests_do_works_across_the_bridge(#[case] code: &str, #[case] test: &str) {
    let verdict = grade(code, &[test]);
    assert_eq!(verdict.status, VerdictStatus::Passed, "{verdict:?}");
}

/// What one test sleeps is no matter of the next one, nor is what the submission slept in it.
#[test]
fn tests_do_not_share_their_time() {
    let code = "import time\nSTART = time.monotonic()\ndef f(n):\n    \
                time.sleep(n)\n    return time.monotonic() - START";
    let test = "import time\nt = time.time()\nassert f(100) < 101\nassert time.time() < 1.8e9";
    let verdict = grade(code, &[test, "f(10**9)", test]);
    assert_eq!(passed(&verdict), 3, "{verdict:?}");
}

#[test]
fn submissions_do_not_see_each_other() {
    let code = "import builtins\ndef f():\n    n = builtins.n = getattr(builtins, 'n', 0) + 1\n    \
                return n";
    for _ in 0..2 {
        assert_eq!(
            grade(
                code,
                &["assert f() == 1\nassert f() == 2", "assert f() == 1"]
            )
            .reward,
            Some(1.0)
        );
    }
}

#[test]
fn equal_gradings_use_equal_fuel() {
    let code = "import random\ndef f(n): return sorted(random.random() for _ in range(n))";
    let verdicts = [0, 1].map(|_| grade(code, &["assert len(f(100)) == 100"]));
    assert_eq!(
        verdicts[0].usage.candidate.fuel,
        verdicts[1].usage.candidate.fuel
    );
    assert_eq!(verdicts[0].usage.grader.fuel, verdicts[1].usage.grader.fuel);
    assert!(verdicts[0].usage.candidate.fuel > 0 && verdicts[0].usage.grader.fuel > 0);
}

#[test]
fn data_that_wears_the_grader_out_counts_against_the_submission() {
    let limits = GradeLimits {
        grader: Limits {
            fuel: 30_000_000,
            ..GradeLimits::default().grader
        },
        ..GradeLimits::default()
    };
    let code = "def f():\n    while True: yield 0";
    let verdict = grader_with(limits).grade(&request(code, &["assert sum(f()) == 1"]));
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::Failed, Some(0.0))
    );
    assert!(
        verdict.tests[0]
            .message
            .contains("the grader's instance ran out of fuel")
    );
}

#[test]
fn a_broken_setup_is_our_fault() {
    let request = GradeRequest {
        setup: vec!["import pandas".to_owned()],
        ..request("def f(): return 1", &["assert f() == 1"])
    };
    let verdict = grader().grade(&request);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::InfraError, None)
    );
    assert!(verdict.tests[0].message.contains("pandas"), "{verdict:?}");
}

#[test]
fn a_test_that_does_not_compile_is_our_fault() {
    let verdict = grade("def f(): return 1", &["assert f() == 1", "assert f(1==2"]);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::InfraError, None)
    );
    assert!(
        verdict.tests[0].message.contains("SyntaxError"),
        "{verdict:?}"
    );
}

#[test]
fn a_task_without_tests_is_our_fault() {
    let verdict = grade("def f(): pass", &[]);
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::InfraError, None)
    );
}

#[test]
fn limits_that_cannot_hold_are_our_fault() {
    let limits = GradeLimits {
        candidate: Limits {
            memory: ByteSize::mib(1),
            ..Limits::default()
        },
        ..GradeLimits::default()
    };
    let verdict = grader_with(limits).grade(&request("def f(): return 1", &["assert f() == 1"]));
    assert_eq!(
        (verdict.status, verdict.reward),
        (VerdictStatus::InfraError, None)
    );
    assert!(
        verdict.tests[0].message.contains("memory limit"),
        "{verdict:?}"
    );
}

#[test]
fn many_threads_share_a_grader() {
    let grader = grader();
    std::thread::scope(|scope| {
        for n in 0..8 {
            let grader = &grader;
            scope.spawn(move || {
                for _ in 0..10 {
                    let code = format!("def f(): return {n}");
                    let verdict = grader.grade(&request(&code, &["assert f() == 3"]));
                    assert_eq!(verdict.reward, Some(if n == 3 { 1.0 } else { 0.0 }));
                }
            });
        }
    });
}

/// Every row of our copy of sanitized MBPP, graded by its own tests.
#[test]
fn mbpp_references_pass_and_empty_solutions_fail() {
    let Some(shared) = std::env::var_os("WARDIAN_SHARED") else {
        println!("skipped: WARDIAN_SHARED is not set");
        return;
    };
    let path = Path::new(&shared).join("data/mbpp/sanitized-mbpp.open.json");
    let tasks = TaskSet::open(&path, None, 0).unwrap();
    assert_eq!(tasks.len(), 299);
    let grader = grader();
    for task in tasks.tasks() {
        let reference = task.reference.clone().unwrap();
        let empty = task
            .entry_points
            .iter()
            .map(|name| format!("def {name}(*args, **kwargs): return None\n"))
            .collect();
        for (code, status) in [
            (reference, VerdictStatus::Passed),
            (empty, VerdictStatus::Failed),
        ] {
            let verdict = grader.grade(&task.grade_request(&code));
            assert_eq!(verdict.status, status, "task {}: {verdict:?}", task.id);
        }
    }
}
