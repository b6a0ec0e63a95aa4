//! CPython in the sandbox.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::time::Duration;

use bytesize::ByteSize;
use rstest::rstest;
use wardian::sandbox::{ExecOutcome, ExecRequest, Exit, Limits};

use super::python;

fn exec(code: &str) -> ExecOutcome {
    exec_with(code, &Limits::default())
}

fn exec_with(code: &str, limits: &Limits) -> ExecOutcome {
    python().exec(&ExecRequest::new(code), limits).unwrap()
}

#[rstest]
#[case("print(6 * 7)", 0, "42\n")]
#[case("import sys; sys.exit(3)", 3, "")]
#[case("import os; os._exit(9)", 9, "")]
#[case("raise SystemExit", 0, "")]
#[case("print(1)\n1 / 0", 1, "1\n")]
#[case(
    "import json; print(json.dumps({'a': [1, None]}))",
    0,
    "{\"a\": [1, null]}\n"
)]
fn programs_end_as_natively(#[case] code: &str, #[case] status: u32, #[case] stdout: &str) {
    let outcome = exec(code);
    assert_eq!(
        outcome.exit,
        Exit::Exited { code: status },
        "{}",
        outcome.stderr_text()
    );
    assert_eq!(outcome.stdout_text(), stdout);
}

#[test]
fn an_exception_prints_its_traceback() {
    let outcome = exec("def f():\n    raise ValueError('no')\nf()\n");
    let stderr = outcome.stderr_text();
    assert!(
        stderr.contains("File \"main.py\", line 2, in f"),
        "{stderr}"
    );
    assert!(stderr.ends_with("ValueError: no\n"), "{stderr}");
}

#[test]
fn a_program_reads_its_input() {
    let request = ExecRequest {
        stdin: "2\n3\n".to_owned(),
        ..ExecRequest::new("print(int(input()) + int(input()))")
    };
    let outcome = python().exec(&request, &Limits::default()).unwrap();
    assert_eq!(outcome.stdout_text(), "5\n");
}

#[test]
fn an_endless_loop_runs_out_of_fuel() {
    let limits = Limits {
        fuel: 100_000_000,
        ..Limits::default()
    };
    let outcome = exec_with("print('in', flush=True)\nwhile True: pass", &limits);
    assert_eq!(outcome.exit, Exit::OutOfFuel { limit: 100_000_000 });
    assert_eq!(outcome.stdout_text(), "in\n");
}

#[test]
fn an_endless_loop_meets_its_deadline() {
    let limits = Limits {
        fuel: i64::MAX as u64,
        deadline: Duration::from_millis(200),
        ..Limits::default()
    };
    let code = "while True:\n  try:\n    while True: pass\n  except BaseException: pass";
    let exit = exec_with(code, &limits).exit;
    assert!(matches!(exit, Exit::DeadlineExceeded { .. }), "{exit}");
}

/// Work that stays in one C function, or in few, for as long as it is let.
#[rstest]
#[case::bytecode("while True: pass")]
#[case::handler("while True:\n  try: 1 / 0\n  except Exception: pass")]
#[case::uninterrupted_jumps(
    "import dis\ndef f():\n  while True: pass\ncode = bytearray(f.__code__.co_code)\n\
     for i in range(0, len(code), 2):\n\
     \x20 if code[i] == dis.opmap['JUMP_BACKWARD']:\n\
     \x20   code[i] = dis.opmap['JUMP_BACKWARD_NO_INTERRUPT']\n\
     f.__code__ = f.__code__.replace(co_code=bytes(code))\nf()"
)]
#[case::sum("sum(range(10**12))")]
#[case::sum_of_one("import itertools\nsum(itertools.repeat(1))")]
#[case::queue("import collections, itertools\ncollections.deque(itertools.count(), 0)")]
#[case::sort("a = ['x' * (i % 7) for i in range(10**5)]\nwhile True: a.sort(key=len)")]
#[case::search("a = [0] * 10**7\nwhile True: 1 in a")]
#[case::regex("import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')")]
#[case::copies("a = 'a' * 10**7\nwhile True: a + 'b'")]
#[case::power("3 ** 10**8")]
#[case::division("a = 1 << 10**7\nb = (1 << 5 * 10**6) + 12345\na % b")]
#[case::decimal("import decimal as d\nd.getcontext().prec = 10**6\nd.Decimal(2).exp()")]
#[case::substrings("s = 'a' * 10**6\nwhile True: s.count('a' * 999 + 'b')")]
#[case::hash("import hashlib\nb = bytes(10**7)\nwhile True: hashlib.sha512(b)")]
#[case::recursion("def f(n):\n  if n: f(n - 1); f(n - 1)\nf(900)")]
#[case::query(
    "import sqlite3\nsqlite3.connect(':memory:').execute('with recursive n(x) as \
     (select 1 union all select x + 1 from n) select count(*) from n').fetchone()"
)]
#[case::garbage("import gc\na = [[] for _ in range(10**5)]\nwhile True: gc.collect()")]
#[case::output("while True: print('x' * 1000)")]
#[case::clock("import time\nwhile True: time.sleep(1)")]
fn endless_work_meets_either_limit(#[case] code: &str) {
    let limits = Limits {
        fuel: 2_000_000_000,
        deadline: Duration::from_mins(1),
        ..Limits::default()
    };
    let runs = [(); 2].map(|()| exec_with(code, &limits));
    assert_eq!(runs[0].exit, Exit::OutOfFuel { limit: limits.fuel });
    assert_eq!(runs[0].exit, runs[1].exit);
    assert_eq!(runs[0].stdout, runs[1].stdout);

    let limits = Limits {
        fuel: i64::MAX as u64,
        deadline: Duration::from_millis(50),
        ..Limits::default()
    };
    let exit = exec_with(code, &limits).exit;
    assert!(matches!(exit, Exit::DeadlineExceeded { .. }), "{exit}");
}

#[test]
fn an_uncaught_memory_error_is_out_of_memory() {
    let limits = Limits {
        memory: ByteSize::mib(128),
        ..Limits::default()
    };
    let outcome = exec_with("x = []\nwhile True: x.append('a' * 10**6)", &limits);
    let Exit::OutOfMemory {
        limit,
        requested: Some(requested),
    } = outcome.exit
    else {
        panic!("ended with {}", outcome.exit);
    };
    assert!(limit == 128 << 20 && requested > limit);
    assert!(outcome.usage.memory_bytes <= limit);
}

#[test]
fn a_caught_memory_error_is_the_programs_business() {
    let code = "try:\n    'a' * (400 << 20)\nexcept MemoryError:\n    print('caught')";
    let outcome = exec(code);
    assert!(outcome.exit.is_success(), "{}", outcome.exit);
    assert_eq!(outcome.stdout_text(), "caught\n");
}

#[test]
fn deep_recursion_is_a_recursion_error() {
    let code = "
def f(): return f()
def nested(n):
    x = []
    for _ in range(n): x = [x]
    return x
class A:
    def __getattr__(self, name): return getattr(self, name + 'x')
for attack in [f, lambda: repr(nested(10**5)), lambda: A().a, lambda: nested(10**5) == nested(10**5)]:
    try: attack()
    except RecursionError: print('RecursionError')
";
    let outcome = exec(code);
    assert_eq!(
        outcome.stdout_text(),
        "RecursionError\n".repeat(4),
        "{}",
        outcome.stderr_text()
    );
}

#[test]
fn forged_bytecode_is_contained() {
    let code = "
def f(): pass
f.__code__ = f.__code__.replace(co_code=bytes([255, 0] * 50), co_stacksize=1)
print('armed', flush=True)
f()
";
    let outcome = exec(code);
    assert_eq!(outcome.stdout_text(), "armed\n");
    assert!(!outcome.exit.is_success(), "{}", outcome.exit);
    assert!(exec("print(1)").exit.is_success());
}

#[test]
fn nothing_outside_is_within_reach() {
    let code = "
import os, socket, subprocess, threading
def attempt(name, action):
    try: print(name, 'ESCAPED', action())
    except (OSError, RuntimeError, AttributeError) as e: print(name, 'denied')
attempt('read', lambda: open('/etc/passwd').read())
attempt('write', lambda: open('/etc/x', 'w'))
attempt('list', lambda: os.listdir('/proc'))
attempt('up', lambda: open('../../../../etc/passwd'))
attempt('fd', lambda: os.read(3, 10))
attempt('socket', lambda: socket.create_connection(('127.0.0.1', 80)))
attempt('process', lambda: subprocess.run(['true']))
attempt('fork', lambda: os.fork())
attempt('thread', lambda: threading.Thread(target=print).start())
print(dict(os.environ), os.sys.argv)
";
    let outcome = exec(code);
    let denied: String = [
        "read", "write", "list", "up", "fd", "socket", "process", "fork", "thread",
    ]
    .map(|name| format!("{name} denied\n"))
    .concat();
    assert_eq!(
        outcome.stdout_text(),
        format!("{denied}{{}} ['main.py']\n"),
        "{}",
        outcome.stderr_text()
    );
}

#[test]
fn a_program_leaves_nothing_to_the_next() {
    exec("import builtins, sys\nbuiltins.secret = 1\nsys.modules.clear()\nbuiltins.print = None");
    let outcome = exec("import builtins\nprint(hasattr(builtins, 'secret'))");
    assert_eq!(outcome.stdout_text(), "False\n");
}

#[test]
fn the_same_program_uses_the_same_fuel_and_prints_the_same() {
    let code = "
import random, time, os, uuid
print(random.random(), time.time(), os.urandom(4), uuid.uuid4(), id(object()), hash('a'))
print(sorted(range(1000), key=lambda _: random.random())[:5])
";
    let (first, second) = (exec(code), exec(code));
    assert_eq!(first.stdout_text(), second.stdout_text());
    assert_eq!(first.usage.fuel, second.usage.fuel);
    assert!(first.usage.fuel > 0);
}

#[test]
fn a_seed_decides_random_numbers() {
    let draw = |seed| {
        let request = ExecRequest {
            seed: Some(seed),
            ..ExecRequest::new("import os, random\nprint(random.random(), os.urandom(8))")
        };
        python()
            .exec(&request, &Limits::default())
            .unwrap()
            .stdout_text()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    // All 64 bits may be used; the guest has a value of its own for "no seed".
    assert_eq!(draw(u64::MAX), draw(u64::MAX));
}

#[test]
fn sleep_takes_no_time() {
    let code = "import time\nt = time.time()\ntime.sleep(3600)\nprint(round(time.time() - t))";
    assert_eq!(exec(code).stdout_text(), "3600\n");
}

#[test]
fn a_session_keeps_its_state() {
    let mut session = python().session(&Limits::default()).unwrap();
    let mut step = |code: &str| session.step(&ExecRequest::new(code)).unwrap();
    step("import math\nx = 20\ndef gen():\n    yield from range(9)\ng = gen()");
    step("next(g)\n1 / 0");
    assert_eq!(
        step("print(x + next(g), math.pi > 3)").stdout_text(),
        "21 True\n"
    );
    let exit = step("raise SystemExit(4)").exit;
    assert_eq!(exit, Exit::Exited { code: 4 });
    assert_eq!(step("print(x)").stdout_text(), "20\n");
}

#[test]
fn a_traceback_shows_the_lines_of_every_step() {
    let mut session = python().session(&Limits::default()).unwrap();
    let mut step = |code: &str| session.step(&ExecRequest::new(code)).unwrap().stderr_text();
    step("def f(x):\n    return 1 / x  # first");
    step("\ndef g(x):\n    return f(x)  # second");
    let stderr = step("g(0)  # third");
    for line in [
        "File \"<step 3>\", line 1, in <module>\n    g(0)  # third",
        "File \"<step 2>\", line 3, in g\n    return f(x)  # second",
        "File \"main.py\", line 2, in f\n    return 1 / x  # first",
    ] {
        assert!(stderr.contains(line), "{stderr}");
    }
}

#[test]
fn carets_stand_where_cpython_puts_them() {
    let sources = [
        include_str!("../../../benches/programs/json_documents.py"),
        include_str!("../../../benches/programs/sudoku.py"),
        include_str!("../../../benches/programs/nbody.py"),
        include_str!("../../../wasm-runtimes/cpython/boot/_wardian_wheels.py"),
        include_str!("../../../graders/unit_tests.py"),
    ];
    let request = ExecRequest {
        stdin: sources.join("\0"),
        ..ExecRequest::new(include_str!("../../data/caret_positions.py"))
    };
    let outcome = python().exec(&request, &Limits::default()).unwrap();
    let stdout = outcome.stdout_text();
    assert!(!stdout.contains("differs"), "{stdout}");
    let numbers: Vec<usize> = stdout
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [simple, total] = numbers[..] else {
        panic!("{stdout}{}", outcome.stderr_text());
    };
    // Else it were two runs of the same method.
    assert!(simple > total * 3 / 5 && total > 2000, "{stdout}");
}

#[test]
fn a_traceback_counts_lines_as_python_does() {
    // A form feed ends no line, a carriage return does.
    let outcome = exec("s = '\x0c \x1c \u{85}'\rx = 1\r\nx = undefined\n");
    let stderr = outcome.stderr_text();
    assert!(
        stderr.contains("line 3, in <module>\n    x = undefined\n"),
        "{stderr}"
    );
}

#[test]
fn arguments_and_start_time_are_the_requests() {
    let code = "import sys, time\nprint(sys.argv, int(time.time()))";
    let request = ExecRequest {
        argv: vec!["--n".to_owned(), "é\n".to_owned(), String::new()],
        start_time: Some(86_400),
        ..ExecRequest::new(code)
    };
    let mut session = python().session(&Limits::default()).unwrap();
    let outcome = session.step(&request).unwrap();
    assert_eq!(
        outcome.stdout_text(),
        "['main.py', '--n', 'é\\n', ''] 86400\n"
    );
    let outcome = session.step(&ExecRequest::new(code)).unwrap();
    assert_eq!(outcome.stdout_text(), "['main.py'] 86400\n");
    assert_eq!(exec(code).stdout_text(), "['main.py'] 1767225600\n");
}

#[test]
fn what_is_not_there_says_so() {
    let code = "
import os, signal, socket, subprocess, sys, threading, urllib.request
def attempt(action):
    try: action()
    except (ImportError, OSError, RuntimeError) as e: print(type(e).__name__, e)
attempt(lambda: threading.Thread(target=print).start())
attempt(lambda: subprocess.run(['ls']))
attempt(lambda: os.fork())
attempt(lambda: socket.socket())
attempt(lambda: urllib.request.urlopen('http://example.com'))
attempt(lambda: signal.alarm(1))
attempt(lambda: __import__('ctypes').CDLL(None))
attempt(lambda: __import__('ssl'))
lock = threading.Lock()
with lock: print(lock.acquire(timeout=3600)); attempt(lock.acquire)
";
    let outcome = exec(code);
    assert_eq!(
        outcome.stdout_text(),
        "RuntimeError can't start new thread: the sandbox has no threads
OSError [Errno 58] the sandbox has no processes
OSError [Errno 58] the sandbox has no processes
OSError [Errno 58] the sandbox has no network
URLError <urlopen error [Errno 58] the sandbox has no network>
OSError [Errno 58] the sandbox has no signals but those that a program raises itself
OSError [Errno 58] the sandbox loads no native code
ModuleNotFoundError No module named '_ssl': the sandbox has no network
False
RuntimeError deadlock: waiting for ever, as the sandbox has no other threads
",
        "{}",
        outcome.stderr_text()
    );
}

#[test]
fn a_session_carries_its_random_state_on() {
    let code = "import random\nprint(random.random())";
    let draws = |seed| {
        let mut session = python().session(&Limits::default()).unwrap();
        let first = ExecRequest {
            seed,
            ..ExecRequest::new(code)
        };
        [first, ExecRequest::new(code)].map(|step| session.step(&step).unwrap().stdout_text())
    };
    let [first, second] = draws(Some(5));
    assert_ne!(first, second);
    assert_eq!(draws(Some(5)), [first, second]);
    assert_ne!(draws(Some(6)), draws(Some(5)));
}

#[test]
fn many_threads_share_a_runtime() {
    std::thread::scope(|scope| {
        let run = |n: u32| {
            for _ in 0..20 {
                let outcome = exec(&format!("print(sum(range({n})))"));
                assert_eq!(outcome.stdout_text(), format!("{}\n", n * (n - 1) / 2));
            }
        };
        for n in 1..=8 {
            scope.spawn(move || run(n * 100));
        }
    });
}
