//! What `bwrap` is told: the one place that writes its arguments.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The program.
pub(crate) const PROGRAM: &str = "bwrap";

/// Of the host's settings what programs need to find names, hosts and certificates.
const SETTINGS: &[&str] = &[
    "alternatives",
    "ca-certificates",
    "group",
    "hosts",
    "ld.so.cache",
    "localtime",
    "nsswitch.conf",
    "passwd",
    "pki/ca-trust",
    "pki/tls/certs",
    "resolv.conf",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
];

/// What fits in `/dev/shm`, in bytes: 64 MiB, as in containers.
const SHARED_MEMORY: &str = "67108864";

/// Whether what runs has the host's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Network {
    /// A loopback device of its own.
    None,
    /// The host's.
    Host,
}

/// The arguments of one call: namespaces of its own of everything, files as they are shown.
#[derive(Debug)]
pub(crate) struct Arguments(Vec<OsString>);

impl Arguments {
    /// Returns arguments that show nothing but `/proc`, `/dev` and an empty `/tmp`.
    pub(crate) fn new(network: Network) -> Self {
        let mut arguments = Self(Vec::new());
        arguments.add(["--die-with-parent", "--new-session", "--unshare-all"]);
        // To one who starts it as root it leaves all rights, with which what is shown to be read could be
        // mounted to be written.
        arguments.add(["--cap-drop", "ALL"]);
        if network == Network::Host {
            arguments.add(["--share-net"]);
        }
        arguments.add(["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]);
        // Both are the host's memory, which nobody counts there.
        arguments.add([
            "--perms",
            "1777",
            "--size",
            SHARED_MEMORY,
            "--tmpfs",
            "/dev/shm",
        ]);
        arguments.add(["--remount-ro", "/dev"]);
        // Under root's user id these take writes that reach the whole machine. `bwrap` means to cover them,
        // and does not where it has no right to write to the folder itself.
        for name in ["sys", "sysrq-trigger", "irq", "bus"] {
            let path = Path::new("/proc").join(name);
            arguments.show(&path, &path);
        }
        arguments
    }

    /// Adds arguments as they are.
    pub(crate) fn add<T: Into<OsString>>(&mut self, more: impl IntoIterator<Item = T>) {
        self.0.extend(more.into_iter().map(Into::into));
    }

    /// Shows the host's programs, and the settings that they need.
    pub(crate) fn show_system(&mut self) {
        for path in ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt"] {
            self.show(Path::new(path), Path::new(path));
        }
        for name in SETTINGS {
            let path = Path::new("/etc").join(name);
            self.show(&path, &path);
        }
    }

    /// Shows a path of the host to read, if it is there.
    pub(crate) fn show(&mut self, here: &Path, there: &Path) {
        self.add([Path::new("--ro-bind-try"), here, there]);
    }

    /// Shows a path of the host to read, which must be there.
    pub(crate) fn require(&mut self, here: &Path, there: &Path) {
        self.add([Path::new("--ro-bind"), here, there]);
    }

    /// Shows a folder of the host to write.
    pub(crate) fn bind(&mut self, here: &Path, there: &Path) {
        self.add([Path::new("--bind"), here, there]);
    }

    /// Shows the top of a root filesystem to read, without what is the machine's own.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be listed.
    pub(crate) fn show_root(&mut self, root: &Path) -> std::io::Result<()> {
        for entry in fs_err::read_dir(root)? {
            let entry = entry?;
            let name = entry.file_name();
            if ["dev", "proc", "run", "sys", "tmp"]
                .iter()
                .any(|own| name == *own)
            {
                continue;
            }
            let there = Path::new("/").join(&name);
            if entry.file_type()?.is_symlink() {
                let target: PathBuf = fs_err::read_link(entry.path())?;
                self.add([Path::new("--symlink"), &target, &there]);
            } else {
                self.show(&entry.path(), &there);
            }
        }
        Ok(())
    }

    /// Returns them, with the command that runs.
    pub(crate) fn running<T: Into<OsString>>(
        mut self,
        command: impl IntoIterator<Item = T>,
    ) -> Vec<OsString> {
        self.add(["--"]);
        self.add(command);
        self.0
    }
}
