//! What a check finds.

use serde::Serialize;

/// How a finding stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// As it should be.
    Fine,
    /// Worth knowing, and nothing that is needed.
    Note,
    /// Something that is needed is missing or broken.
    Wrong,
}

/// One thing that a check has looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// The check.
    pub(super) check: &'static str,
    pub(super) state: State,
    /// What was found.
    pub(super) about: String,
    /// What mends it: a command, or what to do; always there where something is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<String>,
}

impl Finding {
    pub(super) fn fine(check: &'static str, about: impl Into<String>) -> Self {
        Self {
            check,
            state: State::Fine,
            about: about.into(),
            fix: None,
        }
    }

    pub(super) fn note(check: &'static str, about: impl Into<String>) -> Self {
        Self {
            state: State::Note,
            ..Self::fine(check, about)
        }
    }

    pub(super) fn wrong(
        check: &'static str,
        about: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            state: State::Wrong,
            fix: Some(fix.into()),
            ..Self::fine(check, about)
        }
    }

    /// Something wrong if it is needed, else a note.
    pub(super) fn missing(
        check: &'static str,
        is_needed: bool,
        about: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        let state = match is_needed {
            true => State::Wrong,
            false => State::Note,
        };
        Self {
            state,
            ..Self::wrong(check, about, fix)
        }
    }

    pub(super) fn is_fine(&self) -> bool {
        self.state == State::Fine
    }

    /// The lines of a terminal.
    pub(super) fn text(&self) -> String {
        let state = match self.state {
            State::Fine => "\x1b[32mok\x1b[0m   ",
            State::Note => "\x1b[33mnote\x1b[0m ",
            State::Wrong => "\x1b[1;31mwrong\x1b[0m",
        };
        let about = self.about.replace('\n', "\n                ");
        let fix = self
            .fix
            .iter()
            .map(|fix| format!("\n                fix: {fix}"));
        let fix: String = fix.collect();
        format!("{state} {:<9} {about}{fix}", self.check)
    }
}
