//! Commands as text for a shell.

use std::collections::BTreeMap;
use std::path::Path;

use super::ActorError;

/// Returns the lines that give a command its setting. Its variables are names that a shell can take.
///
/// # Errors
///
/// Fails where a variable's name or the folder is none that a shell can be told.
pub(crate) fn setting(
    cwd: &Path,
    env: &BTreeMap<String, String>,
    open_files: u32,
) -> Result<Vec<String>, ActorError> {
    let invalid = |reason: String| ActorError::InvalidSpec { reason };
    let cwd = cwd
        .to_str()
        .ok_or_else(|| invalid(format!("`{}` is not UTF-8", cwd.display())))?;
    let mut lines = vec![
        // Where it is refused the image's own limit is lower.
        format!("ulimit -n {open_files} 2>/dev/null"),
        format!("cd -- {} || exit 126", quote(cwd)),
    ];
    for (name, value) in env {
        if !is_name(name) {
            return Err(invalid(format!(
                "a shell cannot set the variable `{name}`; take letters, digits and `_`"
            )));
        }
        lines.push(format!("export {name}={}", quote(value)));
    }
    Ok(lines)
}

/// Whether a shell can set it.
pub(crate) fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes
        .next()
        .is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Returns the text as one word of a shell, whatever is in it.
pub(crate) fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Returns the words of a command.
pub(crate) fn words(argv: &[String]) -> String {
    let words: Vec<String> = argv.iter().map(|word| quote(word)).collect();
    words.join(" ")
}
