//! A command as a script for the shell of an image.

use std::path::Path;

use super::mark::Mark;
use crate::actor::script::{setting, words};
use crate::actor::{ActorCommand, ActorError};

/// The most of a script that travels in the address of a request; longer ones are files.
pub(super) const MAX_INLINE: usize = 12 << 10;

/// Returns what a shell must do to run the command and to say how it ended. Its variables are names that a
/// shell can take.
pub(super) fn script(
    command: &ActorCommand,
    workdir: &Path,
    open_files: u32,
    mark: &Mark,
) -> Result<String, ActorError> {
    let cwd = command.cwd.as_deref().unwrap_or(workdir);
    let mut lines = setting(cwd, &command.env, open_files)?;
    let input = match command.stdin.is_empty() {
        true => " </dev/null",
        false => "",
    };
    // A process of its own: after it there is something to say.
    lines.push(format!("(exec {}{input})", words(&command.argv)));
    lines.push(mark.script());
    Ok(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(command: &ActorCommand) -> std::process::Output {
        let script = script(command, Path::new("/tmp"), 64, &Mark::new()).unwrap();
        std::process::Command::new("/bin/sh")
            .args(["-c", &script])
            .output()
            .unwrap()
    }

    #[test]
    fn words_arrive_as_they_are() {
        let odd = "a b\n'\"$HOME`id`\\*;#|&<>!{}~ü";
        let command = ActorCommand {
            env: [("VALUE".to_owned(), odd.to_owned())].into(),
            cwd: Some("/".into()),
            ..ActorCommand::new([
                "sh",
                "-c",
                "printf '%s|%s|%s' \"$VALUE\" \"$1\" \"$PWD\"",
                "sh",
                odd,
            ])
        };
        let output = run(&command);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text, format!("{odd}|{odd}|/"));
    }

    #[test]
    fn what_cannot_start_has_the_codes_of_a_shell() {
        for (command, code) in [
            (ActorCommand::new(["no-such-program"]), 127),
            (ActorCommand::new(["/etc/passwd"]), 126),
            (
                ActorCommand {
                    cwd: Some("/no/such/folder".into()),
                    ..ActorCommand::new(["true"])
                },
                126,
            ),
        ] {
            let output = run(&command);
            assert_eq!(output.status.code(), Some(code), "{command:?}");
            assert!(!output.stderr.is_empty());
        }
    }

    #[test]
    fn names_that_no_shell_can_set_are_refused() {
        for name in ["a.b", "1a", "a b", "a;id", ""] {
            let command = ActorCommand {
                env: [(name.to_owned(), String::new())].into(),
                ..ActorCommand::new(["true"])
            };
            let error = script(&command, Path::new("/"), 64, &Mark::new()).unwrap_err();
            assert!(error.to_string().contains("cannot set"), "{error}");
        }
    }
}
