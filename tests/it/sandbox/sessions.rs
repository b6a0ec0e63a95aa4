//! Forks and snapshots of live sessions, in this process.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use bytesize::ByteSize;
use wardian::sandbox::{ExecRequest, Limits, SandboxError, Session, Snapshot};

use super::python;

/// State of every kind: names, a generator half-way through, random numbers, a graph with a cycle.
const SET_UP: &str = "\
import random
random.seed(5)
def squares():
    n = 0
    while True:
        n += 1
        yield n * n
numbers = squares()
next(numbers), next(numbers)
graph = {'name': 'root', 'children': [[1, 2], {3, 4}]}
graph['self'] = graph
";
const LOOK: &str = "import os; print(next(numbers), random.random(), os.urandom(4), graph['self']['self']['children'])";

fn print(session: &mut Session, code: &str) -> String {
    let outcome = session.step(&ExecRequest::new(code)).unwrap();
    assert!(outcome.exit.is_success(), "{}", outcome.stderr_text());
    outcome.stdout_text()
}

fn session() -> Session {
    let mut session = python().session(&Limits::default()).unwrap();
    print(&mut session, SET_UP);
    session
}

#[test]
fn a_fork_goes_on_where_its_parent_was() {
    let mut parent = session();
    let mut children = parent.fork(3).unwrap();
    let expected = print(&mut parent, LOOK);
    for child in &mut children {
        assert_eq!(print(child, LOOK), expected);
    }
    assert!(expected.starts_with("9 "), "{expected}");
}

#[test]
fn forks_do_not_influence_each_other() {
    let mut parent = session();
    let mut children = parent.fork(2).unwrap();
    print(&mut children[0], "graph['name'] = 'changed'; next(numbers)");
    assert_eq!(print(&mut children[1], "print(graph['name'])"), "root\n");
    assert_eq!(print(&mut parent, "print(graph['name'])"), "root\n");
    assert_eq!(print(&mut parent, "print(next(numbers))"), "9\n");
    assert_eq!(print(&mut children[0], "print(next(numbers))"), "16\n");
}

#[test]
fn a_fork_of_a_fork_has_all_of_it() {
    let mut parent = session();
    let mut child = parent.fork(1).unwrap().remove(0);
    print(&mut child, "more = list(range(1000))");
    drop(parent);
    let mut grandchild = child.fork(1).unwrap().remove(0);
    drop(child);
    assert_eq!(print(&mut grandchild, "print(sum(more))"), "499500\n");
    assert!(print(&mut grandchild, LOOK).starts_with("9 "));
}

#[test]
fn a_grown_memory_is_forked_whole() {
    let mut parent = session();
    print(
        &mut parent,
        "big = [str(i) for i in range(600_000)]; raw = bytes([7]) * (20 << 20)",
    );
    let before = parent.step(&ExecRequest::new("pass")).unwrap();
    assert!(before.usage.memory_bytes > 70 << 20);
    let mut child = parent.fork(1).unwrap().remove(0);
    let check = "print(len(big), big[599_999], raw.count(7), hash(tuple(big)))";
    assert_eq!(print(&mut child, check), print(&mut parent, check));
    // The slot is used again by somebody who must not notice.
    drop(child);
    let fresh = python().exec(&ExecRequest::new("print(len(dir()))"), &Limits::default());
    assert!(fresh.unwrap().usage.memory_bytes < 50 << 20);
}

#[test]
fn a_seed_tells_forks_apart() {
    let mut parent = session();
    let mut children = parent.fork(2).unwrap();
    let draw = |session: &mut Session, seed| {
        let request = ExecRequest {
            seed: Some(seed),
            ..ExecRequest::new("import os; print(random.random(), os.urandom(4))")
        };
        session.step(&request).unwrap().stdout_text()
    };
    assert_ne!(draw(&mut children[0], 1), draw(&mut children[1], 2));
}

#[test]
fn forks_and_snapshots_know_of_arguments() {
    let with_arguments = ExecRequest {
        argv: vec!["secret".to_owned()],
        ..ExecRequest::new("pass")
    };
    let look = "import sys; print(sys.argv)";
    let mut parent = session();
    parent.step(&with_arguments).unwrap();
    let mut child = parent.fork(1).unwrap().remove(0);
    let snapshot = parent.snapshot().unwrap();
    let mut resumed = python().resume(&snapshot, &Limits::default()).unwrap();
    for session in [&mut parent, &mut child, &mut resumed] {
        assert_eq!(print(session, look), "['main.py']\n");
    }
}

#[test]
fn more_forks_than_instances_are_refused() {
    let error = session().fork(usize::MAX).unwrap_err();
    assert!(
        matches!(error, SandboxError::PoolExhausted { .. }),
        "{error}"
    );
    assert!(session().fork(0).unwrap().is_empty());
}

#[test]
fn an_ended_session_cannot_be_forked() {
    let mut session = session();
    session
        .step(&ExecRequest::new("import os; os._exit(0)"))
        .unwrap();
    for error in [
        session.fork(1).unwrap_err(),
        session.snapshot().unwrap_err(),
    ] {
        assert!(
            matches!(error, SandboxError::SessionEnded { .. }),
            "{error}"
        );
    }
}

#[test]
fn a_snapshot_is_resumed_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let mut parent = session();
    print(&mut parent, "import time; time.sleep(1000)");
    parent.snapshot().unwrap().save(&path).unwrap();
    let snapshot = Snapshot::load(&path, 64 << 20).unwrap();
    let mut resumed = python().resume(&snapshot, &Limits::default()).unwrap();
    let look = format!("{LOOK}\nprint(time.monotonic() > 1000)");
    assert_eq!(print(&mut resumed, &look), print(&mut parent, &look));
}

#[test]
fn equal_sessions_have_equal_files() {
    let folder = tempfile::tempdir().unwrap();
    let save = |name| {
        let path = folder.path().join(name);
        session().snapshot().unwrap().save(&path).unwrap();
        fs_err::read(path).unwrap()
    };
    assert!(save("first") == save("second"));
}

#[test]
fn a_damaged_snapshot_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    session().snapshot().unwrap().save(&path).unwrap();
    let sound = fs_err::read(&path).unwrap();
    let load = |bytes: &[u8], max_bytes| {
        fs_err::write(&path, bytes).unwrap();
        let error = Snapshot::load(&path, max_bytes).expect_err("damaged");
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(error.to_string().contains("session"), "{error}");
        source
    };
    let mut changed = sound.clone();
    changed[sound.len() / 2] ^= 1;
    assert!(load(&changed, u64::MAX).contains("hash"));
    assert!(load(&sound[..20], u64::MAX).contains("truncated"));
    assert!(load(&sound[1..], u64::MAX).contains("not a session snapshot"));
    let mut newer = sound.clone();
    newer[8] = 9;
    assert!(load(&newer, u64::MAX).contains("version 9"));
    // The file fits, what it unpacks to does not.
    assert!(load(&sound, sound.len() as u64 - 1).contains("larger"));
    assert!(load(&sound, sound.len() as u64).contains("unpacks"));
}

#[test]
fn a_resumed_session_needs_its_memory() {
    let mut parent = session();
    print(&mut parent, "raw = bytes([1]) * (100 << 20)");
    let snapshot = parent.snapshot().unwrap();
    let limits = Limits {
        memory: ByteSize::mib(64),
        ..Limits::default()
    };
    let error = python().resume(&snapshot, &limits).unwrap_err();
    assert!(
        matches!(error, SandboxError::MemoryLimitTooSmall { minimum, .. }
            if minimum == snapshot.memory_bytes()),
        "{error}"
    );
}
