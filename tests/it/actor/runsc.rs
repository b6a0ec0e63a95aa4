//! What only gVisor does, and what its guests try against it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use wardian::actor::runsc::{RunscBackend, RunscOptions};
use wardian::actor::{
    ActorBackend as _, ActorCommand, ActorError, ActorSpec, Ending, RootFs, TreeLimits, User,
    WarmPool,
};

use super::{assert_cpu_time_is_bounded, processes_naming, runs, runsc, sh, spec, text};

#[test]
fn the_kernel_is_not_the_hosts() {
    let scene = runsc();
    let actor = scene.actor();
    let inside = text(&*actor, "uname -r; cat /proc/version");
    let outside = fs_err::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert!(!inside.contains(outside.trim()), "{inside}");
    drop(actor);
    scene.close();
}

#[test]
fn usual_programs_work() {
    let scene = runsc();
    let mut spec = spec();
    spec.limits.lifetime = Duration::from_secs(300);
    let actor = scene.backend().create(&spec).unwrap();
    let script = "ls -la / > /dev/null && stat /usr > /dev/null && find /usr/lib -name 'libc.so*' | head -1 && \
        git init -q repo && cd repo && git config user.email a@b && git config user.name c && \
        echo 1 > f && git add f && git commit -qm first && git log --oneline | wc -l && \
        echo 'int main(void){return 42;}' > m.c && cc m.c -o m; ./m; echo $?; \
        python3 -c 'import subprocess; print(subprocess.check_output([\"echo\", \"py\"]))'";
    let command = ActorCommand {
        timeout: Duration::from_secs(200),
        ..ActorCommand::shell(script)
    };
    let output = actor.exec(&command).unwrap().stdout.text();
    assert!(output.trim_end().ends_with("1\n42\nb'py\\n'"), "{output}");
    drop(actor);
    scene.close();
}

#[test]
fn the_hosts_files_are_out_of_reach() {
    let scene = runsc();
    let actor = scene.actor();
    let secret = tempfile::Builder::new().prefix("secret").tempdir().unwrap();
    fs_err::write(secret.path().join("key"), "the host's").unwrap();
    let here = env!("CARGO_MANIFEST_DIR");
    for path in [
        secret.path().join("key").to_string_lossy().as_ref(),
        "/etc/shadow",
        "/etc/ssh",
        &format!("{here}/Cargo.toml"),
        "/var/lib/dpkg/status",
        "/proc/1/root/etc/shadow",
        "/proc/self/root/../../etc/shadow",
        "/sys/fs/cgroup/memory",
        "/dev/vda",
    ] {
        let output = sh(&*actor, &format!("cat {path} || ls {path}"));
        // Said by the guest's own programs: the attack ran, and found nothing.
        let said = output.stderr.text();
        let is_meant = said.contains("No such file") || said.contains("Permission denied");
        assert!(is_meant && !output.is_success(), "{path}: {output:?}");
    }
    // A write lands in the actor alone.
    let name = format!("wardian-{}", std::process::id());
    let output = text(
        &*actor,
        &format!("echo x > /usr/bin/{name}; cat /usr/bin/{name}"),
    );
    assert_eq!(output, "x", "the write reached the overlay");
    assert!(!Path::new("/usr/bin").join(&name).exists());
    let output = sh(&*actor, "echo x > /.wardian/helper");
    assert!(output.stderr.text().contains("Read-only"), "{output:?}");
    // Nor by rights that root has elsewhere.
    let mount = sh(&*actor, "mkdir -p m; mount -t tmpfs none m");
    assert!(
        mount.stderr.text().contains("permission denied"),
        "{mount:?}"
    );
    let device = sh(&*actor, "mknod d b 254 0 && cat d");
    assert!(
        device.stderr.text().contains("No such device"),
        "{device:?}"
    );
    drop(actor);
    scene.close();
}

#[test]
fn there_is_a_loopback_and_no_network() {
    let scene = runsc();
    let actor = scene.actor();
    // A server of the host's, which the guest must not find under any name.
    let server = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = server.local_addr().unwrap().port();
    server.set_nonblocking(true).unwrap();
    let script = format!(
        r#"
import socket, threading
own = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: own.accept()[0].sendall(b"own"), daemon=True).start()
print(socket.create_connection(own.getsockname()).recv(3).decode())
for name in ("127.0.0.1", "10.0.0.1", "1.1.1.1", "8.8.8.8"):
    try:
        socket.create_connection((name, {port}), timeout=2)
        print("reached", name)
    except OSError as error:
        print(type(error).__name__)
try:
    socket.getaddrinfo("example.org", 80)
    print("resolved")
except OSError as error:
    print(type(error).__name__)
try:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    print("raw")
except OSError as error:
    print("no raw sockets")
"#
    );
    let command = ActorCommand {
        stdin: script.into_bytes(),
        ..ActorCommand::new(["python3", "-"])
    };
    let output = actor.exec(&command).unwrap();
    assert!(output.is_success(), "{output:?}");
    assert_eq!(
        output.stdout.text(),
        "own\nConnectionRefusedError\nOSError\nOSError\nOSError\ngaierror\nno raw sockets\n"
    );
    assert!(server.accept().is_err(), "somebody came");
    drop(actor);
    scene.close();
}

#[test]
fn a_fork_bomb_meets_the_limit_and_its_end() {
    let scene = runsc();
    let actor = scene.actor();
    let command = ActorCommand {
        timeout: Duration::from_secs(10),
        ..ActorCommand::new(["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 100"])
    };
    let started = Instant::now();
    let output = actor.exec(&command).unwrap();
    assert!(
        matches!(output.ending, Ending::TimedOut { .. }),
        "{output:?}"
    );
    let complaint = "fork: retry: Resource temporarily unavailable";
    assert!(
        output.stderr.text().contains(complaint),
        "it met the limit: {output:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(25));
    // The actor is as good as before: what killed them kills nothing that comes later.
    assert_eq!(
        text(&*actor, "ls /proc | grep -c '^[0-9]' | sed 's/[1-9]$/few/'"),
        "few"
    );
    // Other users inside are no way around it.
    let script = "import os, sys\nn = 0\nfor uid in range(1000, 1100):\n    for _ in range(10):\n        try:\n            pid = os.fork()\n        except BlockingIOError:\n            continue\n        if pid == 0:\n            os.setuid(uid); os.execvp('sleep', ['sleep', '100'])\n        n += 1\n        print(n)\nimport time; time.sleep(100)\n";
    let command = ActorCommand {
        stdin: script.as_bytes().to_vec(),
        timeout: Duration::from_secs(20),
        ..ActorCommand::new(["python3", "-u", "-"])
    };
    let output = actor.exec(&command).unwrap();
    let threads = matches!(&output.ending, Ending::Killed { reason } if reason.contains("threads"));
    let started = output.stdout.text().lines().next_back().map(str::to_owned);
    let started: u32 = started.unwrap_or_default().parse().unwrap_or(0);
    let few = (20..600).contains(&started);
    assert!(threads || few, "{output:?}");
    drop(actor);
    scene.close();
}

#[test]
fn a_memory_hog_is_ended_alone() {
    let scene = runsc();
    let (hog, other) = (scene.actor(), scene.actor());
    let script = "import sys\nheld = []\nwhile True:\n    held.append(bytearray(b'x') * (1 << 22))\n    print(len(held), flush=True)\n";
    let command = ActorCommand {
        stdin: script.as_bytes().to_vec(),
        ..ActorCommand::new(["python3", "-"])
    };
    let output = hog.exec(&command).unwrap();
    let Ending::OutOfMemory { limit, used } = output.ending else {
        panic!("{output:?}");
    };
    assert_eq!(limit, (192 + 64) << 20);
    assert!(
        used > limit && used < 4 * limit,
        "it held {used} bytes, of at most {limit}"
    );
    let again = sh(&*hog, "echo still there");
    assert!(
        matches!(again.ending, Ending::OutOfMemory { .. }),
        "{again:?}"
    );
    let error = hog
        .get(Path::new("/workspace"), TreeLimits::default())
        .unwrap_err();
    assert!(matches!(error, ActorError::Ended { .. }), "{error}");
    assert!(error.is_guests_doing());
    assert_eq!(text(&*other, "echo fine"), "fine");
    drop((hog, other));
    scene.close();
}

#[test]
fn files_are_bounded_one_by_one_and_together() {
    let scene = runsc();
    let actor = scene.actor();
    let one = sh(&*actor, "head -c 80000000 /dev/zero > big; stat -c %s big");
    assert_eq!(one.stdout.text(), format!("{}\n", 64 << 20), "{one:?}");
    let command = ActorCommand {
        timeout: Duration::from_secs(40),
        ..ActorCommand::shell(
            "i=0; while :; do head -c 30000000 /dev/zero > f$i; i=$((i+1)); echo $i; done",
        )
    };
    let output = actor.exec(&command).unwrap();
    assert!(
        matches!(output.ending, Ending::OutOfMemory { .. }),
        "{output:?}"
    );
    assert!(output.stdout.text().lines().count() >= 3, "{output:?}");
    drop(actor);
    scene.close();
}

#[test]
fn whoever_fights_the_first_process_gains_nothing() {
    let scene = runsc();
    let actor = scene.actor();
    let command = ActorCommand {
        timeout: Duration::from_secs(5),
        ..ActorCommand::shell("kill -KILL 1; sleep 100")
    };
    // All of it dies with its first process; or that one is not to be killed, and the time is over.
    let output = actor.exec(&command).unwrap();
    let ending = &output.ending;
    let is_dead = matches!(ending, Ending::Killed { .. }) || output.code() == Some(137);
    let is_over = matches!(ending, Ending::TimedOut { .. });
    assert!(is_dead || is_over, "{output:?}");
    let again = sh(&*actor, "echo still there");
    match again.ending {
        Ending::Killed { .. } => {}
        _ => assert!(again.is_success() && is_over, "{again:?}"),
    }
    // It may be stopped, too, and then processes cannot be killed by it.
    let other = scene.actor();
    let command = ActorCommand {
        timeout: Duration::from_secs(1),
        ..ActorCommand::shell("kill -STOP 1; while :; do sleep 1; done")
    };
    let started = Instant::now();
    let output = other.exec(&command).unwrap();
    assert!(
        matches!(output.ending, Ending::TimedOut { .. }),
        "{output:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(20));
    drop((actor, other));
    scene.close();
}

#[test]
fn an_actor_that_is_killed_from_outside_says_so() {
    let scene = runsc();
    let actor = scene.actor();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| sh(&*actor, "echo begun; sleep 100"));
        let id = actor.id();
        // Its program is known once it has started; then it has a word to say.
        let begun = Instant::now();
        let has_started = |name: String| name.starts_with("exec-") && name.ends_with(".pid");
        while !names_below(scene.base.path()).any(has_started) {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "it does not start"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_secs(2));
        let listing = Command::new("pgrep")
            .args(["-f", &format!("runsc-sandbox.* {id}$")])
            .output();
        let pid = String::from_utf8(listing.unwrap().stdout).unwrap();
        let killed = Command::new("kill")
            .args(["-KILL", pid.trim()])
            .status()
            .unwrap();
        assert!(killed.success(), "no sandbox of {id}: {pid:?}");
        let output = running.join().unwrap();
        assert!(matches!(output.ending, Ending::Killed { .. }), "{output:?}");
        assert_eq!(output.stdout.text(), "begun\n");
    });
    drop(actor);
    scene.close();
}

#[test]
fn an_actor_lives_no_longer_than_it_may() {
    let scene = runsc();
    let mut spec = spec();
    spec.limits.lifetime = Duration::from_secs(2);
    let actor = scene.backend().create(&spec).unwrap();
    let output = sh(&*actor, "sleep 100");
    assert_eq!(
        output.ending,
        Ending::TimedOut {
            limit: Duration::from_secs(2)
        }
    );
    drop(actor);
    scene.close();
}

#[test]
fn processes_and_their_memory_are_in_a_snapshot() {
    let scene = runsc();
    let actor = scene.actor();
    let counter = "(n=0; while :; do n=$((n+1)); echo $n > new; mv new count; sleep 0.05; done) > /dev/null 2>&1 &\nsleep 0.5; cat count";
    let before: u64 = text(&*actor, counter).parse().unwrap();
    let snapshot = actor.snapshot().unwrap();
    let members: Vec<_> = (0..2).map(|_| snapshot.restore().unwrap()).collect();
    for member in members.iter().chain([&actor]) {
        let first: u64 = text(&**member, "cat count").parse().unwrap();
        let later: u64 = text(&**member, "sleep 0.5; cat count").parse().unwrap();
        assert!(before <= first && first < later, "{before} {first} {later}");
    }
    drop((actor, members, snapshot));
    scene.close();
}

#[test]
fn a_root_folder_is_shared_and_stays_as_it_is() {
    let scene = runsc();
    let root = tempfile::tempdir().unwrap();
    let script = "mkdir -p usr/bin usr/lib etc tmp proc dev && ln -s usr/bin bin && cp -L /bin/sh /bin/cat /bin/tar /bin/ls usr/bin/ && \
        for b in sh cat tar ls; do ldd usr/bin/$b | grep -o '/[^ )]*' ; done | sort -u | while read l; do mkdir -p ./$(dirname $l); cp -L $l ./$l; done; \
        echo mine > etc/mark";
    let made = Command::new("sh")
        .args(["-c", script])
        .current_dir(root.path())
        .status();
    assert!(made.unwrap().success());
    let listing = |path: &Path| Command::new("find").arg(path).output().unwrap().stdout;
    let before = listing(root.path());
    let spec = ActorSpec {
        root: RootFs::Folder(root.path().to_owned()),
        mounts: vec![("/usr/share/common-licenses".into(), "/data".into())],
        ..spec()
    };
    let (one, other) = (
        scene.backend().create(&spec).unwrap(),
        scene.backend().create(&spec).unwrap(),
    );
    assert_eq!(
        text(
            &*one,
            "cat /etc/mark; echo changed > /etc/mark; cat /etc/mark"
        ),
        "mine\nchanged"
    );
    assert_eq!(text(&*other, "cat /etc/mark"), "mine");
    assert!(text(&*one, "ls /data").contains("Apache-2.0"));
    let write = sh(&*one, "echo x > /data/x");
    assert!(write.stderr.text().contains("Read-only"), "{write:?}");
    drop((one, other));
    let after = String::from_utf8(listing(root.path())).unwrap();
    let new: Vec<_> = after
        .lines()
        .filter(|line| {
            !String::from_utf8_lossy(&before)
                .lines()
                .any(|old| old == *line)
        })
        .collect();
    // The points where folders are shown are made, and nothing else.
    let is_point = |line: &&str| line.ends_with("/data") || line.ends_with("/.wardian");
    assert!(new.iter().all(is_point), "{new:?}");
    assert_eq!(
        fs_err::read_to_string(root.path().join("etc/mark")).unwrap(),
        "mine\n"
    );
    let missing = ActorSpec {
        root: RootFs::Folder("/no/such/root".into()),
        ..spec
    };
    scene.backend().create(&missing).unwrap_err();
    scene.close();
}

#[test]
fn a_pool_has_actors_ready_and_makes_up_for_them() {
    let scene = runsc();
    let prepared = scene.actor();
    text(&*prepared, "echo prepared > state");
    let snapshot = prepared.snapshot().unwrap();
    let pool = WarmPool::start(2, move || snapshot.restore()).unwrap();
    let patience = Duration::from_secs(30);
    let taken: Vec<_> = (0..4).map(|_| pool.take(patience).unwrap()).collect();
    for (actor, number) in taken.iter().zip(0..) {
        assert_eq!(
            text(&**actor, &format!("cat state; echo {number} > state")),
            "prepared"
        );
    }
    let until = Instant::now() + patience;
    while pool.ready() < 2 {
        assert!(Instant::now() < until, "the pool is not filled again");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop((pool, taken, prepared));
    let failing = WarmPool::start(1, || {
        Err(ActorError::InvalidSpec {
            reason: "on purpose".to_owned(),
        })
    })
    .unwrap();
    let error = failing.take(patience).unwrap_err();
    assert!(error.to_string().contains("on purpose"), "{error}");
    scene.close();
}

/// Run by the test below in a process of its own, which is killed.
#[test]
#[ignore = "it waits to be killed"]
fn helper_that_is_killed() {
    let base = std::env::var("WARDIAN_TEST_BASE").unwrap();
    let options = RunscOptions {
        folder: Some(base.into()),
        ..RunscOptions::default()
    };
    let backend = RunscBackend::open(&options).unwrap();
    let _actor = backend.create(&spec()).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn what_a_crashed_run_left_is_collected() {
    let base = tempfile::tempdir().unwrap();
    let name = base.path().to_string_lossy().into_owned();
    let mut run = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "actor::runsc::helper_that_is_killed",
        ])
        .env("WARDIAN_TEST_BASE", base.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    let sandbox = |line: &String| line.starts_with("runsc-sandbox");
    while !processes_naming(&name).iter().any(sandbox) {
        assert!(Instant::now() < until, "the run started no sandbox");
        std::thread::sleep(Duration::from_millis(50));
    }
    // While it lives, another run leaves it alone.
    let options = RunscOptions {
        folder: Some(base.path().to_owned()),
        ..RunscOptions::default()
    };
    drop(RunscBackend::open(&options).unwrap());
    assert!(processes_naming(&name).iter().any(sandbox));
    run.kill().unwrap();
    run.wait().unwrap();
    assert_eq!(runs(base.path()).len(), 1);
    assert!(
        processes_naming(&name).iter().any(sandbox),
        "the sandbox outlives its run"
    );
    let next = RunscBackend::open(&options).unwrap();
    assert!(!processes_naming(&name).iter().any(sandbox));
    assert_eq!(runs(base.path()).len(), 1);
    drop(next);
    assert!(runs(base.path()).is_empty());
}

/// The first process once held the streams of `runsc`, through which a guest could fill the host's disk.
#[test]
fn no_stream_of_the_host_is_open_to_guests() {
    let scene = runsc();
    let actor = scene.actor();
    assert_eq!(text(&*actor, "ls /proc/1/fd | wc -l"), "0");
    let forged = sh(&*actor, "echo forged > /proc/1/fd/2");
    assert!(!forged.is_success(), "{forged:?}");
    assert!(!actor.logs().contains("forged"));
    drop(actor);
    scene.close();
}

/// Without our own program in it no command can be started, and that would be our fault.
/// Guests can see to it that nothing can be started any more, which is no fault of ours.
#[test]
fn an_actor_in_which_nothing_can_be_started_was_ended_by_its_guest() {
    let scene = runsc();
    let actor = scene.actor();
    assert!(sh(&*actor, "chmod 700 /").is_success());
    let other = ActorCommand {
        user: Some(User {
            uid: 1000,
            gid: 1000,
        }),
        ..ActorCommand::shell("true")
    };
    let output = actor.exec(&other).unwrap();
    let Ending::Killed { reason } = &output.ending else {
        panic!("{output:?}");
    };
    assert!(reason.contains("no program could be started"), "{reason}");
    // It has ended, for whoever asks.
    assert_eq!(sh(&*actor, "true").ending, output.ending);
    let error = actor
        .get(Path::new("/workspace"), TreeLimits::default())
        .unwrap_err();
    assert!(error.is_guests_doing(), "{error}");
    drop(actor);
    scene.close();
}

#[test]
fn our_program_cannot_be_taken_away() {
    let scene = runsc();
    let actor = scene.actor();
    for script in [
        "mv /.wardian /tmp/taken",
        "mv /.wardian /.other",
        "rm -rf /.wardian",
        "mv /.wardian/helper /tmp/",
        "ln -sfn /tmp /.wardian/helper",
        "mv /run /tmp/run; mv /usr /tmp/usr; true",
    ] {
        let tried = sh(&*actor, script);
        assert!(
            script.ends_with("true") || !tried.is_success(),
            "{script}: {tried:?}"
        );
        let next = actor.exec(&ActorCommand::new([
            "/.wardian/helper",
            "make",
            "0",
            "0",
            "/tmp/made",
        ]));
        assert!(next.unwrap().is_success(), "{script}");
    }
    drop(actor);
    scene.close();
}

/// Returns the names of all that is in a folder, however deep.
fn names_below(folder: &Path) -> impl Iterator<Item = String> {
    let mut folders = vec![folder.to_owned()];
    let mut names = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder).into_iter().flatten().flatten() {
            names.push(entry.file_name().to_string_lossy().into_owned());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            }
        }
    }
    names.into_iter()
}

#[test]
fn cpu_time_is_bounded() {
    let scene = runsc();
    assert_cpu_time_is_bounded(&scene);
    scene.close();
}
