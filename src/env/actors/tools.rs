//! The tools of a policy that has an actor, as the model sees them, and running a command.

use std::time::Duration;

use serde_json::json;

use crate::actor::{Actor, ActorCommand, ActorError, ActorOutput, Captured, Ending, User};
use crate::chat::ToolSpec;
use crate::env::head_and_tail;
use crate::trajectory::{KeptText, RunEnding, ToolRun};

/// The tool that runs a command.
pub const BASH: &str = "bash";
/// The tool that shows and changes a file.
pub const EDIT: &str = "edit";
/// The tool that ends the task, or its step.
pub const SUBMIT: &str = "submit";

/// The longest command: Linux takes no argument of 128 KiB.
const MAX_COMMAND: usize = 64 << 10;

/// The most of each stream of a command that is kept, for the policy to be shown a part of.
const MAX_OUTPUT: usize = 256 << 10;

/// Runs a command by `bash` where there is one; what it prints and what it complains about is one stream.
const RUN: &str = r#"exec 2>&1; if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; fi; exec /bin/sh -c "$1""#;

/// Returns the tools, as the model sees them.
#[must_use]
pub fn actor_tools() -> Vec<ToolSpec> {
    let text = |description: &str| json!({"type": "string", "description": description});
    let line = |description: &str| json!({"type": "integer", "description": description});
    vec![
        ToolSpec::new(
            BASH,
            "Runs a command in a shell and returns what it prints. Files stay from one command to the next; \
             each starts anew in the working folder.",
            json!({
                "type": "object",
                "properties": {"command": text("The command.")},
                "required": ["command"],
            }),
        ),
        ToolSpec::new(
            EDIT,
            "Shows or changes a text file. `view` shows its lines with their numbers, `create` writes all of \
             it, `replace` puts `new` in the place of `old`, which must be there exactly once.",
            json!({
                "type": "object",
                "properties": {
                    "action": {"type": "string", "enum": ["view", "create", "replace"]},
                    "path": text("The file."),
                    "content": text("What `create` writes."),
                    "old": text("What `replace` takes out."),
                    "new": text("What `replace` puts there."),
                    "first_line": line("The first line that `view` shows."),
                    "last_line": line("The last line that `view` shows."),
                },
                "required": ["action", "path"],
            }),
        ),
        ToolSpec::new(
            SUBMIT,
            "Says that you are done: what the files are like now is judged.",
            json!({"type": "object", "properties": {}}),
        ),
    ]
}

/// What came of a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ran {
    /// It has ended, and the actor goes on.
    Told {
        /// What the policy is told.
        text: String,
        /// Whether it ended with an error.
        is_failure: bool,
        /// Whether its time was over.
        timed_out: bool,
    },
    /// The actor has ended with it.
    Gone {
        /// What the policy is told.
        text: String,
    },
}

/// What came of a call of `bash`.
#[derive(Debug)]
pub(super) struct Bashed {
    pub(super) ran: Ran,
    /// What is stored of it; none where nothing was run.
    pub(super) run: Option<ToolRun>,
}

/// Runs a command of the policy behind `setup`, lines of the task's own.
pub(super) fn bash(
    actor: &dyn Actor,
    user: Option<User>,
    setup: &[String],
    command: &str,
    timeout: Duration,
    max_chars: usize,
) -> Result<Bashed, ActorError> {
    let refusal = match command {
        command if command.contains('\0') => Some("a command cannot hold a zero byte".to_owned()),
        command if command.len() > MAX_COMMAND => Some(format!(
            "a command has at most {MAX_COMMAND} bytes; write longer ones to a file with `{EDIT}`"
        )),
        _ => None,
    };
    if let Some(refusal) = refusal {
        return Ok(Bashed {
            ran: Ran::Told {
                text: format!("error: {refusal}"),
                is_failure: true,
                timed_out: false,
            },
            run: None,
        });
    }
    let mut script = setup.join("\n");
    script.push('\n');
    script.push_str(command);
    let output = actor.exec(&ActorCommand {
        user,
        timeout,
        max_output: MAX_OUTPUT,
        ..ActorCommand::new(["/bin/sh", "-c", RUN, "sh", &script])
    })?;
    Ok(Bashed {
        ran: describe(&output, timeout, max_chars),
        run: Some(tool_run(&output)),
    })
}

fn kept(stream: &Captured) -> KeptText {
    match stream.is_truncated() {
        false => KeptText::of(&stream.head),
        true => KeptText::of_ends(&stream.head, stream.dropped, &stream.tail),
    }
}

/// Returns what is stored of a command.
fn tool_run(output: &ActorOutput) -> ToolRun {
    ToolRun {
        call: None,
        ending: match &output.ending {
            Ending::Exited { code } => RunEnding::Exited {
                code: i64::from(*code),
            },
            Ending::TimedOut { .. } => RunEnding::TimedOut,
            Ending::OutOfMemory { .. } => RunEnding::OutOfMemory,
            Ending::Killed { reason } => RunEnding::Killed {
                reason: reason.clone(),
            },
        },
        stdout: kept(&output.stdout),
        stderr: kept(&output.stderr),
        fuel: None,
    }
}

fn describe(output: &ActorOutput, timeout: Duration, max_chars: usize) -> Ran {
    let mut text = output.stdout.text();
    let complaint = output.stderr.text();
    if !complaint.trim().is_empty() {
        text.push_str(&complaint);
    }
    let text = head_and_tail(text.trim_end(), max_chars);
    let with = |ending: String| match text.as_str() {
        "" => ending,
        text => format!("{text}\n{ending}"),
    };
    let (text, is_failure, timed_out) = match &output.ending {
        Ending::Exited { code: 0 } if text.is_empty() => ("(no output)".to_owned(), false, false),
        Ending::Exited { code: 0 } => (text, false, false),
        Ending::Exited { code } => (with(format!("(exit code {code})")), true, false),
        Ending::TimedOut { .. } => {
            let limit = timeout.as_secs_f64();
            let ending =
                format!("(it took more than {limit} s and was ended, with all that was started)");
            (with(ending), true, true)
        }
        Ending::OutOfMemory { limit, .. } => {
            let mebibytes = limit >> 20;
            let text = with(format!(
                "(the sandbox held more than {mebibytes} MiB, and was ended: nothing is left of it)"
            ));
            return Ran::Gone { text };
        }
        Ending::Killed { reason } => {
            let text = with(format!(
                "(the sandbox was ended: nothing is left of it: {reason})"
            ));
            return Ran::Gone { text };
        }
    };
    Ran::Told {
        text,
        is_failure,
        timed_out,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(ending: Ending, stdout: &str) -> Ran {
        let output = ActorOutput {
            ending,
            stdout: Captured {
                head: stdout.as_bytes().to_vec(),
                ..Captured::default()
            },
            stderr: Captured::default(),
            elapsed: Duration::ZERO,
        };
        describe(&output, Duration::from_secs(2), 12)
    }

    #[test]
    fn a_command_is_told_with_how_it_ended() {
        let of = |text: &str, is_failure, timed_out| Ran::Told {
            text: text.to_owned(),
            is_failure,
            timed_out,
        };
        let exited = |code| Ending::Exited { code };
        assert_eq!(told(exited(0), ""), of("(no output)", false, false));
        assert_eq!(told(exited(0), "a\n"), of("a", false, false));
        assert_eq!(told(exited(1), "a\n"), of("a\n(exit code 1)", true, false));
        assert_eq!(told(exited(2), ""), of("(exit code 2)", true, false));
        let long = told(exited(0), "0123456789abcdef");
        assert_eq!(
            long,
            of("012345\n[4 characters left out]\nabcdef", false, false)
        );
        let limit = Duration::from_secs(2);
        let Ran::Told {
            text, timed_out, ..
        } = told(Ending::TimedOut { limit }, "a")
        else {
            unreachable!("the actor goes on");
        };
        assert!(timed_out && text.contains("more than 2 s"), "{text}");
    }

    #[test]
    fn what_is_stored_of_a_command_is_what_it_left() {
        let output = ActorOutput {
            ending: Ending::Exited { code: 3 },
            stdout: Captured {
                head: b"first".to_vec(),
                dropped: 9,
                tail: b"last".to_vec(),
            },
            stderr: Captured::default(),
            elapsed: Duration::from_secs(7),
        };
        let run = tool_run(&output);
        assert_eq!(run.ending, RunEnding::Exited { code: 3 });
        assert_eq!(run.stdout, KeptText::of_ends(b"first", 9, b"last"));
        assert_eq!((run.stderr, run.fuel), (KeptText::default(), None));
        let late = ActorOutput {
            ending: Ending::TimedOut {
                limit: Duration::ZERO,
            },
            ..output
        };
        assert_eq!(tool_run(&late).ending, RunEnding::TimedOut);
    }

    #[test]
    fn an_actor_that_has_ended_is_gone() {
        let ended = Ending::OutOfMemory {
            limit: 64 << 20,
            used: 65 << 20,
        };
        let Ran::Gone { text } = told(ended, "a") else {
            unreachable!("nothing goes on");
        };
        assert!(text.contains("more than 64 MiB"), "{text}");
    }
}
