//! What `runsc` is told about an actor: its files, processes and limits, as an OCI bundle.

use std::path::{Path, PathBuf};

use fs_err as fs;
use serde_json::{Value, json};

use crate::actor::guest::{self, GUEST_FOLDER, HELPER};
use crate::actor::{ActorCommand, ActorError, ActorSpec, RootFs, User};

/// What root keeps inside: the rights over files, users and processes of a container, none over devices,
/// networks, mounts or the kernel.
const CAPABILITIES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
];

/// Of the host's settings what programs need to find each other and their names.
const SETTINGS: &[&str] = &[
    "alternatives",
    "bash.bashrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "perl",
    "profile",
    "python3",
    "timezone",
];

/// The folders that all actors of a run share, to read.
#[derive(Debug)]
pub(super) struct Shared {
    guest: PathBuf,
    host_root: PathBuf,
}

impl Shared {
    /// Writes them into the folder of a run.
    ///
    /// # Errors
    ///
    /// Fails where they cannot be written.
    pub(super) fn write(run: &Path) -> std::io::Result<Self> {
        let guest = guest::write(run)?;
        let host_root = run.join("host-root");
        write_host_root(&host_root)?;
        Ok(Self { guest, host_root })
    }

    /// Returns the bundle's `config.json`.
    ///
    /// # Errors
    ///
    /// Fails where the spec names a root filesystem that is not there.
    pub(super) fn config(&self, spec: &ActorSpec) -> Result<Value, ActorError> {
        let mut mounts = vec![
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}),
        ];
        // Through the overlay over it a mount that may be written to writes nothing to the host.
        let mut show = |here: &Path, there: &Path, options: &[&str]| {
            let options = [&["bind"], options].concat();
            mounts.push(json!({
                "destination": there, "type": "bind", "source": here, "options": options,
            }));
        };
        let root = match &spec.root {
            RootFs::Host => {
                for name in system_folders() {
                    let path = Path::new("/").join(name);
                    show(&path, &path, &[]);
                }
                self.host_root.clone()
            }
            RootFs::Folder(folder) => {
                let resolved = fs::canonicalize(folder).map_err(|source| ActorError::Files {
                    activity: "finding the root filesystem",
                    source,
                })?;
                if !resolved.join("usr").is_dir() {
                    return Err(ActorError::InvalidSpec {
                        reason: format!(
                            "`{}` has no `usr` and is no root filesystem",
                            folder.display()
                        ),
                    });
                }
                resolved
            }
            RootFs::Image(_) => return Err(ActorError::image_on_this_machine(super::NAME)),
        };
        show(&self.guest, Path::new(GUEST_FOLDER), &["ro"]);
        for (here, there) in &spec.mounts {
            show(here, there, &["ro"]);
        }
        let helper = ActorCommand::new([HELPER, "init"]);
        Ok(json!({
            "ociVersion": "1.0.0",
            "process": process(spec, &helper, User::default(), Path::new("/")),
            "root": {"path": root, "readonly": false},
            "hostname": "actor",
            "mounts": mounts,
            "linux": {"namespaces": [
                {"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
            ]},
        }))
    }
}

/// Returns the description of a process of the actor.
pub(super) fn process(spec: &ActorSpec, command: &ActorCommand, user: User, cwd: &Path) -> Value {
    let limits = &spec.limits;
    let capabilities = match user.uid {
        0 => CAPABILITIES,
        _ => &[],
    };
    let variables: Vec<String> = spec
        .variables(user, &command.env)
        .into_iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let rlimits: Vec<Value> = [
        ("RLIMIT_NOFILE", u64::from(limits.open_files)),
        ("RLIMIT_NPROC", u64::from(limits.processes)),
        ("RLIMIT_FSIZE", limits.disk),
        ("RLIMIT_CORE", 0),
    ]
    .iter()
    .map(|(kind, limit)| json!({"type": kind, "soft": limit, "hard": limit}))
    .collect();
    json!({
        "user": {"uid": user.uid, "gid": user.gid},
        "args": command.argv,
        "env": variables,
        "cwd": cwd,
        "capabilities": {
            "bounding": CAPABILITIES,
            "effective": capabilities,
            "permitted": capabilities,
            "inheritable": [],
        },
        "rlimits": rlimits,
    })
}

/// Returns the host's folders of programs that are folders, not links to others.
fn system_folders() -> impl Iterator<Item = &'static str> {
    ["usr", "bin", "sbin", "lib", "lib32", "lib64", "opt"]
        .into_iter()
        .filter(|name| {
            let status = fs::symlink_metadata(Path::new("/").join(name));
            status.is_ok_and(|status| status.is_dir())
        })
}

/// Writes what a root filesystem has besides the host's programs.
fn write_host_root(root: &Path) -> std::io::Result<()> {
    for name in [
        "dev", "etc", "home", "mnt", "proc", "root", "run", "srv", "sys", "tmp", "var/tmp",
    ] {
        fs::create_dir_all(root.join(name))?;
    }
    for name in system_folders() {
        fs::create_dir_all(root.join(name))?;
    }
    for name in ["bin", "sbin", "lib", "lib32", "lib64"] {
        if let Ok(target) = fs::read_link(Path::new("/").join(name)) {
            std::os::unix::fs::symlink(target, root.join(name))?;
        }
    }
    let settings = root.join("etc");
    for name in SETTINGS {
        copy(&Path::new("/etc").join(name), &settings.join(name))?;
    }
    for (name, text) in [
        (
            "passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n",
        ),
        ("group", "root:x:0:\nnogroup:x:65534:\n"),
        ("hosts", "127.0.0.1 localhost\n127.0.0.1 actor\n"),
        ("hostname", "actor\n"),
    ] {
        fs::write(settings.join(name), text)?;
    }
    Ok(())
}

/// Copies a file, a link or a folder, if it is there.
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    let Ok(status) = fs::symlink_metadata(from) else {
        return Ok(());
    };
    if status.is_symlink() {
        std::os::unix::fs::symlink(fs::read_link(from)?, to)?;
    } else if status.is_dir() {
        fs::create_dir(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    } else {
        fs::copy(from, to)?;
    }
    Ok(())
}
