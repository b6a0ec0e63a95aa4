//! The tool `edit`: files are changed here, as bytes that come from the actor and go back.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::actor::{Actor, ActorError, Entry, FileTree, TreeLimits};
use crate::chat::ToolCall;

/// The largest file that is edited.
const MAX_FILE: u64 = 1 << 20;

/// The longest path that Linux takes.
const MAX_PATH: usize = 4095;

/// What came of a call: what the policy is told, and whether that is a failure.
pub(super) type Edited = Result<String, String>;

/// One call, understood.
enum Edit<'a> {
    View { first: usize, last: usize },
    Create { content: &'a str },
    Replace { old: &'a str, new: &'a str },
}

/// Does what a call asks for.
///
/// # Errors
///
/// Fails where the actor does, by our fault or because it has ended; what the policy asks wrongly is told to it.
pub(super) fn edit(actor: &dyn Actor, call: &ToolCall) -> Result<Edited, ActorError> {
    let (path, edit) = match read(call) {
        Ok(read) => read,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let path = actor.spec().workdir.join(path);
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(Err(format!("`{}` is no file", path.display())));
    };
    let (folder, name) = (folder.to_owned(), PathBuf::from(name));
    let told = match edit {
        Edit::View { first, last } => match text_of(actor, &path)? {
            Ok((text, _)) => view(&text, first, last),
            Err(refusal) => Err(refusal),
        },
        Edit::Create { content } => {
            let file = (content.as_bytes().to_vec(), false);
            write(actor, &folder, &name, file)?
                .map(|()| format!("wrote `{}`, {} bytes", path.display(), content.len()))
        }
        Edit::Replace { old, new } => match text_of(actor, &path)? {
            Err(refusal) => Err(refusal),
            Ok((text, executable)) => match replaced(&text, old, new) {
                Err(refusal) => Err(refusal),
                Ok(text) => write(actor, &folder, &name, (text.into_bytes(), executable))?
                    .map(|()| format!("changed `{}`", path.display())),
            },
        },
    };
    Ok(told)
}

/// Reads the arguments of a call.
fn read(call: &ToolCall) -> Result<(&str, Edit<'_>), String> {
    let text = |name: &str| match call.arguments.get(name) {
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(_) => Err(format!("argument `{name}` of `edit` must be a string")),
        None => Err(format!("`edit` needs the argument `{name}` here")),
    };
    let line = |name: &str, default: usize| match call.arguments.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(value) => (value.as_u64())
            .and_then(|line| usize::try_from(line).ok())
            .ok_or_else(|| format!("argument `{name}` of `edit` must be the number of a line")),
    };
    let path = text("path")?;
    if path.is_empty() || path.contains('\0') || path.len() > MAX_PATH {
        return Err("argument `path` of `edit` must name a file".to_owned());
    }
    let edit = match text("action")? {
        "view" => Edit::View {
            first: line("first_line", 1)?.max(1),
            last: line("last_line", usize::MAX)?,
        },
        "create" => Edit::Create {
            content: text("content")?,
        },
        "replace" => Edit::Replace {
            old: text("old")?,
            new: text("new")?,
        },
        other => {
            return Err(format!(
                "`{other}` is no action of `edit`: there are `view`, `create` and `replace`"
            ));
        }
    };
    Ok((path, edit))
}

/// Returns the text of a file, and whether it can be run; or why there is none to be had.
fn text_of(actor: &dyn Actor, path: &Path) -> Result<Result<(String, bool), String>, ActorError> {
    let limits = TreeLimits {
        bytes: MAX_FILE,
        entries: 1,
    };
    let tree = match actor.get(path, limits) {
        Ok(tree) => tree,
        Err(ActorError::TreeTooLarge { .. }) => {
            return Ok(Err(format!(
                "`{}` is a folder, or larger than {MAX_FILE} bytes; use `bash`",
                path.display()
            )));
        }
        Err(error) => return refusal(error),
    };
    let name = path.file_name().unwrap_or_default();
    Ok(match tree.get(Path::new(name)) {
        Some(Entry::File { bytes, executable }) => match String::from_utf8(bytes.clone()) {
            Ok(text) => Ok((text, *executable)),
            Err(_) => Err(format!("`{}` is no text; use `bash`", path.display())),
        },
        _ => Err(format!(
            "`{}` is no plain file: a folder, a link or the like; use `bash`",
            path.display()
        )),
    })
}

fn write(
    actor: &dyn Actor,
    folder: &Path,
    name: &Path,
    (bytes, executable): (Vec<u8>, bool),
) -> Result<Result<(), String>, ActorError> {
    let mut tree = FileTree::new();
    if let Err(error) = tree.insert(name, Entry::File { bytes, executable }) {
        return refusal(error);
    }
    match actor.put(folder, &tree) {
        Ok(()) => Ok(Ok(())),
        Err(error) => refusal(error),
    }
}

/// Tells the policy of what it brought about; an actor that has ended, and what is ours, is not for it to mend.
fn refusal<T>(error: ActorError) -> Result<Result<T, String>, ActorError> {
    match error {
        ActorError::Ended { .. } => Err(error),
        error if error.is_guests_doing() => Ok(Err(error.to_string())),
        // A path that the backend cannot be told is the policy's, too: all others of the spec were checked.
        ActorError::InvalidSpec { reason } => Ok(Err(reason)),
        error => Err(error),
    }
}

/// Returns the lines from `first` to `last`, with their numbers.
fn view(text: &str, first: usize, last: usize) -> Edited {
    let count = text.lines().count();
    if first > count.max(1) || last < first {
        return Err(format!("there are only the lines 1 to {count}"));
    }
    let lines = text.lines().enumerate().skip(first - 1);
    let lines: Vec<String> = lines
        .take_while(|(index, _)| *index < last)
        .map(|(index, line)| format!("{:>5}  {line}", index + 1))
        .collect();
    Ok(match lines.is_empty() {
        true => "(the file is empty)".to_owned(),
        false => lines.join("\n"),
    })
}

/// Puts `new` in the place of `old`, which has to be there once.
fn replaced(text: &str, old: &str, new: &str) -> Edited {
    if old.is_empty() {
        return Err("argument `old` of `edit` is empty; `create` writes whole files".to_owned());
    }
    // Places that overlap are several, too.
    let first = text.find(old);
    let last = text.rfind(old);
    match (first, last) {
        (Some(first), Some(last)) if first == last => {
            let (before, rest) = text.split_at(first);
            Ok(format!("{before}{new}{}", &rest[old.len()..]))
        }
        (Some(_), _) => {
            Err("`old` is there more than once; give more of what is around it".to_owned())
        }
        _ => Err("`old` is not there; it has to be exactly what the file holds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_replaced_is_there_exactly_once() {
        assert_eq!(replaced("a b c", "b", "x"), Ok("a x c".to_owned()));
        assert_eq!(replaced("a", "a", ""), Ok(String::new()));
        for (text, old, told) in [
            ("a b", "c", "not there"),
            ("a a", "a", "more than once"),
            ("aaa", "aa", "more than once"),
            ("a", "", "is empty"),
        ] {
            let refusal = replaced(text, old, "x").unwrap_err();
            assert!(refusal.contains(told), "{text} {old}: {refusal}");
        }
    }

    #[test]
    fn lines_are_shown_with_their_numbers() {
        let text = "one\ntwo\nthree\n";
        assert_eq!(view(text, 2, 2), Ok("    2  two".to_owned()));
        assert_eq!(
            view(text, 2, usize::MAX),
            Ok("    2  two\n    3  three".to_owned())
        );
        assert!(view(text, 4, 9).unwrap_err().contains("1 to 3"));
        view(text, 3, 2).unwrap_err();
        assert_eq!(view("", 1, 9), Ok("(the file is empty)".to_owned()));
    }

    #[test]
    fn arguments_are_checked() {
        let refusal = |arguments: Value| {
            let call = ToolCall::new("edit", arguments);
            read(&call).map(|_| ()).unwrap_err()
        };
        for (arguments, told) in [
            (json!({"action": "view"}), "needs the argument `path`"),
            (json!({"path": "a"}), "needs the argument `action`"),
            (json!({"path": "", "action": "view"}), "must name a file"),
            (json!({"path": 1, "action": "view"}), "must be a string"),
            (json!({"path": "a", "action": "move"}), "no action"),
            (
                json!({"path": "a", "action": "view", "first_line": -1}),
                "number of a line",
            ),
            (json!({"path": "a", "action": "create"}), "`content`"),
            (
                json!({"path": "a", "action": "replace", "old": "x"}),
                "`new`",
            ),
        ] {
            let said = refusal(arguments);
            assert!(said.contains(told), "{said}");
        }
    }
}
