//! The tool `edit`: files are changed here, as bytes that come from the actor and go back.
//!
//! They are read and written by commands of the policy's own user, who so has no rights but those of `bash`.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::actor::{Actor, ActorCommand, ActorError, ActorOutput, Ending, User};
use crate::chat::ToolCall;

/// The largest file that is edited.
const MAX_FILE: usize = 1 << 20;

/// The longest path that Linux takes.
const MAX_PATH: usize = 4095;

/// The most bytes that are listed of a folder.
const MAX_LISTING: usize = 2000;

/// How long reading or writing a file may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What [`READ`] ends with of what is no plain file.
const NO_FILE: i32 = 41;
/// Of a folder, whose names it prints.
const FOLDER: i32 = 42;
/// Of what is not there.
const GONE: i32 = 43;

/// Prints the file `$1`, or so many bytes (`$2`) of what is in the folder (`$3`).
const READ: &str = r#"
[ -L "$1" ] && exit 41
if [ -d "$1" ]; then ls -ap "$1" | head -c "$3"; exit 42; fi
[ -f "$1" ] && exec head -c "$2" "$1"
[ -e "$1" ] && exit 41
exit 43
"#;

/// Writes its input to the file `$1` in the folder `$2`; one that is there keeps its rights.
const WRITE: &str = r#"
if [ -e "$1" ] && [ ! -f "$1" ]; then echo "it is no plain file" >&2; exit 1; fi
mkdir -p "$2" && cat > "$1"
"#;

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
pub(super) fn edit(
    actor: &dyn Actor,
    user: Option<User>,
    call: &ToolCall,
) -> Result<Edited, ActorError> {
    let (path, edit) = match read(call) {
        Ok(read) => read,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let path = actor.spec().workdir.join(path);
    let files = Files { actor, user };
    let told = match edit {
        Edit::View { first, last } => match files.text(&path)? {
            Ok(text) => view(&text, first, last),
            Err(refusal) => Err(refusal),
        },
        Edit::Create { content } => files
            .write(&path, content)?
            .map(|()| format!("wrote `{}`, {} bytes", path.display(), content.len())),
        Edit::Replace { old, new } => match files.text(&path)? {
            Err(refusal) => Err(refusal),
            Ok(text) => match replaced(&text, old, new) {
                Err(refusal) => Err(refusal),
                Ok(text) => files
                    .write(&path, &text)?
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

/// The files of an actor, as its policy's user has them.
struct Files<'a> {
    actor: &'a dyn Actor,
    user: Option<User>,
}

impl Files<'_> {
    /// Returns the text of a file, or why there is none to be had.
    fn text(&self, path: &Path) -> Result<Result<String, String>, ActorError> {
        let shown = path.display();
        let limits = [MAX_FILE + 1, MAX_LISTING].map(|limit| limit.to_string());
        let arguments = [&limits[0], &limits[1]].map(String::as_str);
        let output = self.run(READ, path, &arguments, Vec::new())?;
        let bytes = match output.ending {
            Ending::Exited { code: 0 } => output.stdout.head,
            Ending::Exited { code: FOLDER } => {
                let listing = output.stdout.text();
                return Ok(Err(format!("`{shown}` is a folder; {}", listed(&listing))));
            }
            Ending::Exited { code: NO_FILE } => {
                return Ok(Err(format!(
                    "`{shown}` is no plain file, but a link or the like; use `bash`"
                )));
            }
            Ending::Exited { code: GONE } => {
                return Ok(Err(format!("`{shown}` cannot be read: it is not there")));
            }
            _ => return Ok(Err(format!("`{shown}` cannot be read: {}", why(&output)))),
        };
        if bytes.len() > MAX_FILE {
            return Ok(Err(format!(
                "`{shown}` is larger than {MAX_FILE} bytes; use `bash`"
            )));
        }
        Ok(String::from_utf8(bytes).map_err(|_| format!("`{shown}` is no text; use `bash`")))
    }

    /// Writes a file, with the folders that it needs.
    fn write(&self, path: &Path, text: &str) -> Result<Result<(), String>, ActorError> {
        let Some(folder) = path.parent().and_then(Path::to_str) else {
            return Ok(Err(format!("`{}` is no file", path.display())));
        };
        let output = self.run(WRITE, path, &[folder], text.as_bytes().to_vec())?;
        Ok(match output.is_success() {
            true => Ok(()),
            false => Err(format!(
                "`{}` cannot be written: {}",
                path.display(),
                why(&output)
            )),
        })
    }

    fn run(
        &self,
        script: &str,
        path: &Path,
        arguments: &[&str],
        stdin: Vec<u8>,
    ) -> Result<ActorOutput, ActorError> {
        let path = path.to_string_lossy();
        let argv = [&["/bin/sh", "-c", script, "sh", &path], arguments].concat();
        let output = self.actor.exec(&ActorCommand {
            cwd: Some("/".into()),
            stdin,
            user: self.user,
            timeout: TIMEOUT,
            // All of it is kept.
            max_output: 2 * MAX_FILE,
            ..ActorCommand::new(argv)
        })?;
        let reason = match &output.ending {
            Ending::OutOfMemory { limit, used } => {
                format!("it held {used} bytes, of at most {limit}")
            }
            Ending::Killed { reason } => reason.clone(),
            Ending::Exited { .. } | Ending::TimedOut { .. } => return Ok(output),
        };
        Err(ActorError::Ended {
            id: self.actor.id().to_owned(),
            reason,
        })
    }
}

/// Returns why a command did nothing, in its own words.
fn why(output: &ActorOutput) -> String {
    match output.ending {
        Ending::TimedOut { .. } => "it took too long".to_owned(),
        _ => {
            let said = output.stderr.text();
            said.trim().chars().take(300).collect()
        }
    }
}

/// Returns what is in a folder, of a listing that may have been cut.
fn listed(listing: &str) -> String {
    let is_cut = listing.len() >= MAX_LISTING;
    let mut names: Vec<&str> = listing.lines().collect();
    if is_cut {
        // Of the last one the end may be missing.
        names.pop();
    }
    names.retain(|name| !["./", "../"].contains(name));
    let names = match names.as_slice() {
        [] => "it is empty".to_owned(),
        names => format!("it has {}", names.join(", ")),
    };
    let more = if is_cut { " and more" } else { "" };
    format!("{names}{more}; use `bash`")
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
    fn a_folder_is_listed_as_far_as_it_goes() {
        assert_eq!(listed("./\n../\n"), "it is empty; use `bash`");
        assert_eq!(listed("./\n../\na\nb/\n"), "it has a, b/; use `bash`");
        let long = "name\n".repeat(MAX_LISTING / 5);
        let told = listed(&long);
        assert!(told.ends_with("name, name and more; use `bash`"), "{told}");
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
