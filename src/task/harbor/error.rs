//! Why a Harbor task or data set could not be read or fetched.

use std::path::PathBuf;

/// A failure to read a task folder, a registry or a repository; never a fault of a policy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HarborError {
    // === task.toml ===
    /// The text is not TOML, or a value has another type.
    #[error("not a task configuration")]
    Toml(#[from] toml::de::Error),
    /// A value that Harbor refuses.
    #[error("`{key}` {reason}")]
    Value {
        /// The key, from the top of the file.
        key: String,
        /// What is wrong and what would do.
        reason: String,
    },
    /// The configuration of a task.
    #[error("reading `{path}`")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        #[source]
        source: Box<Self>,
    },

    // === Folders ===
    /// A file or folder could not be read.
    #[error("reading `{path}`")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// A file is over a limit.
    #[error("`{path}` is too large: more than {limit} {what}")]
    TooLarge {
        /// The file or folder.
        path: PathBuf,
        /// What was measured.
        what: &'static str,
        /// How much is taken.
        limit: u64,
    },
    /// A file is not text.
    #[error("`{path}` is not UTF-8; convert it")]
    NotText {
        /// The file.
        path: PathBuf,
    },
    /// The folder lacks a file that its configuration needs.
    #[error("task `{folder}` has no `{missing}`; {remedy}")]
    Missing {
        /// The task's folder.
        folder: PathBuf,
        /// What is not there, from that folder.
        missing: String,
        /// What the reader can do.
        remedy: &'static str,
    },
    /// A link leads out of the task's folder.
    #[error("`{path}` leads out of its task; put what it points to into the task's folder")]
    Outside {
        /// The link.
        path: PathBuf,
    },
    /// Something in the task's folder is neither a file, a folder nor a link.
    #[error(
        "`{path}` is a pipe, a socket or a device; a task has files, folders and links to them"
    )]
    Special {
        /// What it is.
        path: PathBuf,
    },
    /// The task asks for what nothing here can give.
    #[error("task `{folder}` cannot be run: {reason}")]
    Unsupported {
        /// The task's folder.
        folder: PathBuf,
        /// Why.
        reason: String,
    },
    /// A folder holds neither a task nor tasks.
    #[error("`{path}` has no `task.toml`, nor has a folder in it")]
    NoTasks {
        /// The folder.
        path: PathBuf,
    },
    /// Two tasks of a data set have the same name.
    #[error("`{second}` has the name `{name}`, as has `{first}`; give each its own")]
    SameName {
        /// The name.
        name: String,
        /// The earlier folder.
        first: PathBuf,
        /// The later folder.
        second: PathBuf,
    },

    // === Registries ===
    /// The text is no reference to a data set.
    #[error("`{text}` is no data set; write `harbor:NAME` or `harbor:NAME@VERSION`")]
    Reference {
        /// The text.
        text: String,
    },
    /// The registry is not JSON of the published form.
    #[error("registry `{path}` is not a list of data sets")]
    Registry {
        /// The file.
        path: PathBuf,
        /// What the JSON parser said.
        #[source]
        source: serde_json::Error,
    },
    /// The registry has no such data set, or not in this version.
    #[error("registry `{path}` has no {what}; it has {available}")]
    Unknown {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        what: String,
        /// What there is, for the message.
        available: String,
    },
    /// An entry of the registry cannot be used.
    #[error("registry `{path}`, task `{task}`: {reason}")]
    Entry {
        /// The file.
        path: PathBuf,
        /// The name of the task.
        task: String,
        /// What is wrong with it.
        reason: String,
    },
    /// `git` could not be started.
    #[error("starting `git`; is it installed?")]
    NoGit {
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// `git` did not do what it was asked to.
    #[error("`git {command}` for `{url}` {ended}: {said}")]
    Git {
        /// The sub-command.
        command: String,
        /// The repository.
        url: String,
        /// How it ended.
        ended: String,
        /// The end of what it printed.
        said: String,
    },
}
