//! Demonstrations: conversations to imitate.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;

use serde::Deserialize;

use super::RunError;
use crate::chat::Message;

/// Longest accepted line.
const MAX_LINE_BYTES: u64 = 16 << 20;

#[derive(Deserialize)]
struct Row {
    messages: Vec<Message>,
}

/// Reads JSON Lines of `{"messages": […]}`, the layout of conversational datasets.
///
/// # Errors
///
/// Fails where the file cannot be read or a line is not such an object; the error names the line.
pub fn read_demonstrations(path: &Path) -> Result<Vec<Vec<Message>>, RunError> {
    let mut reader = BufReader::new(fs_err::File::open(path)?);
    let mut demonstrations = Vec::new();
    let mut text = String::new();
    for line in 1_usize.. {
        let invalid = |reason: String| RunError::Demonstration {
            path: path.to_owned(),
            line,
            reason,
        };
        text.clear();
        let size = reader
            .by_ref()
            .take(MAX_LINE_BYTES + 1)
            .read_line(&mut text)
            .map_err(|error| invalid(error.to_string()))?;
        if size == 0 {
            break;
        }
        if size as u64 > MAX_LINE_BYTES {
            return Err(invalid(format!("longer than {MAX_LINE_BYTES} bytes")));
        }
        if text.trim().is_empty() {
            continue;
        }
        let row: Row = serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        demonstrations.push(row.messages);
    }
    if demonstrations.is_empty() {
        let reason = "there is no demonstration".to_owned();
        return Err(RunError::Demonstration {
            path: path.to_owned(),
            line: 1,
            reason,
        });
    }
    Ok(demonstrations)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("demos.jsonl");
        fs_err::write(&path, "{\"messages\": []}\n\n{\"message\": 1}\n").unwrap();
        let error = read_demonstrations(&path).unwrap_err().to_string();
        assert!(
            error.contains("line 3") && error.contains("messages"),
            "{error}"
        );
    }
}
