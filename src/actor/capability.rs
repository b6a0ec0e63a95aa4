//! What a backend's actors can do, and how well they are kept apart.

/// What stands between a guest and the host, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Isolation {
    /// Namespaces: guests call the host's kernel, and a fault in it is a way out.
    Namespaces,
    /// A kernel of its own in user space (gVisor): guests' calls end there, and the host's kernel sees only
    /// the few that it makes itself.
    UserKernel,
    /// WebAssembly: guests have no calls but those of the sandbox, and no processes at all.
    Wasm,
}

impl Isolation {
    /// Returns what it is, for a message.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces on the host's kernel",
            Self::UserKernel => "a kernel in user space",
            Self::Wasm => "WebAssembly",
        }
    }
}

/// What a backend can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// What keeps its guests in.
    pub isolation: Isolation,
    /// Whether guests are processes of a Linux: a shell, compilers, anything that is executable.
    pub shell: bool,
    /// Whether guests can be given a network. They never have one unasked.
    pub network: bool,
    /// Whether the root filesystem may be a folder that the caller names.
    pub root_folder: bool,
    /// Whether actors start from images of a registry.
    pub image: bool,
    /// Whether guests may write anywhere in their root filesystem, not only where the spec says.
    pub writable_root: bool,
    /// Whether processes may outlive the command that started them.
    pub background: bool,
    /// Whether users inside have rights of their own; otherwise all of them have those of one.
    pub users: bool,
    /// Whether an actor can be kept and started again, files included.
    pub snapshot: bool,
    /// Whether a snapshot holds processes and their memory, too.
    pub snapshot_memory: bool,
    /// Whether another actor can be started from a running one.
    pub fork: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stronger_isolation_is_greater() {
        assert!(Isolation::Namespaces < Isolation::UserKernel);
        assert!(Isolation::UserKernel < Isolation::Wasm);
    }
}
