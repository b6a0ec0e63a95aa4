//! Why a run file was refused: always which key, which value and what to do.

use std::fmt;
use std::path::PathBuf;

/// A run file or a `--set` that can not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file could not be read.
    #[error("reading run file `{path}`")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// The file is larger than any run file.
    #[error("run file `{path}` is too large: {found} bytes > {limit}; is it a run file?")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// How many bytes had been read.
        found: u64,
        /// How many are read at most.
        limit: u64,
    },
    /// The file is not TOML.
    #[error("{origin} is not valid TOML")]
    Syntax {
        /// The file.
        origin: String,
        /// What the parser said, with the line.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A `--set` has no `=` or no key.
    #[error("`--set {text}` is not `section.key=value`")]
    Set {
        /// What was given.
        text: String,
    },
    /// A key is not known.
    #[error("unknown key `{key}` in {origin}; {hint}")]
    UnknownKey {
        /// The key's path.
        key: String,
        /// The file or the `--set`.
        origin: String,
        /// The nearest known key, or where to find them.
        hint: String,
    },
    /// A value stands where a section belongs.
    #[error("`{key}` in {origin} is a section, not a value; set one of its keys: {keys}")]
    NotASection {
        /// The section's path.
        key: String,
        /// The file or the `--set`.
        origin: String,
        /// The section's keys.
        keys: String,
    },
    /// A value has the wrong type or form.
    #[error("`{key}` can not be `{value}` in {origin}: {problem}")]
    Value {
        /// The key's path.
        key: String,
        /// The value, as TOML.
        value: String,
        /// The file or the `--set`.
        origin: String,
        /// What was expected.
        problem: String,
    },
    /// Values are well-formed but make no sense.
    #[error("this cannot be done as configured: {}", list(issues))]
    Invalid {
        /// All that is wrong.
        issues: Vec<Issue>,
    },
}

/// One value that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issue {
    /// The key's path.
    pub key: String,
    /// The value.
    pub value: String,
    /// What it must be, and why or how.
    pub remedy: String,
}

impl fmt::Display for Issue {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "`{}` is `{}`; {}",
            self.key, self.value, self.remedy
        )
    }
}

fn list(issues: &[Issue]) -> String {
    issues.iter().map(|issue| format!("\n  {issue}")).collect()
}
