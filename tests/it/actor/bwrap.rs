//! What namespaces do alone, and what their guests try against them.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use wardian::actor::{ActorBackend as _, ActorCommand, ActorSpec, Ending, RootFs};

use super::{assert_cpu_time_is_bounded, bwrap, sh, spec, text};

#[test]
fn the_hosts_files_processes_and_network_are_out_of_reach() {
    let scene = bwrap();
    let actor = scene.actor();
    let secret = tempfile::Builder::new().prefix("secret").tempdir().unwrap();
    fs_err::write(secret.path().join("key"), "the host's").unwrap();
    let key = secret.path().join("key").to_string_lossy().into_owned();
    for path in [key.as_str(), "/etc/shadow", "/home", "/var", "/sys"] {
        let output = sh(&*actor, &format!("cat {path} || ls {path}"));
        assert!(
            output.stderr.text().contains("No such file"),
            "{path}: {output:?}"
        );
        assert!(!output.is_success(), "{path}");
    }
    let output = sh(&*actor, "echo x > /usr/bin/wardian; echo y > /new");
    assert_eq!(
        output
            .stderr
            .text()
            .matches("Read-only file system")
            .count(),
        2,
        "{output:?}"
    );
    assert!(!Path::new("/usr/bin/wardian").exists());
    let output = sh(&*actor, "mkdir m && mount -t tmpfs none m");
    assert!(
        output.stderr.text().contains("permission denied"),
        "{output:?}"
    );
    let output = sh(
        &*actor,
        "v=$(cat /proc/sys/kernel/panic); echo $v > /proc/sys/kernel/panic",
    );
    assert!(
        output.stderr.text().contains("Read-only file system"),
        "{output:?}"
    );
    assert_eq!(
        text(
            &*actor,
            "ls /proc | grep -c '^[0-9]*$' | sed 's/^[1-9]$/few/'"
        ),
        "few"
    );
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let script = format!(
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', {}), 2)\n    print('reached')\n\
         except OSError as error:\n    print(type(error).__name__)",
        server.local_addr().unwrap().port()
    );
    let output = actor
        .exec(&ActorCommand::new(["python3", "-c", &script]))
        .unwrap();
    assert_eq!(
        output.stdout.text(),
        "ConnectionRefusedError\n",
        "{output:?}"
    );
    drop(actor);
    scene.close();
}

#[test]
fn who_uses_too_much_is_ended() {
    let scene = bwrap();
    let actor = scene.actor();
    let started = Instant::now();
    let bomb = ActorCommand {
        timeout: Duration::from_secs(4),
        ..ActorCommand::new(["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 100"])
    };
    let output = actor.exec(&bomb).unwrap();
    let complaint = "fork: retry: Resource temporarily unavailable";
    assert!(output.stderr.text().contains(complaint), "{output:?}");
    let hog = "held = []\nwhile True:\n    held.append(bytearray(b'x') * (1 << 22))\n";
    let output = actor
        .exec(&ActorCommand::new(["python3", "-c", hog]))
        .unwrap();
    let Ending::OutOfMemory { limit, used } = output.ending else {
        panic!("{output:?}");
    };
    assert!(
        limit == 192 << 20 && used > limit && used < 8 * limit,
        "{used}"
    );
    let fill = "i=0; while :; do head -c 30000000 /dev/zero > f$i; i=$((i+1)); done";
    let output = sh(&*actor, fill);
    let is_meant = matches!(&output.ending, Ending::Killed { reason } if reason.contains("wrote"));
    assert!(is_meant, "{output:?}");
    assert!(started.elapsed() < Duration::from_secs(45));
    drop(actor);
    scene.close();
}

#[test]
fn a_root_folder_is_read_and_its_writable_folders_are_copied() {
    let scene = bwrap();
    let root = tempfile::tempdir().unwrap();
    // Actors of root are other users.
    let everybody = std::fs::Permissions::from_mode(0o755);
    fs_err::set_permissions(root.path(), everybody).unwrap();
    for folder in ["usr", "data", "fixed"] {
        fs_err::create_dir(root.path().join(folder)).unwrap();
        fs_err::write(root.path().join(folder).join("file"), folder).unwrap();
    }
    let mount = |name: &str| {
        let path = Path::new("/usr").join(name);
        (path.clone(), path)
    };
    for name in ["bin", "lib", "lib64"] {
        fs_err::create_dir(root.path().join("usr").join(name)).unwrap();
        std::os::unix::fs::symlink(format!("usr/{name}"), root.path().join(name)).unwrap();
    }
    let spec = ActorSpec {
        root: RootFs::Folder(root.path().to_owned()),
        mounts: ["bin", "lib", "lib64"].map(mount).into(),
        writable: vec!["/data".into()],
        ..spec()
    };
    let actor = scene.backend().create(&spec);
    let actor = actor.unwrap();
    let output = sh(
        &*actor,
        "cat /data/file; echo more > /data/file; cat /data/file; echo x > /fixed/file",
    );
    assert_eq!(output.stdout.text(), "datamore\n", "{output:?}");
    assert!(
        output.stderr.text().contains("Read-only file system"),
        "{output:?}"
    );
    assert_eq!(
        fs_err::read_to_string(root.path().join("data/file")).unwrap(),
        "data"
    );
    drop(actor);
    scene.close();
}

/// The host's programs that start an actor run as root: what a command has in its environment is for the
/// actor's programs alone.
#[test]
fn variables_of_a_command_reach_no_program_of_the_hosts() {
    let scene = bwrap();
    let actor = scene.actor();
    let mut command = ActorCommand::new(["true"]);
    command
        .env
        .insert("LD_PRELOAD".to_owned(), "/nothing.so".to_owned());
    let output = actor.exec(&command).unwrap();
    assert!(output.is_success(), "{output:?}");
    // The loader complains once, for the one program inside that it loads.
    let told = output.stderr.text();
    assert_eq!(told.matches("/nothing.so").count(), 1, "{told}");
}

#[test]
fn cpu_time_is_bounded() {
    let scene = bwrap();
    assert_cpu_time_is_bounded(&scene);
    scene.close();
}
