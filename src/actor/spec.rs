//! What an actor is started from.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::{ActorError, User};

/// The root filesystem of an actor. It is never written to: changes are the actor's own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RootFs {
    /// The programs of this machine: `/usr`, `/opt` and the few files of `/etc` that programs need to find
    /// names and certificates. No home, no `/tmp`, no `/var`, no keys, no other setting.
    Host,
    /// A folder with a root filesystem, as `debootstrap` or an unpacked image leave it.
    Folder(PathBuf),
    /// An image of a registry, for backends that start actors elsewhere.
    Image(String),
}

/// What an actor may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActorLimits {
    /// Memory of all its processes, in bytes.
    pub memory: u64,
    /// What it may write to its files, in bytes; a single file may be no larger either.
    pub disk: u64,
    /// CPU time that it may use, in thousandths of a CPU.
    pub cpu_millis: u32,
    /// Processes and threads at a time.
    pub processes: u32,
    /// Open files of a process.
    pub open_files: u32,
    /// How long the actor may live.
    pub lifetime: Duration,
}

impl Default for ActorLimits {
    /// 2 GiB of memory and of files, one CPU, 512 processes, 4096 open files, an hour.
    fn default() -> Self {
        Self {
            memory: 2 << 30,
            disk: 2 << 30,
            cpu_millis: 1000,
            processes: 512,
            open_files: 4096,
            lifetime: Duration::from_secs(3600),
        }
    }
}

/// What an actor is started from. There is no network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActorSpec {
    /// Its files.
    pub root: RootFs,
    /// Folders of the host that it sees to read: what they are here, and where they are there.
    pub mounts: Vec<(PathBuf, PathBuf)>,
    /// Folders that must be writable, for backends that cannot let all of the root be; they are made where
    /// they are missing. `/tmp` and the working folder always are.
    pub writable: Vec<PathBuf>,
    /// Variables of its processes. `PATH`, `HOME` and `LANG` have values unless they are here.
    pub env: BTreeMap<String, String>,
    /// Where its processes start; it is made where it is missing.
    pub workdir: PathBuf,
    /// Who its processes are.
    pub user: User,
    /// What it may use.
    pub limits: ActorLimits,
    /// Whether few like it are asked for: backends that keep actors ready keep none of these.
    pub is_rare: bool,
}

/// More memory and disk than this is a slip of the pen: 64 TiB.
const MOST_BYTES: u64 = 64 << 40;

impl ActorSpec {
    /// The working folder unless said otherwise.
    pub const WORKDIR: &str = "/workspace";

    /// Returns a spec with root's rights inside, an empty environment and the default limits.
    #[must_use]
    pub fn new(root: RootFs) -> Self {
        Self {
            root,
            mounts: Vec::new(),
            writable: Vec::new(),
            env: BTreeMap::new(),
            workdir: PathBuf::from(Self::WORKDIR),
            user: User::default(),
            limits: ActorLimits::default(),
            is_rare: false,
        }
    }

    /// Checks what every backend needs.
    ///
    /// # Errors
    ///
    /// Fails on paths that are not absolute or leave their root, and on limits that let nothing run.
    pub(crate) fn check(&self) -> Result<(), ActorError> {
        let invalid = |reason: String| Err(ActorError::InvalidSpec { reason });
        let inner = self.mounts.iter().map(|(_, there)| there);
        for path in inner.chain(&self.writable).chain([&self.workdir]) {
            let plain = path.components().all(|part| {
                use std::path::Component::{Normal, RootDir};
                matches!(part, RootDir | Normal(_))
            });
            if !path.is_absolute() || !plain || path.as_os_str() == "/" {
                return invalid(format!(
                    "`{}` must be an absolute path below `/` without `.` and `..`",
                    path.display()
                ));
            }
        }
        for (here, _) in &self.mounts {
            if !here.is_absolute() {
                return invalid(format!("`{}` must be an absolute path", here.display()));
            }
        }
        for (name, value) in &self.env {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                return invalid(format!("`{name}` cannot be an environment variable"));
            }
        }
        if self.limits.memory < 16 << 20 {
            return invalid(format!(
                "{} bytes of memory are fewer than the 16 MiB that a shell needs",
                self.limits.memory
            ));
        }
        let largest = self.limits.memory.max(self.limits.disk);
        if largest > MOST_BYTES {
            return invalid(format!(
                "{largest} bytes of memory or disk are more than any machine has"
            ));
        }
        if self.limits.cpu_millis < 10 {
            return invalid(format!(
                "{} thousandths of a CPU are fewer than the 10 that let anything be run",
                self.limits.cpu_millis
            ));
        }
        if self.limits.processes < 4 {
            return invalid(format!(
                "{} processes are fewer than the 4 that a script needs",
                self.limits.processes
            ));
        }
        Ok(())
    }

    /// Returns the variables of a process: the defaults, the actor's, then `more`.
    pub(crate) fn variables(
        &self,
        user: User,
        more: &BTreeMap<String, String>,
    ) -> BTreeMap<String, String> {
        let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let home = match user.uid {
            0 => "/root",
            _ => "/tmp",
        };
        let mut variables: BTreeMap<String, String> =
            [("PATH", path), ("HOME", home), ("LANG", "C.UTF-8")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into();
        variables.extend(self.env.clone());
        variables.extend(more.clone());
        variables
    }
}
