//! What every backend must do alike.

use std::path::Path;
use std::time::{Duration, Instant};

use wardian::actor::{
    ActorCommand, ActorError, ActorSpec, Ending, Entry, FileTree, TreeLimits, User,
};

use super::{Case, sh, text};

macro_rules! conformance {
    ($($backend:ident: $($case:ident)*;)*) => {$(
        mod $backend {
            $(
                #[test]
                fn $case() {
                    let scene = super::super::$backend();
                    super::$case(&scene.case());
                    scene.close();
                }
            )*
        }
    )*};
}

conformance! {
    runsc: commands_have_results commands_have_a_setting output_is_bounded a_command_ends_in_time
        programs_that_cannot_start_are_results trees_go_in_and_come_out hostile_trees_stop_at_the_host
        actors_are_apart specs_are_checked a_snapshot_starts_a_group;
    bwrap: commands_have_results commands_have_a_setting output_is_bounded a_command_ends_in_time
        programs_that_cannot_start_are_results trees_go_in_and_come_out hostile_trees_stop_at_the_host
        actors_are_apart specs_are_checked a_snapshot_starts_a_group;
    sandboxd: commands_have_results commands_have_a_setting output_is_bounded a_command_ends_in_time
        programs_that_cannot_start_are_results trees_go_in_and_come_out actors_are_apart specs_are_checked;
    openenv: commands_have_results commands_have_a_setting output_is_bounded a_command_ends_in_time
        programs_that_cannot_start_are_results trees_go_in_and_come_out hostile_trees_stop_at_the_host
        actors_are_apart specs_are_checked;
}

pub(crate) fn commands_have_results(scene: &Case<'_>) {
    let actor = scene.actor();
    let output = sh(&*actor, "echo out; echo err >&2; exit 7");
    assert_eq!(output.ending, Ending::Exited { code: 7 });
    assert_eq!(output.stdout.text(), "out\n");
    assert_eq!(output.stderr.text(), "err\n");
    assert!(!output.is_success());
    let output = actor.exec(&ActorCommand::new(["cat"])).unwrap();
    assert_eq!(output.stdout.text(), "", "without input there is none");
    let bytes: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let command = ActorCommand {
        stdin: bytes.clone(),
        max_output: 1 << 20,
        ..ActorCommand::new(["cat"])
    };
    assert_eq!(actor.exec(&command).unwrap().stdout.head, bytes);
    let signalled = sh(&*actor, "kill -TERM $$");
    assert_eq!(signalled.code(), Some(143), "{signalled:?}");
    let one = actor.exec(&ActorCommand::new(["printf", "%s|", "a b", "$HOME", "*"]));
    assert_eq!(
        one.unwrap().stdout.text(),
        "a b|$HOME|*|",
        "there is no shell in between"
    );
}

pub(crate) fn commands_have_a_setting(scene: &Case<'_>) {
    let actor = scene
        .backend()
        .create(&ActorSpec {
            env: [("A", "actor"), ("B", "actor")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            ..scene.spec()
        })
        .unwrap();
    let command = ActorCommand {
        env: [("B".to_owned(), "command".to_owned())].into(),
        cwd: Some("/tmp".into()),
        ..ActorCommand::shell("echo $A $B $HOME; pwd; id -u; umask; ls /proc/self/fd | wc -l")
    };
    let output = actor.exec(&command).unwrap();
    // Some backends have one user, whoever was asked for.
    let uid = actor.spec().user.uid;
    let home = if uid == 0 { "/root" } else { "/tmp" };
    assert_eq!(
        output.stdout.text(),
        format!("actor command {home}\n/tmp\n{uid}\n0022\n4\n")
    );
    assert_eq!(text(&*actor, "pwd"), "/workspace");
    // Nothing of this process is there.
    let own = std::env::vars().map(|(name, _)| name);
    let inside = text(&*actor, "env");
    for name in own.filter(|name| name.starts_with("CARGO")) {
        assert!(!inside.contains(&name), "{name} is there: {inside}");
    }
    if !scene.backend().capabilities().users {
        return;
    }
    let user = ActorCommand {
        user: Some(User {
            uid: 1234,
            gid: 4321,
        }),
        ..ActorCommand::shell("id -u; id -g; touch /workspace/mine || echo denied")
    };
    let output = actor.exec(&user).unwrap();
    assert_eq!(output.stdout.text(), "1234\n4321\ndenied\n", "{output:?}");
}

pub(crate) fn output_is_bounded(scene: &Case<'_>) {
    let actor = scene.actor();
    let command = ActorCommand {
        max_output: 1000,
        ..ActorCommand::shell("head -c 50000000 /dev/zero | tr '\\0' x; echo; echo the end")
    };
    let output = actor.exec(&command).unwrap();
    assert!(output.stdout.is_truncated() && !output.stderr.is_truncated());
    assert_eq!(output.stdout.head, vec![b'x'; 500]);
    assert!(output.stdout.tail.ends_with(b"x\nthe end\n"));
    let kept = (output.stdout.head.len() + output.stdout.tail.len()) as u64;
    assert_eq!(output.stdout.dropped + kept, 50_000_009);
}

pub(crate) fn a_command_ends_in_time(scene: &Case<'_>) {
    let actor = scene.actor();
    for script in [
        "echo begun; sleep 1000",
        "echo begun; while :; do :; done",
        "echo begun; trap '' TERM INT HUP; (setsid sleep 1001 &) ; sleep 1002",
        "echo begun; kill -STOP $$",
    ] {
        let started = Instant::now();
        let limit = Duration::from_secs(1);
        let command = ActorCommand {
            timeout: limit,
            ..ActorCommand::shell(script)
        };
        let output = actor.exec(&command).unwrap();
        assert_eq!(output.ending, Ending::TimedOut { limit }, "{script}");
        assert_eq!(output.stdout.text(), "begun\n", "{script}");
        let elapsed = started.elapsed();
        assert!(
            elapsed >= limit && elapsed < Duration::from_secs(9),
            "{script}: {elapsed:?}"
        );
    }
    // What was started has ended, inside, and the actor goes on.
    let left = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done | grep -c '^sleep 1' || true";
    assert_eq!(text(&*actor, left), "0");
}

pub(crate) fn programs_that_cannot_start_are_results(scene: &Case<'_>) {
    let actor = scene.actor();
    for (command, code) in [
        (ActorCommand::new(["no-such-program"]), 127),
        (ActorCommand::new(["/no/such/program"]), 127),
        (ActorCommand::new(["/etc/passwd"]), 126),
        (
            ActorCommand {
                cwd: Some("/no/such/folder".into()),
                ..ActorCommand::new(["true"])
            },
            126,
        ),
    ] {
        let output = actor.exec(&command).unwrap();
        assert_eq!(output.code(), Some(code), "{command:?}: {output:?}");
        assert!(!output.stderr.text().is_empty());
    }
    let error = actor.exec(&ActorCommand::new([""; 0])).unwrap_err();
    assert!(matches!(error, ActorError::InvalidSpec { .. }), "{error}");
}

pub(crate) fn trees_go_in_and_come_out(scene: &Case<'_>) {
    let actor = scene.actor();
    let folder = Path::new("/workspace/new/folder");
    let mut tree = FileTree::new();
    let script = Entry::File {
        bytes: b"#!/bin/sh\necho \"$1\" > made\n".to_vec(),
        executable: true,
    };
    let long = format!("{}/{}", "d".repeat(120), "f".repeat(120));
    tree.insert("run.sh", script).unwrap();
    tree.insert(
        "a/ü b",
        Entry::File {
            bytes: vec![0, 255],
            executable: false,
        },
    )
    .unwrap();
    tree.insert(
        long,
        Entry::File {
            bytes: vec![b'x'; 70_000],
            executable: false,
        },
    )
    .unwrap();
    tree.insert("empty", Entry::Folder).unwrap();
    tree.insert(
        "link",
        Entry::Link {
            target: "run.sh".into(),
        },
    )
    .unwrap();
    actor.put(folder, &tree).unwrap();
    let command = ActorCommand {
        cwd: Some(folder.to_owned()),
        ..ActorCommand::new(["./link", "yes"])
    };
    assert!(actor.exec(&command).unwrap().is_success());
    let back = actor.get(folder, TreeLimits::default()).unwrap();
    assert_eq!(back.file("made").unwrap(), b"yes\n");
    for (path, entry) in tree.iter() {
        assert_eq!(back.get(path), Some(entry), "{}", path.display());
    }
    let one = actor
        .get(&folder.join("made"), TreeLimits::default())
        .unwrap();
    assert_eq!(one, FileTree::of_file("made", *b"yes\n").unwrap());
    // What is there is replaced.
    let made = FileTree::of_file("made", *b"again").unwrap();
    actor.put(folder, &made).unwrap();
    assert_eq!(text(&*actor, "cat /workspace/new/folder/made"), "again");
    let error = actor.get(Path::new("/workspace/missing"), TreeLimits::default());
    assert!(
        matches!(error, Err(ActorError::Unreadable { .. })),
        "{error:?}"
    );
    let few = TreeLimits {
        bytes: 1000,
        entries: 2,
    };
    let error = actor.get(folder, few).unwrap_err();
    assert!(matches!(error, ActorError::TreeTooLarge { .. }), "{error}");
    assert!(error.is_guests_doing());
}

pub(crate) fn hostile_trees_stop_at_the_host(scene: &Case<'_>) {
    let actor = scene.actor();
    let host = tempfile::tempdir().unwrap();
    let secret = host.path().join("secret");
    fs_err::write(&secret, "the host's").unwrap();
    // Links out, devices, pipes, sockets, names that look like options or leave the folder.
    text(
        &*actor,
        &format!(
            "mkdir -p out && cd out && ln -s {} away && ln -s ../../../../etc up && mkfifo pipe && \
             mkdir -p ./-rf && echo x > ./--checkpoint=1 && echo y > 'a\nb' && ln away2 x 2>/dev/null; \
             ln -s / root; echo kept > file; ln file hard",
            secret.display()
        ),
    );
    let tree = actor
        .get(Path::new("/workspace/out"), TreeLimits::default())
        .unwrap();
    assert_eq!(
        tree.get("away"),
        Some(&Entry::Link { target: secret }),
        "it is a name"
    );
    assert_eq!(tree.file("hard").unwrap(), b"kept\n");
    assert_eq!(tree.get("pipe"), None);
    let copy = host.path().join("copy");
    tree.write_to(&copy).unwrap();
    for link in ["away", "up", "root"] {
        assert!(
            fs_err::symlink_metadata(copy.join(link)).is_err(),
            "{link} is on the host"
        );
    }
    assert_eq!(fs_err::read(copy.join("--checkpoint=1")).unwrap(), b"x\n");
    // A put through a link lands where the link points inside.
    text(
        &*actor,
        "mkdir -p /tmp/t && ln -s /tmp/t /workspace/through",
    );
    let name = format!("wardian-{}", std::process::id());
    let tree = FileTree::of_file(&name, *b"x").unwrap();
    actor.put(Path::new("/workspace/through"), &tree).unwrap();
    assert_eq!(text(&*actor, &format!("cat /tmp/t/{name}")), "x");
    assert!(!Path::new("/tmp/t").join(&name).exists());
    // An archive that the guest forges, by a `tar` of its own.
    let forged = "mkdir -p /workspace/bin && cat > /workspace/bin/tar <<'EOF'\n#!/bin/sh\n\
        exec python3 -c '\nimport io, sys, tarfile\nt = tarfile.open(fileobj=sys.stdout.buffer, mode=\"w|\")\n\
        i = tarfile.TarInfo(\"../../../../tmp/forged\"); i.size = 1\nt.addfile(i, io.BytesIO(b\"x\"))\nt.close()'\n\
        EOF\nchmod +x /workspace/bin/tar";
    text(&*actor, forged);
    let forging = scene
        .backend()
        .create(&ActorSpec {
            env: [("PATH".to_owned(), "/workspace/bin:/usr/bin:/bin".to_owned())].into(),
            ..scene.spec()
        })
        .unwrap();
    text(&*forging, forged);
    let error = forging
        .get(Path::new("/workspace/x"), TreeLimits::default())
        .unwrap_err();
    assert!(
        error.to_string().contains("leads out of it"),
        "the forgery was read: {error}"
    );
}

pub(crate) fn actors_are_apart(scene: &Case<'_>) {
    let started = Instant::now();
    std::thread::scope(|scope| {
        for number in 0..8 {
            scope.spawn(move || {
                let actor = scene.actor();
                let script = format!("echo {number} > here; sleep 1; cat here; ls | wc -l");
                assert_eq!(text(&*actor, &script), format!("{number}\n1"));
                actor.destroy().unwrap();
            });
        }
    });
    assert!(started.elapsed() < Duration::from_secs(60));
}

pub(crate) fn specs_are_checked(scene: &Case<'_>) {
    for workdir in ["relative", "/", "/a/../b"] {
        let error = scene
            .backend()
            .create(&ActorSpec {
                workdir: workdir.into(),
                ..scene.spec()
            })
            .unwrap_err();
        assert!(
            error.to_string().contains("must be an absolute path"),
            "{error}"
        );
        assert!(!error.is_guests_doing());
    }
}

pub(crate) fn a_snapshot_starts_a_group(scene: &Case<'_>) {
    let actor = scene.actor();
    text(&*actor, "echo prepared > state");
    let snapshot = actor.snapshot().unwrap();
    text(&*actor, "echo original > state");
    let group: Vec<_> = (0..3).map(|_| snapshot.restore().unwrap()).collect();
    for (member, number) in group.iter().zip(0..) {
        assert_eq!(
            text(&**member, &format!("cat state; echo {number} > state")),
            "prepared"
        );
    }
    for (member, number) in group.iter().zip(0..) {
        assert_eq!(text(&**member, "cat state"), number.to_string());
    }
    assert_eq!(text(&*actor, "cat state"), "original");
    let fork = actor.fork().unwrap();
    drop(actor);
    drop(snapshot);
    assert_eq!(text(&*fork, "cat state"), "original");
}
