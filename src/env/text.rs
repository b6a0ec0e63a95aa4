//! Text that crosses between the policy and its tools: bounded output and fenced code.

use crate::sandbox::{ExecOutcome, Exit};

/// Returns `text` cut to `limit` characters, keeping its head and its tail.
///
/// A traceback's last line and a program's first lines both matter, so the middle goes.
pub(crate) fn head_and_tail(text: &str, limit: usize) -> String {
    let count = text.chars().count();
    if count <= limit {
        return text.to_owned();
    }
    let head = limit / 2;
    let tail = limit - head;
    let skipped = count - limit;
    let start: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(count - tail).collect();
    format!("{start}\n[{skipped} characters left out]\n{end}")
}

/// Returns the content of the last fenced block that is Python or names no language.
///
/// A block that the text's end cuts off counts only where there is no whole one.
pub(crate) fn last_code_block(text: &str) -> Option<String> {
    let (mut whole, mut cut_off) = (None, None);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(language) = line.trim_start().strip_prefix("```") else {
            continue;
        };
        let is_python = matches!(language.trim(), "" | "python" | "py" | "python3");
        let mut block = Vec::new();
        let mut is_closed = false;
        for line in lines.by_ref() {
            is_closed = line.trim_start().starts_with("```");
            if is_closed {
                break;
            }
            block.push(line);
        }
        if is_python && !block.is_empty() {
            let found = if is_closed { &mut whole } else { &mut cut_off };
            *found = Some(block.join("\n"));
        }
    }
    whole.or(cut_off)
}

/// Returns what the model sees of a finished program.
pub fn describe_outcome(outcome: &ExecOutcome, limit: usize) -> String {
    let mut text = String::from_utf8_lossy(&outcome.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&outcome.stderr));
    let mut text = head_and_tail(text.trim_end(), limit);
    let ending = match &outcome.exit {
        Exit::Exited { code: 0 } => None,
        // A traceback speaks for itself; an exit without words does not.
        Exit::Exited { .. } if !text.is_empty() => None,
        exit => Some(exit.to_string()),
    };
    if let Some(ending) = ending {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&ending);
    }
    if text.is_empty() {
        "(no output)".to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_keeps_its_head_and_tail() {
        let cut = head_and_tail("abcdefghij", 4);
        assert_eq!(cut, "ab\n[6 characters left out]\nij");
        assert_eq!(head_and_tail("äöü", 3), "äöü");
    }

    #[test]
    fn the_last_python_block_is_the_answer() {
        let text = "first\n```python\na = 1\n```\nthen\n```py\nb = 2\nc = 3\n```\n```json\n{}\n```";
        assert_eq!(last_code_block(text).as_deref(), Some("b = 2\nc = 3"));
        assert_eq!(
            last_code_block("```\na = 1\n```\n```\nb =").as_deref(),
            Some("a = 1")
        );
        assert_eq!(last_code_block("no code"), None);
        assert_eq!(
            last_code_block("```\nopen = 1").as_deref(),
            Some("open = 1")
        );
    }
}
