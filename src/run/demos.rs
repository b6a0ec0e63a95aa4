//! Demonstrations: conversations to imitate.

use std::io::BufReader;
use std::path::Path;

use serde::Deserialize;

use super::RunError;
use crate::chat::Message;
use crate::lines::Lines;

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
    let invalid = |line: u64, reason: String| RunError::Demonstration {
        path: path.to_owned(),
        line,
        reason,
    };
    let file = BufReader::new(fs_err::File::open(path)?);
    let mut demonstrations = Vec::new();
    for (line, text) in Lines::new(file, MAX_LINE_BYTES) {
        let text = text.map_err(|error| invalid(line, error.to_string()))?;
        let row: Row =
            serde_json::from_slice(&text).map_err(|error| invalid(line, error.to_string()))?;
        demonstrations.push(row.messages);
    }
    if demonstrations.is_empty() {
        return Err(invalid(1, "there is no demonstration".to_owned()));
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
