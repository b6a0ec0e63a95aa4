//! Whether a run goes on, and how it ended: `state.json` of the run folder.
//!
//! It is for who looks at runs. Nothing in it changes what a run does, and what cannot be written ends none.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::RunError;
use super::folder::{FolderLock, RunFolder, write_atomically};
use crate::causes::with_causes;

/// The name of the file.
pub(crate) const STATE: &str = "state.json";

/// The most characters of why a run ended.
const MAX_REASON: usize = 2000;

/// Where a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// A process works on it, or was killed at it.
    Running,
    /// It came to its end.
    Finished,
    /// It was asked to stop, and goes on when it is resumed.
    Stopped,
    /// It ended by an error.
    Failed,
}

/// `state.json`; times are in seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunState {
    /// Where the run is.
    pub state: Phase,
    /// When its last process began.
    pub started_at: u64,
    /// When its first process did; none of runs that began before this was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began_at: Option<u64>,
    /// The first step whose episodes were compared by the settings that `run.toml` has now, where earlier ones
    /// were compared by others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings_since: Option<u64>,
    /// The start of the machine that it runs on, by a name that no other has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// When that ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<u64>,
    /// Why it stopped or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The state of a run that goes on, in its folder.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    state: RunState,
    /// Nobody else may begin before the end is written.
    _lock: Arc<FolderLock>,
}

impl StateFile {
    /// Says that the run in a folder goes on.
    pub(super) fn begin(root: &Path, folder: &RunFolder) -> Self {
        Self::begin_with(root, folder.lock(), folder.settings_since())
    }

    fn begin_with(root: &Path, lock: Arc<FolderLock>, settings_since: Option<u64>) -> Self {
        let path = root.join(STATE);
        let before: Option<RunState> = fs_err::read(&path)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok());
        let before = before.as_ref();
        let started_at = now();
        let file = Self {
            path,
            state: RunState {
                state: Phase::Running,
                started_at,
                began_at: Some(before.map_or(started_at, |before| {
                    before.began_at.unwrap_or(before.started_at)
                })),
                settings_since: settings_since
                    .or_else(|| before.and_then(|before| before.settings_since)),
                boot: boot(),
                ended_at: None,
                reason: None,
            },
            _lock: lock,
        };
        file.write();
        file
    }

    /// Says how the run ended.
    pub(super) fn end<T>(mut self, result: &Result<T, RunError>) {
        self.state.ended_at = Some(now());
        self.state.state = match result {
            Ok(_) => Phase::Finished,
            Err(error) if error.is_stop() => Phase::Stopped,
            Err(_) => Phase::Failed,
        };
        let reason = result.as_ref().err().map(|error| with_causes(error));
        self.state.reason = reason.map(|reason| reason.chars().take(MAX_REASON).collect());
        self.write();
    }

    fn write(&self) {
        let written = serde_json::to_vec_pretty(&self.state)
            .map_err(|error| RunError::from(std::io::Error::from(error)))
            .and_then(|text| write_atomically(&self.path, &text));
        if let Err(error) = written {
            tracing::warn!(%error, "the run's state was not written");
        }
    }
}

/// Returns where a run is by what is known of it: whether a process has its folder, what it said of itself,
/// and whether it has a summary.
pub(crate) fn phase(
    is_taken: Option<bool>,
    told: Option<&RunState>,
    has_summary: bool,
) -> (Phase, Option<String>) {
    let reason = told.and_then(|told| told.reason.clone());
    match (is_taken, told.map(|told| told.state)) {
        (Some(true), _) => (Phase::Running, None),
        // On a file system that cannot tell, its word is taken.
        (None, Some(Phase::Running)) => (Phase::Running, None),
        // Nor do machines that share one always see each other's locks.
        (_, Some(Phase::Running)) if told.is_some_and(is_elsewhere) => (Phase::Running, None),
        (Some(false), Some(Phase::Running)) => (
            Phase::Failed,
            Some("its process ended without a word: killed, or out of memory".to_owned()),
        ),
        (_, Some(state)) => (state, reason),
        // A run of before runs said so.
        (_, None) if has_summary => (Phase::Finished, None),
        (_, None) => (Phase::Stopped, None),
    }
}

/// Whether a run's process is, or was, on another machine, or on this one before it was started again.
fn is_elsewhere(told: &RunState) -> bool {
    told.boot.is_some() && told.boot != boot()
}

/// Returns the kernel's name for this start of the machine.
fn boot() -> Option<String> {
    let text = fs_err::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_says_that_it_goes_on_and_how_it_ended() {
        let run = tempfile::tempdir().unwrap();
        let lock = || Arc::new(FolderLock::take(run.path()).unwrap());
        let read = || -> RunState {
            serde_json::from_slice(&fs_err::read(run.path().join(STATE)).unwrap()).unwrap()
        };
        let file = StateFile::begin_with(run.path(), lock(), None);
        assert_eq!((read().state, read().ended_at), (Phase::Running, None));
        let stopped = RunError::Stopped {
            step: 3,
            path: run.path().to_owned(),
        };
        file.end::<()>(&Err(stopped));
        assert_eq!(read().state, Phase::Stopped);
        assert!(read().reason.is_some() && read().ended_at.is_some());

        let file = StateFile::begin_with(run.path(), lock(), None);
        assert_eq!(read().reason, None, "that was of the process before");
        file.end::<()>(&Err(RunError::NoTasks { key: "task.path" }));
        assert_eq!(read().state, Phase::Failed);
        StateFile::begin_with(run.path(), lock(), None).end(&Ok(()));
        assert_eq!((read().state, read().reason), (Phase::Finished, None));
    }

    #[test]
    fn a_run_that_goes_on_remembers_its_beginning() {
        let run = tempfile::tempdir().unwrap();
        let lock = || Arc::new(FolderLock::take(run.path()).unwrap());
        let older = r#"{"state":"stopped","started_at":5,"settings_since":7}"#;
        fs_err::write(run.path().join(STATE), older).unwrap();
        let file = StateFile::begin_with(run.path(), lock(), None);
        let state = &file.state;
        assert_eq!((state.began_at, state.settings_since), (Some(5), Some(7)));
        assert!(state.started_at > 5);
        file.end(&Ok(()));
        let file = StateFile::begin_with(run.path(), lock(), Some(4));
        assert_eq!(file.state.began_at, Some(5));
        assert_eq!(file.state.settings_since, Some(4));
    }

    #[test]
    fn a_folder_is_taken_until_the_end_is_written() {
        let run = tempfile::tempdir().unwrap();
        let is_taken = || FolderLock::is_taken(fs_err::File::open(run.path()).unwrap().file());
        assert_eq!(is_taken(), Some(false));
        let lock = Arc::new(FolderLock::take(run.path()).unwrap());
        let file = StateFile::begin_with(run.path(), lock, None);
        assert_eq!(is_taken(), Some(true));
        file.end(&Ok(()));
        assert_eq!(is_taken(), Some(false));
    }

    #[test]
    fn a_run_is_where_its_lock_and_its_word_say() {
        let told = |state| RunState {
            state,
            started_at: 1,
            began_at: None,
            settings_since: None,
            boot: None,
            ended_at: None,
            reason: Some("why".to_owned()),
        };
        let of = |is_taken, told: Option<RunState>, has_summary| {
            phase(is_taken, told.as_ref(), has_summary).0
        };
        assert_eq!(
            of(Some(true), Some(told(Phase::Running)), false),
            Phase::Running
        );
        assert_eq!(
            of(Some(false), Some(told(Phase::Running)), false),
            Phase::Failed
        );
        assert_eq!(of(None, Some(told(Phase::Running)), false), Phase::Running);
        let elsewhere = RunState {
            boot: Some("another".to_owned()),
            ..told(Phase::Running)
        };
        assert_eq!(of(Some(false), Some(elsewhere), false), Phase::Running);
        assert_eq!(
            of(Some(false), Some(told(Phase::Stopped)), false),
            Phase::Stopped
        );
        assert_eq!(of(Some(false), None, true), Phase::Finished);
        assert_eq!(of(Some(false), None, false), Phase::Stopped);
    }
}
